"""A metric over whitened dimensions."""

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

_DRIFT = 0.05  # drift of the whitening, in log distances, after which all points are mapped again
_WIDER = 8  # factor on the number of candidates if the first ones do not prove an answer


class Mahalanobis(Metric):
    """Measures the norm of `W (a - b)`, where `W` whitens the rows stored now.

    With `z` the Z-scored difference and `R` the correlation matrix of the rows stored now, the
    squared distance is `z^T ((1 - shrinkage) R + shrinkage I)^-1 z`: correlated dimensions count
    once. Without shrinkage it is the classical `(a - b)^T S^-1 (a - b)` with the covariance `S`,
    which does not exist if a dimension depends linearly on others. A shrinkage of 1 gives
    `Euclidean`.

    All searches support this metric. A search holds points that were mapped by a slightly older
    whitening. Once that has drifted by a few percent, all points are mapped again. Each query asks
    for more candidates than needed and ranks them in float64 by the current whitening. A bound on
    the difference of the two whitenings proves which answers are exact. The other queries ask for
    more candidates and, if that is not enough, compare all points. So neighbors are exact under the
    current statistics if the search is exact: `"torch"`, `"faiss"`, `"keops"` (up to float32), and
    `NeighborGraph(..., exact=True)`. The default graph skips the proof: its answers are the nearest
    of its candidates under the current statistics.

    Each draw after a write costs some operations on `[d, d]` matrices. If you pass your own graph,
    give it room for the candidates, `NeighborGraph(2 * k + 4)`; a smaller one uses brute force.

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
                f"shrinkage={shrinkage!r} is out of range; give a number from 1e-5 (nearly the "
                "classical distance) to 1 (the distance of Euclidean). The default is 0.01."
            )
        self.shrinkage = float(shrinkage)

    def check(self, search: SearchOption, keys: tuple[NestedKey, ...]) -> None:
        """Accepts any search and any keys."""

    def open(self, search: SearchOption, k: int, widths: Widths, device: torch.device) -> Space:
        """See `Metric.open`."""
        made = make_search(search, candidates(k), device)
        return WhitenedSpace(made, sum(widths.values()), self.shrinkage)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(shrinkage={self.shrinkage})"


def candidates(k: int) -> int:
    """Returns how many candidates to ask a search for, so that k neighbors can be proven."""
    return 2 * k + 4


@dataclass(frozen=True)
class Whitening:
    """The linear map of a Mahalanobis distance at one moment."""

    matrix: Tensor  # [d, d], lower triangular, float64 on the CPU
    inverse: Tensor  # [d, d]
    center: Tensor  # [d]; does not change distances, but keeps mapped points small

    @staticmethod
    def of(statistics: RunningCovariance, shrinkage: float) -> Whitening:
        """Builds the whitening of the rows that the statistics describe."""
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
        """Returns the least and greatest ratio of a distance here to the same one in `other`."""
        factors = torch.linalg.svdvals(self.matrix @ other.inverse)
        return float(factors[-1]), float(factors[0])


class WhitenedSpace(Space):
    """A space whose whitening follows the statistics of its points; see `Mahalanobis`.

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
        self._current: Whitening | None = None  # current whitening, computed when needed
        self._frozen: Whitening | None = None  # whitening that mapped the search's points
        self._least: float | None = None  # least ratio of current distances to frozen ones
        self._error = 0.0  # rounding error of a mapped point in its dtype
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
        """Maps all points by this whitening and writes them to the search."""
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
        if not len(index) and self._frozen is not None:  # lets the search do pending work
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
        """Maps the search's points again if the current whitening has drifted from theirs."""
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
        """Ranks candidates `[q, c]` by the current whitening and returns neighbors `[q, k]`.

        If the search is exact, answers that cannot be proven are searched again. The proof: points
        that the search left out are at least as far as the last candidate under the frozen
        whitening, up to rounding, and at least `_least` times that under the current one.
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
        """Finds neighbors `[q, k]` by comparing all points, in bounded memory."""
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
            self._freeze(Whitening(**{name: part.cpu() for name, part in frozen.items()}))
            self.search.load_state_dict(state["search"])
