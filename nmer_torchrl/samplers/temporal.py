"""Uniform anchors with partners that come next in time."""

from __future__ import annotations

from collections.abc import Sequence

from tensordict import NestedKey
from torch import Tensor
from torchrl.data.replay_buffers import Storage

from nmer_torchrl.keys import END_KEYS, POINT_KEYS, TRAJECTORY_KEY, VALUE_KEYS
from nmer_torchrl.pairs import SuccessorPairs
from nmer_torchrl.samplers.base import PairSampler


class TemporalPairSampler(PairSampler):
    """Pairs a uniform anchor with the transition that followed it in its episode.

    With `PairMixup` this is Continuous Transition (Lin et al., 2020) as the NMER paper compares
    with it: alpha is fixed and a terminal transition is not mixed, where the source learns alpha
    and mixes the last transition of an episode with the one before it.

    `SuccessorPairs` says how successors are found and which rows have none.

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

    unit: SuccessorPairs

    def __init__(
        self,
        *,
        keys: Sequence[NestedKey] = POINT_KEYS,
        value_keys: Sequence[NestedKey] = VALUE_KEYS,
        end_keys: Sequence[NestedKey] = END_KEYS,
        trajectory_key: NestedKey = TRAJECTORY_KEY,
    ) -> None:
        unit = SuccessorPairs(
            keys=keys, value_keys=value_keys, end_keys=end_keys, trajectory_key=trajectory_key
        )
        super().__init__(unit)

    def successors(self, storage: Storage, index: Tensor) -> Tensor:
        """Returns the positions `[q]` of the successors of positions `[q]`, -1 for none."""
        return self.unit.successors(storage, index)
