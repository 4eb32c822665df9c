"""Brute-force search by KeOps, which reduces distances without storing them."""

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
_FAR = 1e30  # larger than any squared distance under a scale that follows the points


class KeOpsSearch(TableSearch):
    """Finds nearest neighbors by one KeOps reduction over all points, on CUDA or the CPU.

    Distances are computed from differences in the points' dtype, so answers are exact up to its
    rounding: with float32, neighbors whose distances differ by less than a millionth may be
    swapped. KeOps waits for the device at the end of each reduction; nothing else here does.

    The scale is a parameter of the formula, so stored points are never rewritten. KeOps compiles
    the formula once for each number of dimensions and of neighbors (some seconds, with a C++
    compiler on the CPU) and caches the result for later runs. The scale may also be `[g, d]`; the
    distance is then a product of g norms.

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
        self._scale: tuple[Tensor, Tensor] | None = None  # the last scale, as given and converted
        self._far: Tensor | None = None  # [n, 1], added to the distances of empty positions

    def query(self, index: Tensor, k: int, scale: Tensor) -> Tensor:
        """See `NeighborSearch.query`; one reduction answers all queries."""
        if not len(index):
            return index.new_empty((0, k))
        points, valid = self.table.rows()
        if len(points) > _LARGEST:
            raise ValueError(
                f"KeOpsSearch supports at most {_LARGEST:,} points, but {len(points):,} are "
                'stored; use search="graph" or search="torch".'
            )
        if len(points) <= k + 1:
            return scan(self.table, index, k, scale.to(points.device, torch.float64))
        # One more than needed, since the answer includes the position itself or a duplicate of it.
        found = self._nearest(index, k + 1, scale)
        passed = (found == index.unsqueeze(1)).cumsum(1)[:, :k].bool()
        found = torch.where(passed, found[:, 1:], found[:, :-1])
        if self.table.holes:
            absent = ~(valid[found] & valid[index].unsqueeze(1))
            found = found.masked_fill_(absent, -1)
        return found

    def _nearest(self, index: Tensor, k: int, scale: Tensor) -> Tensor:
        """Returns positions `[q, k]` by distance, with empty positions last."""
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
    """Builds the reduction to the k least products of norms of `(x - y) * scale`, plus `far`."""
    scales = [f"s{number}" for number in range(norms)]
    formula = " * ".join(f"SqNorm2((x - y) * {scale})" for scale in scales) + " + far"
    aliases = [f"x = Vi({d})", f"y = Vj({d})", "far = Vj(1)", *(f"{s} = Pm({d})" for s in scales)]
    genred = _import_pykeops().Genred
    return genred(formula, aliases, reduction_op="ArgKMin", axis=1, opt_arg=k)


@cache
def _reduction(d: int, norms: int, k: int) -> Callable[..., Tensor]:
    """Returns the reduction, whose first call holds a lock that processes share."""
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
    """Returns `pykeops.torch`, without its messages unless an environment variable enables them."""
    asked = "PYKEOPS_VERBOSE" in os.environ or "KEOPS_VERBOSE" in os.environ
    silence = {} if asked else {"PYKEOPS_VERBOSE": "0", "KEOPS_VERBOSE": "0"}
    os.environ.update(silence)
    try:
        with _locked_cache() if "pykeops" not in sys.modules else nullcontext():
            import pykeops.torch
    except ImportError as error:
        raise ImportError(
            "KeOpsSearch needs pykeops, which is not installed; run `pip install pykeops`."
        ) from error
    finally:
        for name in silence:
            del os.environ[name]
    _lock_at_exit()
    return pykeops.torch


@cache
def _lock_at_exit() -> None:
    """Holds the lock while KeOps writes its index of formulas, which it does as Python exits.

    Functions that are registered last run first. The end of the process releases the lock.
    """
    atexit.register(_locked_cache().__enter__)


@contextmanager
def _locked_cache() -> Iterator[None]:
    """Locks KeOps's cache of compiled formulas for other processes that use this package.

    KeOps assumes that an existing file is complete. Two processes that compile the same formula at
    once, or one that starts while another exits, could otherwise read an incomplete file.
    """
    folder = Path(os.environ.get("KEOPS_CACHE_FOLDER") or Path.home() / ".cache")
    try:
        import fcntl

        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / "nmer_torchrl.lock").open("w")
    except (ImportError, OSError):  # no file locks on this system, or a read-only folder
        yield
        return
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
