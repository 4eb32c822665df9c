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

        def standardize(rows: Tensor) -> Tensor:
            return ((rows - center) * scale).float()

        keep = 1.0 - relative_error(points.shape[1])
        queries = standardize(points[index])
        query_norms = keep * queries.square().sum(-1, keepdim=True)
        bounds = queries.new_empty((len(index), 0))
        candidates = index.new_empty((len(index), 0))
        step = BLOCK // max(len(index), points.shape[1])
        for start in range(0, len(points), step):
            block = standardize(points[start : start + step])
            norms = keep * block.square().sum(-1)
            norms.masked_fill_(~valid[start : start + step], torch.inf)
            # Lower bounds of the squared distances, so that what is left out is beyond the last.
            block_bounds = torch.addmm(query_norms + norms, queries, block.T, alpha=-2.0)
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
