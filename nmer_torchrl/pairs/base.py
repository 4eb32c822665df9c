"""Base class of all pairings."""

from __future__ import annotations

import gc
import threading
from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor
from torchrl.data.replay_buffers import SampleUnit, Storage

from nmer_torchrl.composition import Guard, check_anchors, check_folded
from nmer_torchrl.tracking.rows import StoredRows


class Pairing(SampleUnit):
    """Expands each anchor `[B]` to itself and its partners, `[B, 1 + m]`.

    Pass it to a replay buffer as `sample_unit=`, with any sampler that draws single rows. The
    buffer needs a transform that folds the pairs, such as `PairMixup` or your own. Without one, the
    first `sample()` raises an error. An anchor without a partner is paired with itself.

    A subclass implements `synchronize`, which reads the rows that have changed, and `partners`. If
    it has state that cannot be rebuilt from the stored rows, it also extends `clear`, `state_dict`
    and `load_state_dict`. If it needs the order of writes, it extends `mark_update`.

    As `sample_unit=`, a pairing is notified of writes from its first draw on. It reads the rows
    written before, but does not know the order in which they were written. If the order matters,
    pass `sampler=PairSampler(unit)` instead, which is notified of every write.

    Args:
        rows: The entries that the pairing reads from the storage.
        generator: Source of all randomness; `None` uses torch's global one. It is independent of
            the buffer's generator, and its state is not part of the buffer's state.

    Examples:
        >>> class WithTheNext(Pairing):  # pairs a row with the one at the next position
        ...     def __init__(self):
        ...         super().__init__(StoredRows(["observation", "action"], []))
        ...
        ...     def synchronize(self, storage):
        ...         for index, points in self.rows.changes(storage):
        ...             pass  # a pairing that depends on the points reads them here
        ...
        ...     def partners(self, anchor, generator=None):
        ...         return (anchor + 1) % self.rows.length
        >>> from tensordict import TensorDict
        >>> from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
        >>> buffer = TensorDictReplayBuffer(
        ...     storage=LazyTensorStorage(4),
        ...     sample_unit=WithTheNext(),
        ...     transform=lambda pairs: pairs[:, 0],  # keeps the anchors, without mixing
        ...     batch_size=8,
        ... )
        >>> rows = TensorDict(
        ...     observation=torch.randn(4, 3), action=torch.randn(4, 1), batch_size=[4]
        ... )
        >>> _ = buffer.extend(rows)
        >>> anchor, partner = buffer.sample()["index"].unbind(-1)
        >>> bool((partner == (anchor + 1) % 4).all())
        True
    """

    draws = "pairs [B, 2]"

    def __init__(self, rows: StoredRows, generator: torch.Generator | None = None) -> None:
        self.rows = rows
        self.generator = generator
        # `ReplayBuffer.empty`, among others, does not wait for prefetching threads.
        self.lock = threading.RLock()
        self._guard = Guard()

    @abstractmethod
    def synchronize(self, storage: Storage) -> None:
        """Reads all rows that have changed in the storage."""

    @abstractmethod
    def partners(self, anchor: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Returns the partners `[B]` or `[B, m]` of anchors `[B]`; call `synchronize` first."""

    def clear(self) -> None:
        """Forgets all rows; the next draw reads the whole storage."""
        with self.lock:
            self.rows.forget()

    def join(self, anchor: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Returns anchors `[B]` with their partners, `[B, 1 + m]`; call `synchronize` first."""
        partner = self.partners(anchor, generator)
        if partner.ndim == 1:
            return torch.stack([anchor, partner]).T  # in memory: all anchors, then all partners
        return torch.cat([anchor.unsqueeze(1), partner], 1)

    def expand(
        self, index: Tensor | tuple[Tensor, ...], info: dict[str, Any], storage: Storage
    ) -> tuple[Tensor, dict[str, Any]]:
        """Returns positions `[B, 1 + m]` for the positions `[B]` of anchors.

        Entries of `info`, such as importance weights, remain the anchors'.
        """
        self._guard.check(self, storage, check_anchors, check_folded)
        if not isinstance(index, Tensor) or index.ndim != 1:
            raise TypeError(
                f"{type(self).__name__} expects one position for each anchor, but the sampler "
                f"returned {_describe(index)}; use a sampler that draws single rows."
            )
        with self.lock:
            self.follow(storage)
            return self.join(index.to(self.rows.device), self.generator), info

    def follow(self, storage: Storage) -> None:
        """Reads all rows that have changed in the storage, and subscribes to its writes."""
        with self.lock:
            if self._serves_another(storage):
                gc.collect()  # a deleted buffer may be part of a cycle
            if self._serves_another(storage):
                raise RuntimeError(
                    f"This {type(self).__name__} follows the storage of another buffer, and can "
                    "follow only one. Create one for each buffer, or call `clear()` if the other "
                    "is no longer used."
                )
            storage.attach(self)  # attaching again has no effect
            self.synchronize(storage)

    def _serves_another(self, storage: Storage) -> bool:
        return self.rows.storage is not None and self.rows.follows_another(storage)

    def mark_update(self, index: int | Tensor, *, storage: Storage | None = None) -> None:
        """Records that these positions have been written."""
        with self.lock:
            self.rows.announce(index, storage)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state that cannot be rebuilt from the storage; empty by default."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Clears the pairing, so that the next draw reads the whole storage."""
        self.clear()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(keys={self.rows.keys})"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.lock = threading.RLock()


def _describe(index: Any) -> str:
    shape = f" of shape {tuple(index.shape)}" if isinstance(index, Tensor) else ""
    return f"a {type(index).__name__}{shape}"
