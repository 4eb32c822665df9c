"""Uniform rows, and the spread of what is stored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tensordict import NestedKey
from torch import Tensor
from torchrl.data.replay_buffers import Storage

from nmer_torchrl import _compat
from nmer_torchrl.keys import POINT_KEYS, VALUE_KEYS
from nmer_torchrl.samplers.base import LockedSampler, draw_uniform
from nmer_torchrl.tracking.spread import Spread


class SpreadSampler(LockedSampler):
    """Draws rows uniformly, and keeps the spread of each entry in step with what is stored.

    A transform never sees the sampler, so `GaussianNoise` is given the sampler's `spread` when the
    two are made. Each draw takes up every write before it.

    Keyword Args:
        keys: Entries whose spread is kept. A copy of them is held, to know what an overwritten row
            takes away.

    Examples:
        >>> from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
        >>> from nmer_torchrl import GaussianNoise
        >>> from nmer_torchrl.samplers import SpreadSampler
        >>> sampler = SpreadSampler()
        >>> buffer = TensorDictReplayBuffer(
        ...     storage=LazyTensorStorage(1_000),
        ...     sampler=sampler,
        ...     transform=GaussianNoise(0.1, spread=sampler.spread),
        ...     batch_size=32,
        ... )
    """

    def __init__(self, *, keys: Sequence[NestedKey] = (*POINT_KEYS, *VALUE_KEYS)) -> None:
        self.spread = Spread(keys=keys)
        super().__init__()

    def sample(self, storage: Storage, batch_size: int) -> tuple[Tensor, dict[str, Any]]:
        """Returns uniform positions `[B]`."""
        with self._lock:
            self.spread.synchronize(storage)
            return draw_uniform(self.spread.rows, batch_size, _compat.generator(self)), {}

    def mark_update(self, index: int | Tensor, *, storage: Storage | None = None) -> None:
        """Notes that the buffer has written these positions."""
        with self._lock:
            self.spread.rows.announce(index, storage)

    def _empty(self) -> None:
        with self._lock:
            self.spread.clear()

    def state_dict(self) -> dict[str, Any]:
        """Returns nothing: all of it follows from the storage."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Reads the storage anew at the next draw."""
        self._empty()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(keys={self.spread.keys})"
