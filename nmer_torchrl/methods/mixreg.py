"""Mixture regularization."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tensordict import NestedKey

from nmer_torchrl.checks import POSITIVE
from nmer_torchrl.methods.base import option
from nmer_torchrl.methods.groups import Keyed
from nmer_torchrl.methods.options import read_keys
from nmer_torchrl.samplers import RandomPairSampler
from nmer_torchrl.transforms import MixReg


@dataclass(frozen=True, kw_only=True)
class Mixreg(Keyed[RandomPairSampler]):
    """Mixes the inputs of two random rows, and keeps the outcome of one of them.

    Observation and action are `w * anchor + (1 - w) * partner` with `w ~ Beta(alpha, alpha)`. All
    other entries are the anchor's with probability `w`, else the partner's (see `MixReg`).

    The options are those below and those of `Keyed`.

    Source: K. Wang et al., *Improving generalization in reinforcement learning with mixture
    regularization*, NeurIPS, 2020.

    Keyword Args:
        alpha: Parameter of the Beta distribution of the weights.
        anchor_keys: Entries besides `keys` that are not mixed on purpose, so that no warning names
            them.

    Examples:
        >>> from nmer_torchrl import make_replay_buffer
        >>> make_replay_buffer(Mixreg(), capacity=1_000, batch_size=32).transform[0]
        MixReg(alpha=0.2)
    """

    alpha: float = option(0.2, POSITIVE)
    anchor_keys: Sequence[NestedKey] = option((), read_keys)

    def make_sampler(self, capacity: int) -> RandomPairSampler:
        """Builds the sampler of random pairs."""
        return RandomPairSampler(keys=self.keys, value_keys=self.value_keys)

    def make_transform(self, sampler: RandomPairSampler) -> MixReg:
        """Builds the transform that mixes inputs."""
        return MixReg(self.alpha, mix_keys=self.keys, anchor_keys=self.anchor_keys)
