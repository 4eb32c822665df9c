"""A pairing of an anchor with a random row."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tensordict import NestedKey
from torch import Tensor
from torchrl.data.replay_buffers import Storage

from nmer_torchrl.functional import as_rows, choose_other, finite_rows
from nmer_torchrl.keys import POINT_KEYS, VALUE_KEYS
from nmer_torchrl.pairs.base import Pairing
from nmer_torchrl.tracking.rows import StoredRows


class RandomPairs(Pairing):
    """Pairs each anchor with another stored row, drawn uniformly.

    With `PairMixup` this is Mixup without a neighborhood. Rows with a non-finite entry are never
    partners and have none.

    Keyword Args:
        keys: Entries that the transform mixes. They must be finite in a partner.
        value_keys: Further entries that the transform mixes, as in `NeighborPairs`.
        generator: Source of all randomness; `None` uses torch's global one.

    Examples:
        >>> from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
        >>> from nmer_torchrl import PairMixup, RandomPairs
        >>> buffer = TensorDictReplayBuffer(
        ...     storage=LazyTensorStorage(1_000),
        ...     sample_unit=RandomPairs(),
        ...     transform=PairMixup(alpha=0.75),
        ...     batch_size=32,
        ... )
    """

    def __init__(
        self,
        *,
        keys: Sequence[NestedKey] = POINT_KEYS,
        value_keys: Sequence[NestedKey] = VALUE_KEYS,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__(StoredRows(keys, value_keys), generator)
        self._forget()

    def _forget(self) -> None:
        self._usable = torch.empty(0, dtype=torch.bool)  # by position; may be longer than needed
        self._holes = False  # whether some rows may be unusable
        self._ranks: Tensor | None = None  # number of usable rows up to each position

    def synchronize(self, storage: Storage) -> None:
        """Reads all rows that have changed in the storage."""
        if self.rows.follows_another(storage):
            self.clear()
        for index, points in self.rows.changes(storage):
            usable, size = finite_rows(points), int(index.max()) + 1
            if size > len(self._usable):
                grown = max(size, len(self._usable) * 9 // 8)
                table = torch.ones(grown, dtype=torch.bool, device=points.device)
                table[: len(self._usable)] = self._usable
                self._usable = table
            self._usable[as_rows(index, points.device)] = usable
            # On another device, checking whether all are usable would wait for it.
            if points.device.type != "cpu":
                self._holes = True
            elif self._holes or not usable.all():
                self._holes = not bool(self._usable[: len(storage)].all())
            self._ranks = None

    def partners(self, anchor: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Returns the partners `[B]` of anchors `[B]`; call `synchronize` first."""
        length = self.rows.length
        if not self._holes:
            partner = choose_other(anchor, length, generator=generator)
            return torch.where(partner >= 0, partner, anchor)
        # Drawn by rank among the usable rows, which keeps the choice uniform without host reads.
        if self._ranks is None:
            self._ranks = self._usable[:length].cumsum(0)
        usable = self._usable[anchor]
        rank = torch.where(usable, self._ranks[anchor] - 1, -1)
        chosen = choose_other(rank, self._ranks[-1], generator=generator)
        partner = torch.searchsorted(self._ranks, chosen + 1)
        return torch.where(usable & (chosen >= 0), partner, anchor)

    def clear(self) -> None:
        """Forgets all rows; the next draw reads the whole storage."""
        with self.lock:
            super().clear()
            self._forget()
