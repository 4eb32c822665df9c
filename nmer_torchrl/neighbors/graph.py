"""The neighbour graph: exact neighbours at the price of a table look-up.

Brute force compares each query with every point. The graph inverts the work: it keeps for every
point a list of its C nearest others (C about 3k), and keeps the lists right as points come, go and
change their weight. A query then reads the first k entries of a list.

- *Lists are made when they are asked for* (`_build`), by one sweep of matrix products over all
  points. Storages that were filled before cost nothing until they are sampled.
- *Arrivals wait* until a block of them is worth a sweep (`_insert`), which offers each to all lists
  and makes its own. Meanwhile queries compare with those that wait (`_with_arrivals`), so that no
  answer is stale. An overwritten point counts as gone at once; with the next block it is taken out
  of the lists that hold it (`_remove`).
- *A sweep never sorts*: a bound on what can matter to a row, or to a column, leaves few pairs.
- *The scale drifts* with the statistics. Lists are kept in order under a working scale. When the
  current one has drifted a little from it, all lists are put into order anew (`_rescore`); when it
  has drifted far from where they were made, they are made anew, when asked for. Only drift between
  dimensions matters: a common factor changes no order.

Each list has a reach: no point outside of it was nearer than that when it was last compared. A list
with fewer than k entries within its reach is made anew. The reach, less the worst that drift can
have done since, is a certificate: entries within that are proven to be the nearest. With
`exact=True` every answer is proven or searched again by brute force.
"""

from __future__ import annotations

import math
from copy import copy
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nmer_torchrl.neighbors.base import PointTable, as_slice
from nmer_torchrl.neighbors.exact import nearest, refine, relative_error
from nmer_torchrl.neighbors.torch import TorchSearch

_BLOCK = 128  # arrivals that are worth a sweep
_TILE = 2**18  # distances that a sweep holds at a time: they stay in the processor's cache
_GATHER = 2**19  # numbers that are gathered at a time, likewise
_FEW = 2**16  # numbers that are not worth the trouble
_SAMPLE = 1_024  # columns that bound the reach of a row without a list
_RESCORE = 0.001  # drift of the scale after which lists are put into order anew
_REORDER = 0.02  # drift of the scale after which whole lists are put into order, not just heads
_REBUILD = 0.06  # drift of the scale after which lists are made anew
_EMPTY = {  # what is kept for each point, and its value where there is none
    "_lists": -1,
    "_distances": math.inf,
    "_reach": 0.0,
    "_norms": math.inf,
    "_listed": False,
    "_waits": False,
}
_OTHER = (
    *("_scale", "_factors", "_ordered_under", "_made_under", "_center", "_varies"),
    *("_constants", "_largest", "_offset", "_doubt", "_stale", "_holes", "_counts"),
)
_FACTOR = 5.0  # common factor of two scales, in logarithms, before float32 might overflow


class NeighborGraph:
    """Nearest neighbours from lists that are kept up as points come, go and the scale drifts.

    Args:
        k: Number of neighbours that queries will ask for; more are answered by brute force.

    Keyword Args:
        candidates: Length of each list; `3 * k + 2`, at least 16, unless given.
        exact: Prove every answer or search it again, under the very scale of the query. Without it
            answers are those under a scale that may have drifted by less than a percent.

    Examples:
        >>> import torch
        >>> graph = NeighborGraph(k=2)
        >>> graph.write(torch.arange(4), torch.tensor([[0.0], [1.0], [3.0], [4.0]]))
        >>> graph.query(torch.tensor([0, 3]), k=2, scale=torch.ones(1))
        tensor([[1, 2],
                [2, 1]])
    """

    def __init__(self, k: int = 10, *, candidates: int | None = None, exact: bool = False) -> None:
        candidates = max(3 * k + 2, 16) if candidates is None else candidates
        if candidates < k:
            raise ValueError(
                f"candidates={candidates} leaves no room for k={k} neighbours; "
                "make it k at least, or leave it out."
            )
        self.k = k
        self.candidates = candidates
        self.exact = exact
        self.table = PointTable()
        self.clear()

    def __reduce__(self) -> tuple[Any, ...]:
        return _make_graph, (self.k, self.candidates, self.exact)

    def clear(self) -> None:
        """See `NeighborSearch.clear`."""
        self.table.clear()
        self._allocate(0)
        self._arrivals: list[Tensor] = []
        self._side: tuple[Tensor, Tensor, Tensor] | None = None  # see `_arrivals_side`
        self._limits: Tensor | None = None  # see `_thresholds`
        self._scale = self._factors = torch.empty(0)  # the working scale; in the points' dtype
        self._ordered_under = self._made_under = self._scale  # when whole lists were; when made
        self._center = torch.empty(0)
        self._varies = torch.empty(0, dtype=torch.bool)  # dimensions in which points differ
        self._constants = False  # whether there are others
        self._largest = 0.0  # the largest squared norm relative to the center
        self._offset = 0.0  # the norm of the center
        self._sample: Tensor | None = None  # positions all over the table, for first bounds
        self._last: Tensor | None = None  # the scale of the last query
        self._doubt = 1.0  # the worst that drift can have done to a reach
        self._stale = False  # whether lists may hold points that have been overwritten
        self._holes = False  # whether positions may be empty
        self._counts = dict.fromkeys(("inserted", "built", "rescored", "rebuilt"), 0)

    def _allocate(self, size: int) -> None:
        device, c = self.table.points.device, self.candidates
        self._lists = torch.empty((size, c), dtype=torch.int32, device=device)
        self._distances = torch.empty((size, c), device=device)  # squared
        self._reach = torch.empty(size, device=device)  # squared
        self._norms = torch.empty(size, device=device)  # infinite: not in the graph
        self._listed = torch.empty(size, dtype=torch.bool, device=device)
        self._waits = torch.empty(size, dtype=torch.bool, device=device)
        for name, value in _EMPTY.items():
            getattr(self, name).fill_(value)

    # -- writing -----------------------------------------------------------------------------------

    def write(self, index: Tensor, points: Tensor) -> None:
        """See `NeighborSearch.write`."""
        if not len(index):
            return
        self.table.write(index, points)
        if len(self._listed) < len(self.table.points) or self._lists.device != points.device:
            self._grow()
        self._replaced(index)

    def _replaced(self, index: Tensor) -> None:
        """What stands at these positions is new: it waits to be inserted."""
        rows = as_slice(index)
        waiting = self._waits[rows].any()
        stale = self._norms[rows].isfinite().any()
        if stale or waiting:
            self._stale |= bool(stale)
            self._norms[rows] = torch.inf
            self._lists[rows], self._distances[rows] = -1, torch.inf
            self._listed[rows] = False
        if not self.table.valid[rows].all():
            self._holes = True
        fresh = index[~self._waits[rows]] if waiting else index
        if len(fresh):
            self._arrivals.append(fresh)
        self._waits[rows] = True
        self._side = None
        if self._limits is not None:
            self._limits[rows] = torch.inf

    def _grow(self) -> None:
        self._limits = None
        before = {name: getattr(self, name) for name in _EMPTY}
        self._allocate(len(self.table.points))
        for name, tensor in before.items():
            getattr(self, name)[: len(tensor)] = tensor

    def _waiting(self) -> Tensor:
        """Positions `[m]` that wait to be inserted."""
        if not self._arrivals:
            return torch.empty(0, dtype=torch.int64, device=self._lists.device)
        if len(self._arrivals) > 1:
            self._arrivals = [torch.cat(self._arrivals)]
        return self._arrivals[0]

    def _insert(self, arrivals: Tensor) -> None:
        """Takes arrivals out of the lists that hold what they replaced, and offers them to all."""
        self._arrivals, self._side, self._sample = [], None, None
        self._waits[arrivals] = False
        if self._stale:
            self._remove(arrivals)
        new = arrivals[self.table.valid[arrivals]]
        if not len(new):
            return
        self._counts["inserted"] += len(new)
        many = 2 * len(new) > int(self._listed.sum())
        for block in new.split(_BLOCK):
            self._set_norms(block)
            if not many:
                self._make_lists(block, self._first_bound(block), offer=True)
        if many:  # making lists when they are asked for costs less
            self._listed.zero_()

    def _remove(self, gone: Tensor) -> None:
        """Takes points out of the lists that hold them."""
        self._stale = False
        size = self.table.size
        marked = torch.zeros(size, dtype=torch.bool, device=gone.device)
        marked[gone] = True
        step = 2**22 // self.candidates
        for start in range(0, size, step):
            lists = self._lists[start : min(start + step, size)]
            held = marked[lists.clamp_min(0)] & (lists >= 0)
            rows = held.any(-1).nonzero().squeeze(1)
            if not len(rows):
                continue
            held, rows = held[rows], rows + start
            distances = self._distances[rows].masked_fill_(held, torch.inf)
            best, positions = nearest(distances, self._lists[rows], self.candidates)
            self._distances[rows], self._lists[rows] = best, positions
            self._listed[rows] &= best[:, self.k - 1] <= self._reach[rows]
            self._renew(rows)

    # -- sweeping ----------------------------------------------------------------------------------

    def _centered(self, index: Tensor | slice) -> Tensor:
        """Points `[n, d]` relative to the center, under the working scale, float32."""
        points = self.table.points
        return ((points[index] - self._center) * self._factors).float()

    def _make_lists(self, rows: Tensor, bound: Tensor, *, offer: bool) -> None:
        """Makes the lists of `[m]` rows, given bounds on their reach; offers the rows to others."""
        # Where anything is within reach, a number that no distance exceeds does the same.
        far = 1.01 * (float(self._centered(rows).norm(dim=-1).amax()) + self._largest**0.5) ** 2 + 1
        limit = bound.clamp_max(far)
        reach = torch.where(self._listed, self._reach.clamp_max(far), -torch.inf)
        row, column, least = self._sweep(rows, limit, reach if offer else None)
        if offer:
            taken = least < reach[column]
            self._offer(rows[row[taken]], column[taken])
        mine = (least < limit[row]) & (column != rows[row])
        self._keep_nearest(rows, bound, row[mine], column[mine], least[mine])

    def _sweep(
        self, rows: Tensor, bound: Tensor, reach: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Pairs `[h]` that may be nearer than the row's bound or the column's reach.

        With lower bounds `[h]` of squared distances: rounding excludes no one. One tile of the
        product is held at a time, in memory that is used again: fresh memory would cost more than
        the product.
        """
        size = self.table.size
        norms, left = self._left(rows)
        limit, norms = bound.unsqueeze(1), norms.unsqueeze(1)
        keep = 1.0 - self._rounding()
        step = max(_TILE // len(rows), 512)
        memory = torch.empty(2, len(rows) * step, device=left.device)
        found = []
        for start in range(0, size, step):
            stop = min(start + step, size)
            products, limits = memory[:, : len(rows) * (stop - start)].view(2, len(rows), -1)
            tile = slice(start, stop)
            torch.addmm(self._norms[tile], left, self._right(tile).T, beta=keep, out=products)
            if reach is None:
                products -= limit - norms
            else:
                products -= torch.maximum(limit, reach[start:stop], out=limits).sub_(norms)
            columns = (products.amin(0) < 0).nonzero().squeeze(1)
            excess = products[:, columns]
            row, hit = (excess < 0).nonzero(as_tuple=True)
            found.append((row, columns[hit] + start, excess[row, hit]))
        row, column, excess = (torch.cat(parts) for parts in zip(*found, strict=True))
        limits = bound[row] if reach is None else torch.maximum(bound[row], reach[column])
        return row, column, excess + limits

    def _left(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Numbers `[m]` and vectors `[m, d]` for lower bounds of squared distances to `_right`.

        With `a` and `b` relative to a center, `|a - b|**2 = |a|**2 + |b|**2 - 2ab`. Only this side
        is shifted, so that stored points go into the product as they are, unless they are too far
        from the origin for that. The rounding of all this is at most a share of
        `|a|**2 + |b|**2 + |a||b| + |a||center|`; each side bears its own.
        """
        left, rounding = self._centered(rows), self._rounding()
        norms = left.norm(dim=-1)
        if self._remote():
            return norms.square_().mul_(1.0 - rounding), left.mul_(-2.0)
        norms = (norms * (1.0 - rounding) - rounding * self._offset).mul_(norms)
        left = (left * self._factors).float()
        return norms.addmv_(left, self._center.float(), alpha=2.0), left.mul_(-2.0)

    def _right(self, index: Tensor | slice) -> Tensor:
        if self._remote():
            return self._centered(index)
        points = self.table.points
        some = points[index] if isinstance(index, slice) else points.index_select(0, index)
        return some.float()

    def _rounding(self) -> float:
        """The share of squared norms that products may be off, `|a||b|` taken half by half."""
        return 1.5 * relative_error(len(self._scale))

    def _remote(self) -> bool:
        """Whether the origin is so far off, by the spread of the points, that rounding tells."""
        return self._offset > 100.0 * (1.0 + self._largest**0.5)

    def _first_bound(self, rows: Tensor) -> Tensor:
        """An upper bound `[m]` on the squared distance of the C-th neighbour of each row.

        From some columns all over the table, and then from the lists of the nearest ones found.
        """
        c = self.candidates
        if self._sample is None:
            inside = self._norms.isfinite()
            columns = (inside & self._listed).nonzero().squeeze(1)
            if len(columns) < _SAMPLE // 4:
                columns = inside.nonzero().squeeze(1)
            self._sample = columns[:: max(len(columns) // _SAMPLE, 1)]
        columns = self._sample[self._norms[self._sample].isfinite()]
        if len(columns) <= c:
            return torch.full((len(rows),), torch.inf, device=rows.device)
        distances = torch.cdist(self._centered(rows), self._centered(columns)).square_()
        best, column = distances.topk(c + 1, largest=False)
        bound, near = best[:, -1], columns[column]  # one more, since the row itself may be there
        for _ in range(2):
            around = self._lists[near[:, :6]].flatten(1).long()
            around = torch.cat([near, around], 1).sort(1).values
            around.masked_fill_(self._norms[around].isinf(), -1)  # not in the graph (any more)
            around[:, 1:].masked_fill_(around[:, 1:] == around[:, :-1], -1)
            best, near = nearest(self._direct(rows, around), around, c + 1)
            bound = torch.minimum(bound, best[:, -1])
        return bound * (1 + 1e-3) + 1e-6

    def _offer(self, new: Tensor, rows: Tensor) -> None:
        """Puts new points `[h]` into the lists of `[h]` rows wherever they are within reach."""
        apart = new != rows
        new, rows = new[apart], rows[apart]
        distances = self._direct(rows, new.unsqueeze(1)).squeeze(1)
        within = distances < self._reach[rows]
        new, rows, distances = new[within], rows[within], distances[within]
        if not len(new):
            return
        target, offered, offered_distances = _by_row(rows, new, distances)
        distances = torch.cat([self._distances[target], offered_distances], 1)
        lists = torch.cat([self._lists[target], offered.int()], 1)
        best, lists = nearest(distances, lists, self.candidates + 1)
        self._distances[target], self._lists[target] = best[:, :-1], lists[:, :-1]
        self._reach[target] = torch.minimum(self._reach[target], best[:, -1])
        self._renew(target)

    def _keep_nearest(
        self,
        rows: Tensor,
        bound: Tensor,
        row: Tensor,
        column: Tensor,
        least: Tensor,
    ) -> None:
        """The lists of `[m]` rows from `[h]` pairs that hold all points within the bound."""
        bound = bound.clone()
        distances = torch.full((len(rows), self.candidates + 1), torch.inf, device=rows.device)
        lists = torch.full_like(distances, -1, dtype=torch.int64)
        if len(row):
            target, columns, coarse = _by_row(row, column, least)
            some_coarse, some = nearest(coarse, columns, self.candidates + 4)
            best, chosen = nearest(self._direct(rows[target], some), some, self.candidates + 1)
            left_out = some_coarse[:, -1]  # what was left out is no nearer than this
            again = (left_out < best[:, self.k - 1]).nonzero().squeeze(1)
            if len(again):  # rounding is coarser than the distances are: rank them all
                exact = self._direct(rows[target[again]], columns[again])
                best[again], chosen[again] = nearest(exact, columns[again], self.candidates + 1)
                left_out[again] = torch.inf
            distances[target], lists[target] = best, chosen
            bound[target] = torch.minimum(bound[target], left_out)
        self._lists[rows] = lists[:, :-1].int()
        self._distances[rows] = distances[:, :-1]
        self._reach[rows] = torch.minimum(distances[:, -1], bound)
        self._listed[rows] = True
        self._renew(rows)

    def _direct(self, index: Tensor, others: Tensor) -> Tensor:
        """Squared distances `[q, m]` by differences, float32, under the working scale."""
        points, (q, m), d = self.table.points, others.shape, self.table.points.shape[1]
        scale = self._factors
        if q * m * d < _FEW:
            difference = (points[others] - points[index].unsqueeze(1)) * scale
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
            squared[start : start + step] = (rows.mul_(scale).square_() @ ones).view(-1, m)
        return squared.float().masked_fill_(others < 0, torch.inf)

    # -- drift -------------------------------------------------------------------------------------

    def _follow(self, scale: Tensor) -> None:
        """Takes up the scale of a query, if it has drifted from the working scale."""
        if scale is self._last:
            return
        self._last = scale
        current = scale.to("cpu", torch.float64)
        if not len(self._scale):
            self._made_under = self._ordered_under = current
            self._work_under(current)
            return
        ratios = self._log_ratios(current, self._scale)
        if ratios.std() > _RESCORE or abs(ratios.mean()) > _FACTOR:
            again = self._drift(current, self._made_under) > _REBUILD
            self._rescore(current)
            if again:
                self._made_under, self._doubt = current, 1.0
                self._listed.zero_()
                self._counts["rebuilt"] += 1

    def _drift(self, scale: Tensor, other: Tensor) -> float:
        """How differently two scales weigh the dimensions: the spread of their log-ratios."""
        return float(self._log_ratios(scale, other).std())

    def _log_ratios(self, scale: Tensor, other: Tensor) -> np.ndarray[Any, Any]:
        """Of two scales, in NumPy, which is quicker for so few numbers.

        Dimensions in which all points agree have no part in any distance, and none in this.
        """
        ratios = np.log(scale.numpy() / other.numpy())
        return ratios[self._varies.numpy() | (ratios != 0)] if self._constants else ratios

    def _work_under(self, scale: Tensor) -> None:
        points, valid = self.table.rows()
        self._scale, self._side, self._limits = scale, None, None
        self._factors = scale.to(points.device, points.dtype)
        center = points.sum(0, dtype=torch.float64) / max(int(valid.sum()), 1)
        self._center, self._largest = center.to(points.dtype), 0.0
        self._offset = float((center * self._factors).norm())
        there = points[valid] if self._holes else points
        if len(there):
            self._varies = (there.amax(0) != there.amin(0)).cpu()
        self._constants = bool(self._varies.any()) and not bool(self._varies.all())
        for rows in self._norms[: len(points)].isfinite().nonzero().squeeze(1).split(65_536):
            self._set_norms(rows)

    def _set_norms(self, rows: Tensor) -> None:
        norms = self._centered(rows).square().sum(-1)
        self._norms[rows] = norms
        if len(norms):
            self._largest = max(self._largest, float(norms.amax()))

    def _rescore(self, scale: Tensor) -> None:
        """Puts all lists into order under another scale."""
        worst = float((scale / self._scale).min()) ** 2
        self._work_under(scale)
        before = after = 0.0
        head = self.candidates
        if self._drift(scale, self._ordered_under) < _REORDER:
            head = min(self.k + 6, head)  # none from farther down has come among the first k
        else:
            self._ordered_under = scale
        for rows in torch.arange(self.table.size, device=self._lists.device).split(8_192):
            lists, old = self._lists[rows, :head].long(), self._distances[rows, :head]
            new = self._direct(rows, lists)
            before += float(old.masked_fill(lists < 0, 0.0).sum())
            after += float(new.masked_fill(lists < 0, 0.0).sum())
            self._distances[rows, :head], order = new.sort(1)
            self._lists[rows, :head] = lists.gather(1, order).int()
        typical = after / before if before > 0 else 1.0
        self._distances[:, head:].mul_(typical)
        self._reach.mul_(typical)
        self._listed &= self._distances[:, self.k - 1] <= self._reach
        self._doubt *= min(worst / typical, 1.0)
        self._counts["rescored"] += 1

    # -- asking ------------------------------------------------------------------------------------

    def query(self, index: Tensor, k: int, scale: Tensor) -> Tensor:
        """See `NeighborSearch.query`."""
        self._follow(scale)
        if self._arrivals and len(self._waiting()) >= _BLOCK:
            self._insert(self._waiting())
        if k > (self.candidates if self.exact else self.k):
            return self._brute_force(index, k, scale)
        self._build(index)
        if self.exact:
            return self._prove(index, k, scale)
        lists = self._lists[:, :k].index_select(0, index).long()  # faster than by brackets
        if self._arrivals:
            lists = self._with_arrivals(index, lists)
        if self._holes:
            lists = lists.masked_fill(~self.table.valid[index].unsqueeze(1), -1)
        return lists

    def _build(self, index: Tensor) -> None:
        """Makes the lists that are asked for and missing, and others with them to fill a block."""
        listed = self._listed.index_select(0, index)
        if listed.all():
            return
        if len(self._waiting()) >= _BLOCK // 4 and self._waits[index].any():
            self._insert(self._waiting())  # no more work than to make a list for one that waits
            listed = self._listed[index]
        missing = index[~listed].unique()
        missing = missing[self.table.valid[missing]]
        if not len(missing):
            return
        if len(missing) < _BLOCK:
            unlisted = self.table.valid & ~self._listed
            unlisted[missing] = False
            more = unlisted.nonzero().squeeze(1)[: _BLOCK - len(missing)]
            missing = torch.cat([missing, more])
        for block in missing.split(2 * _BLOCK):
            # A list that was made under another scale still bounds the one to be made.
            bound = self._candidates(block)[1].amax(1) * (1 + 1e-5)
            unbound = bound.isinf()
            if unbound.any():
                bound[unbound] = self._first_bound(block[unbound])
            self._make_lists(block, bound, offer=False)
            self._counts["built"] += len(block)
            if self._counts["built"] % _SAMPLE < len(block):
                self._sample = None  # more lists to sample from

    def _candidates(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Lists `[q, C]` without points that have been overwritten, and their distances."""
        lists = self._lists.index_select(0, index).long()
        distances = self._distances.index_select(0, index)
        if self._stale:
            old = self._waits[lists.clamp_min(0)]
            distances = distances.masked_fill(old, torch.inf)
            lists = lists.masked_fill(old, -1)
        return lists, distances

    def _with_arrivals(self, index: Tensor, lists: Tensor) -> Tensor:
        """Lists `[q, k]` put right where one that waits is nearer, or has been overwritten."""
        k = lists.shape[1]
        norms, left, scaled = self._arrivals_side()
        distances = torch.addmm(norms, self._right(index), left)
        doubtful = distances.amin(1) < self._thresholds().index_select(0, index)
        if self._stale:
            doubtful |= self._waits[lists].any(1)
        rows = doubtful.nonzero().squeeze(1)
        if len(rows):
            index, arrivals = index[rows], self._waiting().expand(len(rows), -1)
            listed, known = self._candidates(index)
            new = _differences(self._centered(index), scaled)
            absent = arrivals == index.unsqueeze(1)
            if self._holes:
                absent |= ~self.table.valid[arrivals]
            new.masked_fill_(absent, torch.inf)
            best, found = nearest(torch.cat([known, new], 1), torch.cat([listed, arrivals], 1), k)
            if self._stale:  # overwriting may have left too few within reach
                beyond = (best[:, -1] > self._reach[index]) & self.table.valid[index]
                if beyond.any():
                    found[beyond] = self._brute_force(index[beyond], k, self._scale)
            lists[rows] = found
        return lists

    def _arrivals_side(self) -> tuple[Tensor, Tensor, Tensor]:
        """The arrivals' side, as of `_left`, of lower bounds on distances; and themselves."""
        if self._side is None:
            arrivals = self._waiting()
            norms, left = self._left(arrivals)
            if self._holes:
                norms.masked_fill_(~self.table.valid[arrivals], torch.inf)
            self._side = norms, left.T, self._centered(arrivals)
        return self._side

    def _thresholds(self) -> Tensor:
        """What `[n]` the arrivals' side must fall below to come among a row's first k."""
        if self._limits is None:
            self._limits = torch.empty_like(self._norms)
            self._renew(slice(None))
        return self._limits

    def _renew(self, rows: Tensor | slice) -> None:
        if self._limits is not None:
            norms, last = self._norms[rows], self._distances[rows, self.k - 1]
            limits = last - norms * (1.0 - self._rounding())
            # Those that wait themselves have been compared with no other that does.
            self._limits[rows] = limits.masked_fill_(self._waits[rows], torch.inf)

    def _prove(self, index: Tensor, k: int, scale: Tensor) -> Tensor:
        """Answers under the very scale of the query, each proven or searched again."""
        lists = self._candidates(index)[0]
        arrivals = self._waiting().expand(len(index), -1)
        arrivals = arrivals.masked_fill(arrivals == index.unsqueeze(1), -1)
        worst = float((scale.cpu() / self._scale).min()) ** 2 * self._doubt * self._safety()
        frontier = self._reach[index].double() * worst
        frontier.masked_fill_(~self._listed[index], -1.0)
        candidates = torch.cat([lists, arrivals], 1)
        scale = scale.to(candidates.device, torch.float64)
        return refine(self.table, index, candidates, frontier, k, scale)

    def _safety(self) -> float:
        """What float32 rounding of distances by differences leaves of a reach."""
        return 1.0 - relative_error(len(self._scale))

    def _brute_force(self, index: Tensor, k: int, scale: Tensor) -> Tensor:
        search = TorchSearch()
        search.table = self.table
        return search.query(index, k, scale)

    # -- saving ------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The lists and all that goes with them but the points, which belong to the storage."""
        size = self.table.size
        rows = {name: getattr(self, name)[:size].clone() for name in _EMPTY}
        rest = {name: getattr(self, name) for name in _OTHER}
        return {"points": self._fingerprints(), "arrivals": self._waiting(), **rows, **rest}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes up saved lists, if most points written since `clear` are those they were made of.

        The others count as written after the state was saved. For a table of other points the state
        is of no use; then lists are made when they are asked for.
        """
        if not {"points", "arrivals", *_EMPTY, *_OTHER} <= set(state):
            return  # of another version
        now, then = self._fingerprints(), state["points"].to(self._lists.device)
        same = now[: len(then)] == then[: len(now)]
        known = len(state["_scale"]) == self.table.points.shape[1] and len(then) <= len(now)
        if not known or state["_lists"].shape[1] != self.candidates or 2 * same.sum() < len(then):
            return
        for name in _EMPTY:
            getattr(self, name)[: len(then)] = state[name]
            getattr(self, name)[len(then) :] = _EMPTY[name]
        for name in _OTHER:
            setattr(self, name, copy(state[name]))
        self._factors, self._center = self._factors.to(now.device), self._center.to(now.device)
        self._arrivals = [state["arrivals"].to(now.device)] if len(state["arrivals"]) else []
        self._sample = self._last = self._limits = None
        changed = torch.ones(len(now), dtype=torch.bool, device=now.device)
        changed[: len(then)] = ~same
        self._replaced(changed.nonzero().squeeze(1))

    def _fingerprints(self) -> Tensor:
        """Integers `[size]` that tell points from one another, whatever the device."""
        points, valid = self.table.rows()
        generator = torch.Generator().manual_seed(0)
        weights = torch.randint(2**62, points.shape[1:], generator=generator).to(points.device)
        bits = points.view(torch.int32 if points.dtype == torch.float32 else torch.int64)
        rows = [(chunk * weights).sum(1) for chunk in bits.split(8_192)]
        return torch.cat(rows).masked_fill_(~valid, -1) if rows else weights[:0]

    def stats(self) -> dict[str, float]:
        """Numbers of points, lists and work done, and the share of lists that are proven exact.

        `certified` is the share of lists whose first k entries the certificate proves to be the
        nearest under the working scale.
        """
        size = self.table.size
        listed = self._listed[:size]
        last = self._distances[:size][listed][:, self.k - 1]
        proven = last <= self._reach[:size][listed] * (self._doubt * self._safety())
        return {
            "points": int(self.table.valid[:size].sum()),
            "lists": int(listed.sum()),
            "waiting": len(self._waiting()),
            "certified": float(proven.float().mean()) if len(proven) else math.nan,
            **self._counts,
        }


def _make_graph(k: int, candidates: int, exact: bool) -> NeighborGraph:
    return NeighborGraph(k, candidates=candidates, exact=exact)


def _differences(points: Tensor, others: Tensor) -> Tensor:
    """Squared distances `[q, m]` between `[q, d]` and `[m, d]`, by differences."""
    return torch.cdist(points, others, compute_mode="donot_use_mm_for_euclid_dist").square_()


def _by_row(rows: Tensor, columns: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Pairs `[h]` to distinct rows `[r]` with their columns and values `[r, width]`, padded."""
    order = rows.argsort()
    target, counts = rows[order].unique_consecutive(return_counts=True)
    width = int(counts.max())
    row = torch.arange(len(target), device=rows.device).repeat_interleave(counts)
    first = counts.cumsum(0) - counts
    slot = torch.arange(len(rows), device=rows.device) - first[row]
    padded_columns = torch.full((len(target), width), -1, device=rows.device)
    padded_values = torch.full((len(target), width), torch.inf, device=rows.device)
    padded_columns[row, slot] = columns[order]
    padded_values[row, slot] = values[order]
    return target, padded_columns, padded_values
