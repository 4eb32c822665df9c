"""Neighborhood Mixup Experience Replay."""

from __future__ import annotations

from dataclasses import dataclass

from nmer_torchrl.checks import COUNT
from nmer_torchrl.methods.base import option
from nmer_torchrl.methods.groups import Near, Pairs
from nmer_torchrl.samplers import NeighborPairSampler


@dataclass(frozen=True, kw_only=True)
class NMER(Near[NeighborPairSampler], Pairs[NeighborPairSampler]):
    """Mixes each row with one of its k nearest neighbors.

    The anchor is drawn uniformly. Its neighbors are nearest by the distance over Z-scored
    observation and action. The pair becomes `w * anchor + (1 - w) * partner` with
    `w ~ Beta(alpha, alpha)`. If either row is terminal, the anchor is used unchanged.

    The options are those below and those of `Keyed`, `Ending`, `Near`, `Gated`, `Folding`
    and `Pairs`.

    Source: R. Sander et al., *Neighborhood mixup experience replay*, L4DC, 2022.

    Keyword Args:
        k: Number of neighbors to choose from.

    Examples:
        >>> from nmer_torchrl import NMER, make_replay_buffer
        >>> buffer = make_replay_buffer(NMER(k=10), capacity=1_000_000, batch_size=256)
        >>> buffer.sampler, buffer.transform[0]
        (NeighborPairSampler(k=10, keys=('observation', 'action')), PairMixup(alpha=0.75))
    """

    k: int = option(10, COUNT)

    def make_sampler(self, capacity: int) -> NeighborPairSampler:
        """Builds the sampler of neighbor pairs."""
        return NeighborPairSampler(self.k, **self.search_options())
