"""Brute force by KeOps: distances are reduced as they are computed, and never stored."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from nmer_torchrl.neighbors.base import TableSearch
from nmer_torchrl.neighbors.exact import scan

_LARGEST = 2**24  # KeOps returns positions as floating-point numbers
_FAR = 1e30  # beyond any squared distance under a scale that follows the points


class KeOpsSearch(TableSearch):
    """Nearest neighbors by one KeOps reduction over all points, on CUDA or the CPU.

    Distances are taken by differences in the points' dtype, so that answers are exact up to its
    rounding: with float32, neighbors whose distances differ by less than a millionth may change
    places. KeOps waits for the device at the end of each reduction; nothing else here does.

    The scale enters the formula as a parameter, so that stored points are never rewritten. KeOps
    compiles the formula once for each number of dimensions and of neighbors (some seconds, with a
    C++ compiler on the CPU) and keeps the result in its cache for later runs. A scale may also be
    `[g, d]`: nearest is then by the product of g norms.

    Examples:
        >>> import torch
        >>> search = KeOpsSearch()
        >>> search.write(torch.arange(4), torch.tensor([[0.0], [1.0], [3.0], [4.0]]))
        >>> search.query(torch.tensor([0, 3]), k=2, scale=torch.ones(1))
        tensor([[1, 2],
                [2, 1]])
    """

    products = True

    def __init__(self) -> None:
        _import_pykeops()
        super().__init__()

    def _changed(self) -> None:
        self._scale: tuple[Tensor, Tensor] | None = None  # of the last query, and in its dtype
        self._far: Tensor | None = None  # [n, 1], what is added to distances of empty positions

    def query(self, index: Tensor, k: int, scale: Tensor) -> Tensor:
        """See `NeighborSearch.query`. One reduction answers all queries."""
        if not len(index):
            return index.new_empty((0, k))
        points, valid = self.table.rows()
        if len(points) > _LARGEST:
            raise ValueError(
                f"KeOpsSearch addresses at most {_LARGEST:,} points, but {len(points):,} are "
                'stored; use search="graph" or search="torch".'
            )
        if len(points) <= k + 1:
            return scan(self.table, index, k, scale.to(points.device, torch.float64))
        # One more than wanted, since the position itself is among them unless duplicates are.
        found = self._nearest(index, k + 1, scale)
        passed = (found == index.unsqueeze(1)).cumsum(1)[:, :k].bool()
        found = torch.where(passed, found[:, 1:], found[:, :-1])
        if self.table.holes:
            absent = ~(valid[found] & valid[index].unsqueeze(1))
            found = found.masked_fill_(absent, -1)
        return found

    def _nearest(self, index: Tensor, k: int, scale: Tensor) -> Tensor:
        """Positions `[q, k]` by distance, those of empty positions last."""
        points, valid = self.table.rows()
        if self._scale is None or self._scale[0] is not scale:
            self._scale = scale, scale.to(points.device, points.dtype)
        factors = self._scale[1].reshape(-1, points.shape[1])
        if self._far is None:
            self._far = torch.where(valid, 0.0, _FAR).to(points.dtype).unsqueeze(1)
        reduce = _reduction(points.shape[1], len(factors), k)
        with torch.no_grad():
            return reduce(points.index_select(0, index), points, self._far, *factors).long()


def _genred(d: int, norms: int, k: int) -> Any:
    """The k nearest by a product of norms of `(x - y) * scale`; what is absent is far."""
    scales = [f"s{number}" for number in range(norms)]
    formula = " * ".join(f"SqNorm2((x - y) * {scale})" for scale in scales) + " + far"
    aliases = [f"x = Vi({d})", f"y = Vj({d})", "far = Vj(1)", *(f"{s} = Pm({d})" for s in scales)]
    genred = _import_pykeops().Genred
    return genred(formula, aliases, reduction_op="ArgKMin", axis=1, opt_arg=k)


@cache
def _reduction(d: int, norms: int, k: int) -> Callable[..., Tensor]:
    """Calls that, alone among processes the first time."""
    reduce = _genred(d, norms, k)
    known = set()  # dtypes and devices for which it is compiled

    def locked_at_first(*variables: Tensor) -> Tensor:
        form = variables[0].dtype, variables[0].device
        with nullcontext() if form in known else _locked_cache():
            found: Tensor = reduce(*variables)
        known.add(form)
        return found

    return locked_at_first


def _import_pykeops() -> ModuleType:
    """`pykeops.torch`, without its messages on import and compilation unless they are asked for."""
    asked = "PYKEOPS_VERBOSE" in os.environ or "KEOPS_VERBOSE" in os.environ
    silence = {} if asked else {"PYKEOPS_VERBOSE": "0", "KEOPS_VERBOSE": "0"}
    os.environ.update(silence)
    try:
        with _locked_cache() if "pykeops" not in sys.modules else nullcontext():
            import pykeops.torch
    except ImportError as error:
        raise ImportError(
            "KeOpsSearch needs pykeops, which is not installed: pip install pykeops"
        ) from error
    finally:
        for name in silence:
            del os.environ[name]
    _lock_at_exit()
    return pykeops.torch


@cache
def _lock_at_exit() -> None:
    """Keeps the lock while KeOps writes its index of formulas, which it does as Python ends.

    What is registered last runs first; the end of the process gives the lock back.
    """
    atexit.register(_locked_cache().__enter__)


@contextmanager
def _locked_cache() -> Iterator[None]:
    """Keeps other processes that use this package from KeOps's cache of compiled formulas.

    KeOps takes a file that is there for one that is whole, so that two processes which compile the
    same formula at once, or one that starts while another ends, may read half a file.
    """
    folder = Path(os.environ.get("KEOPS_CACHE_FOLDER") or Path.home() / ".cache")
    try:
        import fcntl

        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / "nmer_torchrl.lock").open("w")
    except (ImportError, OSError):  # no such locks here, or a folder that is never written to
        yield
        return
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
