"""Every private name of TorchRL and tensordict that the package relies on, in one place.

Each function here has a canary test that fails when a release changes what it touches.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase, is_tensor_collection
from torch import Tensor
from torchrl.data.replay_buffers import (
    HERReplayBuffer,
    PrioritizedSampler,
    Sampler,
    Storage,
    TensorStorage,
)
from torchrl.envs.transforms import Compose, Transform


def revision(storage: Storage) -> int:
    """A number that grows with each write to the storage, from whichever process."""
    return int(storage._mutation_revision)


def revision_lock(storage: Storage) -> AbstractContextManager[Any]:
    """The lock, shared by processes and reentrant, under which the revision grows."""
    counter: Any = storage._mutation_revision_value
    return nullcontext() if torch.is_tensor(counter) else counter.get_lock()


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


def draw_by_priority(
    sampler: PrioritizedSampler, storage: Storage, batch_size: int
) -> tuple[Tensor, dict[str, Tensor]]:
    """What TorchRL's sampler draws, from torch's global generator where it would use NumPy's."""
    given = sampler._rng
    if given is None and sampler.device.type == "cpu":
        sampler._rng = torch.default_generator
    try:
        return PrioritizedSampler.sample(sampler, storage, batch_size)
    finally:
        sampler._rng = given


def priority_powers(sampler: PrioritizedSampler, index: Tensor) -> Tensor:
    """`(priority + eps) ** alpha` at these positions, 0 where none has been set."""
    flat = index.reshape(-1).to(sampler.device)
    powers = torch.as_tensor(sampler._sum_tree[flat], dtype=sampler.dtype)
    return powers.reshape(index.shape).to(index.device)


def set_priority_powers(sampler: PrioritizedSampler, powers: Tensor, largest: Tensor) -> None:
    """Sets `(priority + eps) ** alpha` `[capacity]` and the largest priority ever, and no other."""
    sampler._init()
    index = powers.nonzero().squeeze(1).to(sampler.device)
    values = powers.to(sampler.device)[index]
    if len(index):
        sampler._sum_tree[index] = values
        sampler._min_tree[index] = values
    # The second is its position, of interest only where the maximum is that of the rows stored now.
    sampler._max_priority = (largest.to(sampler.device), torch.tensor(0))


def follow_device(sampler: PrioritizedSampler, storage: Storage | None) -> None:
    """Has the priorities go where the rows are; TorchRL would leave them behind."""
    device = sampler._tree_device_from_storage(storage)
    if device is None or device == sampler.device:
        return
    powers = priority_powers(sampler, torch.arange(sampler.max_size))
    largest = torch.as_tensor(sampler.default_priority)
    PrioritizedSampler._maybe_init_from_storage(sampler, storage)
    set_priority_powers(sampler, powers, largest)


def priority_eps(sampler: PrioritizedSampler) -> float:
    """What is added to each priority before it is raised to alpha."""
    return float(sampler._eps)


def set_priority_eps(sampler: PrioritizedSampler, eps: float) -> None:
    """Sets what is added to each priority that is set from now on."""
    sampler._eps = eps
