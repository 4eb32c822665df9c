"""What is done when: the life of a neighbor graph. The package's docstring tells the whole."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nmer_torchrl.functional import as_rows, fingerprint
from nmer_torchrl.neighbors.base import PointTable, Search
from nmer_torchrl.neighbors.exact import nearest, refine
from nmer_torchrl.neighbors.graph.lists import Lists
from nmer_torchrl.neighbors.graph.scaled_points import ScaledPoints
from nmer_torchrl.neighbors.torch import TorchSearch

_BLOCK = 128  # arrivals that are worth a sweep
_FEW = 2**22  # distances that are sooner taken twice than bounded in other ways
_SAMPLE = 1_024  # columns that bound the reach of a row without a list
_RESCORE = 0.0015  # drift of the scale after which lists are put into order anew
_REORDER = 0.02  # drift of the scale after which whole lists are put into order, not just heads
_FACTOR = 5.0  # common factor of two scales, in logarithms, before float32 might overflow
_STATE = ("_ordered_under", "_stale", "_counts")


class NeighborGraph(Search):
    """Nearest neighbors from lists that are kept up as points come, go and the scale drifts.

    Args:
        k: Number of neighbors that queries will ask for; more are answered by brute force.

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

    fills = True
    table: PointTable

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
        self._scaled = ScaledPoints(self.table)
        self._lists = Lists(k, candidates)
        self.clear()

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(NeighborGraph, self.k, candidates=self.candidates, exact=self.exact), ()

    def clear(self) -> None:
        """See `NeighborSearch.clear`."""
        self.table.clear()
        self._scaled.clear()
        self._lists.clear(self.table.points.device)
        self._waits = torch.empty(0, dtype=torch.bool)  # which positions wait to be inserted
        self._arrivals: list[Tensor] = []  # the same, in order of arrival
        self._complete = False  # whether every point is known to have a list to rely on
        self._passed = 0  # queries since it was last looked whether this is so
        self._side: tuple[Tensor, Tensor] | None = None  # see `_arrivals_side`
        self._limits: Tensor | None = None  # see `_thresholds`
        self._sample: Tensor | None = None  # positions all over the table, for first bounds
        self._last: Tensor | None = None  # the scale of the last query
        self._ordered_under = torch.empty(0)  # the scale that whole lists are in order under
        self._stale = False  # whether lists may hold points that have been overwritten
        self._counts = dict.fromkeys(("inserted", "built", "rescored"), 0)

    # -- writing -----------------------------------------------------------------------------------

    def write(self, index: Tensor, points: Tensor) -> None:
        """See `NeighborSearch.write`."""
        if not len(index):
            return
        before, index = self.table.size, index.cpu()
        self.table.write(index, points)
        if len(self._waits) < len(self.table.points) or self._waits.device != points.device:
            self._grow()
        self._replaced(index, before)

    def _grow(self) -> None:
        size, device, before = len(self.table.points), self.table.points.device, self._waits
        self._scaled.resize()
        self._lists.resize(size, device)
        self._waits = torch.zeros(size, dtype=torch.bool, device=device)
        self._waits[: len(before)] = before
        self._limits = None

    def _replaced(self, index: Tensor, size: int) -> None:
        """What stands at these positions is new, `size` being taken: it waits to be inserted.

        Positions are on the CPU.
        """
        self._complete = False
        rows = as_rows(index, self._waits.device)
        index = index.to(self._waits.device, non_blocking=True)
        waiting = stale = False
        if not isinstance(rows, slice) or rows.start < size:
            waiting = bool(self._waits[rows].any())
            stale = bool(self._scaled.norms[rows].isfinite().any())
        if stale or waiting:
            self._stale |= stale
            self._scaled.norms[rows] = torch.inf
            self._lists.forget(rows)
        fresh = index[~self._waits[rows]] if waiting else index
        if len(fresh):
            self._arrivals.append(fresh)
        self._waits[rows] = True
        self._side = None
        if self._limits is not None:
            self._limits[rows] = torch.inf

    def _waiting(self) -> Tensor:
        """Positions `[m]` that wait to be inserted."""
        if not self._arrivals:
            return torch.empty(0, dtype=torch.int64, device=self._waits.device)
        if len(self._arrivals) > 1:
            self._arrivals = [torch.cat(self._arrivals)]
        return self._arrivals[0]

    def _insert(self, arrivals: Tensor) -> None:
        """Takes arrivals out of the lists that hold what they replaced, and offers them to all."""
        self._arrivals, self._side, self._sample = [], None, None
        self._waits[arrivals] = self._complete = False
        if self._stale:
            self._renew(self._lists.remove(arrivals, self.table.size))
            self._stale = False
        new = arrivals[self.table.valid[arrivals]]
        if not len(new):
            return
        self._counts["inserted"] += len(new)
        many = 2 * len(new) > int(self._lists.listed.sum())
        for block in new.split(_BLOCK):
            self._scaled.include(block)
            if not many:
                self._make_lists(block, self._first_bound(block), offer=True)
        if many:  # making lists when they are asked for costs less
            self._lists.listed.zero_()

    # -- making lists ------------------------------------------------------------------------------

    def _build(self, index: Tensor) -> None:
        """Makes the lists that are asked for and missing, and others with them to fill a block."""
        if self._complete:
            return
        self._passed += len(index)
        if self._passed >= self.table.size and not self._arrivals:  # likely all have been made
            points, self._passed = self.table.size, 0
            missing = self.table.valid[:points] & ~self._lists.listed[:points]
            self._complete = not bool(missing.any())
            if self._complete:
                return
        listed = self._lists.listed.index_select(0, index)
        if listed.all():
            return
        if len(self._waiting()) >= _BLOCK // 4 and self._waits[index].any():
            self._insert(self._waiting())  # no more work than to make a list for one that waits
            listed = self._lists.listed[index]
        missing = index[~listed].unique()
        missing = missing[self.table.valid[missing]]
        if not len(missing):
            return
        if len(missing) < _BLOCK:
            unlisted = self.table.valid & ~self._lists.listed
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

    def _make_lists(self, rows: Tensor, bound: Tensor, *, offer: bool) -> None:
        """Makes the lists of `[m]` rows, given bounds on their reach; offers the rows to others."""
        lists, scaled = self._lists, self._scaled
        # Where anything is within reach, a number that no distance exceeds does the same.
        far = scaled.beyond_all(rows)
        limit, reach = bound.clamp_max(far), None
        if offer:
            reach = torch.where(lists.listed, lists.reach.clamp_max(far), -torch.inf)
        row, column, least = scaled.sweep(rows, limit, reach)
        if reach is not None:
            taken = least < reach[column]
            self._renew(lists.offer(rows[row[taken]], column[taken], scaled))
        mine = (least < limit[row]) & (column != rows[row])
        lists.keep(rows, bound, (row[mine], column[mine], least[mine]), scaled)
        self._renew(rows)

    def _first_bound(self, rows: Tensor) -> Tensor:
        """An upper bound `[m]` on the squared distance of the C-th neighbor of each row.

        From the products of a sweep where they are few. Else from some columns all over the table,
        and then from the lists of the nearest ones found.
        """
        c, scaled = self.candidates, self._scaled
        if len(rows) * self.table.size <= _FEW:
            return scaled.bound(rows, c + 1) * (1 + 1e-3) + 1e-6  # the row itself may be there
        if self._sample is None:
            inside = scaled.norms.isfinite()
            columns = (inside & self._lists.listed).nonzero().squeeze(1)
            if len(columns) < _SAMPLE // 4:
                columns = inside.nonzero().squeeze(1)
            self._sample = columns[:: max(len(columns) // _SAMPLE, 1)]
        columns = self._sample[scaled.norms[self._sample].isfinite()]
        if len(columns) <= c:
            return torch.full((len(rows),), torch.inf, device=rows.device)
        distances = torch.cdist(scaled.centered(rows), scaled.centered(columns)).square_()
        best, column = distances.topk(c + 1, largest=False)
        near = columns[column]  # one more than C, since the row itself may be there
        around = self._lists.positions[near[:, :6]].flatten(1).long()
        around = torch.cat([near, around], 1).sort(1).values
        around.masked_fill_(scaled.norms[around].isinf(), -1)  # not in the graph (any more)
        around[:, 1:].masked_fill_(around[:, 1:] == around[:, :-1], -1)
        closer = nearest(scaled.direct(rows, around), around, c + 1)[0][:, -1]
        return torch.minimum(best[:, -1], closer) * (1 + 1e-3) + 1e-6

    # -- drift -------------------------------------------------------------------------------------

    def _follow(self, scale: Tensor) -> None:
        """Takes up the scale of a query, if it has drifted from the working scale."""
        if scale is self._last:
            return
        self._last = scale
        current = scale.to("cpu", torch.float64)
        if not len(self._scaled.scale):
            self._ordered_under = current
            self._scaled.work_under(current)
            return
        factor, drift = self._scaled.compare(current, self._scaled.scale)
        if drift > _RESCORE or abs(factor) > _FACTOR:
            self._rescore(current)

    def _rescore(self, scale: Tensor) -> None:
        """Puts all lists into order under another scale."""
        self._complete = False
        worst = float((scale / self._scaled.scale).min()) ** 2 * self._scaled.safety()
        self._scaled.work_under(scale)
        self._side = self._limits = None
        head = self.candidates
        if self._scaled.drift(scale, self._ordered_under) < _REORDER:
            head = min(self.k + 6, head)  # none from farther down has come among the first k
        else:
            self._ordered_under = scale
        self._lists.rescore(self.table.size, head, self._scaled, worst=worst)
        self._counts["rescored"] += 1

    # -- asking ------------------------------------------------------------------------------------

    def query(self, index: Tensor, k: int, scale: Tensor) -> Tensor:
        """See `NeighborSearch.query`."""
        self._follow(scale)
        if self._arrivals and len(self._waiting()) >= _BLOCK:
            self._insert(self._waiting())
        if not len(index):  # all that there was to do has been done
            return index.new_empty((0, k))
        if k > (self.candidates if self.exact else self.k):
            return self._brute_force(index, k, scale)
        return self._prove(index, k, scale) if self.exact else self._answer(index, k)

    def _answer(self, index: Tensor, k: int) -> Tensor:
        """Answers `[q, k]` under the working scale."""
        self._build(index)
        found = self._lists.positions[:, :k].index_select(0, index).long()  # faster than brackets
        if self._arrivals:
            found = self._with_arrivals(index, found)
        if self.table.holes:
            found = found.masked_fill(~self.table.valid[index].unsqueeze(1), -1)
        return found

    def _candidates(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Lists `[q, C]` without points that have been overwritten, and their distances."""
        positions = self._lists.positions.index_select(0, index).long()
        distances = self._lists.distances.index_select(0, index)
        if self._stale:
            old = self._waits.take(positions)
            distances = distances.masked_fill(old, torch.inf)
            positions = positions.masked_fill(old, -1)
        return positions, distances

    def _with_arrivals(self, index: Tensor, found: Tensor) -> Tensor:
        """Answers `[q, k]` put right where one that waits is nearer, or has been overwritten."""
        asked, k = index, found.shape[1]
        norms, left = self._arrivals_side()
        distances = torch.addmm(norms, left, self._scaled.right(index).T)
        doubtful = distances.amin(0) < self._thresholds().index_select(0, index)
        if self._stale:
            doubtful |= self._waits.take(found).any(1)
        # On a device all rows are compared, since to know which are in doubt is to wait for it.
        rows = None if index.device.type != "cpu" else doubtful.nonzero().squeeze(1)
        if rows is not None:
            if not len(rows):
                return found
            index, doubtful = index.index_select(0, rows), doubtful.index_select(0, rows)
        waiting = self._waiting()
        arrivals = waiting.expand(len(index), -1)
        listed, known = self._candidates(index)
        new = _differences(self._scaled.centered(index), self._scaled.centered(waiting))
        absent = arrivals == index.unsqueeze(1)
        if self.table.holes:
            absent |= ~self.table.valid[arrivals]
        new.masked_fill_(absent, torch.inf)
        best, merged = nearest(torch.cat([known, new], 1), torch.cat([listed, arrivals], 1), k)
        if self._stale:
            beyond = best[:, -1] > self._lists.reach.index_select(0, index)
            if (beyond & doubtful & self.table.valid[index]).any():
                # Overwriting has left too few within reach: no more waiting.
                self._insert(self._waiting())
                return self._answer(asked, k)
        if rows is None:
            return torch.where(doubtful.unsqueeze(1), merged, found)
        return found.index_copy_(0, rows, merged)

    def _arrivals_side(self) -> tuple[Tensor, Tensor]:
        """The arrivals' side, as of `ScaledPoints.left`, of lower bounds on distances."""
        if self._side is None:
            arrivals = self._waiting()
            norms, left = self._scaled.left(arrivals)
            if self.table.holes:
                norms.masked_fill_(~self.table.valid[arrivals], torch.inf)
            self._side = norms.unsqueeze(1), left
        return self._side

    def _thresholds(self) -> Tensor:
        """What `[n]` the arrivals' side must fall below to come among a row's first k."""
        if self._limits is None:
            self._limits = torch.empty_like(self._scaled.norms)
            self._renew(slice(None))
        return self._limits

    def _renew(self, rows: Tensor | slice) -> None:
        """Brings the thresholds of rows whose lists have changed up to date."""
        if self._limits is not None:
            norms, last = self._scaled.norms[rows], self._lists.distances[rows, self.k - 1]
            limits = last - norms * self._scaled.kept_of_norms()
            # Those that wait themselves have been compared with no other that does.
            self._limits[rows] = limits.masked_fill_(self._waits[rows], torch.inf)

    def _prove(self, index: Tensor, k: int, scale: Tensor) -> Tensor:
        """Answers under the very scale of the query, each proven or searched again."""
        self._build(index)
        listed = self._candidates(index)[0]
        arrivals = self._waiting().expand(len(index), -1)
        arrivals = arrivals.masked_fill(arrivals == index.unsqueeze(1), -1)
        drift = float((scale.cpu() / self._scaled.scale).min()) ** 2
        frontier = self._lists.reach[index].double() * (drift * self._scaled.safety())
        frontier.masked_fill_(~self._lists.listed[index], -1.0)
        candidates = torch.cat([listed, arrivals], 1)
        scale = scale.to(candidates.device, torch.float64)
        return refine(self.table, index, candidates, frontier, k, scale)

    def _brute_force(self, index: Tensor, k: int, scale: Tensor) -> Tensor:
        search = TorchSearch()
        search.table = self.table
        return search.query(index, k, scale)

    def stats(self) -> dict[str, float]:
        """Numbers of points, lists and work done, and the share of lists that are proven exact.

        `certified` is the share of lists whose first k entries the certificate proves to be the
        nearest under the working scale.
        """
        size, lists = self.table.size, self._lists
        listed = lists.listed[:size]
        last = lists.distances[:size][listed][:, self.k - 1]
        proven = last <= lists.reach[:size][listed] * self._scaled.safety()
        return {
            "points": int(self.table.valid[:size].sum()),
            "lists": int(listed.sum()),
            "waiting": len(self._waiting()),
            "certified": float(proven.float().mean()) if len(proven) else math.nan,
            **self._counts,
        }

    # -- saving ------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The lists and all that goes with them but the points, which belong to the storage."""
        return {
            "points": self._fingerprints(),
            "arrivals": self._waiting(),
            "waits": self._waits[: self.table.size].clone(),
            "scaled": self._scaled.state_dict(),
            "lists": self._lists.state_dict(self.table.size),
            **{name: getattr(self, name) for name in _STATE},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes up saved lists, if most points written since `clear` are those they were made of.

        The others count as written after the state was saved. For a table of other points the state
        is of no use; then lists are made when they are asked for.
        """
        if not self._fits(state):
            return
        now, then = self._fingerprints(), state["points"].to(self._waits.device)
        same = now[: len(then)] == then[: len(now)]
        if len(then) > len(now) or 2 * same.sum() < len(then):
            return
        self._scaled.load_state_dict(state["scaled"])
        self._lists.load_state_dict(state["lists"])
        for name in _STATE:
            setattr(self, name, state[name])
        self._counts = dict(self._counts)
        self._waits.zero_()[: len(then)] = state["waits"]
        self._arrivals = [state["arrivals"].to(now.device)] if len(state["arrivals"]) else []
        self._sample = self._last = self._limits = None
        self._complete = False
        changed = torch.ones(len(now), dtype=torch.bool, device=now.device)
        changed[: len(then)] = ~same
        self._replaced(changed.nonzero().squeeze(1).cpu(), len(now))

    def _fits(self, state: dict[str, Any]) -> bool:
        """Whether a saved state is of this version, width and length of lists."""
        own = self.state_dict()
        return (
            own.keys() <= state.keys()
            and all(own[name].keys() <= state[name].keys() for name in ("scaled", "lists"))
            and state["lists"]["positions"].shape[1] == self.candidates
            and len(state["scaled"]["center"]) == self.table.points.shape[1]
        )

    def _fingerprints(self) -> Tensor:
        """Integers `[size]` that tell points from one another, whatever the device."""
        points, valid = self.table.rows()
        return fingerprint(points).masked_fill_(~valid, -1)


def _differences(points: Tensor, others: Tensor) -> Tensor:
    """Squared distances `[q, m]` between `[q, d]` and `[m, d]`, by differences."""
    return torch.cdist(points, others, compute_mode="donot_use_mm_for_euclid_dist").square_()
