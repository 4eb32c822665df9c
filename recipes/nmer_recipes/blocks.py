"""Arranges the rows of a frame's gradient steps as a block of plain tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor


class Batch(NamedTuple):
    """The entries of `[B]` transitions, or of a block `[K, B]` of them, as plain tensors."""

    observation: Tensor  # [..., B, observations]
    action: Tensor  # [..., B, actions]
    following: Tensor  # [..., B, observations], the next observation
    reward: Tensor  # [..., B]
    terminated: Tensor  # [..., B]
    weight: Tensor | None = None  # [..., B], importance weights of prioritized sampling
    mask: Tensor | None = None  # [..., B, members], which ensemble members learn from a row

    def unbind(self) -> list[Batch]:
        """Returns the K batches of a block."""
        parts = [[None] * len(self.reward) if x is None else x.unbind() for x in self]
        return [Batch(*entries) for entries in zip(*parts, strict=True)]

    def as_rows(self) -> TensorDict:
        """Returns a batch `[B]` as the rows that TorchRL's losses take."""
        flags = {"terminated": self.terminated.unsqueeze(-1)}
        after = {"observation": self.following, "reward": self.reward.unsqueeze(-1), **flags}
        rows = {"observation": self.observation, "action": self.action, "next": after}
        weight = {} if self.weight is None else {"priority_weight": self.weight}
        return TensorDict({**rows, **weight}, batch_size=self.reward.shape)

    def mean(self, losses: Tensor) -> Tensor:
        """Returns the mean of losses `[B]` over the rows, weighted by importance if given."""
        if self.weight is None:
            return losses.mean()
        return (losses * self.weight).sum() / self.weight.sum()

    def clone(self) -> Batch:
        """Returns a copy with its own memory."""
        return Batch(*(None if x is None else x.clone() for x in self))

    def copy_(self, other: Batch) -> None:
        """Copies the values of another batch into this one, without waiting for the device."""
        for x, y in zip(self, other, strict=True):
            if x is not None and y is not None:
                x.copy_(y, non_blocking=True)


def join_blocks(blocks: Sequence[Batch]) -> Batch:
    """Concatenates blocks `[K, B_i]` along their rows.

    Importance weights are relative to the buffer that a block was drawn from. They are scaled to a
    mean of 1 over each batch, so that every block keeps its share of the loss.
    """
    if len(blocks) == 1:
        return blocks[0]
    given = [entry for entry in blocks if entry.weight is not None]
    if given and len(given) < len(blocks):
        raise ValueError(
            "Some blocks have importance weights and others do not; weight all or none."
        )
    if given:
        means = [block.weight.mean(1, keepdim=True) for block in blocks]
        pairs = zip(blocks, means, strict=True)
        blocks = [block._replace(weight=block.weight / mean) for block, mean in pairs]
    parts = zip(*blocks, strict=True)
    return Batch(*(None if part[0] is None else torch.cat(part, 1) for part in parts))


def as_block(rows: TensorDictBase, size: int, device: torch.device) -> Batch:
    """Returns rows `[K * size]` as a block `[K, size]` on the device."""
    following = rows["next"]

    def place(entry: Tensor | None, *shape: int) -> Tensor | None:
        if entry is None:
            return None
        return entry.to(device, non_blocking=True).reshape(-1, size, *shape)

    wide = (rows["observation"], rows["action"], following["observation"])
    flat = (following["reward"], following["terminated"], rows.get("priority_weight", None))
    return Batch(
        *(place(entry, entry.shape[-1]) for entry in wide),
        *(place(entry) for entry in flat),
        place(mask, mask.shape[-1]) if (mask := rows.get("mask", None)) is not None else None,
    )
