"""A storage that reads and writes faster than TorchRL's."""

from __future__ import annotations

import copy
from contextlib import suppress
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase, is_tensor_collection
from torch import Tensor
from torchrl.data import LazyTensorStorage

from nmer_torchrl import _compat
from nmer_torchrl.functional import as_rows


class PairStorage(LazyTensorStorage):
    """Reads batches and writes single rows faster than `LazyTensorStorage`.

    The results are the same. Each entry is gathered with `index_select`. For `[B, 2]` positions of
    a pair sampler it gathers all anchors first and then all partners, so that both are contiguous
    for the fold. A single row is copied entry by entry. Rows are read and written under a lock that
    processes share. The buffer itself takes no such lock for `buffer[i] = row`, so another process
    could otherwise read the row while it is written. `make_replay_buffer` uses this storage by
    default.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> storage = PairStorage(10)
        >>> rows = TensorDict(x=torch.tensor([5.0, 6.0, 7.0]), batch_size=[3])
        >>> storage.set(torch.arange(3), rows)
        >>> storage.get(torch.tensor([[0, 1], [2, 0]]))["x"]
        tensor([[5., 6.],
                [7., 5.]])
    """

    # Positions last written to a device other than the CPU: as given, and copied to the CPU.
    written: tuple[Tensor, Tensor] | None = None

    def get(self, index: Any) -> Any:
        """Reads the rows at these positions."""
        with _compat.revision_lock(self):
            data: Any = _compat.entries(self)
            if isinstance(index, Tensor) and type(data) is TensorDict and len(self):
                if index.ndim == 2:
                    return _read_pairs(data, index.T, index.T.reshape(-1))
                # On other devices, detecting a position out of range would wait for the device.
                simple = index.ndim == data.ndim == 1 and index.dtype is torch.long
                if simple and index.device.type == "cpu":
                    with suppress(IndexError, RuntimeError):  # TorchRL handles or explains them
                        return _read_rows(data, index, len(self))
            return super().get(index)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores saved rows and moves them to the storage's device."""
        room = _find_room(state_dict["_storage"]) if self.ndim == 1 else None
        if room not in (None, self.max_size):
            raise ValueError(
                f"The saved storage has room for {room} rows, but this one for {self.max_size}; "
                f"load it into a storage of {room} rows."
            )
        device = _compat.rows_device(self)
        super().load_state_dict(move_state(state_dict, device))
        _compat.settle(self, device)

    def set(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> None:
        """Writes rows to these positions."""
        with _compat.revision_lock(self):
            if type(cursor) is int and type(data) is TensorDict and set_cursor:
                stored = _compat.entries(self)
                pairs = _match(stored, data) if type(stored) is TensorDict else None
                if pairs is not None:
                    for target, value in pairs:
                        target[cursor] = value
                    _compat.note_row(self, cursor)
                    return
            rows, device = cursor, _compat.rows_device(self)
            if isinstance(cursor, Tensor) and cursor.ndim == 1:
                there = cursor.cpu()
                if device.type != "cpu":
                    # One copy to the CPU, so that TorchRL and the samplers do not each wait for it.
                    self.written = cursor, there
                sliced = isinstance(data, Tensor) or is_tensor_collection(data)
                if len(there) > self.max_size and sliced:
                    # On a device, the order of writes to a repeated position is not defined.
                    there, data = there[-self.max_size :], data[-self.max_size :]
                rows = there if device.type == "cpu" else as_rows(there, device)
            super().set(rows, data, set_cursor=set_cursor)


def _find_room(state: Any) -> int | None:
    """Returns the capacity of a saved storage; None if it has no rows."""
    for value in state.values() if isinstance(state, dict) else ():
        if isinstance(value, Tensor) and value.ndim:
            return len(value)
        if (room := _find_room(value)) is not None:
            return room
    return None


def move_state(state: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Returns a copy of a storage's state with all tensors, also nested ones, on the device.

    TorchRL's storages leave saved rows on the device on which they were saved.
    """
    moved = copy.copy(state)  # keeps the metadata that tensordict attaches to its state
    for name, value in state.items():
        if isinstance(value, Tensor):
            moved[name] = value.to(device)
        elif isinstance(value, dict):
            moved[name] = move_state(value, device)
    _compat.move_metadata(moved, device)
    return moved


def _read_rows(data: TensorDict, index: Tensor, size: int) -> TensorDictBase:
    """Returns the rows at positions `[B]`; the first `size` rows of entries `[n, ...]` exist."""
    entries: dict[str, Any] = {}
    for name, value in data.items():
        if isinstance(value, Tensor):
            entries[name] = value[:size].index_select(0, index)
        elif type(value) is TensorDict:
            entries[name] = _read_rows(value, index, size)
        else:
            entries[name] = value[index]
    return _compat.make_tensordict(entries, index.shape + data.batch_size[1:], data.device)


def _match(stored: TensorDict, row: TensorDict) -> list[tuple[Tensor, Tensor]] | None:
    """Returns each stored entry `[n, ...]` with the row's `[...]`, or None if they do not match."""
    targets, values = dict(stored.items()), dict(row.items())
    if row.batch_size != stored.batch_size[1:] or targets.keys() != values.keys():
        return None
    pairs: list[tuple[Tensor, Tensor]] = []
    for name, value in values.items():
        target: Any = targets[name]
        if type(value) is TensorDict and type(target) is TensorDict:
            inner = _match(target, value)
        elif type(value) is Tensor and type(target) is Tensor:
            fits = value.shape == target.shape[1:] and value.device == target.device
            inner = [(target, value)] if fits else None
        else:
            inner = None
        if inner is None:
            return None
        pairs += inner
    return pairs


def _read_pairs(data: TensorDict, index: Tensor, flat: Tensor) -> TensorDictBase:
    """Returns rows `[B, 2, ...]` at positions `[2, B]`, which are also given flat, `[2 * B]`."""
    entries: dict[str, Any] = {}
    for name, value in data.items():
        if isinstance(value, Tensor):
            rows = value.index_select(0, flat)
            entries[name] = rows.view(*index.shape, *rows.shape[1:]).transpose(0, 1)
        elif type(value) is TensorDict:
            entries[name] = _read_pairs(value, index, flat)
        else:
            entries[name] = value[index.T]
    return _compat.make_tensordict(entries, index.T.shape + data.batch_size[1:], data.device)
