"""The interface of a neighbor search, and the table of points that our searches share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor

from nmer_torchrl.functional import as_rows, finite_rows

SearchName = Literal["auto", "graph", "keops", "torch", "faiss"]
"""The names that `search=` accepts."""


@runtime_checkable
class NeighborSearch(Protocol):
    """Finds nearest neighbors among points at storage positions, which may be overwritten.

    Any object with these three methods can be passed to a sampler as `search`. `Search` declares
    further capabilities.

    Examples:
        >>> from nmer_torchrl import NeighborPairSampler
        >>> class FirstOthers:  # returns the first other rows, to show the methods
        ...     def write(self, index, points):
        ...         self.size = int(index.max()) + 1
        ...
        ...     def query(self, index, k, scale):
        ...         others = torch.arange(k).expand(len(index), k)
        ...         return others + (others >= index.unsqueeze(-1))
        ...
        ...     def clear(self):
        ...         self.size = 0
        >>> isinstance(FirstOthers(), NeighborSearch)
        True
        >>> NeighborPairSampler(k=3, search=FirstOthers())
        NeighborPairSampler(k=3, keys=('observation', 'action'))
    """

    def write(self, index: Tensor, points: Tensor) -> None:
        """Writes the unscaled points `[n, d]` to the positions `[n]`, replacing earlier points.

        Positions are distinct and on the CPU, wherever the points are. A point with a non-finite
        entry empties its position: it is never a neighbor and has no neighbors.
        """
        ...

    def query(self, index: Tensor, k: int, scale: Tensor) -> Tensor:
        """Returns the neighbors `[q, k]` of the points at positions `[q]`, nearest first.

        Distances are norms of `(a - b) * scale` with `scale` `[d]`. A position is never its own
        neighbor, even among exact duplicates. With fewer than k other points, rows are padded on
        the right with -1.
        """
        ...

    def clear(self) -> None:
        """Forgets all points."""
        ...


SearchOption: TypeAlias = SearchName | NeighborSearch
"""A neighbor search, by its name or as an object."""


class Search(ABC):
    """Base class of our searches: a `NeighborSearch` that declares its capabilities.

    An object with only the three methods gets the defaults. Derive from this class to declare more.

    Examples:
        >>> from nmer_torchrl.neighbors import FaissSearch, TorchSearch
        >>> TorchSearch.products, FaissSearch.products
        (True, False)
    """

    products: bool = False  # the scale may be [g, d]; the distance is then a product of g norms
    exact: bool = True  # True if `query` returns the exact neighbors under the given scale
    fills: bool = False  # always returns k neighbors if there are k other points
    lists: bool = False  # builds a point's list of neighbors at its first query, and keeps it
    table: PointTable | None = None  # the points as written, on their device, if it keeps them

    @abstractmethod
    def write(self, index: Tensor, points: Tensor) -> None:
        """See `NeighborSearch.write`."""

    @abstractmethod
    def query(self, index: Tensor, k: int, scale: Tensor) -> Tensor:
        """See `NeighborSearch.query`."""

    @abstractmethod
    def clear(self) -> None:
        """See `NeighborSearch.clear`."""

    def state_dict(self) -> dict[str, Any]:
        """Returns state beyond the points, such as lists that are expensive to build."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027
        """Restores a saved state after the points were written; ignores one that does not fit."""


def as_search(search: NeighborSearch) -> Search:
    """Returns a `Search` unchanged, and wraps any other object in one with the defaults."""
    return search if isinstance(search, Search) else _Plain(search)


class _Plain(Search):
    """Wraps an object that has only the three methods of `NeighborSearch`."""

    def __init__(self, search: NeighborSearch) -> None:
        self.search = search

    def write(self, index: Tensor, points: Tensor) -> None:
        self.search.write(index, points)

    def query(self, index: Tensor, k: int, scale: Tensor) -> Tensor:
        return self.search.query(index, k, scale)

    def clear(self) -> None:
        self.search.clear()


class PointTable:
    """Holds points `[capacity, d]` by storage position, with a flag for occupied positions.

    The table keeps the dtype (float32 or float64) and device of the first points, and grows as
    needed. `points` is zero where `valid` is false. Copies and pickles are empty, because the
    points can be read from the storage again.

    Examples:
        >>> table = PointTable()
        >>> table.write(torch.tensor([2, 0]), torch.tensor([[1.0, 2.0], [torch.nan, 3.0]]))
        >>> points, valid = table.rows()
        >>> points.tolist(), valid.tolist()
        ([[0.0, 0.0], [0.0, 0.0], [1.0, 2.0]], [False, False, True])
    """

    def __init__(self) -> None:
        self.clear()

    def __reduce__(self) -> tuple[type[PointTable], tuple[()]]:
        return PointTable, ()

    def clear(self) -> None:
        """Forgets all points."""
        self.points = torch.empty(0, 0)
        self.valid = torch.empty(0, dtype=torch.bool)
        self.count: int | Tensor = 0  # number of occupied positions
        self.size = 0  # one more than the greatest position ever written
        self.holes = False  # whether some positions below `size` may be empty

    def write(self, index: Tensor, points: Tensor) -> None:
        """Writes points `[n, d]` to distinct positions `[n]`; non-finite points empty theirs."""
        if not len(index):
            return
        index = index.cpu()  # samplers pass them on the CPU already
        if not self.size:
            self.points = points.new_empty((0, points.shape[1]))
            self.valid = torch.empty(0, dtype=torch.bool, device=points.device)
        elif points.shape[1] != self.points.shape[1]:
            raise ValueError(
                f"The points have {points.shape[1]} dimensions, but those stored before have "
                f"{self.points.shape[1]}; call `clear()` first to change the width."
            )
        before, size = self.size, int(index.max()) + 1
        if size > before:
            self._grow(size)
        rows, finite = as_rows(index, points.device), finite_rows(points)
        if not self.holes:
            skipped = size > before and size - before > int((index >= before).sum())
            # On another device, checking whether all are finite would wait for it.
            self.holes = skipped or points.device.type != "cpu" or not bool(finite.all())
        self.points[rows] = points.where(finite.unsqueeze(-1), 0.0) if self.holes else points
        self.count = self.count + (finite.sum() - self.valid[rows].sum())
        self.valid[rows] = finite

    def _grow(self, size: int) -> None:
        if size > len(self.points):
            # Grows in small steps: spare memory for each point costs more than copying it.
            grown = max(size, len(self.points) + len(self.points) // 12, 1024)
            points = self.points.new_empty((grown, self.points.shape[1]))
            points[: self.size] = self.points[: self.size]
            valid = self.valid.new_zeros(grown)
            valid[: self.size] = self.valid[: self.size]
            self.points, self.valid = points, valid
        self.points[self.size : size] = 0.0
        self.size = size

    def read(self, index: Tensor) -> Tensor:
        """Returns the points `[m, d]` at those of the ascending positions `[n]` below `size`.

        Empty positions are NaN.
        """
        index = index[: int(torch.searchsorted(index, self.size))]
        if not len(index):
            return self.points[:0]
        rows = as_rows(index, self.points.device)
        points = self.points[rows]
        return points.where(self.valid[rows].unsqueeze(-1), torch.nan) if self.holes else points

    def present(self) -> Tensor:
        """Returns all points `[size, d]`, with NaN at empty positions."""
        points, valid = self.rows()
        return points.where(valid.unsqueeze(-1), torch.nan) if self.holes else points

    def rows(self) -> tuple[Tensor, Tensor]:
        """Returns views of the points `[size, d]` and of the flags `[size]`."""
        return self.points[: self.size], self.valid[: self.size]


class TableSearch(Search):
    """A search that keeps its points in a table, and caches derived data until they change."""

    fills = True
    table: PointTable

    def __init__(self) -> None:
        self.table = PointTable()
        self._changed()

    @abstractmethod
    def _changed(self) -> None:
        """Drops cached data that was derived from the points."""

    def write(self, index: Tensor, points: Tensor) -> None:
        """See `NeighborSearch.write`."""
        self.table.write(index, points)
        self._changed()

    def clear(self) -> None:
        """See `NeighborSearch.clear`."""
        self.table.clear()
        self._changed()

    def __reduce__(self) -> tuple[type[TableSearch], tuple[()]]:
        return type(self), ()
