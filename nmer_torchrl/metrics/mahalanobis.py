"""Distances over whitened dimensions."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import NestedKey
from torch import Tensor

from nmer_torchrl.metrics.base import Metric, Space, Widths
from nmer_torchrl.neighbors import PointTable, Search, SearchOption, make_search
from nmer_torchrl.neighbors.exact import BLOCK, nearest, relative_error
from nmer_torchrl.tracking.covariance import RunningCovariance
from nmer_torchrl.tracking.standardize import recompute_if_doubtful

_DRIFT = 0.05  # of the whitening, as a logarithm of distances, after which it is renewed
_WIDER = 8  # times as many candidates, where those asked for first prove too little


class Mahalanobis(Metric):
    """The norm of `W (a - b)` where `W` whitens what is stored now.

    With `z` the Z-scored difference and `R` the correlation matrix of the rows stored now, the
    squared distance is `z^T ((1 - shrinkage) R + shrinkage I)^-1 z`: dimensions that move together
    count once. Without shrinkage it is the classical `(a - b)^T S^-1 (a - b)` of the covariance
    `S`, which does not exist where a dimension depends on others linearly; a shrinkage of 1 gives
    `Euclidean`.

    Every search serves it. Searches are given points mapped by a whitening that is kept until it
    has drifted by a few percent from the current one; then all points are mapped anew. Each answer
    is ranked again, in float64, by the current one: more candidates are asked for than are wanted,
    and how far the two whitenings differ at most tells which answers are proven. For the others
    more candidates are asked for, and in the end all points compared. So neighbors are exact under
    the statistics of *now* where the search is exact: `"torch"`, `"faiss"`, `"keops"` (up to
    float32), and `NeighborGraph(..., exact=True)`. The graph by default is not asked for proofs:
    its answers are the nearest of its candidates, by the statistics of now.

    Each draw after a write costs some operations on `[d, d]` matrices. Give a graph of your own
    room for the candidates, `NeighborGraph(2 * k + 4)`; with less it answers by brute force.

    Keyword Args:
        shrinkage: Share of the identity in the correlation matrix, from 1e-5 to 1.

    Examples:
        >>> from nmer_torchrl import NeighborPairSampler
        >>> NeighborPairSampler(metric=Mahalanobis()).metric
        Mahalanobis(shrinkage=0.01)
    """

    def __init__(self, *, shrinkage: float = 0.01) -> None:
        if not 1e-5 <= shrinkage <= 1:
            raise ValueError(
                f"shrinkage={shrinkage!r}, but it is from 1e-5, for nearly the classical distance, "
                "to 1, for that of Euclidean (the default is 0.01)."
            )
        self.shrinkage = float(shrinkage)

    def check(self, search: SearchOption, keys: tuple[NestedKey, ...]) -> None:
        """Any search and any keys will do."""

    def open(self, search: SearchOption, k: int, widths: Widths, device: torch.device) -> Space:
        """See `Metric.open`."""
        made = make_search(search, candidates(k), device)
        return WhitenedSpace(made, sum(widths.values()), self.shrinkage)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(shrinkage={self.shrinkage})"


def candidates(k: int) -> int:
    """How many neighbors a search is asked for, so that k of them can be proven."""
    return 2 * k + 4


@dataclass(frozen=True)
class Whitening:
    """The linear map of a Mahalanobis distance, as it is at one moment."""

    matrix: Tensor  # [d, d], lower triangular, float64 on the CPU
    inverse: Tensor  # [d, d]
    center: Tensor  # [d]; it has no part in distances, but keeps what is mapped small

    @staticmethod
    def of(statistics: RunningCovariance, shrinkage: float) -> Whitening:
        """The one that whitens what these statistics are of."""
        scale = statistics.moments.scale
        correlation = (1.0 - shrinkage) * statistics.correlation()
        correlation.diagonal().fill_(1.0)
        root = torch.linalg.cholesky(correlation)
        matrix = torch.linalg.solve_triangular(root, torch.diag(scale), upper=False)
        return Whitening(matrix, root / scale.unsqueeze(1), statistics.moments.mean)

    def embed(self, points: Tensor) -> Tensor:
        """See `View.embed`."""
        return self._map(points.double() - self.center.to(points.device))

    def distances(self, first: Tensor, second: Tensor) -> Tensor:
        """See `View.distances`."""
        return self._map(first.double() - second.double()).norm(dim=-1)

    def _map(self, differences: Tensor) -> Tensor:
        return differences @ self.matrix.to(differences.device).T

    def stretch(self, other: Whitening) -> tuple[float, float]:
        """The least and the greatest factor by which a distance is longer here than there."""
        factors = torch.linalg.svdvals(self.matrix @ other.inverse)
        return float(factors[-1]), float(factors[0])


class WhitenedSpace(Space):
    """Points under a whitening that follows their statistics; see `Mahalanobis`.

    Args:
        search: An empty search.
        d: Number of dimensions.
        shrinkage: Share of the identity in the correlation matrix.
    """

    def __init__(self, search: Search, d: int, shrinkage: float) -> None:
        self.search = search
        self.table = PointTable()
        self.statistics = RunningCovariance(d)
        self._shrinkage = shrinkage
        self._current: Whitening | None = None  # that of now, once it was asked for
        self._frozen: Whitening | None = None  # that by which the search's points were mapped
        self._least: float | None = None  # factor from distances by that to those of now
        self._error = 0.0  # of a mapped point, by the rounding of its dtype
        self._scale = torch.ones(d, dtype=torch.float64)

    def replace(self, index: Tensor, points: Tensor, removed: Tensor) -> None:
        """See `Space.replace`."""
        self.statistics.replace(points, removed)
        self._current = self._least = None
        self.table.write(index, points)
        if self._frozen is not None:
            self._write(index, points)

    def _write(self, index: Tensor, points: Tensor) -> None:
        assert self._frozen is not None
        mapped = self._frozen.embed(points)
        if len(mapped):
            largest = float(mapped.norm(dim=-1).nan_to_num(0.0, 0.0).max())
            self._error = max(self._error, torch.finfo(points.dtype).eps * largest)
        self.search.write(index, mapped.to(points.dtype))

    def _freeze(self, whitening: Whitening) -> None:
        """Maps all points by this one."""
        self._frozen, self._least, self._error = whitening, None, 0.0
        self.search.clear()
        points, valid = self.table.rows()
        for rows in torch.arange(len(points), device=points.device).split(65_536):
            self._write(rows, points[rows].masked_fill(~valid[rows].unsqueeze(1), torch.nan))

    def view(self) -> Whitening:
        """See `Space.view`."""
        if self._current is None:
            recompute_if_doubtful(self.statistics, self.table.present)
            self._current = Whitening.of(self.statistics, self._shrinkage)
        return self._current

    def query(self, index: Tensor, k: int) -> Tensor:
        """See `Space.query`."""
        if not len(index) and self._frozen is not None:  # the search may have things to do
            return self.search.query(index, k, self._scale)
        self._follow()
        found = self.search.query(index, candidates(k), self._scale)
        step = max(1, BLOCK // (4 * found.shape[1] * len(self._scale)))
        rows = [
            self._rank(some, near, k)
            for some, near in zip(index.split(step), found.split(step), strict=True)
        ]
        return torch.cat(rows) if rows else index.new_empty((0, k))

    def _follow(self) -> None:
        """Renews the whitening of the search's points if the current one has drifted from it."""
        current = self.view()
        if self._least is None:
            least, greatest = 1.0, math.inf
            if self._frozen is not None:
                least, greatest = current.stretch(self._frozen)
            if greatest > least * math.exp(_DRIFT):
                self._freeze(current)
                least = 1.0
            self._least = least

    def _rank(self, index: Tensor, found: Tensor, k: int) -> Tensor:
        """Candidates `[q, c]` to neighbors `[q, k]` by the current whitening, proven or scanned.

        What the search left out is at least as far as the last candidate, by mapped points that
        each are off by a rounding, and `_least` times that by the current whitening.
        """
        assert self._frozen is not None
        assert self._least is not None
        points, valid = self.table.rows()
        own, others = points[index].unsqueeze(1), points[found]
        distances = self.view().distances(own, others).masked_fill_(found < 0, torch.inf)
        best, neighbors = nearest(distances, found, k)
        last = self._frozen.distances(own, others[:, -1:]).squeeze(1) - 4.0 * self._error
        frontier = self._least * (1.0 - relative_error(points.shape[1])) * last
        proven = (best[:, -1] <= frontier) | (best[:, -1] == 0) | (found[:, -1] < 0)
        again = ~proven & valid[index]
        if self.search.exact and again.any():
            some = index[again]
            if found.shape[1] > candidates(k):
                neighbors[again] = self._scan(some, k)
            else:
                wider = self.search.query(some, _WIDER * candidates(k), self._scale)
                neighbors[again] = self._rank(some, wider, k)
        return neighbors

    def _scan(self, index: Tensor, k: int) -> Tensor:
        """Neighbors `[q, k]` by distances to every point, in bounded memory."""
        (points, valid), view = self.table.rows(), self.view()
        own = view.embed(points[index])
        best = own.new_empty((len(index), 0))
        neighbors = index.new_empty((len(index), 0))
        step = max(1, BLOCK // (4 * max(len(index), points.shape[1])))
        for positions in torch.arange(len(points), device=index.device).split(step):
            mapped = view.embed(points[positions])
            distances = torch.cdist(own, mapped, compute_mode="donot_use_mm_for_euclid_dist")
            absent = ~valid[positions] | (positions == index.unsqueeze(1))
            distances = torch.cat([best, distances.masked_fill_(absent, torch.inf)], 1)
            others = torch.cat([neighbors, positions.expand(len(index), -1)], 1)
            best, neighbors = nearest(distances, others, k)
        return neighbors

    def state_dict(self) -> dict[str, Any]:
        """See `Space.state_dict`."""
        if self._frozen is None:
            return {}
        frozen = {name: getattr(self._frozen, name) for name in ("matrix", "inverse", "center")}
        return {"search": self.search.state_dict(), "whitening": frozen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Space.load_state_dict`."""
        frozen = state.get("whitening")
        if frozen is not None and len(frozen["center"]) == len(self._scale):
            self._freeze(Whitening(**frozen))
            self.search.load_state_dict(state["search"])
