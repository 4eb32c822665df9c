"""Partners that come next in time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import NestedKey
from torch import Tensor
from torchrl.data.replay_buffers import Storage

from nmer_torchrl.keys import END_KEYS, POINT_KEYS, TRAJECTORY_KEY, VALUE_KEYS
from nmer_torchrl.samplers.base import PairSampler, check_positions
from nmer_torchrl.succession import Succession


class TemporalPairSampler(PairSampler):
    """Pairs a uniform anchor with the transition that followed it in its episode.

    With `PairMixup` this is Continuous Transition (Lin et al., 2020) as the NMER paper compares
    with it: alpha is fixed and a terminal transition is not mixed, where the source learns alpha
    and mixes the last transition of an episode with the one before it.

    The successor of a row is the row written after it whose observation equals its next
    observation, number for number, so nothing needs to be stored beyond a transition. Several
    environments may write in turns. Rows after which an episode ended have none; nor has the newest
    row, one whose successor was overwritten, or one with a non-finite entry: these are paired with
    themselves.

    A reset changes the observation, which keeps episodes apart even where only `terminated` is
    stored and the episode was cut by a time limit. An environment that resets to the very state in
    which the episode before was cut would join the two: store `("next", "done")`, `("next",
    "truncated")` or the trajectory ids that TorchRL's collectors write, all of which are heeded.
    Where several rows end in a state from which one starts, the last of them is its predecessor,
    and where several start from it, the first is the successor. Rows of n-step returns are followed
    by those that start n steps later.

    Keyword Args:
        keys: Observations and actions. Those whose `("next", key)` is among `value_keys` are the
            observations by which successors are found.
        value_keys: Next observations and rewards.
        end_keys: Flags that end an episode; those that are stored count.
        trajectory_key: Where the id of a trajectory is; counts if it is stored.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
        >>> from nmer_torchrl import PairMixup, TemporalPairSampler
        >>> buffer = TensorDictReplayBuffer(
        ...     storage=LazyTensorStorage(1_000),
        ...     sampler=TemporalPairSampler(),
        ...     transform=PairMixup(alpha=0.75),
        ...     batch_size=32,
        ... )
        >>> states = torch.randn(5, 3)
        >>> transitions = TensorDict(
        ...     observation=states[:4],
        ...     action=torch.randn(4, 1),
        ...     next=TensorDict(
        ...         observation=states[1:],
        ...         reward=torch.randn(4, 1),
        ...         terminated=torch.zeros(4, 1, dtype=torch.bool),
        ...         batch_size=[4],
        ...     ),
        ...     batch_size=[4],
        ... )
        >>> _ = buffer.extend(transitions)
        >>> buffer.sampler.successors(buffer.storage, torch.arange(4))
        tensor([ 1,  2,  3, -1])
        >>> buffer.sample()["index"].shape
        torch.Size([32, 2])
    """

    def __init__(
        self,
        *,
        keys: Sequence[NestedKey] = POINT_KEYS,
        value_keys: Sequence[NestedKey] = VALUE_KEYS,
        end_keys: Sequence[NestedKey] = END_KEYS,
        trajectory_key: NestedKey = TRAJECTORY_KEY,
    ) -> None:
        self._succession = Succession(keys, value_keys, end_keys, trajectory_key)
        super().__init__(self._succession.rows)

    def successors(self, storage: Storage, index: Tensor) -> Tensor:
        """Positions `[q]` to the positions `[q]` of their successors, -1 where there is none."""
        index = check_positions(index, storage)
        with self._lock:
            self._succession.synchronize(storage)
            return self._succession.successors(index)

    def _synchronize(self, storage: Storage) -> None:
        self._succession.synchronize(storage)

    def _partners(self, anchor: Tensor) -> Tensor:
        successor = self._succession.successors(anchor)
        return torch.where(successor >= 0, successor, anchor)

    def mark_update(self, index: int | Tensor, *, storage: Storage | None = None) -> None:
        """The buffer has written these positions."""
        super().mark_update(index, storage=storage)
        if storage is not None:
            with self._lock:
                self._succession.note_storage(storage)

    def add(self, index: int) -> None:
        """The buffer is done with the write of one row that it announced."""
        super().add(index)
        with self._lock:
            self._succession.note_write(index)

    def extend(self, index: Tensor) -> None:
        """The buffer is done with the write of rows that it announced."""
        super().extend(index)
        with self._lock:
            self._succession.note_write(index)

    def _empty(self) -> None:
        with self._lock:
            self._succession.clear()

    def state_dict(self) -> dict[str, Any]:
        """The position written last, which tells old rows from new ones; -1 if unknown."""
        newest = self._succession.newest
        return {"newest": -1 if newest is None else newest}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Has the next sample read the storage anew; an empty state leaves the order as it is."""
        with self._lock:
            newest = self._succession.newest
            if "newest" in state_dict:
                newest = None if state_dict["newest"] < 0 else state_dict["newest"]
            self._succession.clear()
            self._succession.newest = newest

    def __repr__(self) -> str:
        return f"{type(self).__name__}(observations={self._succession.observations})"
