"""Follows a storage and reports which rows have changed since the last call."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor
from torchrl.data.replay_buffers import Storage, TensorStorage

from nmer_torchrl import _compat
from nmer_torchrl.functional import as_rows
from nmer_torchrl.keys import as_keys, get_continuous, read_features, read_points

_CHUNK = 65_536
_MANY = 4_096  # number of announcements after which they are merged


class StoredRows:
    """Reads the changed rows of a storage as points.

    The buffer announces most writes (`announce`), and only those rows are read again. Any other
    write (`rb[i] = ...`, another process, a storage that was filled before, a checkpoint) changes
    the storage's revision or length without saying which rows it changed. Then all rows are read.

    Args:
        keys: Entries that form a point.
        value_keys: Further entries that must be finite for a row to be usable.
        feature: Function that maps rows to points instead. The `keys` must still be finite.
    """

    def __init__(
        self,
        keys: Sequence[NestedKey],
        value_keys: Sequence[NestedKey],
        feature: Callable[[TensorDictBase], Tensor] | None = None,
    ) -> None:
        self.keys = as_keys(keys, "keys")
        self.value_keys = as_keys(value_keys, "value_keys")
        if not self.keys:
            raise ValueError("`keys` is empty; name at least one entry.")
        self.feature = feature
        self.forget()

    def forget(self) -> None:
        """Marks every row as unread, and accepts another storage."""
        self._storage: weakref.ref[Storage] | None = None  # the storage of the rows
        self._revision: int | None = None  # all changes up to it have been read or announced
        self.length = 0  # number of stored rows
        self.device = torch.device("cpu")
        self.partial = False  # whether `changes` yields only announced rows, not all rows
        self._announced: list[Tensor] = []

    @property
    def storage(self) -> Storage | None:
        """Returns the storage that is followed."""
        return None if self._storage is None else self._storage()

    def follows_another(self, storage: Storage) -> bool:
        """Returns whether the known rows belong to another storage."""
        return self._storage is not None and self._storage() is not storage

    def announce(self, index: int | Tensor, storage: Storage | None) -> None:
        """Records that the latest write changed these positions."""
        if storage is None and (storage := self.storage) is None:
            return
        if self._storage is None:
            check_layout(storage)
            self._storage = weakref.ref(storage)
        if self._revision is None or self.follows_another(storage):
            return  # all rows will be read anyway
        self._announced.append(written_positions(index, storage))
        if len(self._announced) > _MANY:
            self._announced = [torch.cat(self._announced).unique()]
        now = _compat.revision(storage)
        if now == self._revision + 1:  # there was no other write since then
            self._revision = now

    def changes(self, storage: Storage) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields positions `[n]` and points `[n, d]` that may have changed since the last call.

        Positions ascend and are on the CPU, so that reading them never waits for a device. Points
        are on the device of the rows. They are NaN if a row is not usable or no longer stored. If
        the caller stops early, the next call yields the same changes again.
        """
        revision, length = _compat.revision(storage), len(storage)
        self.partial = revision == self._revision and not self.follows_another(storage)
        if self.partial and not self._announced:
            return
        data = self._entries(storage)
        if self.partial:
            # Includes rows that were never announced, because the storage already held them.
            appeared = torch.arange(self.length, length)
            changed = torch.cat([*self._announced, appeared])
            changed = changed.unique() if len(changed) > 1 else changed
        else:
            changed = torch.arange(max(length, self.length))
        self.length = max(length, self.length)
        self._revision = None  # until the caller has consumed all changes
        there = int(torch.searchsorted(changed, length))
        for index in changed[:there].split(_CHUNK):
            if len(index):
                yield index, self._read(data, index)
        for index in changed[there:].split(_CHUNK):
            if len(index):
                width = self._read(data, index[:1]).shape[1]
                yield index, torch.full((len(index), width), torch.nan, device=self.device)
        self._revision, self.length = revision, length
        self._announced = []

    def _entries(self, storage: Storage) -> TensorDictBase:
        """Returns the stored entries, and validates them unless only rows can have changed."""
        if self.partial:
            return _compat.entries(storage)
        data = stored_entries(storage)
        for key in self.keys:
            get_continuous(data, key, "keys")
        for key in self.value_keys:
            get_continuous(data, key, "value_keys")
        self.device = data.device or next(iter(data.values(True, True))).device
        self._storage = weakref.ref(storage)
        return data

    def _read(self, data: TensorDictBase, index: Tensor) -> Tensor:
        rows = as_rows(index, self.device)
        points = read_points(data, rows, self.keys, self.value_keys)
        return points if self.feature is None else read_features(data, rows, self.feature, points)

    def __getstate__(self) -> dict[str, Any]:
        return {"keys": self.keys, "value_keys": self.value_keys, "feature": self.feature}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]


def written_positions(index: int | Tensor, storage: Storage | None) -> Tensor:
    """Returns the positions that a writer announces, as a vector on the CPU, without -1.

    Writers return -1 for rows that they skip. A `PairStorage` on a device keeps the last positions
    on the CPU.
    """
    if not isinstance(index, Tensor):
        return torch.tensor([index] if index >= 0 else [], dtype=torch.int64)
    given, known = getattr(storage, "written", None) or (None, None)
    index = known if known is not None and given is index else index.reshape(-1).cpu()
    return index[index >= 0]


def check_layout(storage: Storage) -> None:
    """Raises an error if the storage cannot be followed row by row."""
    name = type(storage).__name__
    if not isinstance(storage, TensorStorage):
        raise TypeError(
            f"The sampler reads rows of tensors, but the storage is a {name}; "
            "use LazyTensorStorage or LazyMemmapStorage."
        )
    if storage.ndim != 1:
        raise ValueError(
            f"The sampler needs a storage of one dimension, but this {name} has "
            f"ndim={storage.ndim}; leave `ndim` out and extend the buffer with `data.reshape(-1)`."
        )
    if _compat.relabels_goals(storage):
        raise TypeError(
            "The sampler does not work in a HERReplayBuffer, which relabels rows by a flat index; "
            "use a TensorDictReplayBuffer."
        )


def stored_entries(storage: Storage) -> TensorDictBase:
    """Returns the tensordict `[capacity]` inside a storage that holds at least one row."""
    check_layout(storage)
    if not len(storage):
        raise RuntimeError("Cannot sample from an empty storage; extend the buffer first.")
    data = _compat.entries(storage)
    if data is None:
        raise TypeError(
            "The sampler reads named entries, but the storage holds bare tensors; "
            "extend the buffer with a TensorDict."
        )
    return data


def check_positions(index: Tensor, storage: Storage) -> Tensor:
    """Validates a vector of stored positions `[q]` and returns it as int64."""
    index = torch.as_tensor(index)
    if index.ndim != 1 or index.dtype not in (torch.int64, torch.int32):
        raise ValueError(
            f"Positions are a vector of integers, but `index` is {index.dtype} of shape "
            f"{tuple(index.shape)}; give an int64 tensor of one dimension."
        )
    index = index.long()
    if not len(index):
        return index
    outside = (index < 0) | (index >= len(storage))
    if outside.any():
        raise IndexError(
            f"Position {int(index[outside][0])} was asked for, "
            f"but the storage holds positions 0 to {len(storage) - 1}."
        )
    return index
