"""The neighbour graph: exact neighbours at the price of a table look-up.

Brute force compares each query with every point. The graph inverts the work: it keeps for every
point a list of its C nearest others (C about 3k), and keeps the lists right as points come, go and
change their weight. A query then reads the first k entries of a list.

- *Lists are made when they are asked for* (`_build`), by one sweep of matrix products over all
  points. Storages that were filled before cost nothing until they are sampled.
- *Arrivals wait* until a block of them is worth a sweep (`_insert`), which offers each to all lists
  and makes its own. Meanwhile queries compare with those that wait (`_with_arrivals`), so that no
  answer is stale. An overwritten point counts as gone at once; with the next block it is taken out
  of the lists that hold it (`_remove`). A list left with fewer than k is made anew.
- *A sweep never sorts*: a bound on what can matter to a row, or to a column, leaves few pairs.
- *The scale drifts* with the statistics. Lists are kept in order under a working scale. When the
  current one has drifted a little from it, all lists are put into order anew (`_rescore`); when it
  has drifted far from where they were made, they are made anew, when asked for. Only drift between
  dimensions matters: a common factor changes no order.

Each list has a reach: no point outside of it was nearer than that when it was last compared. The
reach, less the worst that drift can have done, is a certificate: entries within it are proven to be
the nearest. With `exact=True` every answer is proven or searched again by brute force.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from nmer_torchrl.neighbors.base import PointTable
from nmer_torchrl.neighbors.exact import nearest, refine, relative_error
from nmer_torchrl.neighbors.torch import TorchSearch

_BLOCK = 128  # arrivals that are worth a sweep
_TILE = 2**18  # distances that a sweep holds at a time: they stay in the processor's cache
_SAMPLE = 4_096  # columns that bound the reach of a row without a list
_RESCORE = 0.004  # drift of the scale after which lists are put into order anew
_REBUILD = 0.08  # drift of the scale after which lists are made anew
_SAFETY = 1.0 - 1e-5  # float32 rounding of stored distances


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
        self._scale = self._made_under = torch.empty(0)  # the working scale; that of making lists
        self._last: Tensor | None = None  # the scale of the last query
        self._doubt = 1.0  # the worst that drift can have done to a reach
        self._stale = False  # whether lists may hold points that have been overwritten
        self._holes = False  # whether positions may be empty
        self._counts = dict.fromkeys(("inserted", "built", "rescored", "rebuilt"), 0)

    def _allocate(self, size: int) -> None:
        device, c = self.table.points.device, self.candidates
        self._lists = torch.full((size, c), -1, dtype=torch.int32, device=device)
        self._distances = torch.full((size, c), torch.inf, device=device)  # squared
        self._reach = torch.zeros(size, device=device)  # squared
        self._norms = torch.full((size,), torch.inf, device=device)  # infinite: not in the graph
        self._listed = torch.zeros(size, dtype=torch.bool, device=device)
        self._waits = torch.zeros(size, dtype=torch.bool, device=device)

    # -- writing -----------------------------------------------------------------------------------

    def write(self, index: Tensor, points: Tensor) -> None:
        """See `NeighborSearch.write`."""
        if not len(index):
            return
        self.table.write(index, points)
        if len(self._listed) < len(self.table.points) or self._lists.device != points.device:
            self._grow()
        self._stale |= bool(self._norms[index].isfinite().any())
        self._holes |= not bool(self.table.valid[index].all())
        self._norms[index] = torch.inf
        self._lists[index], self._distances[index] = -1, torch.inf
        self._listed[index] = False
        fresh = index[~self._waits[index]]
        self._waits[fresh] = True
        self._arrivals.append(fresh)

    def _grow(self) -> None:
        names = ("_lists", "_distances", "_reach", "_norms", "_listed", "_waits")
        before = [getattr(self, name) for name in names]
        self._allocate(len(self.table.points))
        for name, tensor in zip(names, before, strict=True):
            getattr(self, name)[: len(tensor)] = tensor

    def _waiting(self) -> Tensor:
        """Positions `[m]` that wait to be inserted."""
        if len(self._arrivals) != 1:
            empty = torch.empty(0, dtype=torch.int64, device=self._lists.device)
            self._arrivals = [torch.cat([empty, *self._arrivals])]
        return self._arrivals[0]

    def _insert(self, arrivals: Tensor) -> None:
        """Takes arrivals out of the lists that hold what they replaced, and offers them to all."""
        self._arrivals = []
        self._waits[arrivals] = False
        if self._stale:
            self._remove(arrivals)
        new = arrivals[self.table.valid[arrivals]]
        self._norms[new] = self._centered(new).square().sum(-1)
        self._counts["inserted"] += len(new)
        if 2 * len(new) > int(self._listed.sum()):
            self._listed.zero_()  # making lists when they are asked for costs less
            return
        for block in new.split(_BLOCK):
            self._make_lists(block, self._first_bound(block), offer=True)

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
            self._listed[rows] &= best[:, self.k - 1].isfinite()

    # -- sweeping ----------------------------------------------------------------------------------

    def _centered(self, index: Tensor) -> Tensor:
        """Points `[n, d]` relative to the center, under the working scale, float32."""
        return ((self.table.points[index] - self._center) * self._scale).float()

    def _make_lists(self, rows: Tensor, bound: Tensor, *, offer: bool) -> None:
        """Makes the lists of `[m]` rows, given bounds on their length; offers the rows to others.

        With `a` and `b` relative to a center, `|a - b|**2 = |a|**2 + |b|**2 - 2ab`; only the row's
        side is shifted, so that stored points go into the product as they are.
        """
        points, size = self.table.points, self.table.size
        left = self._centered(rows)
        norms = left.square().sum(-1)
        left = (left * self._scale).float()
        norms = norms + 2.0 * (left @ self._center.float())
        error = self._product_error(left, norms)
        limit, shift = bound.unsqueeze(1), (error - norms).unsqueeze(1)
        reach = torch.where(self._listed[:size], self._reach[:size], -torch.inf)
        own: list[tuple[Tensor, Tensor, Tensor]] = []
        step = max(_TILE // len(rows), 512)
        left = -2.0 * left
        table = points[:size] if points.dtype == torch.float32 else points[:size].float()
        for start in range(0, size, step):
            stop = min(start + step, size)
            products = torch.addmm(self._norms[start:stop], left, table[start:stop].T)
            limits = torch.maximum(limit, reach[start:stop]) if offer else limit
            row, column = (products < limits + shift).nonzero(as_tuple=True)
            own.append((row, column + start, products[row, column]))
        row, column, product = (torch.cat(parts) for parts in zip(*own, strict=True))
        approximate = product + norms[row]
        if offer:
            taken = approximate < reach[column] + error[row]
            self._offer(rows[row[taken]], column[taken])
        mine = (approximate < bound[row] + error[row]) & (column != rows[row])
        self._keep_nearest(rows, bound, row[mine], column[mine], approximate[mine])

    def _product_error(self, left: Tensor, norms: Tensor) -> Tensor:
        """A bound `[m]` on the rounding of a sweep's squared distances."""
        finite = self._norms[: self.table.size]
        largest = finite[finite.isfinite()].amax().sqrt() if finite.isfinite().any() else 0.0
        raw = largest + (self._center * self._scale).norm().float()
        lengths = (left / self._scale.float()).norm(dim=-1)
        return relative_error(left.shape[1]) * (lengths * raw + lengths.square() + largest**2)

    def _first_bound(self, rows: Tensor) -> Tensor:
        """An upper bound `[m]` on the squared distance of the C-th neighbour, from some columns."""
        size = self.table.size
        columns = torch.linspace(0, size - 1, min(size, _SAMPLE), device=rows.device).long()
        columns = columns[self._norms[columns].isfinite()]
        if len(columns) <= self.candidates:
            return torch.full((len(rows),), torch.inf, device=rows.device)
        distances = torch.cdist(self._centered(rows), self._centered(columns)).square_()
        # One more, since the row itself may be among them.
        best = distances.topk(self.candidates + 1, largest=False).values[:, -1]
        return best * (1 + 1e-3) + 1e-6

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

    def _keep_nearest(
        self, rows: Tensor, bound: Tensor, row: Tensor, column: Tensor, approximate: Tensor
    ) -> None:
        """The lists of `[m]` rows from `[h]` pairs that hold all points within the bound."""
        bound = bound.clone()
        distances = torch.full((len(rows), self.candidates + 1), torch.inf, device=rows.device)
        lists = torch.full_like(distances, -1, dtype=torch.int64)
        if len(row):
            target, columns, coarse = _by_row(row, column, approximate)
            coarse, columns = nearest(coarse, columns, self.candidates + 4)
            exact = self._direct(rows[target], columns)
            distances[target], lists[target] = nearest(exact, columns, self.candidates + 1)
            # What the coarse order left out is no nearer than its last, rounding aside.
            bound[target] = torch.minimum(bound[target], coarse[:, -1] * _SAFETY)
        self._lists[rows] = lists[:, :-1].int()
        self._distances[rows] = distances[:, :-1]
        self._reach[rows] = torch.minimum(distances[:, -1], bound)
        self._listed[rows] = True

    def _direct(self, index: Tensor, others: Tensor) -> Tensor:
        """Squared distances `[q, m]` by differences, float32, under the working scale."""
        scale = self._scale.to(self.table.points.dtype)
        difference = self.table.points[others] - self.table.points[index].unsqueeze(1)
        squared = (difference * scale).square_().sum(-1).float()
        return squared.masked_fill_(others < 0, torch.inf)

    # -- drift -------------------------------------------------------------------------------------

    def _follow(self, scale: Tensor) -> None:
        """Takes up the scale of a query, if it has drifted from the working scale."""
        if scale is self._last:
            return
        self._last = scale
        current = scale.to(self.table.points.device, torch.float64)
        if not len(self._scale):
            self._scale = self._made_under = current
            self._refresh_norms()
        elif _drift(current, self._scale) > _RESCORE:
            again = _drift(current, self._made_under) > _REBUILD
            self._rescore(current)
            if again:
                self._made_under, self._doubt = current, 1.0
                self._listed.zero_()
                self._counts["rebuilt"] += 1

    def _refresh_norms(self) -> None:
        points, valid = self.table.rows()
        self._center = points.sum(0, dtype=torch.float64) / max(int(valid.sum()), 1)
        for rows in self._norms[: len(points)].isfinite().nonzero().squeeze(1).split(65_536):
            self._norms[rows] = self._centered(rows).square().sum(-1)

    def _rescore(self, scale: Tensor) -> None:
        """Puts all lists into order under another scale."""
        worst = float((scale / self._scale).min()) ** 2
        self._scale = scale
        self._refresh_norms()
        before = after = 0.0
        size = self.table.size
        step = max(2**21 // (self.candidates * scale.shape[0]), 64)
        for start in range(0, size, step):
            rows = slice(start, min(start + step, size))
            lists, old = self._lists[rows].long(), self._distances[rows]
            index = torch.arange(start, rows.stop, device=lists.device)
            new = self._direct(index, lists)
            known = new.isfinite()
            before += float(old[known].sum())
            after += float(new[known].sum())
            self._distances[rows], order = new.sort(1)
            self._lists[rows] = lists.gather(1, order).int()
        typical = after / before if before > 0 else 1.0
        self._reach.mul_(typical)
        self._doubt *= min(worst / typical, 1.0)
        self._counts["rescored"] += 1

    # -- asking ------------------------------------------------------------------------------------

    def query(self, index: Tensor, k: int, scale: Tensor) -> Tensor:
        """See `NeighborSearch.query`."""
        self._follow(scale)
        if len(self._waiting()) >= _BLOCK:
            self._insert(self._waiting())
        if k > self.candidates:
            return self._brute_force(index, k, scale)
        self._build(index)
        if self.exact:
            return self._prove(index, k, scale)
        lists = self._with_arrivals(index, k) if len(self._waiting()) else self._lists[index, :k]
        if self._holes:
            lists = lists.masked_fill(~self.table.valid[index].unsqueeze(1), -1)
        return lists.long()

    def _build(self, index: Tensor) -> None:
        """Makes the lists that are asked for and missing, and others with them to fill a block."""
        listed = self._listed[index]
        if listed.all():
            return
        missing = index[~listed].unique()
        missing = missing[self.table.valid[missing]]
        if not len(missing):
            return
        if len(missing) < _BLOCK:
            unlisted = self._norms.isfinite() & ~self._listed
            unlisted[missing] = False
            more = unlisted.nonzero().squeeze(1)[: _BLOCK - len(missing)]
            missing = torch.cat([missing, more])
        for block in missing.split(2 * _BLOCK):
            # A list that was made under another scale still bounds the one to be made.
            known = self._distances[block, -1]
            bound = torch.where(known.isfinite(), known * (1 + 1e-5), torch.inf)
            if not known.isfinite().all():
                bound = torch.minimum(bound, self._first_bound(block))
            self._make_lists(block, bound, offer=False)
            self._counts["built"] += len(block)

    def _candidates(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Lists `[q, C]` without points that have been overwritten, and their distances."""
        lists, distances = self._lists[index].long(), self._distances[index]
        if self._stale:
            old = self._waits[lists.clamp_min(0)]
            distances = distances.masked_fill(old, torch.inf)
            lists = lists.masked_fill(old, -1)
        return lists, distances

    def _with_arrivals(self, index: Tensor, k: int) -> Tensor:
        """The k nearest `[q, k]` of the lists and of the points that wait."""
        arrivals = self._waiting()
        arrivals = arrivals[self.table.valid[arrivals]]
        if self._stale:
            lists, distances = self._candidates(index)
            distances, lists = nearest(distances, lists, k)
        else:
            lists, distances = self._lists[index, :k].long(), self._distances[index, :k]
        if not len(arrivals):
            return lists
        near = torch.cdist(self._centered(index), self._centered(arrivals)).square_()
        closer = near < distances[:, -1:] * (1 + 1e-3) + 1e-6
        rows = closer.any(-1).nonzero().squeeze(1)
        if len(rows):
            others = arrivals.expand(len(rows), -1)
            new = self._direct(index[rows], others)
            new.masked_fill_(others == index[rows].unsqueeze(1), torch.inf)
            merged = torch.cat([distances[rows], new], 1)
            lists[rows] = nearest(merged, torch.cat([lists[rows], others], 1), k)[1]
        return lists

    def _prove(self, index: Tensor, k: int, scale: Tensor) -> Tensor:
        """Answers under the very scale of the query, each proven or searched again."""
        scale = scale.to(self._scale.device, torch.float64)
        lists = self._candidates(index)[0]
        arrivals = self._waiting().expand(len(index), -1)
        arrivals = arrivals.masked_fill(arrivals == index.unsqueeze(1), -1)
        worst = self._doubt * float((scale / self._scale).min()) ** 2 * _SAFETY
        frontier = self._reach[index].double() * worst
        frontier.masked_fill_(~self._listed[index], -1.0)
        return refine(self.table, index, torch.cat([lists, arrivals], 1), frontier, k, scale)

    def _brute_force(self, index: Tensor, k: int, scale: Tensor) -> Tensor:
        search = TorchSearch()
        search.table = self.table
        return search.query(index, k, scale)

    def stats(self) -> dict[str, float]:
        """Numbers of points, lists and work done, and the share of lists that are proven exact.

        `certified` is the share of lists whose first k entries the certificate proves to be the
        nearest under the working scale.
        """
        size = self.table.size
        listed = self._listed[:size]
        last = self._distances[:size][listed][:, self.k - 1]
        proven = last <= self._reach[:size][listed] * (self._doubt * _SAFETY)
        return {
            "points": int(self.table.valid[:size].sum()),
            "lists": int(listed.sum()),
            "waiting": len(self._waiting()),
            "certified": float(proven.float().mean()) if len(proven) else math.nan,
            **self._counts,
        }


def _make_graph(k: int, candidates: int, exact: bool) -> NeighborGraph:
    return NeighborGraph(k, candidates=candidates, exact=exact)


def _drift(scale: Tensor, other: Tensor) -> float:
    """How differently two scales weigh the dimensions: the spread of their log-ratios."""
    return float((scale / other).log().std(correction=0))


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
