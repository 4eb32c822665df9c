"""A uniform sampler that tracks the standard deviations of the stored rows."""

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
    """Draws rows uniformly, and tracks the standard deviation of each entry in the storage.

    A transform has no access to the sampler, so pass the sampler's `spread` to `GaussianNoise` when
    you build the two. Each draw processes all earlier writes first.

    Keyword Args:
        keys: Entries to track. The sampler keeps a copy of them, so that it can subtract
            overwritten rows.

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
        """Draws positions `[B]` uniformly."""
        with self._lock:
            self.spread.synchronize(storage)
            return draw_uniform(self.spread.rows, batch_size, _compat.generator(self)), {}

    def mark_update(self, index: int | Tensor, *, storage: Storage | None = None) -> None:
        """Records that the buffer has written these positions."""
        with self._lock:
            self.spread.rows.announce(index, storage)

    def _empty(self) -> None:
        with self._lock:
            self.spread.clear()

    def state_dict(self) -> dict[str, Any]:
        """Returns an empty state, since everything can be rebuilt from the storage."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Clears the statistics; the next draw reads the whole storage again."""
        self._empty()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(keys={self.spread.keys})"
