"""Brute-force search by a FAISS flat index."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from nmer_torchrl.neighbors.base import TableSearch
from nmer_torchrl.neighbors.exact import refine, relative_error

_SPARE = 8  # extra candidates, so that rounding rarely requires a second search


class FaissSearch(TableSearch):
    """Finds exact nearest neighbors by FAISS's flat index, on the CPU.

    A flat index holds scaled points, so it is filled again when points or scale have changed since
    the last query. This is cheap compared to the query, which compares with every point.

    Examples:
        >>> import torch
        >>> search = FaissSearch()
        >>> search.write(torch.arange(4), torch.tensor([[0.0], [1.0], [3.0], [4.0]]))
        >>> search.query(torch.tensor([0, 3]), k=2, scale=torch.ones(1))
        tensor([[1, 2],
                [2, 1]])
    """

    def __init__(self) -> None:
        self._faiss = _import_faiss()
        super().__init__()

    def _changed(self) -> None:
        self._filled_for: Tensor | None = None  # the scale under which the index was filled

    def query(self, index: Tensor, k: int, scale: Tensor) -> Tensor:
        """See `NeighborSearch.query`."""
        if not len(index):
            return index.new_empty((0, k))
        scale = scale.to(self.table.points.device, torch.float64)
        if self._filled_for is None or not torch.equal(self._filled_for, scale):
            self._fill(scale)
        queries = self._standardize(self.table.points[index], scale)
        wanted = k + 1 + _SPARE
        found, rows = self._index.search(queries.numpy(), min(wanted, max(len(self._positions), 1)))
        distances, rows = torch.from_numpy(found), torch.from_numpy(rows).to(index.device)
        candidates = torch.where(rows >= 0, self._positions[rows.clamp_min(0)], -1)
        candidates.masked_fill_(candidates == index.unsqueeze(1), -1)
        if candidates.shape[1] < wanted:  # no point was left out
            frontier = torch.full((len(index),), torch.inf)
        else:
            norms = queries.double().square().sum(-1) + self._largest_norm
            frontier = distances[:, -1] - relative_error(queries.shape[1]) * norms
        return refine(self.table, index, candidates, frontier.to(index.device), k, scale)

    def _standardize(self, points: Tensor, scale: Tensor) -> Tensor:
        return ((points - self._center) * scale).float().cpu().contiguous()

    def _fill(self, scale: Tensor) -> None:
        points, valid = self.table.rows()
        self._positions = valid.nonzero().squeeze(1)
        if not len(self._positions):
            self._positions = self._positions.new_zeros(1)  # FAISS needs at least one row
        points = points[self._positions]
        self._center = points.double().mean(0)
        scaled = self._standardize(points, scale)
        self._largest_norm = scaled.double().square().sum(-1).max()
        self._index = self._faiss.IndexFlatL2(scaled.shape[1])
        self._index.add(scaled.numpy())
        self._filled_for = scale.clone()


def _import_faiss() -> ModuleType:
    try:
        import faiss
    except ImportError as error:
        raise ImportError(
            "FaissSearch needs faiss, which is not installed; run `pip install faiss-cpu`."
        ) from error
    return faiss
