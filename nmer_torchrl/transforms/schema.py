"""The layout of a buffer's rows, and the check of new rows against it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor
from torchrl.data.replay_buffers import ReplayBufferEnsemble, TensorStorage
from torchrl.envs.transforms import Transform

from nmer_torchrl import _compat
from nmer_torchrl.keys import as_keys, get_continuous, get_entry
from nmer_torchrl.storages import PairStorage
from nmer_torchrl.transforms.n_step import TimeOrder, check_time_order

# Entries that a buffer, a transform or a loss adds to sampled rows.
_WRITTEN = ("index", "td_error", "priority_weight", "mixup_weight", "state_weight")
_LAYOUT = ("_shapes", "_dtypes", "_needed", "_dims")  # attributes that are never changed in place


class RowSchema:
    """Holds shape and dtype of each entry of a row, read from the storage or the first rows.

    Each transform of this package has one and checks rows with it before they are stored.

    Args:
        keys: Entries that must be present and continuous.
        argument: Name of the user's argument that lists these entries, for errors.
    """

    def __init__(self, keys: Sequence[NestedKey] = (), argument: str = "") -> None:
        self.keys = as_keys(keys, argument)
        if argument and not self.keys:
            raise ValueError(f"`{argument}` is empty; name at least one entry.")
        self.argument = argument
        self.looked = False  # whether a check of the first rows was conclusive
        self._forget()

    def _forget(self) -> None:
        self._shapes: dict[NestedKey, torch.Size] = {}  # shapes of all entries seen so far
        self._dtypes: dict[NestedKey, torch.dtype] = {}
        self._needed: list[NestedKey] = []  # entries of the first rows
        self._dims = 0  # batch dimensions of the first rows
        # Shapes, dtypes and device of rows that passed before.
        self._last: tuple[Any, ...] | None = None
        self._revision: int | None = None  # the storage's revision before the first write
        self._order = TimeOrder()

    def entries(self, rows: TensorDictBase) -> dict[NestedKey, Tensor]:
        """Returns the entries under `keys`; raises an error if one is missing or not continuous."""
        return {key: get_continuous(rows, key, self.argument) for key in self.keys}

    def check(
        self,
        transform: Transform,
        rows: TensorDictBase,
        look: Callable[[TensorDictBase], bool] = lambda rows: True,
    ) -> None:
        """Raises an error if the rows to be stored do not fit earlier rows.

        Args:
            transform: The transform that calls this.
            rows: The rows to be stored.
            look: Function that checks the first rows and returns whether that was conclusive.
        """
        self.entries(rows)
        check_time_order(transform, self._order, rows)
        entries = {k: v for k, v in rows.items(True, True) if isinstance(v, Tensor)}
        shapes = {key: entry.shape[rows.ndim :] for key, entry in entries.items()}
        dtypes = {key: entry.dtype for key, entry in entries.items()}
        dims = max(rows.ndim, 1)
        if (shapes, dtypes, rows.device) == self._last and dims <= self._dims:
            return
        self._consult_storage(transform)
        if 0 < self._dims < dims:
            raise ValueError(
                f"The rows are a batch of shape {tuple(rows.shape)}, but earlier rows had "
                f"{self._dims} batch dimension(s); extend the buffer with `data.reshape(-1)`."
            )
        for key in shapes:
            if shapes[key] != self._shapes.get(key, shapes[key]):
                raise ValueError(
                    f"The entry {key!r} has shape {tuple(shapes[key])} in each row, but the rows "
                    f"stored before have {tuple(self._shapes[key])}; use another buffer for these "
                    "rows."
                )
            if dtypes[key] != self._dtypes.get(key, dtypes[key]):
                raise ValueError(
                    f"The entry {key!r} is {dtypes[key]}, but in the rows stored before it is "
                    f"{self._dtypes[key]}; convert it first."
                )
        for key in (*self._needed, *self._gained()):
            get_entry(rows, key)
        _check_writer()
        _check_device(rows)
        self.looked = self.looked or look(rows)
        self._needed = self._needed or [key for key in entries if key not in _WRITTEN]
        self._shapes, self._dtypes = self._shapes | shapes, self._dtypes | dtypes
        self._dims = self._dims or dims
        self._last = shapes, dtypes, rows.device

    def _consult_storage(self, transform: Transform) -> None:
        """Reads the layout of a row from the storage of the buffer that writes.

        A layout that came from rows that were rejected later, and so never stored, is dropped.
        """
        buffer = _compat.buffer_at_work("extend", "add", "__setitem__")
        if buffer is None or isinstance(buffer, ReplayBufferEnsemble):
            return
        storage = buffer.storage
        revision = _compat.revision(storage)
        if self._revision == revision:
            self._forget()
        self._revision = None if self._shapes else revision
        data = _compat.entries(storage) if isinstance(storage, TensorStorage) else None
        if self._shapes or data is None or not len(storage) or not _compat.writes_last(transform):
            return
        stored = {k: v for k, v in data.items(True, True) if isinstance(v, Tensor)}
        self._shapes = {key: entry.shape[data.ndim :] for key, entry in stored.items()}
        self._dtypes = {key: entry.dtype for key, entry in stored.items()}
        self._needed = [key for key in stored if key not in _WRITTEN]
        self._dims = data.ndim

    def _gained(self) -> list[NestedKey]:
        """Returns the entries that later rows have added to the storage.

        A row without them would keep the values of the row that it overwrites.
        """
        buffer = _compat.buffer_at_work("extend", "add", "__setitem__")
        storage = None if buffer is None else buffer.storage
        data = _compat.entries(storage) if isinstance(storage, TensorStorage) else None
        if data is None:
            return []
        known = {*self._needed, *_WRITTEN}
        return [key for key in self._shapes if key not in known and data.get(key, None) is not None]

    def state_dict(self) -> dict[str, Any]:
        """Returns the layout of rows, so that a restored buffer rejects the same rows."""
        return {name: getattr(self, name) for name in _LAYOUT}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores a layout that `state_dict` returned."""
        self._forget()
        for name in _LAYOUT:
            setattr(self, name, state.get(name, getattr(self, name)))


def _check_writer() -> None:
    """Raises an error if the buffer that writes would count rows that were never written.

    A new writer starts at position 0 even if its storage already holds rows, and TorchRL then adds
    the new rows to the storage's length.
    """
    buffer = _compat.buffer_at_work("extend", "add")
    if buffer is not None and not _compat.writes_in_place(buffer):
        raise ValueError(
            f"The storage holds {len(buffer.storage)} rows, and this buffer has not written all of "
            "them. It would not write its next row right after them, and TorchRL would count rows "
            "that were never written. Write through one buffer only. To continue after stored "
            "rows, build the buffer with make_replay_buffer(..., storage=storage) once they are "
            "stored."
        )


def _check_device(rows: TensorDictBase) -> None:
    """Raises an error if TorchRL would count rows on a device that it cannot store on the CPU.

    TorchRL creates positions on the rows' device, which cannot index a CPU tensor.
    """
    buffer = _compat.buffer_at_work("extend")
    if buffer is None or rows.device is None or rows.device.type in ("cpu", "meta"):
        return
    storage = buffer.storage
    if isinstance(storage, PairStorage) or getattr(storage, "device", None) != torch.device("cpu"):
        return
    raise ValueError(
        f"The rows are on {rows.device}, but the storage is on the CPU; extend the buffer with "
        "`data.cpu()`, or use a PairStorage, which copies them."
    )
