"""Following a storage: which rows have changed since they were last looked at."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor
from torchrl.data.replay_buffers import Storage, TensorStorage

from nmer_torchrl import _compat
from nmer_torchrl.keys import as_keys, read_features, read_points

_CHUNK = 65_536
_MANY = 4_096  # announcements before they are gathered into one


class StoredRows:
    """The rows of a storage as points, read when they have changed.

    The buffer announces most writes (`announce`, then `confirm`), and those rows alone are read
    again. Any other write (`rb[i] = ...`, another process, a storage that was filled before, a
    checkpoint) shows in the storage's revision or length without telling which rows it touched:
    then all rows are read.

    Args:
        keys: The entries that make up a point.
        value_keys: Entries that must be finite, too, for a row to be usable.
        feature: What makes points of rows instead; the `keys` must be finite all the same.
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
            raise ValueError("`keys` is empty; name at least one entry to measure distances in.")
        self.feature = feature
        self.forget()

    def forget(self) -> None:
        """Takes every row as unread."""
        self._storage: weakref.ref[Storage] | None = None
        self._revision: int | None = None  # up to here, every change has been read or announced
        self.length = 0  # rows that are stored
        self.device = torch.device("cpu")
        self._announced: list[Tensor] = []
        self._unconfirmed: int | None = None

    @property
    def storage(self) -> Storage | None:
        """The storage whose rows have been read."""
        return None if self._storage is None else self._storage()

    def follows(self, storage: Storage) -> bool:
        """Whether rows of this very storage have been read before."""
        return self._storage is not None and self._storage() is storage

    def announce(self, index: int | Tensor, storage: Storage | None) -> None:
        """The buffer is about to confirm a write at these positions."""
        if self._revision is None or storage is None or not self.follows(storage):
            return  # everything will be read anyway
        index = torch.as_tensor(index).reshape(-1).cpu()  # a buffer on CUDA announces it there
        self._announced.append(index[index >= 0])  # a writer that declines a row announces -1
        if len(self._announced) > _MANY:
            self._announced = [torch.cat(self._announced).unique()]
        now = _compat.revision(storage)
        self._unconfirmed = now if now == self._revision + 1 else None

    def confirm(self) -> None:
        """The write announced last is the only one since then."""
        if self._unconfirmed is not None:
            self._revision, self._unconfirmed = self._unconfirmed, None

    def changes(self, storage: Storage) -> Iterator[tuple[Tensor, Tensor]]:
        """Pairs of positions `[n]` and points `[n, d]` that may have changed since the last call.

        NaN where a row is not usable or no longer there. If the caller stops early the same changes
        come again.
        """
        revision, length = _compat.revision(storage), len(storage)
        followed = self.follows(storage)
        if followed and revision == self._revision and not self._announced:
            return
        data = stored_entries(storage)
        self.device = data.device or next(iter(data.values(True, True))).device
        if followed and revision == self._revision:
            # Rows may come into sight that no one announced: those that a storage held before.
            appeared = torch.arange(self.length, length)
            changed = torch.cat([*self._announced, appeared]).unique().to(self.device)
        else:
            changed = torch.arange(max(length, self.length), device=self.device)
        self._storage, self.length = weakref.ref(storage), max(length, self.length)
        self._revision = None  # until the caller has taken everything
        for index in changed.split(_CHUNK):
            kept = index[index < length]
            if len(kept):
                yield kept, self._read(data, kept)
            gone = index[index >= length]
            if len(gone):
                width = self._read(data, gone[:1]).shape[1]
                yield gone, torch.full((len(gone), width), torch.nan, device=gone.device)
        self._revision, self.length = revision, length
        self._announced, self._unconfirmed = [], None

    def _read(self, data: TensorDictBase, index: Tensor) -> Tensor:
        points = read_points(data, index, self.keys, self.value_keys)
        return points if self.feature is None else read_features(data, index, self.feature, points)

    def __getstate__(self) -> dict[str, Any]:
        return {"keys": self.keys, "value_keys": self.value_keys, "feature": self.feature}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]


def check_layout(storage: Storage) -> None:
    """Raises if the storage is of a kind that cannot be followed row by row."""
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
    """The tensordict `[capacity]` inside a storage that holds at least one row."""
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
