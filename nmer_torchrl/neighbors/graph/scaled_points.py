"""Computes distances between points under a working scale."""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import copy
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nmer_torchrl.neighbors.base import PointTable
from nmer_torchrl.neighbors.exact import relative_error

_TILE = 2**20  # distances that a sweep computes at a time, so that they stay in the CPU's cache
_GATHER = 2**19  # numbers that are gathered at a time, for the same reason
_FEW = 2**16  # amount of numbers below which gathering in blocks does not pay off
_ROWS = 256  # rows that are compared at a time to bound their distances
_STATE = ("scale", "factors", "center", "offset", "largest", "varies", "constants")


class ScaledPoints:
    """The points of a table under a working scale: products for sweeps, differences for answers.

    Points take part in sweeps once they are included; `norms` is infinite for all others. All
    distances are squared, in float32.
    """

    def __init__(self, table: PointTable) -> None:
        self.table = table
        self.clear()

    def clear(self) -> None:
        """Forgets the scale, and which points are included."""
        self.norms = torch.empty(0, device=self.table.points.device)  # relative to the center
        self.scale = self.factors = torch.empty(0)  # working scale; `factors` in the points' dtype
        self.center = torch.empty(0)
        self.offset = 0.0  # the norm of the center
        self.largest = 0.0  # the largest norm
        self.varies = torch.empty(0, dtype=torch.bool)  # dimensions in which points differ
        self.constants = False  # whether some dimensions vary and others do not

    def resize(self) -> None:
        """Allocates norms for all points of the table."""
        before, points = self.norms, self.table.points
        self.norms = torch.full((len(points),), torch.inf, device=points.device)
        self.norms[: len(before)] = before

    def work_under(self, scale: Tensor) -> None:
        """Sets the working scale, given in float64 on the CPU."""
        points, valid = self.table.rows()
        self.scale, self.factors = scale, scale.to(points.device, points.dtype)
        center = points.sum(0, dtype=torch.float64) / max(int(valid.sum()), 1)
        self.center, self.largest = center.to(points.dtype), 0.0
        self.offset = float((center * self.factors).norm())
        there = points if valid.all() else points[valid]
        if len(there):
            self.varies = (there.amax(0) != there.amin(0)).cpu()
        self.constants = bool(self.varies.any()) and not bool(self.varies.all())
        for rows in self.norms[: len(points)].isfinite().nonzero().squeeze(1).split(65_536):
            self.include(rows)

    def include(self, rows: Tensor) -> None:
        """Includes points in sweeps."""
        norms = self.centered(rows).square().sum(-1)
        self.norms[rows] = norms
        if len(norms):
            self.largest = max(self.largest, float(norms.amax()))

    def drift(self, scale: Tensor, other: Tensor) -> float:
        """Returns the standard deviation of the log-ratios of two scales."""
        return self.compare(scale, other)[1]

    def compare(self, scale: Tensor, other: Tensor) -> tuple[float, float]:
        """Returns mean and standard deviation of the log-ratios of two scales.

        It uses NumPy, which is faster for few numbers. Dimensions in which all points are equal are
        ignored, since they do not change distances.
        """
        ratios = np.log(scale.numpy() / other.numpy())
        if self.constants:
            ratios = ratios[self.varies.numpy() | (ratios != 0)]
        mean = float(ratios.sum()) / len(ratios)
        return mean, math.sqrt(max(float(ratios @ ratios) / len(ratios) - mean * mean, 0.0))

    # -- differences -------------------------------------------------------------------------------

    def centered(self, index: Tensor | slice) -> Tensor:
        """Returns points `[n, d]` relative to the center, scaled, in float32."""
        return ((self.table.points[index] - self.center) * self.factors).float()

    def direct(self, index: Tensor, others: Tensor) -> Tensor:
        """Returns distances `[q, m]` computed from differences; infinite for position -1."""
        points, (q, m), d = self.table.points, others.shape, self.table.points.shape[1]
        if q * m * d < _FEW:
            difference = (points[others] - points[index].unsqueeze(1)) * self.factors
            return difference.square_().sum(-1).float().masked_fill_(others < 0, torch.inf)
        ones = points.new_ones(d)
        squared = points.new_empty((q, m))
        step = max(_GATHER // (m * d), 1)
        memory = points.new_empty((min(step, q) * m, d))
        for start in range(0, q, step):
            chunk = others[start : start + step]
            rows = memory[: chunk.numel()]
            torch.index_select(points, 0, chunk.clamp_min(0).flatten(), out=rows)
            rows.view(-1, m, d).sub_(points[index[start : start + step]].unsqueeze(1))
            squared[start : start + step] = (rows.mul_(self.factors).square_() @ ones).view(-1, m)
        return squared.float().masked_fill_(others < 0, torch.inf)

    def safety(self) -> float:
        """Returns the factor on a bound that allows for rounding in distances by differences."""
        return 1.0 - relative_error(len(self.scale))

    # -- products ----------------------------------------------------------------------------------

    def sweep(
        self, blocks: Sequence[Tensor], bounds: Sequence[Tensor], reach: Tensor | None = None
    ) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Finds pairs of rows and columns nearer than the row's bound or the column's reach.

        Returns rows, columns and lower bounds `[h]` of their distances for each block of rows, so
        that rounding excludes no pair. A block's bounds are `[m]`, `reach` is `[n]` for all points.

        Norms and bounds are part of the product, so that it is compared with zero and not read
        again. Only a column whose reach exceeds a row's bound is compared with the difference. One
        tile of the product is held at a time, in reused memory that stays in the cache.
        """
        size, slack = self.table.size, 1.0 + relative_error(len(self.scale))
        pairs_of_sides = zip(blocks, bounds, strict=True)
        lefts = [self._left(rows, bound * slack) for rows, bound in pairs_of_sides]  # rounded up
        step = max(_TILE // max(len(rows) for rows in blocks), 512)
        memory = torch.empty(min(step, size) * lefts[0].shape[1], device=lefts[0].device)
        right = self._new_right(min(step, size))
        found: list[list[tuple[Tensor, Tensor, Tensor]]] = [[] for _ in blocks]
        for start in range(0, size, step):
            tile = slice(start, min(start + step, size))
            side = self._fill_right(right[: tile.stop - start], tile)
            for pairs, left, bound in zip(found, lefts, bounds, strict=True):
                products = memory[: len(side) * left.shape[1]].view(len(side), -1)
                torch.mm(side, left, out=products)
                nearest = products.amin(1)
                if reach is None:
                    columns = (nearest < 0).nonzero().squeeze(1)
                    some = products.index_select(0, columns)
                    within = some < 0
                else:
                    here = reach[tile] * slack
                    most = (here - bound.amin()).clamp_min_(0)
                    columns = (nearest < most).nonzero().squeeze(1)
                    some = products.index_select(0, columns)
                    within = some < (here[columns].unsqueeze(1) - bound).clamp_min_(0)
                flat = within.view(-1).nonzero().squeeze(1)
                row, least = flat % len(bound), some.view(-1).index_select(0, flat)
                column = columns[flat // len(bound)] + start
                pairs.append((row, column, least + bound[row]))
        return [_concatenate(pairs) for pairs in found]

    def bound(self, rows: Tensor, count: int, columns: Tensor | None = None) -> Tensor:
        """Returns upper bounds `[m]` on the distance of each row's `count`-th nearest point.

        Compares with all points, or with those at positions `[n]`. Points are divided into groups,
        and only the nearest point of each group is ranked, which is cheap. Nearly all of the
        nearest points are in different groups.
        """
        size = self.table.size if columns is None else len(columns)
        groups = min(8 * count, size)
        if count > groups:
            return torch.full((len(rows),), torch.inf, device=rows.device)
        some = slice(0, size // groups * groups)
        right = self._fill_right(
            self._new_right(some.stop), some if columns is None else columns[some]
        )
        lower = []
        for block in rows.split(_ROWS):
            minima = (right @ self._left(block)).view(-1, groups, len(block)).amin(0)
            lower.append(minima.T.topk(count, largest=False).values[:, -1])
        own, error = self.centered(rows).norm(dim=-1), 2.0 * (1.0 - self.kept_of_norms())
        least, rounding = torch.cat(lower), (own + self.offset) * own
        bound = least + error * (rounding + self.largest)
        if error < 0.25:  # the other point's squared norm is at most 2 * own**2 + 2 * distance,
            closer = (least + error * (rounding + 2.0 * own * own)) / (1.0 - 2.0 * error)
            bound = torch.minimum(bound, closer)  # which is tighter beside a remote point
        return bound

    def _left(self, rows: Tensor, offset: Tensor | float = 0.0) -> Tensor:
        """Returns `[d + 2, m]`, whose product with the other side is a lower bound less offset."""
        norms, left = self.left(rows)
        return torch.cat([left, left.new_ones(len(rows), 1), (norms - offset).unsqueeze(1)], 1).T

    def _new_right(self, count: int) -> Tensor:
        return self.norms.new_ones(count, self.table.points.shape[1] + 2)

    def _fill_right(self, out: Tensor, index: Tensor | slice) -> Tensor:
        """Writes the other side `[n, d + 2]` of the product to `out`: points, norms and ones."""
        out[:, :-2] = self.right(index)
        torch.mul(self.norms[index], self.kept_of_norms(), out=out[:, -2])
        return out

    def left(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Returns numbers `[m]` and vectors `[m, d]` for lower bounds of distances to `right`.

        With `a` and `b` relative to a center, `|a - b|**2 = |a|**2 + |b|**2 - 2ab`. Only this side
        is shifted, so that stored points enter the product unchanged, unless they are too far from
        the origin. The rounding error is at most a share of
        `|a|**2 + |b|**2 + |a||b| + |a||center|`; each side accounts for its own part.
        """
        left, kept = self.centered(rows), self.kept_of_norms()
        norms = left.norm(dim=-1)
        if self._remote():
            return norms.square_().mul_(kept), left.mul_(-2.0)
        norms = (norms * kept - (1.0 - kept) * self.offset).mul_(norms)
        left = (left * self.factors).float()
        return norms.addmv_(left, self.center.float(), alpha=2.0), left.mul_(-2.0)

    def right(self, index: Tensor | slice) -> Tensor:
        """Returns the vectors `[n, d]` that `left` is multiplied with."""
        if self._remote():
            return self.centered(index)
        points = self.table.points
        some = points[index] if isinstance(index, slice) else points.index_select(0, index)
        return some.float()

    def kept_of_norms(self) -> float:
        """Returns the factor on squared norms that allows for rounding in products."""
        return 1.0 - 1.5 * relative_error(len(self.scale))

    def _remote(self) -> bool:
        """Returns whether the origin is too far from the points for accurate products."""
        return self.offset > 100.0 * (1.0 + self.largest**0.5)

    def beyond_all(self, rows: Tensor) -> float:
        """Returns a number that no distance from these rows exceeds."""
        farthest = float(self.centered(rows).norm(dim=-1).amax())
        return 1.01 * (farthest + self.largest**0.5) ** 2 + 1

    # -- saving ------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Returns the scale and the values derived from it."""
        norms = self.norms[: self.table.size].clone()
        return {"norms": norms, **{name: getattr(self, name) for name in _STATE}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores a saved state of the first points of the table."""
        for name in _STATE:
            setattr(self, name, copy(state[name]))
        device = self.table.points.device
        self.scale, self.varies = self.scale.cpu(), self.varies.cpu()
        self.factors, self.center = self.factors.to(device), self.center.to(device)
        self.norms.fill_(torch.inf)[: len(state["norms"])] = state["norms"]


def _concatenate(pairs: list[tuple[Tensor, Tensor, Tensor]]) -> tuple[Tensor, Tensor, Tensor]:
    row, column, least = (torch.cat(parts) for parts in zip(*pairs, strict=True))
    return row, column, least


def halve(points: Tensor, positions: Tensor, size: int) -> list[Tensor]:
    """Splits positions `[n]` into groups of at most `size` whose points `[n, d]` are near.

    Points are split in half across the direction in which they vary most, again and again.
    """
    if len(positions) <= size:
        return [positions]
    centered = points - points.mean(0)
    direction = centered[:, centered.square().sum(0).argmax()]
    for _ in range(2):  # steps of the power iteration, enough for a good direction
        axis = centered.T @ direction
        direction = centered @ (axis / axis.norm().clamp_min(1e-30))
    first, second = direction.argsort().tensor_split(2)
    return [
        *halve(points[first], positions[first], size),
        *halve(points[second], positions[second], size),
    ]
