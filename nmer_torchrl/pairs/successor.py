"""A pairing of an anchor with the next transition of its episode."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor
from torchrl.data.replay_buffers import Storage

from nmer_torchrl.functional import any_feature, as_rows, fingerprint, finite_rows, to_device
from nmer_torchrl.keys import (
    END_KEYS,
    POINT_KEYS,
    TRAJECTORY_KEY,
    VALUE_KEYS,
    as_keys,
    as_roles,
    get_entry,
    next_key,
)
from nmer_torchrl.pairs.base import Pairing
from nmer_torchrl.tracking.rows import (
    StoredRows,
    check_positions,
    stored_entries,
    written_positions,
)

Array = np.ndarray[Any, np.dtype[Any]]

_CHUNK = 65_536
_FEW = 16  # number of new rows up to which comparing on the device is faster than reading them


class SuccessorPairs(Pairing):
    """Pairs each anchor with the transition that followed it in its episode.

    With `PairMixup` this is Continuous Transition (Lin et al., 2020) as the NMER paper evaluates
    it: alpha is fixed and a terminal transition is not mixed. The original method learns alpha and
    mixes the last transition of an episode with the one before it.

    The successor of a row is the row written after it whose observation equals the row's next
    observation exactly, so only transitions need to be stored. Several environments may write in
    turns. These rows have no successor and are paired with themselves: the last row of an episode,
    the newest row, a row whose successor was overwritten, and a row with a non-finite entry.

    A reset changes the observation, which separates episodes even if only `terminated` is stored
    and a time limit cut the episode. If an environment resets to exactly the state in which the
    last episode was cut, the two episodes would be joined. To avoid this, store `("next", "done")`,
    `("next", "truncated")` or the trajectory ids that TorchRL's collectors write. If several rows
    end in the state from which a row starts, the last of them is its predecessor. If several rows
    start from a state, the first is the successor. With n-step returns, the successor of a row
    starts n steps later.

    The storage is read as a ring that ends at the position written last. Writes that continue the
    ring cost time in proportion to the new rows. After any other change all rows are matched again,
    which is a sort. Both look up rows by fingerprints in a dictionary on the host, and then compare
    the rows. On another device, few new rows are compared with all rows there instead, so that the
    host does not wait.

    As `sample_unit=`, it is notified of writes from its first draw on. If a full storage has begun
    to overwrite its oldest rows before that, rows at the last positions whose successors are at the
    first positions are paired with themselves until the next write. `TemporalPairSampler()`, or a
    `PairSampler` of this unit, is notified of every write.

    Keyword Args:
        keys: Observations and actions. Keys whose `("next", key)` is among `value_keys` are the
            observations that identify successors.
        value_keys: Next observations and rewards.
        end_keys: Flags that end an episode. Flags that are not stored are ignored.
        trajectory_key: Entry of the trajectory id. It is ignored if it is not stored.

    Examples:
        >>> from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
        >>> from nmer_torchrl import PairMixup, SuccessorPairs
        >>> buffer = TensorDictReplayBuffer(
        ...     storage=LazyTensorStorage(1_000),
        ...     sample_unit=SuccessorPairs(),
        ...     transform=PairMixup(alpha=0.75),
        ...     batch_size=32,
        ... )
    """

    def __init__(
        self,
        *,
        keys: Sequence[NestedKey] = POINT_KEYS,
        value_keys: Sequence[NestedKey] = VALUE_KEYS,
        end_keys: Sequence[NestedKey] = END_KEYS,
        trajectory_key: NestedKey = TRAJECTORY_KEY,
    ) -> None:
        roles = as_roles(keys, value_keys)
        self.observations = roles.observations
        self.end_keys = as_keys(end_keys, "end_keys")
        self.trajectory_key = as_keys([trajectory_key], "trajectory_key")[0]
        states = (*roles.observations, *roles.next_observations)
        super().__init__(StoredRows(states, (*roles.actions, *roles.rewards)))
        self._reset()

    def _reset(self, newest: int | None = None) -> None:
        self.newest = newest  # the position that the buffer wrote last
        self._capacity = 0
        self._written = 0  # number of rows written since the last match
        self._first = 0  # position of the first of them
        self._continued = False  # whether they continue the ring
        self._changed: list[Tensor] = []
        self._successor = torch.empty(0, dtype=torch.int64)
        # For each row: fingerprints of its first and last state, whether it may have a predecessor
        # and a successor, and whether it still waits for its successor.
        self._marks = torch.empty(0, 2, dtype=torch.int64)
        self._counts = torch.empty(0, 2, dtype=torch.bool)
        self._waits = torch.empty(0, dtype=torch.bool)
        # From the fingerprint of a last state to the one row that waits; None on other devices.
        self._waiting: dict[int, int] | None = {}

    def successors(self, storage: Storage, index: Tensor) -> Tensor:
        """Returns the successors `[q]` of the rows at positions `[q]`; -1 where there is none."""
        index = check_positions(index, storage)
        with self.lock:
            self.synchronize(storage)
            return self._successors(index)

    def _successors(self, index: Tensor) -> Tensor:
        return self._successor.index_select(0, index.to(self._successor.device)).to(index.device)

    def partners(self, anchor: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Returns the partners `[B]` of anchors `[B]`; call `synchronize` first."""
        successor = self._successors(anchor)
        return torch.where(successor >= 0, successor, anchor)

    def mark_update(self, index: int | Tensor, *, storage: Storage | None = None) -> None:
        """Records that these positions have been written, in this order."""
        with self.lock:
            if storage is None and (storage := self.rows.storage) is None:
                return
            self._turn_to(storage)
            self.rows.announce(index, storage)
            positions = written_positions(index, storage)
            if not len(positions):
                return
            first, capacity = int(positions[0]), self._capacity
            if not self._written:
                self._first, self._continued = first, True
            self._continued &= self.newest is not None and first == (self.newest + 1) % capacity
            self._continued &= bool(((positions[1:] - positions[:-1]) % capacity == 1).all())
            self._written += len(positions)
            self.newest = int(positions[-1])

    def _turn_to(self, storage: Storage) -> None:
        if self.rows.follows_another(storage):  # the known order is another storage's
            self.clear()
        self._capacity = storage.max_size

    def synchronize(self, storage: Storage) -> None:
        """Reads all rows that have changed in the storage."""
        self._turn_to(storage)
        for index, points in self.rows.changes(storage):
            self._read(stored_entries(storage), index, points)
            self._changed.append(index)
        if self._changed:
            self._match(stored_entries(storage))
            self._changed, self._written = [], 0

    def _read(self, data: TensorDictBase, index: Tensor, points: Tensor) -> None:
        """Reads the rows at `[n]` positions, whose first and last states are `[n, 2 * d]`."""
        device = points.device
        if not len(self._marks):
            self._check_widths(data)
            self._successor = torch.full((self._capacity,), -1, device=device)
            self._marks = torch.zeros((self._capacity, 2), dtype=torch.int64, device=device)
            self._counts = torch.zeros((self._capacity, 2), dtype=torch.bool, device=device)
            self._waits = torch.zeros(self._capacity, dtype=torch.bool, device=device)
            self._waiting = {} if device.type == "cpu" else None
        rows = as_rows(index, device)
        if self._waiting:  # overwritten rows no longer wait for a successor
            for mark in self._marks[rows, 1][self._waits[rows]].tolist():
                self._waiting.pop(mark, None)
        self._waits[rows] = False
        states = fingerprint(points.reshape(2 * len(points), -1)).reshape(-1, 2)
        usable = finite_rows(points)
        goes_on = usable
        for key in self.end_keys:
            if data.get(key, None) is not None:
                goes_on = goes_on & ~any_feature(get_entry(data, key)[rows].bool(), 1)
        if data.get(self.trajectory_key, None) is not None:
            names = get_entry(data, self.trajectory_key)[rows].reshape(len(index), -1)
            states = states + fingerprint(names.long()).unsqueeze(-1)
        self._marks[rows] = states
        self._counts[rows] = torch.stack([usable, goes_on], -1)

    def _check_widths(self, data: TensorDictBase) -> None:
        for key in self.observations:
            start, end = get_entry(data, key).shape[1:], get_entry(data, next_key(key)).shape[1:]
            if start != end:
                raise ValueError(
                    f"The entry {key!r} has shape {tuple(start)} in each row, but "
                    f"{next_key(key)!r} has {tuple(end)}; store both with the same shape, since "
                    "successors are found by comparing the two."
                )

    def _match(self, data: TensorDictBase) -> None:
        """Finds the successors among the rows that have changed."""
        length, waiting = self.rows.length, self._waiting
        order = self._new_rows(length)
        if order is None:  # all rows, from the oldest to the newest
            newest = length - 1 if self.newest is None else min(self.newest, length - 1)
            order = (newest + 1 + np.arange(length)) % length
            waiting = {}
            self._waits.fill_(False)
            self._successor.fill_(-1)
        elif waiting is None and len(order) <= _FEW:
            for position in order.tolist():
                self._compare(data, position)
            return
        elif waiting is None:
            those = self._waits.nonzero().squeeze(1)
            waiting = dict(zip(self._marks[those, 1].tolist(), those.tolist(), strict=True))
        rows = as_rows(torch.from_numpy(order), self._successor.device)
        self._successor[rows] = -1
        read = torch.cat([self._marks[rows], self._counts[rows]], -1).cpu().numpy()
        counts = read[:, 2:].reshape(-1) > 0
        mark = read[:, :2].reshape(-1)[counts]  # start and end of each row in turn
        ends = np.arange(2 * len(order))[counts]
        by_mark = np.argsort(mark, kind="stable")
        mark, ends = mark[by_mark], ends[by_mark]
        position, ends = order[ends // 2], ends % 2 == 1

        # Adjacent in time: a row that ends in a state, then a row that starts from it.
        same = mark[1:] == mark[:-1]
        joined = same & ends[:-1] & ~ends[1:]
        before, after = position[:-1][joined], position[1:][joined]
        first = np.concatenate([[True], ~same])[: len(mark)]
        if waiting:
            met = self._meet(waiting, mark[first], position[first], ends[first])
            before, after = np.concatenate([before, met[0]]), np.concatenate([after, met[1]])
        last = np.concatenate([~same, [True]])[-len(mark) :] & ends
        waiting.update(zip(mark[last].tolist(), position[last].tolist(), strict=True))
        self._waits[as_rows(torch.from_numpy(position[last]), self._waits.device)] = True
        self._waiting = None if self._waiting is None else waiting
        self._link(data, torch.from_numpy(before), torch.from_numpy(after))

    def _compare(self, data: TensorDictBase, position: int) -> None:
        """Finds the predecessor of a new row on the device, among all rows that wait.

        This is `_match` for one row.
        """
        here, ends = slice(position, position + 1), self._marks[:, 1]
        start, end = self._marks[here].unbind(1)
        follows, goes_on = self._counts[here].unbind(1)
        met = self._waits & (ends == start) & follows  # at most one
        self._successor[here] = -1
        after = torch.full_like(start, position)
        self._link(data, met.int().argmax(0, keepdim=True), after, ~met.any())
        self._waits &= ~(met | ((ends == end) & goes_on))
        self._waits[here] = goes_on

    def _new_rows(self, length: int) -> Array | None:
        """Returns the changed positions in write order; None if they do not continue the ring."""
        changed = sum(len(index) for index in self._changed)  # includes all announced writes
        if not self._continued or self._written != changed or changed >= length:
            return None
        return (self._first + np.arange(self._written)) % self._capacity

    def _meet(
        self, waits: dict[int, int], marks: Array, positions: Array, ends: Array
    ) -> tuple[Array, Array]:
        """Returns waiting rows and their successors among the new rows.

        These rows stop waiting, and so do rows that a new row with the same last state replaces.
        """
        before, after = [], []
        rows: Iterable[tuple[int, int, bool]] = zip(
            marks.tolist(), positions.tolist(), ends.tolist(), strict=True
        )
        for mark, position, end in rows:
            waiting = waits.pop(mark, None)
            if waiting is None:
                continue
            self._waits[waiting] = False
            if not end:
                before.append(waiting)
                after.append(position)
        return np.array(before, np.int64), np.array(after, np.int64)

    def _link(
        self, data: TensorDictBase, before: Tensor, after: Tensor, none: Tensor | None = None
    ) -> None:
        """Stores the pairs whose states are really equal, not only their fingerprints.

        `none` is true if there is no pair to store.
        """
        device = self._successor.device
        trajectories = data.get(self.trajectory_key, None)
        for i, j in zip(before.split(_CHUNK), after.split(_CHUNK), strict=True):
            if not len(i):
                continue
            i, j = to_device(i, device), to_device(j, device)
            differ = torch.zeros(len(i), dtype=torch.bool, device=device)
            differ = differ if none is None else differ | none
            for key in self.observations:
                start, end = get_entry(data, key)[j], get_entry(data, next_key(key))[i]
                differ |= any_feature(start != end, 1)
            if trajectories is not None:
                differ |= any_feature(trajectories[i] != trajectories[j], 1)
            self._successor[i] = torch.where(differ, self._successor[i], j)

    # -- saving ------------------------------------------------------------------------------------

    def clear(self) -> None:
        """Forgets all rows and their order; the next draw reads the whole storage."""
        with self.lock:
            super().clear()
            self._reset()

    def state_dict(self) -> dict[str, Any]:
        """Returns the position written last, or -1 if it is unknown."""
        return {"newest": -1 if self.newest is None else self.newest}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the position written last, if given; the next draw reads the whole storage."""
        with self.lock:
            newest = state_dict.get("newest", self.newest)
            self.clear()
            self.newest = None if newest is None or newest < 0 else newest

    def __getstate__(self) -> dict[str, Any]:
        kept = ("observations", "end_keys", "trajectory_key", "rows", "generator", "_guard")
        return {name: self.__dict__[name] for name in (*kept, "newest")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._reset(self.newest)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(observations={self.observations})"
