"""Partners that come next in time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import NestedKey
from torch import Tensor
from torchrl.data.replay_buffers import Storage

from nmer_torchrl.keys import END_KEYS, POINT_KEYS, TRAJECTORY_KEY, VALUE_KEYS
from nmer_torchrl.pairs.base import Pairing
from nmer_torchrl.tracking.rows import check_positions
from nmer_torchrl.tracking.succession import Succession


class SuccessorPairs(Pairing):
    """Pairs each anchor with the transition that followed it in its episode.

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

    As `sample_unit=`, it is told of writes from its first draw on. If a full storage has begun to
    overwrite its oldest rows before that, rows at the last positions whose successors are at the
    first ones are paired with themselves until the next write. `sampler=TemporalPairSampler()`, or
    `PairSampler` of this unit, is told of every write.

    Keyword Args:
        keys: Observations and actions. Those whose `("next", key)` is among `value_keys` are the
            observations by which successors are found.
        value_keys: Next observations and rewards.
        end_keys: Flags that end an episode; those that are stored count.
        trajectory_key: Where the id of a trajectory is; counts if it is stored.

    Examples:
        >>> from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
        >>> from nmer_torchrl import PairMixup, SuccessorPairs
        >>> buffer = TensorDictReplayBuffer(
        ...     storage=LazyTensorStorage(1_000),
        ...     sample_unit=SuccessorPairs(),
        ...     transform=PairMixup(alpha=0.75),
        ...     batch_size=32,
        ... )
    """

    def __init__(
        self,
        *,
        keys: Sequence[NestedKey] = POINT_KEYS,
        value_keys: Sequence[NestedKey] = VALUE_KEYS,
        end_keys: Sequence[NestedKey] = END_KEYS,
        trajectory_key: NestedKey = TRAJECTORY_KEY,
    ) -> None:
        self.succession = Succession(keys, value_keys, end_keys, trajectory_key)
        super().__init__(self.succession.rows)

    def successors(self, storage: Storage, index: Tensor) -> Tensor:
        """Returns the positions `[q]` of the successors of positions `[q]`, -1 for none."""
        index = check_positions(index, storage)
        with self.lock:
            self.succession.synchronize(storage)
            return self.succession.successors(index)

    def synchronize(self, storage: Storage) -> None:
        """Takes up whatever has changed in the storage."""
        self.succession.synchronize(storage)

    def partners(self, anchor: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Returns the partners `[B]` of anchors `[B]`, after `synchronize`."""
        successor = self.succession.successors(anchor)
        return torch.where(successor >= 0, successor, anchor)

    def mark_update(self, index: int | Tensor, *, storage: Storage | None = None) -> None:
        """Notes that these positions have been written, in this order."""
        with self.lock:
            self.succession.announce(index, storage)

    def clear(self) -> None:
        """Forgets all rows and their order; the next draw reads the whole storage."""
        with self.lock:
            self.succession.clear()

    def state_dict(self) -> dict[str, Any]:
        """Returns the position written last, which tells old rows from new ones; -1 if unknown."""
        newest = self.succession.newest
        return {"newest": -1 if newest is None else newest}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Reads the storage anew at the next draw; an empty state leaves the order as it is."""
        with self.lock:
            newest = self.succession.newest
            if "newest" in state_dict:
                newest = None if state_dict["newest"] < 0 else state_dict["newest"]
            self.succession.clear()
            self.succession.newest = newest

    def __repr__(self) -> str:
        return f"{type(self).__name__}(observations={self.succession.observations})"
