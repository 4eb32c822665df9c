"""Partners from anywhere."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tensordict import NestedKey
from torch import Tensor
from torchrl.data.replay_buffers import Storage

from nmer_torchrl import _compat
from nmer_torchrl.functional import choose_other
from nmer_torchrl.keys import POINT_KEYS, VALUE_KEYS
from nmer_torchrl.rows import StoredRows
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
        super().__init__(StoredRows(keys, value_keys))
        self._unusable: set[int] = set()

    def _partners(self, anchor: Tensor) -> Tensor:
        generator = _compat.generator(self)
        if not self._unusable:
            partner = choose_other(anchor, self._rows.length, generator=generator)
        else:
            unusable = torch.tensor(sorted(self._unusable), device=anchor.device)
            positions = torch.ones(self._rows.length, dtype=torch.bool, device=anchor.device)
            positions[unusable] = False
            # Among the usable rows by rank, so that the choice stays uniform.
            rank = torch.where(positions[anchor], positions.cumsum(0)[anchor] - 1, -1)
            chosen = choose_other(rank, int(positions.sum()), generator=generator)
            usable = torch.cat([positions.nonzero().squeeze(1), anchor.new_tensor([-1])])
            partner = torch.where(positions[anchor], usable[chosen], -1)
        return torch.where(partner >= 0, partner, anchor)

    def _synchronize(self, storage: Storage) -> None:
        if not self._rows.follows(storage):
            self._empty()
        for index, points in self._rows.changes(storage):
            usable = points.isfinite().all(-1)
            self._unusable.difference_update(index.tolist())
            self._unusable.update(index[~usable & (index < len(storage))].tolist())

    def _empty(self) -> None:
        with self._lock:
            super()._empty()
            self._unusable = set()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(keys={self._rows.keys})"
