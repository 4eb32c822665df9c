"""Mixup with the nearest neighbor."""

from __future__ import annotations

from dataclasses import dataclass

from nmer_torchrl.methods.groups import Near, Pairs
from nmer_torchrl.samplers import NeighborPairSampler


@dataclass(frozen=True, kw_only=True)
class OneNN(Near[NeighborPairSampler], Pairs[NeighborPairSampler]):
    """Mixes each row with its nearest neighbor; it is otherwise the same as `NMER`.

    The options are those of `Keyed`, `Ending`, `Near`, `Gated`, `Folding` and `Pairs`.

    Source: R. Sander et al., *Neighborhood mixup experience replay*, L4DC, 2022 (1NN-Mixup).

    Examples:
        >>> from nmer_torchrl import make_replay_buffer
        >>> make_replay_buffer(OneNN(), capacity=1_000, batch_size=32).sampler.k
        1
    """

    def make_sampler(self, capacity: int) -> NeighborPairSampler:
        """Builds the sampler of neighbor pairs, with one neighbor."""
        return NeighborPairSampler(1, **self.search_options())
