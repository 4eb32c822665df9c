"""Wraps every private name of TorchRL and tensordict that the package uses.

Each function here has a canary test that fails when a release changes the name it uses.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase, is_tensor_collection
from torch import Tensor
from torchrl._utils import logger as torchrl_logger
from torchrl.data import OfflineToOnlineReplayBuffer
from torchrl.data.replay_buffers import (
    HERReplayBuffer,
    PrioritizedSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    Sampler,
    SampleUnit,
    Storage,
    TensorStorage,
)
from torchrl.data.replay_buffers.samplers import prioritized
from torchrl.envs.transforms import Compose, MultiStepTransform, Transform
from torchrl.envs.transforms.transforms import _CallableTransform

from nmer_torchrl.functional import to_device

_BUFFERS = (ReplayBuffer, OfflineToOnlineReplayBuffer)


def revision(storage: Storage) -> int:
    """Returns a number that increases with each write to the storage, from any process."""
    return int(storage._mutation_revision)


def revision_lock(storage: Storage) -> AbstractContextManager[Any]:
    """Returns the reentrant lock, shared by processes, under which the revision increases."""
    counter: Any = storage._mutation_revision_value
    return nullcontext() if torch.is_tensor(counter) else counter.get_lock()


def entries(storage: TensorStorage) -> TensorDictBase | None:
    """Returns the tensordict `[capacity]` inside the storage; None if it holds something else."""
    inner = storage._storage
    return inner if is_tensor_collection(inner) else None


def note_row(storage: TensorStorage, position: int) -> None:
    """Records in a storage that one row was written here, as its own `set` does."""
    storage._set_last_cursor(position)
    storage._len = min(storage._len + 1, storage.max_size)
    storage._bump_mutation_revision()


def relabels_goals(storage: Storage) -> bool:
    """Returns whether a hindsight (HER) buffer reads from this storage."""
    return any(isinstance(buffer, HERReplayBuffer) for buffer in storage._attached_entities)


def generator(sampler: Sampler) -> torch.Generator | None:
    """Returns the generator that the replay buffer gave to its sampler."""
    rng: Any = sampler._rng
    return rng


def transforms_beside(transform: Transform) -> Iterator[Any]:
    """Yields all transforms of the buffer that holds this one, also nested, and this one."""
    outer = transform
    while (container := outer.__dict__["_container"]) is not None:  # a weak reference
        held = container()
        if not isinstance(held, Compose):
            break
        outer = held
    return leaves(outer)


def leaves(transform: Any) -> Iterator[Any]:
    """Yields the transforms inside compositions, at any depth.

    This runs at every write, so it uses the fastest access to each.
    """
    if isinstance(transform, Compose):
        inside: Any = transform._modules["transforms"]
        for inner in inside._modules.values():
            yield from leaves(inner)
    else:
        yield transform


def writes_last(transform: Transform) -> bool:
    """Returns whether rows are stored as this transform returns them.

    When rows are written, they pass through the transforms from the last to the first, so this is
    true for the buffer's first transform.
    """
    return next(transforms_beside(transform)) is transform


def writes_in_place(buffer: ReplayBuffer) -> bool:
    """Returns whether the next row that a buffer writes comes after, or replaces, stored rows.

    This is true if its writer has written as many rows as are stored, if its cursor is right after
    them, or if the storage is full. It is not checked for members of an ensemble and for writers
    without a count.
    """
    writer, storage = buffer._writer, buffer._storage
    written = getattr(writer, "_write_count", None)
    if isinstance(buffer, ReplayBufferEnsemble) or written is None:
        return True
    stored, room = len(storage), storage.max_size
    return bool(stored == room or written >= stored or writer._cursor == stored % room)


def write_after(buffer: ReplayBuffer, rows: int) -> None:
    """Makes the buffer write its next row after those that its storage already holds.

    In a full storage that is the position after the one that was written last.
    """
    writer, storage = buffer._writer, buffer._storage
    last = getattr(storage, "_last_cursor_index", None)
    after = rows if rows < storage.max_size or last is None else int(last) + 1
    writer._cursor, writer._write_count = after % storage.max_size, rows


def forget_rows(transform: MultiStepTransform) -> None:
    """Makes an n-step transform forget the rows that it holds back."""
    transform._buffer = None


def buffer_that_draws() -> ReplayBuffer | None:
    """Returns the replay buffer that is drawing a batch now, or None."""
    return buffer_at_work("_sample", "sample")


def buffer_at_work(*methods: str) -> ReplayBuffer | None:
    """Returns the replay buffer of the innermost call of one of these methods, or None.

    A transform gets rows and a sampler gets a storage, but neither gets its buffer. The buffer's
    own method is on the call stack of the thread in which it runs.
    """
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name in methods:
            owner = frame.f_locals.get("self")
            if isinstance(owner, _BUFFERS):
                return owner
        frame = frame.f_back  # type: ignore[assignment]
    return None


def samplers_of(buffer: ReplayBuffer) -> list[Sampler]:
    """Returns the sampler of a buffer, or the samplers of all members of an ensemble."""
    if isinstance(buffer, OfflineToOnlineReplayBuffer):
        return [*samplers_of(buffer.offline_buffer), *samplers_of(buffer.online_buffer)]
    if isinstance(buffer, ReplayBufferEnsemble):
        return list(buffer._sampler._samplers)
    return [buffer._sampler]


def stored_rows(buffer: ReplayBuffer) -> int:
    """Returns the number of rows of a buffer, or of all members of an ensemble."""
    storage = buffer._storage
    return sum(len(each) for each in getattr(storage, "_storages", [storage]))


def samplers_before(buffer: ReplayBuffer, transform: Transform) -> list[Sampler]:
    """Returns the samplers whose rows reach a transform of a buffer or of an ensemble."""
    samplers = samplers_of(buffer)
    if isinstance(buffer, ReplayBufferEnsemble):
        members = buffer._storage._transforms or []
        of_member = [
            sampler
            for sampler, held in zip(samplers, members, strict=False)
            if held is not None and any(part is transform for part in held.modules())
        ]
        return of_member or samplers
    return samplers


def transforms_after(buffer: ReplayBuffer, part: Sampler | SampleUnit) -> list[Transform]:
    """Returns the transforms that the rows drawn by this sampler or unit pass through, in order."""
    if not isinstance(buffer, ReplayBufferEnsemble):
        return [buffer._transform]
    members = buffer._storage._transforms or []
    served = [t for s, t in zip(samplers_of(buffer), members, strict=False) if s is part]
    return [*served, buffer._transform]


def parts_around(buffer: ReplayBuffer, storage: Storage) -> tuple[Any, ...]:
    """Returns a key that changes with the sampler, the transforms and the storage of a buffer.

    This runs at every draw, so it uses the fastest access to each.
    """
    transform = buffer._transform
    inside: Any = transform._modules["transforms"]
    users = storage._attached_entities_list
    return id(buffer._sampler), id(transform), len(inside._modules), id(storage), len(users)


def draws_single_rows(buffer: ReplayBuffer, sampler: Sampler) -> bool:
    """Returns whether a sampler of TorchRL draws, without a user's sample unit that expands it."""
    unit = unit_of(buffer)
    return is_stock(sampler) and (unit is None or is_stock(unit))


def ignores_units(buffer: ReplayBuffer) -> bool:
    """Returns whether a buffer is an ensemble, which ignores the sample units of its members."""
    return any(unit_of(member) is not None for member in getattr(buffer, "_rbs", None) or [])


def unit_of(buffer: ReplayBuffer) -> SampleUnit | None:
    """Returns the sample unit of a buffer; None for an ensemble."""
    return getattr(buffer, "_sample_unit", None)


def member_buffer(buffer: ReplayBuffer, sampler: Sampler) -> ReplayBuffer:
    """Returns the member of an ensemble that has this sampler, or the buffer itself."""
    return next((each for each in members_of(buffer) if each._sampler is sampler), buffer)


def members_of(buffer: ReplayBuffer) -> list[ReplayBuffer]:
    """Returns the members of an ensemble, or the buffer itself."""
    return list(getattr(buffer, "_rbs", None) or [buffer])


def is_stock(part: Any) -> bool:
    """Returns whether a part of a buffer is TorchRL's own, not a user's function or class."""
    own = type(part).__module__.startswith("torchrl.")
    return own and not isinstance(part, _CallableTransform)


def make_tensordict(
    entries: dict[str, Any], batch_size: torch.Size, device: torch.device | None
) -> TensorDict:
    """Builds a tensordict without the checks of the public constructor; entries must fit."""
    return TensorDict._new_unsafe(entries, batch_size=batch_size, device=device)


def settle(storage: TensorStorage, device: torch.device) -> None:
    """Sets the device of the stored tensordict, which is lost when it is loaded.

    Rows from another device are then moved to it.
    """
    inner = entries(storage)
    if inner is not None and inner.device is None:
        storage._storage = inner.to(device)


def move_metadata(state: Any, device: torch.device) -> None:
    """Changes the device in the metadata of a tensordict's state, in place."""
    metadata = getattr(state, "_metadata", None)
    if metadata is not None:
        state._metadata = {
            path: {**entry, "device": device} if entry.get("device") is not None else entry
            for path, entry in metadata.items()
        }


def draw_by_priority(
    sampler: PrioritizedSampler, storage: Storage, batch_size: int
) -> tuple[Any, dict[str, Tensor]]:
    """Draws as TorchRL's sampler does, but uses torch's global generator where it uses NumPy's.

    Random numbers are drawn on the rows' device, so batches do not depend on the trees' device.
    """
    length, tree, device = len(storage), sampler._sum_tree, sampler.device
    if not length:
        raise RuntimeError("Cannot sample from an empty storage; extend the buffer first.")
    place = rows_device(storage)
    uniform = torch.rand(batch_size, generator=generator(sampler), device=place).to(device)
    ends: Any = (0, length)
    if device.type != "cpu":
        ends = [torch.full((), end, dtype=torch.int64, device=device) for end in ends]
    total, least = tree.query(*ends), sampler._min_tree.query(*ends)
    index = torch.as_tensor(tree.scan_lower_bound(uniform * total), device=device).reshape(-1)
    index = index.clamp_max(length - 1)
    powers = torch.as_tensor(tree[index], device=device)
    if device.type == "cpu":
        while (powers == 0).any():  # rounding led beyond the last row with a priority
            index = torch.where(powers == 0, index - 1, index)
            powers = torch.as_tensor(tree[index])
    weight = torch.pow(powers / least, -sampler.beta)
    index, weight = (to_device(each, place) for each in (index, weight))
    if storage.ndim > 1:
        return torch.unravel_index(index, storage.shape), {"priority_weight": weight}
    return index, {"priority_weight": weight}


def rows_device(storage: Storage) -> torch.device:
    """Returns the device of a storage's rows; the CPU if it is not known yet."""
    device = getattr(storage, "device", None)
    return torch.device("cpu" if device in (None, "auto") else device)


def has_cuda_trees() -> bool:
    """Returns whether TorchRL's extension was built with priority trees for CUDA."""
    return prioritized.CudaSumSegmentTreeFp32 is not None


def priority_powers(sampler: PrioritizedSampler, index: Tensor) -> Tensor:
    """Returns `(priority + eps) ** alpha` at these positions, 0 where none has been set."""
    flat = index.reshape(-1).to(sampler.device)
    powers = torch.as_tensor(sampler._sum_tree[flat], dtype=sampler.dtype)
    return to_device(powers.reshape(index.shape), index.device)


def set_priority_powers(sampler: PrioritizedSampler, powers: Tensor, largest: Tensor) -> None:
    """Replaces all `(priority + eps) ** alpha` `[capacity]` and the largest priority ever."""
    sampler._init()
    index = powers.nonzero().squeeze(1).to(sampler.device)
    values = powers.to(sampler.device)[index]
    if len(index):
        sampler._sum_tree[index] = values
        sampler._min_tree[index] = values
    # The second value is its position, which matters only for a maximum over the stored rows.
    sampler._max_priority = (largest.to(sampler.device), torch.tensor(0))


def follow_device(sampler: PrioritizedSampler, storage: Storage | None) -> None:
    """Moves the priority trees to the device of the rows, or logs that they stay on the CPU."""
    device = sampler._tree_device_from_storage(storage)
    if device is None or device == sampler.device:
        return
    if device.type == "cuda" and not has_cuda_trees():
        _say_trees_stay()
        return
    powers = priority_powers(sampler, torch.arange(sampler.max_size))
    largest = torch.as_tensor(sampler.default_priority)
    PrioritizedSampler._maybe_init_from_storage(sampler, storage)
    set_priority_powers(sampler, powers, largest)


@functools.cache
def _say_trees_stay() -> None:
    torchrl_logger.info(
        "Priorities stay on the CPU: this build of TorchRL has no priority trees for CUDA. Batches "
        "are the same; each draw and each update waits for a copy."
    )


def priority_eps(sampler: PrioritizedSampler) -> float:
    """Returns the constant that is added to each priority before it is raised to alpha."""
    return float(sampler._eps)


def set_priority_eps(sampler: PrioritizedSampler, eps: float) -> None:
    """Sets the constant that is added to each priority that is set from now on."""
    sampler._eps = eps
