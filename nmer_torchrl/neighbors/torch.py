"""Brute-force search by matrix products, on any device and in bounded memory."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from nmer_torchrl.neighbors.base import TableSearch
from nmer_torchrl.neighbors.exact import BLOCK, refine, relative_error, scan

_QUERIES = 256
_SPARE = 8  # extra candidates, so that rounding rarely requires a second search


class TorchSearch(TableSearch):
    """Finds exact nearest neighbors by blocks of matrix products, with torch alone.

    The scale may also be `[g, d]`; the distance is then a product of g norms.

    Each query costs a product of `[q, d]` with all stored points. Memory beyond the points stays
    near 64 MB for any number of queries and points.

    Examples:
        >>> import torch
        >>> search = TorchSearch()
        >>> search.write(torch.arange(4), torch.tensor([[0.0], [1.0], [3.0], [4.0]]))
        >>> search.query(torch.tensor([0, 3]), k=2, scale=torch.ones(1))
        tensor([[1, 2],
                [2, 1]])
    """

    products = True

    def _changed(self) -> None:
        self._last: tuple[Tensor, Tensor] | None = None  # the last scale, as given and converted

    def query(self, index: Tensor, k: int, scale: Tensor) -> Tensor:
        """See `NeighborSearch.query`."""
        if not len(index):
            return index.new_empty((0, k))
        scale = scale.to(self.table.points.device, torch.float64)
        if self.table.size <= k + _SPARE:  # all points are candidates
            return scan(self.table, index, k, scale)
        rows = [self._query(chunk, k, scale) for chunk in index.split(_QUERIES)]
        return rows[0] if len(rows) == 1 else torch.cat(rows)

    def _query(self, index: Tensor, k: int, scale: Tensor) -> Tensor:
        points, valid = self.table.rows()
        own = points.index_select(0, index)
        # An origin among the queries keeps norms small, and with them rounding errors.
        center = own.mean(0)
        parts = [_Bounds(own, part, center) for part in self._factors(scale)]
        bounds = candidates = None
        step = BLOCK // max(len(index), points.shape[1])
        for start in range(0, len(points), step):
            block = points[start : start + step]
            block_bounds = parts[0].to(block)
            if len(parts) > 1:
                whole = [part.complete(part.to(block)).clamp_min_(0.0) for part in parts]
                block_bounds = functools.reduce(Tensor.mul_, whole)
            if self.table.holes:
                block_bounds.masked_fill_(~valid[start : start + step], torch.inf)
            _exclude(block_bounds, index.unsqueeze(1), start, whole=len(block) == len(points))
            best, column = block_bounds.topk(min(k + _SPARE, len(block)), largest=False)
            column = column + start if start else column
            if bounds is not None and candidates is not None:
                bounds, column = torch.cat([bounds, best], 1), torch.cat([candidates, column], 1)
                best, order = bounds.topk(min(k + _SPARE, bounds.shape[1]), largest=False)
                column = column.gather(1, order)
            bounds, candidates = best, column
        assert bounds is not None
        assert candidates is not None
        last = bounds[:, -1:]
        frontier = (last if len(parts) > 1 else parts[0].complete(last)).squeeze(1)
        # If the last bound is not finite, it proves nothing about the points that were left out.
        frontier = frontier.nan_to_num(-1.0, -1.0)
        if self.table.holes:  # it may be infinite because no points were left out
            few = valid.sum() <= k + _SPARE
            frontier = torch.where((last.squeeze(1) == torch.inf) & few, torch.inf, frontier)
            candidates = candidates.masked_fill(bounds == torch.inf, -1)
        complete = not self.table.holes
        return refine(self.table, index, candidates, frontier, k, scale, complete=complete)

    def _factors(self, scale: Tensor) -> Tensor:
        """Returns the scale as `[g, d]` in the points' dtype."""
        points = self.table.points
        if self._last is None or self._last[0] is not scale:
            self._last = scale, scale.to(points.dtype).reshape(-1, points.shape[1])
        return self._last[1]


def _exclude(bounds: Tensor, index: Tensor, start: int, *, whole: bool) -> None:
    """Sets the bounds `[q, n]` of the queries `[q, 1]` to themselves to infinity, in place."""
    if whole:
        bounds.scatter_(1, index, torch.inf)
        return
    column = (index - start).clamp(0, bounds.shape[1] - 1)
    inside = (index >= start) & (index < start + bounds.shape[1])
    bounds.scatter_(1, column, bounds.gather(1, column).masked_fill_(inside, torch.inf))


class _Bounds:
    """Computes lower bounds of squared distances, so that no neighbor is left out."""

    def __init__(self, queries: Tensor, scale: Tensor, center: Tensor) -> None:
        self.scale, self.center = scale, center
        # Four more terms account for the three rounding errors of scaled coordinates.
        self.keep = 1.0 - relative_error(queries.shape[1] + 4)
        self.queries, norms = self._standardize(queries)
        self.norms = norms.unsqueeze(1)

    def _standardize(self, points: Tensor) -> tuple[Tensor, Tensor]:
        points = ((points - self.center) * self.scale).float()
        return points, points.square().sum(-1)

    def to(self, points: Tensor) -> Tensor:
        """Returns bounds `[q, n]` of the distances to points `[n, d]`, minus the queries' norms.

        The norms are constant in each row, so they do not change which bounds are least in it.
        """
        points, norms = self._standardize(points)
        return torch.addmm(norms, self.queries, points.T, beta=self.keep, alpha=-2.0)

    def complete(self, bounds: Tensor) -> Tensor:
        """Adds the queries' norms to bounds `[q, n]`."""
        return bounds.add(self.norms, alpha=self.keep)
