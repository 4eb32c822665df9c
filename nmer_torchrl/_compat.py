"""Every private name of TorchRL and tensordict that the package relies on, in one place.

Each function here has a canary test that fails when a release changes what it touches.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase, is_tensor_collection
from torchrl.data.replay_buffers import HERReplayBuffer, Sampler, Storage, TensorStorage
from torchrl.envs.transforms import Compose, Transform


def revision(storage: Storage) -> int:
    """A number that grows with each write to the storage, from whichever process."""
    return int(storage._mutation_revision)


def entries(storage: TensorStorage) -> TensorDictBase | None:
    """The tensordict `[capacity]` inside the storage, or None if it holds something else."""
    inner = storage._storage
    return inner if is_tensor_collection(inner) else None


def relabels_goals(storage: Storage) -> bool:
    """Whether a hindsight (HER) buffer reads from this storage."""
    return any(isinstance(buffer, HERReplayBuffer) for buffer in storage._attached_entities)


def generator(sampler: Sampler) -> torch.Generator | None:
    """The generator that the replay buffer gave to its sampler."""
    rng: Any = sampler._rng
    return rng


def transforms_beside(transform: Transform) -> Iterator[Any]:
    """The transforms of the buffer that holds this one, however nested, and this one itself."""
    outer = transform
    while (container := outer.__dict__["_container"]) is not None:  # a weak reference
        held = container()
        if not isinstance(held, Compose):
            break
        outer = held
    return outer.modules()


def make_tensordict(
    entries: dict[str, Any], batch_size: torch.Size, device: torch.device | None
) -> TensorDict:
    """A tensordict of entries known to fit: the public constructor checks each."""
    return TensorDict._new_unsafe(entries, batch_size=batch_size, device=device)
