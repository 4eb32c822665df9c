"""Neighbours among what a storage holds now, under the statistics of what it holds now."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Sequence
from typing import Any

from tensordict import NestedKey
from torch import Tensor
from torchrl.data.replay_buffers import Storage

from nmer_torchrl.neighbors import NeighborSearch, PointTable, check_search, make_search
from nmer_torchrl.rows import StoredRows
from nmer_torchrl.standardize import RunningStandardizer

# Whom a search serves, by the search's id: a neighborhood keeps its search alive, so ids hold.
_SERVES: weakref.WeakValueDictionary[int, Neighborhood] = weakref.WeakValueDictionary()


def check_k(k: int) -> None:
    """Raises if this is not a number of neighbours."""
    if isinstance(k, bool) or not isinstance(k, int) or k < 1:
        raise ValueError(f"k={k!r}, but the number of neighbours is an integer, at least 1.")


class Neighborhood:
    """Keeps a neighbour search and the statistics in step with a storage.

    Args:
        k: Number of neighbours unless a call asks for another.
        search: `"auto"`, the name of a search, or an object that satisfies `NeighborSearch`.
        keys: Entries in which distances are measured.
        value_keys: Entries that must be finite, too, for a row to be anyone's neighbour.
    """

    def __init__(
        self,
        k: int,
        search: str | NeighborSearch,
        keys: Sequence[NestedKey],
        value_keys: Sequence[NestedKey],
    ) -> None:
        check_k(k)
        check_search(search)
        self.k = k
        self._chosen = search
        self.rows = StoredRows(keys, value_keys)
        self._warned = False
        self._saved: dict[str, Any] | None = None
        self._reset()

    def _reset(self) -> None:
        self.statistics: RunningStandardizer | None = None
        self.search: NeighborSearch | None = None
        self._table = PointTable()

    def __getstate__(self) -> dict[str, Any]:
        return {"k": self.k, "_chosen": self._chosen, "rows": self.rows, "_warned": self._warned}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._saved = None
        self._reset()

    def state_dict(self) -> dict[str, Any]:
        """What the search wants to keep, if anything; the rest follows from the storage."""
        state = getattr(self.search, "state_dict", None)
        return {} if state is None else {"search": state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Reads the storage anew at the next query; then gives the search what it kept."""
        self.clear()
        self._saved = state.get("search")

    def clear(self) -> None:
        """Forgets all points; the next query reads the storage."""
        if self.search is not None:
            self.search.clear()
        self.rows.forget()
        self._saved = None
        self._reset()

    def neighbors(self, index: Tensor, k: int | None = None) -> Tensor:
        """Positions `[q]` to `[q, k]`, nearest first, padded with -1; after `synchronize`."""
        assert self.search is not None  # there is at least one row
        assert self.statistics is not None
        if _SERVES.get(id(self.search)) is not self:
            raise RuntimeError(
                f"The {type(self.search).__name__} of this sampler has since been put to use by "
                "another one, which replaced its points; give each sampler a search of its own."
            )
        return self.search.query(index, self.k if k is None else k, self.statistics.scale)

    def synchronize(self, storage: Storage) -> None:
        """Takes up whatever has changed in the storage."""
        if not self.rows.follows(storage):
            saved = self._saved
            self.clear()
            self._saved = saved
        for index, points in self.rows.changes(storage):
            self._take(index, points, len(storage))
        saved, self._saved = self._saved, None
        load = getattr(self.search, "load_state_dict", None)
        if saved is not None and load is not None:
            load(saved)

    def _take(self, index: Tensor, points: Tensor, length: int) -> None:
        if self.search is None or self.statistics is None:
            self.search = make_search(self._chosen, self.k, points.device)
            self.search.clear()  # an object may have served before
            _SERVES[id(self.search)] = self
            self.statistics = RunningStandardizer(points.shape[1])
            # Our own searches hold the points already; for another we keep them ourselves.
            table = getattr(self.search, "table", None)
            self._table = table if isinstance(table, PointTable) else PointTable()
        usable = points.isfinite().all(-1)
        self._warn(index[~usable & (index < length)])
        before, was_usable = self._table.read(index, points.shape[1])
        changed = (usable != was_usable) | (usable & (before != points).any(-1))
        changed |= index >= self._table.size  # the search hears of every position
        self.statistics.update(points[changed & usable], removed=before[changed & was_usable])
        index, points = index[changed], points[changed]
        if getattr(self.search, "table", None) is not self._table:
            self._table.write(index, points)
        self.search.write(index, points)

    def _warn(self, unusable: Tensor) -> None:
        if self._warned or not len(unusable):
            return
        self._warned = True
        warnings.warn(
            f"The row at position {int(unusable[0])} has a non-finite entry (or one beyond "
            "float32). Such rows stay in the buffer, but are never mixed, are no partners and do "
            "not count in the statistics. This is said once.",
            stacklevel=2,
        )
