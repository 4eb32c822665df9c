"""Random amplitude scaling."""

from __future__ import annotations

from dataclasses import dataclass

from torchrl.data.replay_buffers import RandomSampler

from nmer_torchrl.checks import POSITIVE
from nmer_torchrl.methods.base import option
from nmer_torchrl.methods.groups import Keyed
from nmer_torchrl.transforms import AmplitudeScaling


@dataclass(frozen=True, kw_only=True)
class RAS(Keyed[RandomSampler]):
    """Multiplies both observations of a row by one factor: `z * s`, `z * s'`.

    The factor is `z ~ U[min_factor, max_factor]`. The options are those below and those of `Keyed`.

    Source: M. Laskin et al., *Reinforcement learning with augmented data*, NeurIPS, 2020.

    Keyword Args:
        min_factor: Smallest factor.
        max_factor: Largest factor.

    Examples:
        >>> from nmer_torchrl import make_replay_buffer
        >>> make_replay_buffer(RAS(min_factor=0.8), capacity=1_000, batch_size=32).transform[0]
        AmplitudeScaling(min_factor=0.8, max_factor=1.2)
    """

    min_factor: float = option(0.6, POSITIVE)
    max_factor: float = option(1.2, POSITIVE)

    def __post_init__(self) -> None:
        """Builds the transform once, which checks that the factors are in order."""
        super().__post_init__()
        self.make_transform(self.make_sampler(1))

    def make_sampler(self, capacity: int) -> RandomSampler:
        """Builds TorchRL's uniform sampler."""
        return RandomSampler()

    def make_transform(self, sampler: RandomSampler) -> AmplitudeScaling:
        """Builds the transform that scales observations."""
        return AmplitudeScaling(
            self.min_factor, self.max_factor, observation_keys=self.roles.observations
        )
