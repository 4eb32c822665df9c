"""Tracks the standard deviations of the rows in a storage, by entry."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tensordict import NestedKey, TensorDictBase
from torch import Tensor
from torchrl.data.replay_buffers import Storage

from nmer_torchrl.keys import POINT_KEYS, VALUE_KEYS, get_entry
from nmer_torchrl.neighbors import PointTable
from nmer_torchrl.tracking.rows import StoredRows, stored_entries
from nmer_torchrl.tracking.standardize import RunningStandardizer


class Spread:
    """Tracks the population standard deviation of each dimension of some entries of a storage.

    A sampler that is notified of every write updates it, and a transform reads `std`. It holds a
    copy of the entries, so that it can subtract overwritten rows. Rows with a non-finite entry do
    not count.

    Keyword Args:
        keys: Entries to track.
    """

    def __init__(self, *, keys: Sequence[NestedKey] = (*POINT_KEYS, *VALUE_KEYS)) -> None:
        self.rows = StoredRows(keys, ())
        self._reset()
        self.std: dict[NestedKey, Tensor] = {}  # by entry; replaced, never changed in place

    @property
    def keys(self) -> tuple[NestedKey, ...]:
        """Returns the tracked entries."""
        return self.rows.keys

    def _reset(self) -> None:
        self._statistics: RunningStandardizer | None = None
        self._table = PointTable()

    def clear(self) -> None:
        """Makes the next `synchronize` read the whole storage; `std` stays until then."""
        self.rows.forget()
        self._reset()

    def synchronize(self, storage: Storage) -> None:
        """Reads all rows that have changed in the storage."""
        if self.rows.follows_another(storage):
            self.clear()
        changed = False
        for index, points in self.rows.changes(storage):
            if self._statistics is None:
                self._statistics = RunningStandardizer(points.shape[1], points.device)
            before = self._table.read(index)
            self._statistics.replace(points, before)
            self._table.write(index, points)
            self._statistics.settle(self._table.present)
            changed = True
        if changed and self._statistics is not None:
            self.std = self._split(stored_entries(storage), self._statistics.std)

    def _split(self, data: TensorDictBase, std: Tensor) -> dict[NestedKey, Tensor]:
        entries = {key: get_entry(data, key) for key in self.keys}
        parts = std.split([entry[0].numel() for entry in entries.values()])
        return {
            key: part.reshape(entry.shape[1:]).to(entry.device, entry.dtype)
            for (key, entry), part in zip(entries.items(), parts, strict=True)
        }

    def __getstate__(self) -> dict[str, Any]:
        return {"rows": self.rows}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.rows = state["rows"]
        self._reset()
        self.std = {}
