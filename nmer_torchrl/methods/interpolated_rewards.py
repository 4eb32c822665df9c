"""Interpolated rewards."""

from __future__ import annotations

from dataclasses import dataclass

from nmer_torchrl.checks import COUNT
from nmer_torchrl.methods.base import option
from nmer_torchrl.methods.groups import Ending, Near
from nmer_torchrl.samplers import NeighborPairSampler
from nmer_torchrl.transforms import RewardMean


@dataclass(frozen=True, kw_only=True)
class InterpolatedRewards(Near[NeighborPairSampler], Ending[NeighborPairSampler]):
    """Averages the reward of each row with that of one of its k nearest neighbors.

    The reward becomes `(r + r_partner) / 2`; all other entries are the anchor's. The options are
    those below and those of `Keyed`, `Ending` and `Near`.

    Source: W. Pilar von Pilchau et al., *Bootstrapping a DQN replay memory with synthetic
    experiences*, IJCCI, 2020, which averages over visits to one discrete state.

    Keyword Args:
        k: Number of neighbors to choose from.

    Examples:
        >>> from nmer_torchrl import make_replay_buffer
        >>> method = InterpolatedRewards(k=3)
        >>> make_replay_buffer(method, capacity=1_000, batch_size=32).transform[0]
        RewardMean()
    """

    k: int = option(10, COUNT)

    def make_sampler(self, capacity: int) -> NeighborPairSampler:
        """Builds the sampler of neighbor pairs."""
        return NeighborPairSampler(self.k, **self.search_options())

    def make_transform(self, sampler: NeighborPairSampler) -> RewardMean:
        """Builds the transform that averages rewards."""
        return RewardMean(reward_keys=self.roles.rewards, terminated_key=self.terminated_key)
