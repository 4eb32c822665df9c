"""Functions that make a fast float32 search exact by a float64 ranking and a bound.

A fast pass proposes a few more candidates than needed, and a `frontier`: no point that it left out
is nearer than that. Candidates are ranked by float64 distances computed from differences, which do
not cancel. If the last neighbor is not beyond the frontier, the answer is proven. All other rows
are searched again over all points.
"""

from __future__ import annotations

import functools
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from nmer_torchrl.neighbors.base import PointTable

BLOCK = 2**24  # numbers in one block of distances, which bounds the memory of a search
# Unit roundoff of float32 products under the names of torch.set_float32_matmul_precision, and
# under those of torch.backends.
_ROUNDOFF = {"highest": 2.0**-24, "high": 2.0**-10, "medium": 2.0**-7}
_ROUNDOFF |= {"none": 2.0**-24, "ieee": 2.0**-24, "tf32": 2.0**-10, "bf16": 2.0**-7}


def relative_error(d: int) -> float:
    """Returns `c` such that `|a|**2 + |b|**2 - 2ab` is off by at most `c * (|a|**2 + |b|**2)`.

    This holds in float32. Dot products of `d` terms have an error of `d` roundoffs of `|a||b|`,
    norms likewise, and the scaled coordinates themselves a few.
    """
    return (2 * d + 16) * _roundoff()


def _roundoff() -> float:
    """Returns the largest unit roundoff of float32 products that the settings allow."""
    backends: Any = torch.backends  # whose settings have no types
    names = [
        backends.fp32_precision,
        backends.cuda.matmul.fp32_precision,
        backends.mkldnn.matmul.fp32_precision,
    ]
    with suppress(RuntimeError):  # it refuses settings that were made by `torch.backends`
        names.append(torch.get_float32_matmul_precision())
    return max(_ROUNDOFF[name] for name in names)


def squared_distances(
    table: PointTable, index: Tensor, others: Tensor, scale: Tensor, *, complete: bool = False
) -> Tensor:
    """Returns float64 distances `[q, m]` of positions `[q]` and `[q, m]`; infinite if one is empty.

    `complete` means that none is empty.
    """
    points, valid = table.rows()
    own = points.index_select(0, index).unsqueeze(1)
    distances = squared_norms(points[others].double() - own, scale)
    if complete:
        return distances
    absent = others < 0
    if table.holes:
        absent |= ~valid[others] | ~valid[index].unsqueeze(1)
    return distances.masked_fill_(absent, torch.inf)


def squared_norms(differences: Tensor, scale: Tensor) -> Tensor:
    """Returns squared norms `[...]` of `differences * scale` for differences `[..., d]`.

    The scale is `[d]`, or `[g, d]` for the product of g norms.
    """
    if scale.ndim == 1:
        return (differences * scale).square_().sum(-1)
    return (differences.unsqueeze(-2) * scale).square_().sum(-1).prod(-1)


def nearest(distances: Tensor, others: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Returns the k least of `[q, m]` distances, and positions, padded with infinity and -1."""
    missing = k - distances.shape[1]
    if missing > 0:
        distances = torch.nn.functional.pad(distances, (0, missing), value=torch.inf)
        others = torch.nn.functional.pad(others, (0, missing), value=-1)
    best, column = distances.topk(k, largest=False)
    return best, others.gather(1, column).masked_fill_(best.isinf(), -1)


def refine(
    table: PointTable,
    index: Tensor,
    candidates: Tensor,
    frontier: Tensor,
    k: int,
    scale: Tensor,
    *,
    complete: bool = False,
) -> Tensor:
    """Returns exact neighbors `[q, k]` from candidates `[q, m]` and a squared frontier `[q]`.

    `complete` means that no candidate is empty and that there are at least k. It waits for a device
    once, to check whether all rows are proven.
    """
    distances = squared_distances(table, index, candidates, scale, complete=complete)
    if complete:
        best, column = distances.topk(k, largest=False)
        neighbors = candidates.gather(1, column)
    else:
        best, neighbors = nearest(distances, candidates, k)
    last = best[:, -1]
    proven = last <= frontier.clamp_min(0)  # no point is nearer than distance 0
    if not complete:
        # With fewer than k candidates, an answer is proven only if there are no more points.
        proven &= last.isfinite() | (table.valid.sum() <= k)
        proven |= ~table.valid[index]
    if not proven.all():
        again = ~proven
        neighbors[again] = scan(table, index[again], k, scale)
    return neighbors


def scan(table: PointTable, index: Tensor, k: int, scale: Tensor) -> Tensor:
    """Finds exact neighbors `[q, k]` from float64 differences to every point; slow."""
    points, valid = table.rows()
    scaled = [points.double() * part for part in scale.reshape(-1, points.shape[1])]
    chunks = index.split(max(1, BLOCK // max(len(points), 1)))
    return torch.cat([_scan(scaled, valid, chunk, k) for chunk in chunks])


def _scan(scaled: list[Tensor], valid: Tensor, index: Tensor, k: int) -> Tensor:
    mode = "donot_use_mm_for_euclid_dist"
    norms = [torch.cdist(points[index], points, compute_mode=mode) for points in scaled]
    distances = functools.reduce(Tensor.mul_, norms).masked_fill_(~valid, torch.inf)
    distances.scatter_(1, index.unsqueeze(1), torch.inf)
    positions = torch.arange(len(valid), device=index.device).expand(len(index), -1)
    neighbors = nearest(distances, positions, k)[1]
    return neighbors.masked_fill_(~valid[index].unsqueeze(1), -1)
