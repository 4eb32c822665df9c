"""State mixup of S4RL."""

from __future__ import annotations

from dataclasses import dataclass

from torchrl.data.replay_buffers import RandomSampler

from nmer_torchrl.checks import POSITIVE
from nmer_torchrl.methods.base import option
from nmer_torchrl.methods.groups import ALPHA, Keyed
from nmer_torchrl.transforms import StateMixup


@dataclass(frozen=True, kw_only=True)
class S4RL(Keyed[RandomSampler]):
    """Moves each observation toward the next: `w * s + (1 - w) * s'`, `w ~ Beta(alpha, alpha)`.

    The options are those below and those of `Keyed`.

    Source: S. Sinha et al., *S4RL: Surprisingly simple self-supervision for offline reinforcement
    learning in robotics*, CoRL, 2021.

    Keyword Args:
        alpha: Parameter of the Beta distribution of the weights.

    Examples:
        >>> from nmer_torchrl import make_replay_buffer
        >>> make_replay_buffer(S4RL(), capacity=1_000, batch_size=32).transform[0]
        StateMixup(alpha=0.75)
    """

    alpha: float = option(ALPHA, POSITIVE)

    def make_sampler(self, capacity: int) -> RandomSampler:
        """Builds TorchRL's uniform sampler."""
        return RandomSampler()

    def make_transform(self, sampler: RandomSampler) -> StateMixup:
        """Builds the transform that mixes observations."""
        return StateMixup(self.alpha, observation_keys=self.roles.observations)
