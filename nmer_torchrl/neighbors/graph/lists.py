"""The lists of a neighbor graph."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from nmer_torchrl.neighbors.exact import nearest
from nmer_torchrl.neighbors.graph.scaled_points import ScaledPoints

# Attributes stored for each point, and their values for an empty list.
_EMPTY = {"positions": -1, "distances": math.inf, "slack": 1.0, "reach": 0.0, "listed": False}


class Lists:
    """Holds, for each point, the positions `[n, C]` of near points, nearest first, padded with -1.

    `distances` `[n, C]` are their squared distances; after a small drift of the scale those at the
    end of a list are estimates. `slack` `[n]`: no true distance is below this share of the stored
    one. `reach` `[n]`: no point outside the list is nearer than this squared distance. `listed`
    `[n]`: whether the list is reliable, because its first k entries are within reach.
    """

    def __init__(self, k: int, candidates: int) -> None:
        self.k = k
        self.candidates = candidates
        self.clear(torch.device("cpu"))

    def clear(self, device: torch.device) -> None:
        """Forgets all lists."""
        self._allocate(0, device)

    def _allocate(self, size: int, device: torch.device) -> None:
        shape = (size, self.candidates)
        self.positions = torch.empty(shape, dtype=torch.int32, device=device)
        self.distances = torch.empty(shape, device=device)
        self.slack = torch.empty(size, device=device)
        self.reach = torch.empty(size, device=device)
        self.listed = torch.empty(size, dtype=torch.bool, device=device)
        self.forget(slice(None))

    def resize(self, size: int, device: torch.device) -> None:
        """Allocates lists for more points, on the given device."""
        before = {name: getattr(self, name) for name in _EMPTY}
        self._allocate(size, device)
        for name, tensor in before.items():
            getattr(self, name)[: len(tensor)] = tensor

    def forget(self, rows: Tensor | slice) -> None:
        """Empties the lists of these rows."""
        for name, value in _EMPTY.items():
            getattr(self, name)[rows] = value

    def keep(
        self,
        rows: Tensor,
        bound: Tensor,
        pairs: tuple[Tensor, Tensor, Tensor],
        scaled: ScaledPoints,
    ) -> None:
        """Builds the lists of `[m]` rows from `[h]` pairs that include all points in the bound."""
        (row, column, least), width = pairs, self.candidates + 1
        bound = bound.clone()
        distances = torch.full((len(rows), width), torch.inf, device=rows.device)
        positions = torch.full_like(distances, -1, dtype=torch.int64)
        if len(row):
            target, columns, coarse = _by_row(row, column, least)
            some_coarse, some = nearest(coarse, columns, width + 3)
            best, chosen = nearest(scaled.direct(rows[target], some), some, width)
            left_out = some_coarse[:, -1]  # points that were left out are not nearer than this
            again = (left_out < best[:, self.k - 1]).nonzero().squeeze(1)
            if len(again):  # rounding is too coarse for these distances, so rank all points
                exact = scaled.direct(rows[target[again]], columns[again])
                best[again], chosen[again] = nearest(exact, columns[again], width)
                left_out[again] = torch.inf
            distances[target], positions[target] = best, chosen
            bound[target] = torch.minimum(bound[target], left_out)
        self.positions[rows] = positions[:, :-1].int()
        self.distances[rows] = distances[:, :-1]
        self.slack[rows] = 1.0
        self.reach[rows] = torch.minimum(distances[:, -1], bound)
        self.listed[rows] = True

    def offer(self, new: Tensor, rows: Tensor, scaled: ScaledPoints) -> Tensor:
        """Inserts new points `[h]` into the lists of `[h]` rows where they are within reach.

        Returns the rows whose lists have changed.
        """
        apart = new != rows
        new, rows = new[apart], rows[apart]
        distances = scaled.direct(rows, new.unsqueeze(1)).squeeze(1)
        within = distances < self.reach[rows]
        new, rows, distances = new[within], rows[within], distances[within]
        if not len(new):
            return rows
        target, offered, offered_distances = _by_row(rows, new, distances)
        distances = torch.cat([self.distances[target], offered_distances], 1)
        positions = torch.cat([self.positions[target], offered.int()], 1)
        best, positions = nearest(distances, positions, self.candidates + 1)
        self.distances[target], self.positions[target] = best[:, :-1], positions[:, :-1]
        # The distance of the nearest point that does not fit may be an estimate, but the reach
        # needs a lower bound.
        least = best[:, -1] * self.slack[target]
        self.reach[target] = torch.minimum(self.reach[target], least)
        return target

    def remove(self, gone: Tensor, size: int) -> Tensor:
        """Removes points from the first `size` lists; returns the rows whose lists have changed."""
        marked = torch.zeros(size, dtype=torch.bool, device=gone.device)
        marked[gone] = True
        touched = [gone[:0]]
        step = 2**22 // self.candidates
        for start in range(0, size, step):
            positions = self.positions[start : min(start + step, size)]
            held = marked[positions.clamp_min(0)] & (positions >= 0)
            rows = held.any(-1).nonzero().squeeze(1)
            if not len(rows):
                continue
            held, rows = held[rows], rows + start
            distances = self.distances[rows].masked_fill_(held, torch.inf)
            best, positions = nearest(distances, self.positions[rows], self.candidates)
            self.distances[rows], self.positions[rows] = best, positions
            self.listed[rows] &= best[:, self.k - 1] <= self.reach[rows]
            touched.append(rows)
        return torch.cat(touched)

    def rescore(self, size: int, head: int, scaled: ScaledPoints, *, worst: float) -> None:
        """Reorders the first `head` entries of the first `size` lists under the current scale.

        The rest of each list is estimated to have changed by the mean factor. No distance has
        fallen below `worst` times its old value, so the reach is multiplied by `worst`, and an
        estimate is at most `factor / worst` times the true distance. Such errors multiply until the
        whole list is measured again; the slack is the reciprocal of their product.
        """
        before = after = 0.0
        for rows in torch.arange(size, device=self.positions.device).split(8_192):
            positions, old = self.positions[rows, :head].long(), self.distances[rows, :head]
            new = scaled.direct(rows, positions)
            before += float(old.masked_fill(positions < 0, 0.0).sum())
            after += float(new.masked_fill(positions < 0, 0.0).sum())
            self.distances[rows, :head], order = new.sort(1)
            self.positions[rows, :head] = positions.gather(1, order).int()
        factor = after / before if before > 0 else 1.0
        self.distances[:, head:].mul_(factor)
        if head < self.candidates:
            # At most 1, because a list may also hold measured distances.
            self.slack.mul_(worst / factor if factor else 1.0).clamp_max_(1.0)
        else:
            self.slack.fill_(1.0)
        self.reach.mul_(worst)
        self.listed &= self.distances[:, self.k - 1] <= self.reach

    def state_dict(self, size: int) -> dict[str, Tensor]:
        """Returns the first `size` lists."""
        return {name: getattr(self, name)[:size].clone() for name in _EMPTY}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores saved lists; further points have empty lists."""
        self.forget(slice(None))
        for name in _EMPTY:
            getattr(self, name)[: len(state[name])] = state[name]


def _by_row(rows: Tensor, columns: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Groups pairs `[h]` by row: distinct rows `[r]`, padded columns and values `[r, width]`."""
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
