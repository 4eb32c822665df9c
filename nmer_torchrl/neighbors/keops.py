"""Brute force by KeOps: distances are reduced as they are computed, and never stored."""

from __future__ import annotations

import os
from types import ModuleType

import torch
from torch import Tensor

from nmer_torchrl.neighbors.base import PointTable
from nmer_torchrl.neighbors.exact import nearest, scan, squared_distances

_LARGEST = 2**24  # KeOps returns positions as floating-point numbers


class KeOpsSearch:
    """Exact nearest neighbours by KeOps lazy tensors, on CUDA or the CPU.

    The scale enters the formula as a parameter, so that stored points are never rewritten. KeOps
    compiles the formula once per number of dimensions (some seconds, with a C++ compiler on the
    CPU) and keeps the result in its cache for later runs. A scale may also be `[g, d]`: nearest is
    then by the product of g norms.

    Examples:
        >>> import torch
        >>> search = KeOpsSearch()
        >>> search.write(torch.arange(4), torch.tensor([[0.0], [1.0], [3.0], [4.0]]))
        >>> search.query(torch.tensor([0, 3]), k=2, scale=torch.ones(1))
        tensor([[1, 2],
                [2, 1]])
    """

    products = True  # whether a scale may be [g, d]

    def __init__(self) -> None:
        _import_pykeops()
        self.table = PointTable()

    def write(self, index: Tensor, points: Tensor) -> None:
        """See `NeighborSearch.write`."""
        self.table.write(index, points)

    def clear(self) -> None:
        """See `NeighborSearch.clear`."""
        self.table.clear()

    def query(self, index: Tensor, k: int, scale: Tensor) -> Tensor:
        """See `NeighborSearch.query`."""
        points, valid = self.table.rows()
        scale = scale.to(points.device, torch.float64)
        positions: Tensor | None = None
        if not valid.all():
            positions = valid.nonzero().squeeze(1)
            points = points[positions]
        if len(points) > _LARGEST:
            raise ValueError(
                f"KeOpsSearch addresses at most {_LARGEST:,} points, but {len(points):,} are "
                'stored; use search="graph" or search="torch".'
            )
        if not len(index) or len(points) <= k + 1:
            return scan(self.table, index, k, scale)
        # One more than wanted, since the position itself is among them unless duplicates are.
        candidates = self._nearest(self.table.points[index], points, k + 1, scale)
        if positions is not None:
            candidates = positions[candidates]
        distances = squared_distances(self.table, index, candidates, scale)
        distances.masked_fill_(candidates == index.unsqueeze(1), torch.inf)
        neighbors = nearest(distances, candidates, k)[1]
        return neighbors.masked_fill_(~self.table.valid[index].unsqueeze(1), -1)

    @staticmethod
    def _nearest(queries: Tensor, points: Tensor, k: int, scale: Tensor) -> Tensor:
        lazy = _import_pykeops().LazyTensor
        rows, columns = lazy(queries.contiguous()[:, None]), lazy(points.contiguous()[None])
        squared = None
        for part in scale.to(points.dtype).reshape(-1, points.shape[1]):
            scaled = (((rows - columns) * lazy(part[None, None])) ** 2).sum(-1)
            squared = scaled if squared is None else squared * scaled
        assert squared is not None
        return squared.argKmin(k, dim=1)


def _import_pykeops() -> ModuleType:
    """`pykeops.torch`, without its messages on import and compilation unless they are asked for."""
    asked = "PYKEOPS_VERBOSE" in os.environ or "KEOPS_VERBOSE" in os.environ
    silence = {} if asked else {"PYKEOPS_VERBOSE": "0", "KEOPS_VERBOSE": "0"}
    os.environ.update(silence)
    try:
        import pykeops.torch
    except ImportError as error:
        raise ImportError(
            "KeOpsSearch needs pykeops, which is not installed: pip install pykeops"
        ) from error
    finally:
        for name in silence:
            del os.environ[name]
    return pykeops.torch
