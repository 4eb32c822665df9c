"""NMER with prioritized anchors."""

from __future__ import annotations

from dataclasses import dataclass

from nmer_torchrl.checks import COUNT
from nmer_torchrl.methods.base import option
from nmer_torchrl.methods.groups import Near, Pairs, Prioritized
from nmer_torchrl.pair_priorities import PairPrioritizedReplayBuffer
from nmer_torchrl.samplers import PrioritizedNeighborPairSampler


@dataclass(frozen=True, kw_only=True)
class PERNMER(
    Near[PrioritizedNeighborPairSampler],
    Pairs[PrioritizedNeighborPairSampler],
    Prioritized[PrioritizedNeighborPairSampler],
):
    """Mixes rows that are drawn by priority with one of their k nearest neighbors.

    It is `NMER` with anchors drawn as in `PER`. A new TD error updates the priorities of both rows
    of a pair, and the importance weights of the two are mixed like the rows (see
    `PairPrioritizedReplayBuffer`).

    The options are those below and those of `Keyed`, `Ending`, `Near`, `Gated`, `Folding`,
    `Pairs` and `Prioritized`.

    Source: the code that R. Sander et al. released with *Neighborhood mixup experience replay*,
    L4DC, 2022 (rmsander/interreplay on GitHub). The paper itself does not combine PER and NMER.

    Keyword Args:
        k: Number of neighbors to choose from.

    Examples:
        >>> from nmer_torchrl import make_replay_buffer
        >>> make_replay_buffer(PERNMER(k=5), capacity=1_000, batch_size=32).sampler
        PrioritizedNeighborPairSampler(k=5, alpha=0.6, beta=0.4, keys=('observation', 'action'))
    """

    buffer_class = PairPrioritizedReplayBuffer

    k: int = option(10, COUNT)

    def make_sampler(self, capacity: int) -> PrioritizedNeighborPairSampler:
        """Builds the sampler of neighbor pairs with prioritized anchors."""
        return PrioritizedNeighborPairSampler(
            capacity, self.k, **self.search_options(), **self.priority_options()
        )
