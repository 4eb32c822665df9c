"""A replay buffer with priorities for mixed pairs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tensordict import NestedKey, TensorDictBase
from torch import Tensor
from torchrl.data import TensorDictReplayBuffer

from nmer_torchrl.functional import mix
from nmer_torchrl.samplers import PrioritizedNeighborPairSampler

_REMEDY = "fold pairs with a transform that writes it, such as PairMixup, and keep it in the batch"


class PairPrioritizedReplayBuffer(TensorDictReplayBuffer):
    """A `TensorDictReplayBuffer` that updates the priorities of both rows of a mixed pair.

    Its sampler is a `PrioritizedNeighborPairSampler`, and its transform is a fold that writes
    `"mixup_weight"`, such as `PairMixup`. The arguments are those of `TensorDictReplayBuffer`.

    - A batch has one importance weight for each mixed row, `"priority_weight"` of shape `[B]`:
      `w * anchor's + (1 - w) * partner's`. Without a fold it is `[B, 2]`, as the sampler draws it.
    - `update_tensordict_priority(batch)` updates the priorities of both rows from the new TD error.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl.data import LazyTensorStorage
        >>> from nmer_torchrl import PairMixup, PrioritizedNeighborPairSampler
        >>> buffer = PairPrioritizedReplayBuffer(
        ...     storage=LazyTensorStorage(1_000),
        ...     sampler=PrioritizedNeighborPairSampler(1_000, k=10),
        ...     transform=PairMixup(alpha=0.75),
        ...     batch_size=32,
        ... )
        >>> transitions = TensorDict(
        ...     observation=torch.randn(100, 3),
        ...     action=torch.randn(100, 1),
        ...     next=TensorDict(
        ...         observation=torch.randn(100, 3),
        ...         reward=torch.randn(100, 1),
        ...         terminated=torch.zeros(100, 1, dtype=torch.bool),
        ...         batch_size=[100],
        ...     ),
        ...     batch_size=[100],
        ... )
        >>> _ = buffer.extend(transitions)
        >>> batch = buffer.sample()
        >>> batch["index"].shape, batch["priority_weight"].shape
        (torch.Size([32, 2]), torch.Size([32]))
        >>> batch["td_error"] = torch.rand(32)
        >>> buffer.update_tensordict_priority(batch)
    """

    updates_pairs = True

    if TYPE_CHECKING:

        @property
        def sampler(self) -> PrioritizedNeighborPairSampler:
            """Returns the sampler of the buffer."""
            ...

    def sample(
        self,
        batch_size: int | None = None,
        return_info: bool = False,
        include_info: bool | None = None,
    ) -> Any:
        """Draws a batch of mixed rows, with one importance weight for each."""
        batch, info = super().sample(batch_size, return_info=True, include_info=include_info)
        both = info.get("priority_weight")
        if both is not None and batch.shape == both.shape[:-1]:  # the pairs were folded
            weight = _one_per_row(batch, "mixup_weight", _REMEDY).reshape(batch.shape)
            folded = mix(both[..., 0], both[..., 1], weight.to(both.device))
            info = {**info, "priority_weight": folded}
            if batch.get("priority_weight", None) is not None:
                batch.set("priority_weight", folded.to(weight.device))
        return (batch, info) if return_info else batch

    def update_tensordict_priority(self, data: TensorDictBase) -> None:
        """Updates the priorities of both rows of each pair from the TD errors of a batch.

        The batch comes from `sample()` and has `"index"` and `"mixup_weight"`. The errors of its
        mixed rows are under `priority_key`, `[B]` or `[B, 1]`, finite and at least 0. For an error
        `p`, the priority of a row changes from `old` to

        - `w * p + (1 - w) * old` for the anchor,
        - `(1 - w) * p + w * old` for the partner.

        Priorities here are the given ones: TorchRL stores `(priority + eps) ** alpha`, which is
        inverted to read `old` and applied once when writing. If a pair was not mixed (`w` is 1, or
        there was no partner), the anchor gets `p` and the partner's priority does not change. A
        position that occurs several times in the batch, as anchor or partner, gets the mean of all
        its updates, each computed from the same `old`.

        Rows whose `"index"` is `[B]`, such as the index that `extend` returns, are not pairs: they
        get the error itself, as in TorchRL.
        """
        index = _entry(data, "index", "pass a batch that `sample()` returned")
        if index.shape == data.shape and data.ndim < 2:
            super().update_tensordict_priority(data)
            return
        weight = _one_per_row(data, "mixup_weight", _REMEDY)
        priority = _one_per_row(data, self.priority_key, "write one TD error for each row")
        if index.shape != (*data.shape, 2):
            raise ValueError(
                f"'index' has shape {tuple(index.shape)} in a batch of shape {tuple(data.shape)}; "
                "for pairs it has one more dimension, of size 2. Pass a batch that `sample()` "
                "returned."
            )
        sampler = self.sampler
        if not isinstance(sampler, PrioritizedNeighborPairSampler):
            raise TypeError(
                f"The sampler is a {type(sampler).__name__}, which keeps no priorities of pairs; "
                "use a PrioritizedNeighborPairSampler."
            )
        sampler.update_pairs(index.reshape(-1, 2), weight, priority, storage=self.storage)


def _entry(data: TensorDictBase, key: NestedKey, remedy: str) -> Tensor:
    entry = data.get(key, None)
    if entry is None:
        raise KeyError(f"The batch has no entry {key!r}, which priorities of pairs need; {remedy}.")
    return entry


def _one_per_row(data: TensorDictBase, key: NestedKey, remedy: str) -> Tensor:
    """Returns the entry of a batch `[*B]` under `key`, flattened."""
    entry = _entry(data, key, remedy)
    if entry.numel() != data.numel():
        raise ValueError(
            f"{key!r} has shape {tuple(entry.shape)} in a batch of shape {tuple(data.shape)}, "
            f"but each row needs one number; {remedy}."
        )
    return entry.detach().reshape(-1)
