"""The neighbor graph, which decides when lists are updated; see the package's docstring."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nmer_torchrl.functional import as_rows, fingerprint, to_device
from nmer_torchrl.neighbors.base import PointTable, Search
from nmer_torchrl.neighbors.exact import nearest, refine
from nmer_torchrl.neighbors.graph.lists import Lists
from nmer_torchrl.neighbors.graph.scaled_points import ScaledPoints, halve
from nmer_torchrl.neighbors.torch import TorchSearch

_BLOCK = 128  # number of new points that justify a sweep
_GROUP = 2_048  # number of near rows whose lists are built together
_AT_ONCE = 2**16  # number of rows that are grouped at a time
_FEW = 2**22  # number of distances up to which computing them twice is the fastest bound
_SAMPLE = 1_024  # columns that bound the reach of a row without a list
_RESCORE = 0.0015  # drift of the scale after which lists are reordered
_REORDER = 0.02  # drift of the scale after which whole lists are reordered, not just their heads
_FACTOR = 5.0  # log of the common factor of two scales above which float32 might overflow
_STATE = ("_ordered_under", "_stale", "_counts")


class NeighborGraph(Search):
    """Finds nearest neighbors in lists that follow every write and the drift of the scale.

    Args:
        k: Number of neighbors that queries will ask for. Larger queries use brute force.

    Keyword Args:
        candidates: Length of each list. Default: `3 * k + 2`, at least 16.
        exact: Whether to prove every answer under the exact scale of the query, or search it again.
            If False, answers are for a scale that may have drifted by less than a percent; their
            recall was at least 0.995 on the measured streams (`docs/benchmarks.md`).

    Examples:
        >>> import torch
        >>> graph = NeighborGraph(k=2)
        >>> graph.write(torch.arange(4), torch.tensor([[0.0], [1.0], [3.0], [4.0]]))
        >>> graph.query(torch.tensor([0, 3]), k=2, scale=torch.ones(1))
        tensor([[1, 2],
                [2, 1]])
    """

    fills = True
    lists = True
    table: PointTable

    def __init__(self, k: int = 10, *, candidates: int | None = None, exact: bool = False) -> None:
        candidates = max(3 * k + 2, 16) if candidates is None else candidates
        if candidates < k:
            raise ValueError(
                f"candidates={candidates} is less than k={k}; "
                "give at least k candidates, or leave `candidates` out."
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
        self._arrivals: list[Tensor] = []  # the same positions, in order of arrival
        self._complete = False  # whether every point is known to have a reliable list
        self._passed = 0  # number of queries since this was last checked
        self._side: tuple[Tensor, Tensor] | None = None  # see `_arrivals_side`
        self._limits: Tensor | None = None  # see `_thresholds`
        self._sample: Tensor | None = None  # positions across the table, for first bounds
        self._last: Tensor | None = None  # the scale of the last query
        self._ordered_under = torch.empty(0)  # the scale under which whole lists are in order
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
        """Marks the points at these positions as new, so that they wait to be inserted.

        Positions are on the CPU. `size` is the size of the table before the write.
        """
        self._complete = False
        rows = as_rows(index, self._waits.device)
        index = to_device(index, self._waits.device)
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
        """Returns the positions `[m]` that wait to be inserted."""
        if not self._arrivals:
            return torch.empty(0, dtype=torch.int64, device=self._waits.device)
        if len(self._arrivals) > 1:
            self._arrivals = [torch.cat(self._arrivals)]
        return self._arrivals[0]

    def _insert(self, arrivals: Tensor) -> None:
        """Removes the points that arrivals replaced from lists, and offers the arrivals to them."""
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
                self._make_lists([block], [self._first_bound(block)], offer=True)
        if many:  # building lists when they are queried costs less
            self._lists.listed.zero_()

    # -- building lists ----------------------------------------------------------------------------

    def _build(self, index: Tensor) -> None:
        """Builds missing lists of the queried points, and further missing lists to fill a block."""
        if self._complete:
            return
        self._passed += len(index)
        if self._passed >= self.table.size and not self._arrivals:  # probably all lists are built
            points, self._passed = self.table.size, 0
            missing = self.table.valid[:points] & ~self._lists.listed[:points]
            self._complete = not bool(missing.any())
            if self._complete:
                return
        listed = self._lists.listed.index_select(0, index)
        if listed.all():
            return
        if len(self._waiting()) >= _BLOCK // 4 and self._waits[index].any():
            self._insert(self._waiting())  # costs no more than a list for one waiting point
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
        for some in missing.split(_AT_ONCE):
            # Near rows have near columns, so that few columns of a block must be looked at.
            for group in halve(self._scaled.centered(some), some, _GROUP):
                self._build_group(group)

    def _build_group(self, rows: Tensor) -> None:
        """Builds the lists of near rows `[m]`."""
        # A list that was built under another scale still bounds the new one.
        bound = self._candidates(rows)[1].amax(1) * (1 + 1e-5)
        unbound = bound.isinf()
        if unbound.any():
            bound[unbound] = self._first_bound(rows[unbound])
        blocks = halve(
            self._scaled.centered(rows), torch.arange(len(rows), device=rows.device), _BLOCK
        )
        self._make_lists([rows[b] for b in blocks], [bound[b] for b in blocks], offer=False)
        self._counts["built"] += len(rows)
        if self._counts["built"] % _SAMPLE < len(rows):
            self._sample = None  # there are more lists to sample from now

    def _make_lists(self, blocks: list[Tensor], bounds: list[Tensor], *, offer: bool) -> None:
        """Builds the lists of blocks of rows from bounds on their reach; offers rows to others."""
        lists, scaled = self._lists, self._scaled
        # Replaces infinite bounds with a finite number that no distance exceeds.
        far = max(scaled.beyond_all(rows) for rows in blocks)
        limits, reach = [bound.clamp_max(far) for bound in bounds], None
        if offer:
            reach = torch.where(lists.listed, lists.reach.clamp_max(far), -torch.inf)
        found = scaled.sweep(blocks, limits, reach)
        for rows, bound, limit, (row, column, least) in zip(
            blocks, bounds, limits, found, strict=True
        ):
            if reach is not None:
                taken = least < reach[column]
                self._renew(lists.offer(rows[row[taken]], column[taken], scaled))
            mine = (least < limit[row]) & (column != rows[row])
            lists.keep(rows, bound, (row[mine], column[mine], least[mine]), scaled)
            self._renew(rows)

    def _first_bound(self, rows: Tensor) -> Tensor:
        """Returns an upper bound `[m]` on the squared distance of each row's C-th neighbor.

        If the products of a sweep are few, the bound comes from them. Otherwise it comes from a
        sample of columns, and then from the lists of the nearest of these.
        """
        c, scaled = self.candidates, self._scaled
        if len(rows) >= max(_GROUP // 2, 2 * c):  # near rows
            return scaled.bound(rows, c + 1, columns=rows) * (1 + 1e-3) + 1e-6
        if len(rows) * self.table.size <= _FEW:
            return scaled.bound(rows, c + 1) * (1 + 1e-3) + 1e-6  # may include the row itself
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
        near = columns[column]  # one more than C, since the row itself may be among them
        around = self._lists.positions[near[:, :6]].flatten(1).long()
        around = torch.cat([near, around], 1).sort(1).values
        around.masked_fill_(scaled.norms[around].isinf(), -1)  # not, or no longer, in the graph
        around[:, 1:].masked_fill_(around[:, 1:] == around[:, :-1], -1)
        closer = nearest(scaled.direct(rows, around), around, c + 1)[0][:, -1]
        return torch.minimum(best[:, -1], closer) * (1 + 1e-3) + 1e-6

    # -- drift -------------------------------------------------------------------------------------

    def _follow(self, scale: Tensor) -> None:
        """Adopts the scale of a query if it has drifted from the working scale."""
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
        """Reorders all lists under another scale."""
        self._complete = False
        worst = float((scale / self._scaled.scale).min()) ** 2 * self._scaled.safety()
        self._scaled.work_under(scale)
        self._side = self._limits = None
        head = self.candidates
        if self._scaled.drift(scale, self._ordered_under) < _REORDER:
            head = min(self.k + 6, head)  # entries farther down do not reach the first k
        else:
            self._ordered_under = scale
        self._lists.rescore(self.table.size, head, self._scaled, worst=worst)
        self._counts["rescored"] += 1

    # -- queries -----------------------------------------------------------------------------------

    def query(self, index: Tensor, k: int, scale: Tensor) -> Tensor:
        """See `NeighborSearch.query`."""
        self._follow(scale)
        if self._arrivals and len(self._waiting()) >= _BLOCK:
            self._insert(self._waiting())
        if not len(index):  # pending work is done
            return index.new_empty((0, k))
        if k > (self.candidates if self.exact else self.k):
            return self._brute_force(index, k, scale)
        return self._prove(index, k, scale) if self.exact else self._answer(index, k)

    def _answer(self, index: Tensor, k: int) -> Tensor:
        """Returns neighbors `[q, k]` under the working scale."""
        self._build(index)
        found = self._lists.positions[:, :k].index_select(0, index).long()  # faster than indexing
        if self._arrivals:
            found = self._with_arrivals(index, found)
        if self.table.holes:
            found = found.masked_fill(~self.table.valid[index].unsqueeze(1), -1)
        return found

    def _candidates(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Returns lists `[q, C]` without overwritten points, and their distances."""
        positions = self._lists.positions.index_select(0, index).long()
        distances = self._lists.distances.index_select(0, index)
        if self._stale:
            old = self._waits.take(positions)
            distances = distances.masked_fill(old, torch.inf)
            positions = positions.masked_fill(old, -1)
        return positions, distances

    def _with_arrivals(self, index: Tensor, found: Tensor) -> Tensor:
        """Corrects answers `[q, k]` for nearer waiting points, and for overwritten points."""
        asked, k = index, found.shape[1]
        norms, left = self._arrivals_side()
        distances = torch.addmm(norms, left, self._scaled.right(index).T)
        doubtful = distances.amin(0) < self._thresholds().index_select(0, index)
        if self._stale:
            doubtful |= self._waits.take(found).any(1)
        # On a device all rows are compared, since selecting the doubtful ones would wait for it.
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
                # Overwriting has left too few entries within reach, so insert now.
                self._insert(self._waiting())
                return self._answer(asked, k)
        if rows is None:
            return torch.where(doubtful.unsqueeze(1), merged, found)
        return found.index_copy_(0, rows, merged)

    def _arrivals_side(self) -> tuple[Tensor, Tensor]:
        """Returns `ScaledPoints.left` of the waiting points, for lower bounds on distances."""
        if self._side is None:
            arrivals = self._waiting()
            norms, left = self._scaled.left(arrivals)
            if self.table.holes:
                norms.masked_fill_(~self.table.valid[arrivals], torch.inf)
            self._side = norms.unsqueeze(1), left
        return self._side

    def _thresholds(self) -> Tensor:
        """Returns the thresholds `[n]` below which a waiting point may be among a row's first k."""
        if self._limits is None:
            self._limits = torch.empty_like(self._scaled.norms)
            self._renew(slice(None))
        return self._limits

    def _renew(self, rows: Tensor | slice) -> None:
        """Updates the thresholds of rows whose lists have changed."""
        if self._limits is not None:
            norms, last = self._scaled.norms[rows], self._lists.distances[rows, self.k - 1]
            limits = last - norms * self._scaled.kept_of_norms()
            # Waiting rows have not been compared with other waiting points yet.
            self._limits[rows] = limits.masked_fill_(self._waits[rows], torch.inf)

    def _prove(self, index: Tensor, k: int, scale: Tensor) -> Tensor:
        """Returns neighbors under the exact scale of the query, each proven or searched again."""
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
        """Returns counts of points, lists and work done, and the share of certified lists.

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
        """Returns the lists and their state, without the points, which are in the storage."""
        return {
            "points": self._fingerprints(),
            "arrivals": self._waiting(),
            "waits": self._waits[: self.table.size].clone(),
            "scaled": self._scaled.state_dict(),
            "lists": self._lists.state_dict(self.table.size),
            **{name: getattr(self, name) for name in _STATE},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores saved lists if most points are the ones that the lists were built from.

        The other points count as written after the state was saved. For a table of other points the
        state is ignored, and lists are built when they are queried.
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
        self._counts, self._ordered_under = dict(self._counts), self._ordered_under.cpu()
        self._waits.zero_()[: len(then)] = state["waits"]
        self._arrivals = [state["arrivals"].to(now.device)] if len(state["arrivals"]) else []
        self._sample = self._last = self._limits = None
        self._complete = False
        changed = torch.ones(len(now), dtype=torch.bool, device=now.device)
        changed[: len(then)] = ~same
        self._replaced(changed.nonzero().squeeze(1).cpu(), len(now))

    def _fits(self, state: dict[str, Any]) -> bool:
        """Returns whether a saved state has this version's entries, point width and list length."""
        own = self.state_dict()
        return (
            own.keys() <= state.keys()
            and all(own[name].keys() <= state[name].keys() for name in ("scaled", "lists"))
            and state["lists"]["positions"].shape[1] == self.candidates
            and len(state["scaled"]["center"]) == self.table.points.shape[1]
        )

    def _fingerprints(self) -> Tensor:
        """Returns integers `[size]` that identify points, independent of the device."""
        points, valid = self.table.rows()
        return fingerprint(points).masked_fill_(~valid, -1)


def _differences(points: Tensor, others: Tensor) -> Tensor:
    """Returns squared distances `[q, m]` between `[q, d]` and `[m, d]`, from differences."""
    return torch.cdist(points, others, compute_mode="donot_use_mm_for_euclid_dist").square_()
