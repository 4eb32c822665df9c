"""Pairings of an anchor with its nearest neighbors."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor
from torchrl.data.replay_buffers import Storage

from nmer_torchrl.checks import is_integer
from nmer_torchrl.functional import choose_neighbor, to_device
from nmer_torchrl.keys import POINT_KEYS, VALUE_KEYS, join_entries
from nmer_torchrl.metrics import Euclidean, Metric, Space, View
from nmer_torchrl.neighbors import Search, SearchOption, check_search
from nmer_torchrl.pairs.base import Pairing
from nmer_torchrl.pairs.cap import Cap, QuantileCap
from nmer_torchrl.tracking.rows import StoredRows, check_positions, stored_entries
from nmer_torchrl.tracking.standardize import looks_every

_BLOCK = 2**14  # rows whose lists `build` builds at a time

# The pairing that uses each search object given as `search`, by the object's id. The pairing holds
# a reference to the object, so the id stays valid.
_SERVES: weakref.WeakValueDictionary[int, NearPairing] = weakref.WeakValueDictionary()


class NearPairing(Pairing):
    """Base class of pairings by distance; a subclass chooses partners among the neighbors.

    It keeps a neighbor search and the statistics of a metric up to date with a storage.
    """

    def __init__(
        self,
        k: int = 10,
        *,
        search: SearchOption = "auto",
        keys: Sequence[NestedKey] = POINT_KEYS,
        value_keys: Sequence[NestedKey] = VALUE_KEYS,
        metric: Metric | None = None,
        max_distance: float | QuantileCap | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        _check_k(k)
        check_search(search)
        self.k = k
        self.metric = Euclidean() if metric is None else _check_metric(metric)
        self.cap = None if max_distance is None else Cap(max_distance)
        super().__init__(StoredRows(keys, value_keys, self.metric.feature), generator)
        self.metric.check(search, self.rows.keys)
        self._chosen = search
        self._warned = False
        self._reset()

    def _reset(self) -> None:
        self._unlooked = 0  # writes since usable rows were last counted
        self._at_least = 0  # lower bound on the number of usable rows
        self._saved: dict[str, Any] | None = None
        self.space: Space | None = None  # built from the first rows, which set widths and device

    # The distance function as of the last query. It is immutable, so any thread may use it.
    _view: View | None = None

    @property
    def search(self) -> Search | None:
        """Returns the search, or None before the first rows are read."""
        return None if self.space is None else self.space.search

    # -- queries -----------------------------------------------------------------------------------

    def neighbors(self, storage: Storage, index: Tensor, k: int | None = None) -> Tensor:
        """Returns the neighbors `[q, k]` of the rows at positions `[q]`, nearest first.

        A row is never its own neighbor. Missing neighbors are -1 if fewer than k other rows are
        stored. Exact searches rank by the statistics of the rows stored now. The default graph
        knows every write, but ranks by a scale that may lag behind the statistics by less than a
        percent, so it can miss some neighbors (see `NeighborPairSampler`).
        """
        if k is not None:
            _check_k(k)
        index = check_positions(index, storage)
        with self.lock:
            self.synchronize(storage)
            return self._query(index, k)

    def build(
        self, storage: Storage, *, progress: Callable[[Sequence[Tensor]], Iterable[Tensor]] = iter
    ) -> None:
        """Builds the neighbor lists of all rows now instead of when rows are first drawn.

        Searches without lists have nothing to build. `progress` wraps the blocks of positions that
        are built one after another, such as `tqdm` for a progress bar.
        """
        with self.lock:
            self.synchronize(storage)
            if self.search is None or not self.search.lists:
                return
            positions = torch.arange(self.rows.length, device=self.rows.device)
        for block in progress(positions.split(_BLOCK)):
            self.neighbors(storage, block)

    def _query(self, index: Tensor, k: int | None = None) -> Tensor:
        """Does the work of `neighbors`; call `synchronize` first."""
        assert self.space is not None  # there is at least one row
        if _SERVES.get(id(self._chosen), self) is not self:
            raise RuntimeError(
                f"Another sampler now uses the {type(self._chosen).__name__} of this sampler and "
                "has replaced its points; give each sampler its own search."
            )
        there = to_device(index, self.rows.device)
        found = self.space.query(there, self.k if k is None else k)
        if not len(index):
            return index.new_empty(found.shape)
        self._view = self.space.view()
        return found.to(index.device)

    def embed(self, batch: TensorDictBase) -> Tensor:
        """Maps rows `[*B]` to float64 points `[*B, f]` whose Euclidean distance is the metric's.

        It uses the statistics of the last draw. Rows need not be stored. Raises an error for
        metrics whose `embeds` is false.
        """
        return self._last_view().embed(self._points(batch))

    def distances(self, batch: TensorDictBase) -> Tensor:
        """Returns the distances `[*B, m]` from the first of rows `[*B, 1 + m]` to the others.

        They are float64 and use the statistics of the last draw. For a batch of pairs, m is 1.
        """
        points = self._points(batch)
        first, others = points[..., :1, :], points[..., 1:, :]
        return self._last_view().distances(first, others)

    def _last_view(self) -> View:
        if self._view is None:
            raise RuntimeError(
                "Distances depend on the statistics of the last draw, but nothing has been drawn "
                "yet; sample from the buffer of this sampler first."
            )
        return self._view

    def _points(self, batch: TensorDictBase) -> Tensor:
        points = join_entries(batch.reshape(-1), self.rows.keys, self.rows.feature)
        return points.reshape(*batch.shape, -1)

    def _within(self, anchor: Tensor, partner: Tensor) -> Tensor:
        """Replaces partners beyond the distance limit with the anchor."""
        if self.cap is None:
            return partner
        assert self.space is not None
        points, _ = self.space.table.rows()
        near = self.cap.near(self._last_view().distances(points[anchor], points[partner]))
        return torch.where(near, partner, anchor)

    # -- following the storage ---------------------------------------------------------------------

    def synchronize(self, storage: Storage) -> None:
        """Reads all rows that have changed in the storage."""
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
            self.space.search.clear()  # a search object may have been used before
            if not isinstance(self._chosen, str):
                _SERVES[id(self._chosen)] = self
        before = self.space.table.read(index)
        if not self.rows.partial and len(before):  # all rows were read, but few may have changed
            changed = points.new_ones(len(points), dtype=torch.bool)
            now = points[: len(before)]
            changed[: len(before)] = ((before != now) & ~(before.isnan() & now.isnan())).any(-1)
            before, points = before[changed[: len(before)]], points[changed]
            index = index[changed.cpu()]
        if len(index):
            self.space.replace(index, points, before)
            self._at_least -= len(before)  # worst case: all old rows were usable, no new one is

    def _open(self, points: Tensor, storage: Storage) -> Space:
        widths: dict[NestedKey, int] = {"feature": points.shape[1]}
        if self.metric.feature is None:
            data = stored_entries(storage)
            widths = {key: data[key][0].numel() for key in self.rows.keys}
        return self.metric.open(self._chosen, self.k, widths, points.device)

    def _look(self) -> None:
        """Counts the usable rows, which waits for the device, and warns about unusable ones."""
        assert self.space is not None
        self._unlooked, self._at_least = 0, int(self.space.table.count)
        if self._warned or self._at_least >= self.rows.length:
            return
        self._warned = True
        unusable = ~self.space.table.valid[: self.rows.length]
        warnings.warn(
            f"The row at position {int(unusable.int().argmax())} has a non-finite entry (or one "
            "beyond 1e37). Such rows stay in the buffer, but they are never mixed, are never "
            "partners and do not count in the statistics. This warning is shown once.",
            stacklevel=2,
        )

    # -- saving ------------------------------------------------------------------------------------

    def clear(self) -> None:
        """Forgets all rows, so that the next draw reads and embeds the whole storage again."""
        with self.lock:
            if self.space is not None:
                self.space.search.clear()
            super().clear()
            if self.cap is not None:
                self.cap.clear()
            self._reset()

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the search and the metric, and a quantile cap's distances."""
        with self.lock:
            storage = self.rows.storage
            if storage is not None and len(storage):
                self.synchronize(storage)
            if self._saved is not None:  # loaded, and not used yet
                state = self._saved
            else:
                state = {} if self.space is None else self.space.state_dict()
            return state if self.cap is None else {**state, "recent": self.cap.recent.clone()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores a saved state; the next draw reads the whole storage again."""
        with self.lock:
            self.clear()
            self._saved = dict(state_dict)
            if self.cap is not None and "recent" in state_dict:
                self.cap.recent = state_dict["recent"].clone()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "space": None, "_view": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._reset()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(k={self.k}, keys={self.rows.keys})"


def _check_k(k: int) -> None:
    if not is_integer(k) or k < 1:
        raise ValueError(f"k={k!r} is not a number of neighbors; give an integer, at least 1.")


def _check_metric(metric: Metric) -> Metric:
    if not isinstance(metric, Metric):
        raise TypeError(
            f"`metric` is {metric!r}, which is not a metric; give an object such as Euclidean() or "
            "Mahalanobis()."
        )
    return metric


class NeighborPairs(NearPairing):
    """Pairs each anchor with one of its k nearest neighbors in the storage.

    `NeighborPairSampler`, which combines this pairing with uniform anchors, documents the
    neighbors, their accuracy and the arguments. `generator` is the source of all randomness; `None`
    uses torch's global one.

    Examples:
        >>> from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
        >>> from torchrl.data.replay_buffers import PrioritizedSampler
        >>> from nmer_torchrl import NeighborPairs, PairMixup
        >>> buffer = TensorDictReplayBuffer(
        ...     storage=LazyTensorStorage(1_000),
        ...     sampler=PrioritizedSampler(1_000, alpha=0.6, beta=0.4),  # or any other
        ...     sample_unit=NeighborPairs(k=10),
        ...     transform=PairMixup(alpha=0.75),
        ...     batch_size=32,
        ... )
    """

    def partners(self, anchor: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Returns the partners `[B]` of anchors `[B]`; call `synchronize` first."""
        assert self.space is not None
        near, fills = self._query(anchor), self.space.search.fills
        padded, alone = not fills or self._at_least <= self.k, not fills or self.space.table.holes
        partner = choose_neighbor(anchor, near, generator=generator, padded=padded, alone=alone)
        return self._within(anchor, partner)


class Neighborhoods(NearPairing):
    """Groups each anchor with all of its k nearest neighbors, `[B, 1 + k]`.

    The neighbors are those of `NeighborPairs`, nearest first. The anchor itself fills the places of
    neighbors that are missing or farther away than `max_distance`. Use it with `NeighborhoodMixup`
    or `GaussianProcessMixup`. The arguments are those of `NeighborPairs`.

    Examples:
        >>> from nmer_torchrl import Neighborhoods
        >>> Neighborhoods(k=5)
        Neighborhoods(k=5, keys=('observation', 'action'))
    """

    draws = "neighborhoods [B, 1 + k]"

    def partners(self, anchor: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Returns the neighbors `[B, k]` of anchors `[B]`; call `synchronize` first."""
        own, neighbors = anchor.unsqueeze(1), self._query(anchor)
        return self._within(own, torch.where(neighbors < 0, own, neighbors))
