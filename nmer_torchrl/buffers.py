"""Builds a replay buffer from a method."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Unpack, overload

import torch
from torchrl.data import TensorDictReplayBuffer
from torchrl.data.replay_buffers import RandomSampler, Storage, TensorStorage
from torchrl.envs.transforms import Transform

from nmer_torchrl import _compat, typed
from nmer_torchrl.checks import is_integer
from nmer_torchrl.generators import draw_seed
from nmer_torchrl.methods import PERNMER, Method, make_method
from nmer_torchrl.methods.base import S
from nmer_torchrl.pair_priorities import PairPrioritizedReplayBuffer
from nmer_torchrl.samplers import (
    CheckedPrioritizedSampler,
    NeighborhoodSampler,
    NeighborPairSampler,
    RandomPairSampler,
    ReplayOptimizationSampler,
    SpreadSampler,
    TemporalPairSampler,
)
from nmer_torchrl.storages import PairStorage
from nmer_torchrl.tracking.rows import check_layout
from nmer_torchrl.transforms import RowCheck
from nmer_torchrl.typed import BufferOptions, MethodName, NamedOptions, TransformOption

if TYPE_CHECKING:
    from nmer_torchrl.typed import TypedReplayBuffer

__all__ = ["MethodName", "PairPrioritizedReplayBuffer", "make_replay_buffer"]


@overload
def make_replay_buffer(
    method: PERNMER, **options: Unpack[BufferOptions]
) -> PairPrioritizedReplayBuffer: ...
@overload
def make_replay_buffer(
    method: Method[S], **options: Unpack[BufferOptions]
) -> TypedReplayBuffer[S]: ...
@overload
def make_replay_buffer(
    method: typed.NeighborPair, **options: Unpack[NamedOptions]
) -> TypedReplayBuffer[NeighborPairSampler]: ...
@overload
def make_replay_buffer(
    method: typed.PrioritizedPair, **options: Unpack[NamedOptions]
) -> PairPrioritizedReplayBuffer: ...
@overload
def make_replay_buffer(
    method: typed.Neighborhood, **options: Unpack[NamedOptions]
) -> TypedReplayBuffer[NeighborhoodSampler]: ...
@overload
def make_replay_buffer(
    method: typed.RandomPair, **options: Unpack[NamedOptions]
) -> TypedReplayBuffer[RandomPairSampler]: ...
@overload
def make_replay_buffer(
    method: typed.TemporalPair, **options: Unpack[NamedOptions]
) -> TypedReplayBuffer[TemporalPairSampler]: ...
@overload
def make_replay_buffer(
    method: typed.Prioritized, **options: Unpack[NamedOptions]
) -> TypedReplayBuffer[CheckedPrioritizedSampler]: ...
@overload
def make_replay_buffer(
    method: typed.Spread, **options: Unpack[NamedOptions]
) -> TypedReplayBuffer[SpreadSampler]: ...
@overload
def make_replay_buffer(
    method: typed.Learned, **options: Unpack[NamedOptions]
) -> TypedReplayBuffer[ReplayOptimizationSampler]: ...
@overload
def make_replay_buffer(
    method: typed.Single, **options: Unpack[NamedOptions]
) -> TypedReplayBuffer[RandomSampler]: ...
@overload
def make_replay_buffer(
    method: MethodName, **options: Unpack[NamedOptions]
) -> TensorDictReplayBuffer: ...


def make_replay_buffer(
    method: Method[Any] | str,
    *,
    batch_size: int,
    capacity: int | None = None,
    device: torch.device | str | None = None,
    storage: Storage | None = None,
    transform: TransformOption | None = None,
    prefetch: int | None = None,
    pin_memory: bool = False,
    shared: bool = False,
    generator: torch.Generator | None = None,
    **options: Any,
) -> TensorDictReplayBuffer:
    """Builds the replay buffer of a method.

    Args:
        method: A method, such as `NMER(k=10)`, or the name of one, such as `"nmer"`. The names are
            the keys of `methods.METHODS`.

    Keyword Args:
        batch_size: Number of rows that `sample()` returns.
        capacity: Number of rows that the buffer holds before it overwrites the oldest. It may be
            left out if `storage` is given.
        device: Device of the storage that this function builds. Default: the CPU.
        storage: The storage to use. Default: a `PairStorage`, a `LazyTensorStorage` that reads and
            writes faster.
        transform: A transform, or a function of a batch, that is appended after the method's own
            transform, as with `buffer.append_transform`.
        prefetch: Number of batches that threads draw ahead of time.
        pin_memory: Whether `sample()` returns batches in pinned memory.
        shared: Whether several processes write to the buffer. A buffer with a `generator` cannot be
            sent to a spawned process.
        generator: Source of all randomness. Default: torch's global generator. The method's
            transform gets its own generator, seeded from this one, so that a restored buffer
            continues with the same batches.
        options: The method's options, if `method` is a name.

    Examples:
        >>> from nmer_torchrl import NMER, make_replay_buffer
        >>> buffer = make_replay_buffer(NMER(k=5), capacity=1_000_000, batch_size=256)
        >>> buffer = make_replay_buffer("nmer", capacity=1_000_000, batch_size=256, k=5)  # the same
        >>> buffer.sampler
        NeighborPairSampler(k=5, keys=('observation', 'action'))
    """
    if isinstance(method, Method):
        _refuse_options(method, options)
        chosen = method
    elif isinstance(method, type) and issubclass(method, Method):
        raise TypeError(f"{method.__name__} is a class; give an object, {method.__name__}(...).")
    else:
        chosen = make_method(method, options, BufferOptions.__annotations__)
    _check_common(batch_size, storage, transform, prefetch, pin_memory, shared, generator)
    if getattr(transform, "folds", False):
        raise ValueError(
            f"transform={transform!r} folds pairs, but the buffer of {method!r} either folds pairs "
            "itself or does not draw pairs; leave it out, or build a TensorDictReplayBuffer with a "
            "pair sampler and this fold."
        )
    capacity = _check_capacity(capacity, storage)
    sampler = chosen.make_sampler(capacity)
    storage = _make_storage(capacity, device, storage)
    if not chosen.any_storage:
        check_layout(storage)
    own = chosen.make_transform(sampler)
    if own is None:
        own = RowCheck() if isinstance(storage, TensorStorage) else None  # a list accepts any row
    elif generator is not None and getattr(own, "generator", generator) is None:
        own.generator = torch.Generator(generator.device).manual_seed(draw_seed(generator))
    buffer = chosen.buffer_class(
        storage=storage,
        sampler=sampler,
        transform=own,
        batch_size=batch_size,
        prefetch=prefetch,
        pin_memory=pin_memory,
        shared=shared,
        generator=generator,
    )
    _compat.write_after(buffer, len(storage))
    if transform is not None:
        buffer.append_transform(transform)
    return buffer


def _refuse_options(method: Method[Any], options: Mapping[str, Any]) -> None:
    """Raises an error if options were given together with a method object."""
    for name, value in options.items():
        raise TypeError(
            f"{name}={value!r} was given together with the object {method!r}; pass it to the "
            f"object, as in {type(method).__name__}({name}={value!r}, ...)."
        )


def _check_common(
    batch_size: int,
    storage: Storage | None,
    transform: TransformOption | None,
    prefetch: int | None,
    pin_memory: bool,
    shared: bool,
    generator: torch.Generator | None,
) -> None:
    """Validates the arguments that all methods share."""
    _check_rows("batch_size", batch_size)
    if storage is not None and not isinstance(storage, Storage):
        raise TypeError(
            f"storage={storage!r} is not a storage; give one, such as LazyTensorStorage(10)."
        )
    if transform is not None and not isinstance(transform, Transform) and not callable(transform):
        raise TypeError(
            f"transform={transform!r} is neither a Transform nor a function of a batch."
        )
    ahead = 0 if prefetch is None else prefetch
    if not is_integer(ahead) or ahead < 0:
        raise ValueError(
            f"prefetch={prefetch!r} is not a number of batches; give an integer, at least 0."
        )
    for name, flag in (("pin_memory", pin_memory), ("shared", shared)):
        if not isinstance(flag, bool):
            raise TypeError(f"{name}={flag!r} is neither True nor False.")
    if generator is not None and not isinstance(generator, torch.Generator):
        raise TypeError(
            f"generator={generator!r} is not a torch.Generator; give one, such as "
            "torch.Generator().manual_seed(0)."
        )


def _check_rows(name: str, count: int) -> None:
    if not is_integer(count) or count < 1:
        raise ValueError(f"{name}={count!r} is not a number of rows; give an integer, at least 1.")


def _check_capacity(capacity: int | None, storage: Storage | None) -> int:
    """Returns the number of rows that the buffer holds."""
    if capacity is None:
        if storage is None:
            raise TypeError(
                "Neither `capacity` nor `storage` was given; give `capacity`, the number of rows "
                "that the buffer holds, or a storage."
            )
        return int(storage.max_size)
    _check_rows("capacity", capacity)
    if storage is not None and storage.max_size != capacity:
        raise ValueError(
            f"capacity={capacity}, but the storage has room for {storage.max_size} rows; remove "
            "`capacity`, or make the two equal."
        )
    return capacity


def _make_storage(
    capacity: int,
    device: torch.device | str | None,
    storage: Storage | None,
) -> Storage:
    if storage is None:
        try:
            place = torch.device("cpu" if device is None else device)
        except (TypeError, RuntimeError) as error:
            raise ValueError(f"device={device!r} is not a valid device: {error}") from None
        return PairStorage(capacity, device=place)
    if device is not None:
        raise ValueError(
            f"device={device!r} has no effect if `storage` is given; remove it, and create the "
            "storage on that device."
        )
    return storage
