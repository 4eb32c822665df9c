"""What makes a fast float32 search exact: a float64 ranking, and a bound that tells when it holds.

A fast pass proposes a few more candidates than are wanted, and a `frontier`: no point that it left
out is nearer than that. Candidates are ranked by distances in float64 taken from differences, which
do not cancel. Where the last one wanted is not beyond the frontier the answer is proven; any other
row is searched again over all points.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from nmer_torchrl.neighbors.base import PointTable

BLOCK = 2**24  # numbers in one block of distances: bounds the memory of a search
# Unit roundoff of float32 products under the setting of torch.set_float32_matmul_precision.
_ROUNDOFF = {"highest": 2.0**-24, "high": 2.0**-10, "medium": 2.0**-7}


def relative_error(d: int) -> float:
    """A bound `c`: `|a|**2 + |b|**2 - 2ab` in float32 is off by at most `c * (|a|**2 + |b|**2)`.

    Dot products of `d` terms err by `d` roundoffs of `|a||b|`, norms likewise, and the scaled
    coordinates themselves by a few.
    """
    return (2 * d + 16) * _ROUNDOFF[torch.get_float32_matmul_precision()]


def squared_distances(
    table: PointTable, index: Tensor, others: Tensor, scale: Tensor, *, complete: bool = False
) -> Tensor:
    """Float64 `[q, m]` between positions `[q]` and `[q, m]`; infinite where one is absent.

    With `complete`, all of them are there.
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
    """`[..., d]` to the squared norms `[...]` of `differences * scale`; of g scales, their product.

    The scale is `[d]`, or `[g, d]`.
    """
    if scale.ndim == 1:
        return (differences * scale).square_().sum(-1)
    return (differences.unsqueeze(-2) * scale).square_().sum(-1).prod(-1)


def nearest(distances: Tensor, others: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k best of `[q, m]` as `[q, k]` distances and positions, padded with infinity and -1."""
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
    """Candidates `[q, m]` with their frontier `[q]`, squared, to exact neighbors `[q, k]`.

    With `complete`, all candidates are there, at least k of them. A device is waited for once, to
    learn whether all rows are proven.
    """
    distances = squared_distances(table, index, candidates, scale, complete=complete)
    if complete:
        best, column = distances.topk(k, largest=False)
        neighbors = candidates.gather(1, column)
    else:
        best, neighbors = nearest(distances, candidates, k)
    last = best[:, -1]
    proven = last <= frontier.clamp_min(0)  # none is nearer than one at distance 0
    if not complete:
        # With too few candidates, an answer is right only if there are no more.
        proven &= last.isfinite() | (table.valid.sum() <= k)
        proven |= ~table.valid[index]
    if not proven.all():
        again = ~proven
        neighbors[again] = scan(table, index[again], k, scale)
    return neighbors


def scan(table: PointTable, index: Tensor, k: int, scale: Tensor) -> Tensor:
    """Exact neighbors `[q, k]` by float64 differences to every point: slow, always right."""
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
