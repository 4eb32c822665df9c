"""Which stored row follows which."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor
from torchrl.data.replay_buffers import Storage

from nmer_torchrl.functional import any_feature, as_rows, fingerprint, finite_rows
from nmer_torchrl.keys import as_keys, as_roles, get_entry, next_key
from nmer_torchrl.tracking.rows import StoredRows, stored_entries, written_positions

Array = np.ndarray[Any, np.dtype[Any]]

_CHUNK = 65_536


class Succession:
    """Keeps the successor of each stored row in step with a storage.

    A row ends in a state (its next observation) and starts from one (its observation). Take the
    rows in the order in which they were written. The successor of row i is the first row after i
    that starts from the very state in which i ends, unless a row between the two ends in that state
    as well: then the successor is that one's. Neither goes beyond the end of an episode where one
    is marked, nor from one trajectory to another where trajectories are named. Equal means equal in
    every number: rows are found by fingerprints and then compared.

    The order of writing is that of a ring: positions upwards, around the end, to the one that the
    buffer wrote last. Writes that continue the ring cost time in proportion to the new rows; any
    other change has all rows matched anew, which is a sort.

    Args:
        keys: Observations and actions.
        value_keys: Next observations and rewards; rows with a non-finite entry among all of these
            follow no one and have no successor.
        end_keys: Flags after which an episode does not go on; those that are stored count.
        trajectory_key: Name of the trajectory; counts if it is stored.
    """

    def __init__(
        self,
        keys: Sequence[NestedKey],
        value_keys: Sequence[NestedKey],
        end_keys: Sequence[NestedKey],
        trajectory_key: NestedKey,
    ) -> None:
        roles = as_roles(keys, value_keys)
        self.observations = roles.observations
        self.end_keys = as_keys(end_keys, "end_keys")
        self.trajectory_key = as_keys([trajectory_key], "trajectory_key")[0]
        self.rows = StoredRows(
            (*roles.observations, *roles.next_observations), (*roles.actions, *roles.rewards)
        )
        self.newest: int | None = None  # the position that the buffer wrote last
        self._reset()

    def _reset(self) -> None:
        self._storage: weakref.ref[Storage] | None = None
        self._capacity = 0
        self._written = 0  # rows since the last match, of which the first is at `_first`,
        self._first = 0
        self._continued = False  # and which continue the ring
        self._changed: list[Tensor] = []
        self._marks = np.empty((0, 2), np.int64)  # fingerprints of the states of start and end
        self._counts = np.empty((0, 2), np.bool_)  # whether the row may follow, and be followed
        self._alone = np.empty(0, np.bool_)  # whether no successor has been found
        self._successor = torch.empty(0, dtype=torch.int64)
        self._waiting: dict[int, int] = {}  # of the state in which a row ends, to that row

    def __getstate__(self) -> dict[str, Any]:
        names = ("observations", "end_keys", "trajectory_key", "rows", "newest")
        return {name: self.__dict__[name] for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()

    def clear(self) -> None:
        """Forgets all rows and their order."""
        self.rows.forget()
        self.newest = None
        self._reset()

    def note_storage(self, storage: Storage) -> None:
        """This is the storage that the buffer writes to."""
        if self._storage is None or self._storage() is not storage:
            if self._storage is not None:  # another one: what is known of its order is void
                self.clear()
            self._storage, self._capacity = weakref.ref(storage), storage.max_size

    def note_write(self, index: int | Tensor) -> None:
        """The buffer has written these positions, in this order."""
        positions = written_positions(index, self._storage and self._storage())
        if not len(positions) or not self._capacity:
            return
        first, last = int(positions[0]), int(positions[-1])
        if not self._written:
            self._first, self._continued = first, True
        steps = (positions[1:] - positions[:-1]) % self._capacity
        self._continued &= self.newest is not None and first == (self.newest + 1) % self._capacity
        self._continued &= bool((steps == 1).all())
        self._written += len(positions)
        self.newest = last

    def synchronize(self, storage: Storage) -> None:
        """Takes up whatever has changed in the storage."""
        self.note_storage(storage)
        for index, points in self.rows.changes(storage):
            self._read(stored_entries(storage), index, points)
            self._changed.append(index)
        if self._changed:
            self._match(stored_entries(storage))
            self._changed, self._written = [], 0

    def successors(self, index: Tensor) -> Tensor:
        """Positions `[q]` to those of their successors `[q]`, -1 for none; after `synchronize`."""
        return self._successor.index_select(0, index.to(self._successor.device)).to(index.device)

    def _read(self, data: TensorDictBase, index: Tensor, points: Tensor) -> None:
        """Takes up rows at `[n]` positions, whose states are `[n, 2 * d]`."""
        if not len(self._marks):
            self._check_widths(data)
            self._marks = np.zeros((self._capacity, 2), np.int64)
            self._counts = np.zeros((self._capacity, 2), np.bool_)
            self._successor = torch.full((self._capacity,), -1, device=points.device)
            self._alone = np.ones(self._capacity, np.bool_)
        positions, rows = index.numpy(), as_rows(index, points.device)
        self._stop_waiting(positions)
        states = fingerprint(points.reshape(2 * len(points), -1)).reshape(-1, 2)
        usable = finite_rows(points)
        goes_on = usable
        for key in self.end_keys:
            if data.get(key, None) is not None:
                goes_on = goes_on & ~any_feature(get_entry(data, key)[rows].bool(), 1)
        if data.get(self.trajectory_key, None) is not None:
            names = get_entry(data, self.trajectory_key)[rows].reshape(len(index), -1)
            states = states + fingerprint(names.long()).unsqueeze(-1)
        # One copy for both, since each waits for the device.
        read = torch.cat([states, torch.stack([usable, goes_on], -1)], -1).cpu().numpy()
        self._marks[positions], self._counts[positions] = read[:, :2], read[:, 2:]

    def _check_widths(self, data: TensorDictBase) -> None:
        for key in self.observations:
            start, end = get_entry(data, key).shape[1:], get_entry(data, next_key(key)).shape[1:]
            if start != end:
                raise ValueError(
                    f"The entry {key!r} has shape {tuple(start)} in each row, but "
                    f"{next_key(key)!r} has {tuple(end)}; a row is found to follow another by "
                    "comparing the two, so store both in the same form."
                )

    def _stop_waiting(self, positions: Array) -> None:
        """What stood at these positions has no successor to come."""
        if self._waiting:
            alone = self._alone[positions] & self._counts[positions, 1]
            for position in positions[alone].tolist():
                mark = int(self._marks[position, 1])
                if self._waiting.get(mark) == position:
                    del self._waiting[mark]

    def _match(self, data: TensorDictBase) -> None:
        """Finds the successors that have come with the rows that have changed."""
        length = self.rows.length
        order = self._new_rows(length)
        if order is None:  # all rows, from the oldest to the newest
            newest = length - 1 if self.newest is None else min(self.newest, length - 1)
            order = (newest + 1 + np.arange(length)) % length
            self._waiting = {}
            self._successor.fill_(-1)
        self._alone[order] = True
        self._successor[as_rows(torch.from_numpy(order), self._successor.device)] = -1
        counts = self._counts[order].reshape(-1)
        mark = self._marks[order].reshape(-1)[counts]  # start and end of each row in turn
        ends = np.arange(2 * len(order))[counts]
        by_mark = np.argsort(mark, kind="stable")
        mark, ends = mark[by_mark], ends[by_mark]
        position, ends = order[ends // 2], ends % 2 == 1

        # Next to each other in time, one that ends in a state and one that starts from it.
        same = mark[1:] == mark[:-1]
        joined = same & ends[:-1] & ~ends[1:]
        before, after = position[:-1][joined], position[1:][joined]
        first = np.concatenate([[True], ~same])[: len(mark)]
        if self._waiting:
            met = self._meet(mark[first], position[first], ends[first])
            before, after = np.concatenate([before, met[0]]), np.concatenate([after, met[1]])
        self._alone[before] = False
        last = np.concatenate([~same, [True]])[-len(mark) :] & ends
        self._waiting.update(zip(mark[last].tolist(), position[last].tolist(), strict=True))
        self._link(data, torch.from_numpy(before), torch.from_numpy(after))

    def _new_rows(self, length: int) -> Array | None:
        """Positions in order of writing if what has changed is a continuation of the ring."""
        changed = sum(len(index) for index in self._changed)  # whatever was written is among these
        if not self._continued or self._written != changed or changed >= length:
            return None
        return (self._first + np.arange(self._written)) % self._capacity

    def _meet(self, marks: Array, positions: Array, ends: Array) -> tuple[Array, Array]:
        """Those that waited and the new rows that start where they ended; the rest wait no more."""
        before, after = [], []
        rows: Iterable[tuple[int, int, bool]] = zip(
            marks.tolist(), positions.tolist(), ends.tolist(), strict=True
        )
        for mark, position, end in rows:
            waiting = self._waiting.pop(mark, None)
            if waiting is not None and not end:
                before.append(waiting)
                after.append(position)
        return np.array(before, np.int64), np.array(after, np.int64)

    def _link(self, data: TensorDictBase, before: Tensor, after: Tensor) -> None:
        """Writes down pairs that are equal in truth, not by their fingerprints alone."""
        device = self._successor.device
        trajectories = data.get(self.trajectory_key, None)
        for i, j in zip(before.split(_CHUNK), after.split(_CHUNK), strict=True):
            if not len(i):
                continue
            i, j = i.to(device, non_blocking=True), j.to(device, non_blocking=True)
            differ = torch.zeros(len(i), dtype=torch.bool, device=device)
            for key in self.observations:
                start, end = get_entry(data, key)[j], get_entry(data, next_key(key))[i]
                differ |= any_feature(start != end, 1)
            if trajectories is not None:
                differ |= any_feature(trajectories[i] != trajectories[j], 1)
            self._successor[i] = torch.where(differ, -1, j)
