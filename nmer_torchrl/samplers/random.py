"""Uniform anchors with partners from anywhere."""

from __future__ import annotations

from collections.abc import Sequence

from tensordict import NestedKey

from nmer_torchrl.keys import POINT_KEYS, VALUE_KEYS
from nmer_torchrl.pairs import RandomPairs
from nmer_torchrl.samplers.base import PairSampler


class RandomPairSampler(PairSampler):
    """Pairs a uniform anchor with any other stored row, uniformly: Mixup without a neighbourhood.

    Rows with a non-finite entry are never partners, and have none.

    Keyword Args:
        keys: Entries that a transform mixes, and that must be finite in a partner.
        value_keys: More of them; the split is that of `NeighborPairSampler`.

    Examples:
        >>> from nmer_torchrl import RandomPairSampler
        >>> RandomPairSampler()
        RandomPairSampler(keys=('observation', 'action'))
    """

    def __init__(
        self,
        *,
        keys: Sequence[NestedKey] = POINT_KEYS,
        value_keys: Sequence[NestedKey] = VALUE_KEYS,
    ) -> None:
        super().__init__(RandomPairs(keys=keys, value_keys=value_keys))
