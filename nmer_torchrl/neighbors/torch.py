"""Brute force by matrix products, on any device and in bounded memory."""

from __future__ import annotations

import torch
from torch import Tensor

from nmer_torchrl.neighbors.base import PointTable
from nmer_torchrl.neighbors.exact import BLOCK, refine, relative_error

_QUERIES = 256
_SPARE = 8  # candidates beyond k, so that rounding rarely asks for a second search


class TorchSearch:
    """Exact nearest neighbours by blocks of matrix products, with nothing but torch.

    A scale may also be `[g, d]`: nearest is then by the product of g norms.

    Each query costs a product of `[q, d]` with all stored points. Memory beyond the points stays
    near 64 MB whatever the numbers of queries and of points.

    Examples:
        >>> import torch
        >>> search = TorchSearch()
        >>> search.write(torch.arange(4), torch.tensor([[0.0], [1.0], [3.0], [4.0]]))
        >>> search.query(torch.tensor([0, 3]), k=2, scale=torch.ones(1))
        tensor([[1, 2],
                [2, 1]])
    """

    products = True  # whether a scale may be [g, d]

    def __init__(self) -> None:
        self.table = PointTable()

    def write(self, index: Tensor, points: Tensor) -> None:
        """See `NeighborSearch.write`."""
        self.table.write(index, points)

    def clear(self) -> None:
        """See `NeighborSearch.clear`."""
        self.table.clear()

    def query(self, index: Tensor, k: int, scale: Tensor) -> Tensor:
        """See `NeighborSearch.query`."""
        scale = scale.to(self.table.points.device, torch.float64)
        rows = [self._query(chunk, k, scale) for chunk in index.split(_QUERIES)]
        return torch.cat(rows) if rows else index.new_empty((0, k))

    def _query(self, index: Tensor, k: int, scale: Tensor) -> Tensor:
        points, valid = self.table.rows()
        # The origin is free to choose: amid the queries, norms and with them rounding stay small.
        center = points[index].double().mean(0)

        parts = [
            _Bounds((points[index] - center) * part, part, center)
            for part in scale.reshape(-1, points.shape[1])
        ]
        bounds = torch.empty((len(index), 0), device=index.device)
        candidates = index.new_empty((len(index), 0))
        step = BLOCK // max(len(index), points.shape[1])
        for start in range(0, len(points), step):
            block, there = points[start : start + step], valid[start : start + step]
            block_bounds = parts[0].to(block)
            for part in parts[1:]:
                block_bounds = block_bounds.clamp_min_(0.0) * part.to(block).clamp_min_(0.0)
            if not there.all():
                block_bounds.masked_fill_(~there, torch.inf)
            inside = (index >= start) & (index < start + len(block))
            block_bounds[inside, index[inside] - start] = torch.inf
            best, column = block_bounds.topk(min(k + _SPARE, len(block)), largest=False)
            bounds = torch.cat([bounds, best], 1)
            candidates = torch.cat([candidates, column + start], 1)
            if bounds.shape[1] > k + _SPARE:
                bounds, column = bounds.topk(k + _SPARE, largest=False)
                candidates = candidates.gather(1, column)
        if bounds.shape[1] < k + _SPARE:  # nothing was left out
            frontier = bounds.new_full((len(index),), torch.inf)
        else:
            frontier = bounds.amax(1)
        candidates = candidates.masked_fill(bounds.isinf(), -1)
        return refine(self.table, index, candidates, frontier, k, scale)


class _Bounds:
    """Lower bounds of squared distances, so that what is left out is beyond the last candidate."""

    def __init__(self, queries: Tensor, scale: Tensor, center: Tensor) -> None:
        self.queries, self.scale, self.center = queries.float(), scale, center
        self.keep = 1.0 - relative_error(queries.shape[1])
        self.norms = self.keep * self.queries.square().sum(-1, keepdim=True)

    def to(self, points: Tensor) -> Tensor:
        """Bounds `[q, n]` of the distances of the queries to points `[n, d]`."""
        points = ((points - self.center) * self.scale).float()
        norms = self.keep * points.square().sum(-1)
        return torch.addmm(self.norms + norms, self.queries, points.T, alpha=-2.0)
