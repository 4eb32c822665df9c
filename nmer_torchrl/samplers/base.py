"""What all samplers share."""

from __future__ import annotations

import threading
from abc import abstractmethod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torchrl.data.replay_buffers import Sampler, Storage

from nmer_torchrl import _compat
from nmer_torchrl.rows import StoredRows, check_layout

_STATE_FILE = "sampler.pt"


class LockedSampler(Sampler):
    """A sampler with a lock, and with a state that `torch.load(..., weights_only=True)` reads."""

    def __init__(self) -> None:
        # `ReplayBuffer.empty`, among others, does not wait for prefetching threads.
        self._lock = threading.RLock()

    def dumps(self, path: str | Path) -> None:
        """Saves `state_dict()` into the directory `path`."""
        Path(path).mkdir(exist_ok=True)
        torch.save(self.state_dict(), Path(path) / _STATE_FILE)

    def loads(self, path: str | Path) -> None:
        """Loads what `dumps` saved."""
        self.load_state_dict(torch.load(Path(path) / _STATE_FILE, weights_only=True))

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        del state["_lock"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.RLock()


class FollowingSampler(LockedSampler):
    """Uniform rows, from a storage whose changes it takes up before each draw.

    A subclass derives what it knows from the storage, so a copy in another process starts afresh.
    """

    def __init__(self, rows: StoredRows) -> None:
        self._rows = rows
        LockedSampler.__init__(self)  # not by `super`: a sampler of priorities may come next

    @property
    def stored(self) -> int:
        """Number of rows that were stored at the last draw."""
        return self._rows.length

    @abstractmethod
    def _synchronize(self, storage: Storage) -> None:
        """Takes up whatever has changed in the storage."""

    def sample(self, storage: Storage, batch_size: int) -> tuple[Tensor, dict[str, Any]]:
        """Uniform positions `[B]`."""
        with self._lock:
            self._synchronize(storage)
            return self._uniform(batch_size), {}

    def _uniform(self, batch_size: int) -> Tensor:
        return torch.randint(
            self._rows.length,
            (batch_size,),
            generator=_compat.generator(self),
            device=self._rows.device,
        )

    def mark_update(self, index: int | Tensor, *, storage: Storage | None = None) -> None:
        """The buffer has written these positions."""
        if storage is not None:
            check_layout(storage)
        with self._lock:
            self._rows.announce(index, storage)

    def add(self, index: int) -> None:
        """The buffer is done with the write of one row that it announced."""
        with self._lock:
            self._rows.confirm()

    def extend(self, index: Tensor) -> None:
        """The buffer is done with the write of rows that it announced."""
        with self._lock:
            self._rows.confirm()

    def _empty(self) -> None:
        with self._lock:
            self._rows.forget()

    def state_dict(self) -> dict[str, Any]:
        """Empty unless a subclass keeps more than what follows from the storage."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Has the next sample read the storage anew."""
        self._empty()


class PairSampler(FollowingSampler):
    """Uniform anchors, each with a partner; a subclass says how partners are chosen.

    Examples:
        >>> class WithTheNext(PairSampler):  # whoever stands in the next position
        ...     def __init__(self):
        ...         super().__init__(StoredRows(["observation", "action"], []))
        ...
        ...     def _synchronize(self, storage):
        ...         for index, points in self._rows.changes(storage):
        ...             pass  # a method that keeps count of points does it here
        ...
        ...     def _partners(self, anchor):
        ...         return (anchor + 1) % self.stored
        >>> from tensordict import TensorDict
        >>> from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
        >>> buffer = TensorDictReplayBuffer(
        ...     storage=LazyTensorStorage(4), sampler=WithTheNext(), batch_size=8
        ... )
        >>> rows = TensorDict(
        ...     observation=torch.randn(4, 3), action=torch.randn(4, 1), batch_size=[4]
        ... )
        >>> _ = buffer.extend(rows)
        >>> anchor, partner = buffer.sample()["index"].unbind(-1)
        >>> bool((partner == (anchor + 1) % 4).all())
        True
    """

    @abstractmethod
    def _partners(self, anchor: Tensor) -> Tensor:
        """Anchors `[B]` to partners `[B]`."""

    def sample(self, storage: Storage, batch_size: int) -> tuple[Tensor, dict[str, Any]]:
        """Positions `[B, 2]`: uniform anchors and their partners."""
        with self._lock:
            self._synchronize(storage)
            anchor = self._uniform(batch_size)
            partner = self._partners(anchor)
        return torch.stack([anchor, partner], -1), {}


def check_positions(index: Tensor, storage: Storage) -> Tensor:
    """A vector of stored positions `[q]` as int64; raises if it is anything else."""
    index = torch.as_tensor(index)
    if index.ndim != 1 or index.dtype not in (torch.int64, torch.int32):
        raise ValueError(
            f"Positions are a vector of integers, but `index` is {index.dtype} of shape "
            f"{tuple(index.shape)}; give an int64 tensor of one dimension."
        )
    index = index.long()
    outside = (index < 0) | (index >= len(storage))
    if outside.any():
        raise IndexError(
            f"Position {int(index[outside][0])} was asked for, "
            f"but the storage holds positions 0 to {len(storage) - 1}."
        )
    return index
