"""Neighbours among what a storage holds now, under the statistics of what it holds now."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor
from torchrl.data.replay_buffers import Storage

from nmer_torchrl.checks import is_integer
from nmer_torchrl.keys import join_entries
from nmer_torchrl.metrics import Euclidean, Metric, Space, View
from nmer_torchrl.neighbors import NeighborSearch, Search, SearchName, check_search
from nmer_torchrl.tracking.rows import StoredRows, stored_entries
from nmer_torchrl.tracking.standardize import looks_every

# Whom an object that was given as `search` serves, by its id: it lives as long as they do.
_SERVES: weakref.WeakValueDictionary[int, StoredNeighbors] = weakref.WeakValueDictionary()


def check_k(k: int) -> None:
    """Raises if this is not a number of neighbours."""
    if not is_integer(k) or k < 1:
        raise ValueError(f"k={k!r}, but the number of neighbours is an integer, at least 1.")


def check_metric(metric: Metric) -> Metric:
    """Raises if this is no metric."""
    if not isinstance(metric, Metric):
        raise TypeError(
            f"`metric` is {metric!r}, which is no metric; give an object such as Euclidean() or "
            "Mahalanobis()."
        )
    return metric


class StoredNeighbors:
    """Keeps a neighbour search and the statistics of a metric in step with a storage.

    Args:
        k: Number of neighbours unless a call asks for another.
        search: `"auto"`, the name of a search, or an object that satisfies `NeighborSearch`.
        keys: Entries in which distances are measured.
        value_keys: Entries that must be finite, too, for a row to be anyone's neighbour.
        metric: How far apart rows are; `Euclidean()` unless given.
    """

    def __init__(
        self,
        k: int,
        search: SearchName | NeighborSearch,
        keys: Sequence[NestedKey],
        value_keys: Sequence[NestedKey],
        metric: Metric | None = None,
    ) -> None:
        check_k(k)
        check_search(search)
        self.metric = Euclidean() if metric is None else check_metric(metric)
        self.k = k
        self._chosen = search
        self.rows = StoredRows(keys, value_keys, self.metric.feature)
        self.metric.check(search, self.rows.keys)
        self._warned = False
        self._unlooked = 0  # writes since usable rows were last counted
        self._at_least = 0  # of usable rows there are at least so many
        self._saved: dict[str, Any] | None = None
        self._view: View | None = None  # distances at the last query; it outlives the points
        self.space: Space | None = None  # made by the first rows, which tell widths and device

    @property
    def search(self) -> Search | None:
        """The search, once there are rows."""
        return None if self.space is None else self.space.search

    def __getstate__(self) -> dict[str, Any]:
        names = ("k", "_chosen", "metric", "rows", "_warned")
        return {name: getattr(self, name) for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._unlooked = self._at_least = 0
        self._saved = self._view = self.space = None

    def state_dict(self) -> dict[str, Any]:
        """What search and metric want to keep, if anything; the rest follows from the storage."""
        return {} if self.space is None else self.space.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Reads the storage anew at the next query; then gives search and metric what they kept."""
        self.clear()
        self._saved = dict(state)

    def clear(self) -> None:
        """Forgets all points; the next query reads the storage."""
        if self.space is not None:
            self.space.search.clear()
        self.rows.forget()
        self._unlooked = self._at_least = 0
        self._saved = self.space = None

    def neighbors(self, index: Tensor, k: int | None = None) -> Tensor:
        """Positions `[q]` to `[q, k]`, nearest first, padded with -1; after `synchronize`."""
        assert self.space is not None  # there is at least one row
        if _SERVES.get(id(self._chosen), self) is not self:
            raise RuntimeError(
                f"The {type(self._chosen).__name__} of this sampler has since been put to use by "
                "another one, which replaced its points; give each sampler a search of its own."
            )
        there = index.to(self.rows.device, non_blocking=True)
        found = self.space.query(there, self.k if k is None else k)
        if not len(index):
            return index.new_empty(found.shape)
        self._view = self.space.view()
        return found.to(index.device)

    def padding(self) -> dict[str, bool]:
        """What `choose_neighbor` may rely on in answers to queries, as far as is known."""
        if self.space is None or not self.space.search.fills:
            return {}
        return {"padded": self._at_least <= self.k, "alone": self.space.table.holes}

    def stored_distances(self, first: Tensor, second: Tensor) -> Tensor:
        """Returns the distances between stored rows, by positions that broadcast; as `embed`."""
        assert self.space is not None
        points, _ = self.space.table.rows()
        return self._last_view().distances(points[first], points[second])

    def embed(self, batch: TensorDictBase) -> Tensor:
        """Rows `[*B]` to points `[*B, f]` whose Euclidean distance is that of the last query."""
        return self._last_view().embed(self._points(batch))

    def distances(self, batch: TensorDictBase) -> Tensor:
        """Rows `[*B, 1 + m]` to distances `[*B, m]` of the first from the others, likewise."""
        points = self._points(batch)
        first, others = points[..., :1, :], points[..., 1:, :]
        return self._last_view().distances(first, others)

    def _last_view(self) -> View:
        if self._view is None:
            raise RuntimeError(
                "There are no statistics yet to measure by, since nothing has been drawn; sample "
                "from the buffer whose sampler this is first."
            )
        return self._view

    def _points(self, batch: TensorDictBase) -> Tensor:
        flat = batch.reshape(-1)
        points = join_entries(flat, self.rows.keys, self.rows.feature)
        return points.reshape(*batch.shape, -1)

    def synchronize(self, storage: Storage) -> None:
        """Takes up whatever has changed in the storage."""
        if self.rows.follows_another(storage):
            self.clear()
        changed = False
        for index, points in self.rows.changes(storage):
            self._take(index, points, storage)
            changed = True
        if changed:
            self._unlooked += 1
            if self._at_least <= self.k or self._unlooked >= looks_every(self.rows.device):
                self._look()
        saved, self._saved = self._saved, None
        if saved and self.space is not None:
            self.space.load_state_dict(saved)

    def _take(self, index: Tensor, points: Tensor, storage: Storage) -> None:
        if self.space is None:
            self.space = self._open(points, storage)
            self.space.search.clear()  # an object may have served before
            if not isinstance(self._chosen, str):
                _SERVES[id(self._chosen)] = self
        before = self.space.table.read(index)
        if not self.rows.partial and len(before):  # of all rows, few may have changed
            changed = points.new_ones(len(points), dtype=torch.bool)
            now = points[: len(before)]
            changed[: len(before)] = ((before != now) & ~(before.isnan() & now.isnan())).any(-1)
            before, points = before[changed[: len(before)]], points[changed]
            index = index[changed.cpu()]
        if len(index):
            self.space.replace(index, points, before)
            self._at_least -= len(before)  # if all of these were usable, and no new one is

    def _look(self) -> None:
        """Counts the usable rows, which waits for the device, and warns of others."""
        assert self.space is not None
        self._unlooked, self._at_least = 0, int(self.space.table.count)
        if self._warned or self._at_least >= self.rows.length:
            return
        self._warned = True
        unusable = ~self.space.table.valid[: self.rows.length]
        warnings.warn(
            f"The row at position {int(unusable.int().argmax())} has a non-finite entry (or one "
            "beyond 1e37). Such rows stay in the buffer, but are never mixed, are no partners and "
            "do not count in the statistics. This is said once.",
            stacklevel=2,
        )

    def _open(self, points: Tensor, storage: Storage) -> Space:
        widths: dict[NestedKey, int] = {"feature": points.shape[1]}
        if self.metric.feature is None:
            data = stored_entries(storage)
            widths = {key: data[key][0].numel() for key in self.rows.keys}
        return self.metric.open(self._chosen, self.k, widths, points.device)
