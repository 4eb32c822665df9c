"""Uniform rows, and the spread of what is stored."""

from __future__ import annotations

from collections.abc import Sequence

from tensordict import NestedKey
from torchrl.data.replay_buffers import Storage

from nmer_torchrl.keys import POINT_KEYS, VALUE_KEYS
from nmer_torchrl.samplers.base import FollowingSampler
from nmer_torchrl.spread import Spread


class SpreadSampler(FollowingSampler):
    """Draws rows uniformly, and keeps the spread of each entry in step with what is stored.

    A transform never sees the sampler, so `GaussianNoise` is given the sampler's `spread` when the
    two are made. Each draw takes up every write before it.

    Keyword Args:
        keys: Entries whose spread is kept. A copy of them is held, to know what an overwritten row
            takes away.

    Examples:
        >>> from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
        >>> from nmer_torchrl import GaussianNoise, SpreadSampler
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
        super().__init__(self.spread.rows)

    def _synchronize(self, storage: Storage) -> None:
        self.spread.synchronize(storage)

    def _empty(self) -> None:
        with self._lock:
            self.spread.clear()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(keys={self.spread.keys})"
