"""Checks that the sampler and the transforms of a replay buffer fit together.

Neither a sampler nor a transform knows its buffer in TorchRL, so they are checked here when the
buffer draws. A sampler or pairing that draws several rows for each anchor has an attribute `draws`,
and a transform that folds them to one row has `folds`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from tensordict import TensorDictBase
from torchrl.data.replay_buffers import (
    ReplayBuffer,
    ReplayBufferEnsemble,
    Sampler,
    SampleUnit,
    SliceSampler,
    Storage,
)
from torchrl.envs.transforms import Transform

from nmer_torchrl import _compat


class Guard:
    """Checks the buffer of a part at the first draw, and again when the buffer's parts change."""

    def __init__(self) -> None:
        self._buffer: weakref.ref[ReplayBuffer] | None = None  # the buffer that passed the checks
        self._parts: tuple[Any, ...] = ()

    def check(
        self, part: Any, storage: Storage, *checks: Callable[[Any, ReplayBuffer], None]
    ) -> None:
        """Raises an error if the buffer that is drawing for this part fails one of the checks."""
        known = None if self._buffer is None else self._buffer()
        if known is not None and self._parts == _compat.parts_around(known, storage):
            return
        buffer = _compat.buffer_that_draws()
        if buffer is None:
            return
        for check in checks:
            check(part, buffer)
        # An ensemble draws from buffers that can also be sampled directly.
        if not isinstance(buffer, ReplayBufferEnsemble):
            self._buffer, self._parts = weakref.ref(buffer), _compat.parts_around(buffer, storage)

    def __reduce__(self) -> tuple[type[Guard], tuple[()]]:
        return Guard, ()  # a copy belongs to another buffer


def check_anchors(unit: SampleUnit, buffer: ReplayBuffer) -> None:
    """Raises an error if the sampler of a pairing does not draw single rows."""
    sampler = buffer.sampler
    name = type(sampler).__name__
    if isinstance(sampler, SliceSampler):
        raise TypeError(
            f"{name} draws slices of episodes, and mixing pairs from {type(unit).__name__} would "
            "break their temporal order; use a sampler that draws single rows, such as "
            "RandomSampler."
        )
    if hasattr(sampler, "draws"):
        raise TypeError(
            f"{name} already draws {sampler.draws}, and {type(unit).__name__} would pair them "
            "again; remove one of the two."
        )


def check_folded(part: Sampler | SampleUnit, buffer: ReplayBuffer) -> None:
    """Raises an error if no transform of the buffer can fold what a sampler or pairing draws.

    The user's own transforms and functions are assumed to fold.
    """
    transforms = [
        leaf for held in _compat.transforms_after(buffer, part) for leaf in _compat.leaves(held)
    ]
    name = type(part).__name__
    if not any(getattr(t, "folds", not _compat.is_stock(t)) for t in transforms):
        found = ", ".join(type(t).__name__ for t in transforms) or "none"
        draws = getattr(part, "draws", "several rows for each anchor")
        raise TypeError(
            f"{name} draws {draws}, but no transform of the {type(buffer).__name__} folds them to "
            f"one row each (its transforms: {found}); add a fold such as PairMixup(0.75), or "
            f"remove {name}. To get the drawn rows unchanged, pass transform=lambda batch: batch."
        )


def find_geometry(fold: Transform) -> Any:
    """Returns the neighbor sampler or pairing that is drawing for this fold."""
    buffer = _compat.buffer_that_draws()
    if buffer is None:
        raise RuntimeError(
            f"{type(fold).__name__} uses the metric of its buffer's sampler, but it was called "
            "outside of a buffer's `sample()`; sample from a buffer, or give `geometry`."
        )
    parts = (*_compat.samplers_before(buffer, fold), _compat.unit_of(buffer))
    found = [part for part in parts if hasattr(part, "embed")]
    if len(found) != 1:
        raise TypeError(
            f"{type(fold).__name__} uses the metric of exactly one neighbor sampler, but its "
            f"buffer draws with {_name_draw(buffer)}; use NeighborhoodSampler, or "
            "sample_unit=Neighborhoods(), or give `geometry`."
        )
    return found[0]


def check_spread(transform: Transform, spread: Any) -> None:
    """Raises an error if a transform's spread does not belong to the buffer that is drawing.

    After `buffer.set_sampler(...)`, the old sampler, which updates the spread, is no longer
    notified of writes.
    """
    buffer = _compat.buffer_that_draws()
    samplers = [] if buffer is None else _compat.samplers_before(buffer, transform)
    if buffer is not None and any(getattr(s, "spread", None) is not spread for s in samplers):
        raise ValueError(
            f"The spread of {type(transform).__name__} belongs to another sampler, not to the "
            f"{_name_draw(buffer)} of this buffer, so it describes other rows; use a SpreadSampler "
            "in this buffer, and pass `spread=sampler.spread` of that sampler."
        )


def check_paired(fold: Transform, batch: TensorDictBase, takes: str) -> bool:
    """Raises an error if TorchRL's samplers drew single rows in a shape that looks like pairs.

    An ensemble stacks the rows of its members, so two rows of each member have the shape
    `[members, 2]`. Returns whether a buffer has drawn the batch.
    """
    buffer = _compat.buffer_that_draws()
    if buffer is None:
        return False
    samplers = _compat.samplers_before(buffer, fold)
    if any(_compat.draws_single_rows(buffer, sampler) for sampler in samplers):
        check_drawn(fold, batch, takes)
    return True


def check_drawn(fold: Transform, batch: TensorDictBase, takes: str) -> None:
    """Raises an error if a replay buffer has drawn this batch, which the fold cannot process.

    Rows that were read in another way, such as by `buffer[:]`, pass.
    """
    buffer = _compat.buffer_that_draws()
    if buffer is None:
        return
    raise TypeError(
        f"{type(fold).__name__} folds {takes}, but it received a batch of shape "
        f"{tuple(batch.shape)}, drawn by {_name_draw(buffer)}; {_remedy(batch, buffer)}"
    )


def _name_draw(buffer: ReplayBuffer) -> str:
    """Returns the names of the samplers and the pairing of a buffer."""
    names = " and ".join(type(sampler).__name__ for sampler in _compat.samplers_of(buffer))
    unit = _compat.unit_of(buffer)
    return names if unit is None else f"{names} with {type(unit).__name__}"


def _remedy(batch: TensorDictBase, buffer: ReplayBuffer) -> str:
    parts = (*_compat.samplers_of(buffer), _compat.unit_of(buffer))
    drawn = any(hasattr(part, "draws") for part in parts)
    if drawn and batch.ndim >= 2:
        return (
            "use NeighborhoodMixup for whole neighborhoods, or draw pairs with NeighborPairSampler "
            "or sample_unit=NeighborPairs()."
        )
    if drawn:
        return "use a single fold, and no transform before it that folds or flattens pairs."
    if _compat.ignores_units(buffer):
        return (
            "ReplayBufferEnsemble ignores the sample_unit of its members. Give each a sampler that "
            "draws pairs, such as PairSampler(NeighborPairs()) of nmer_torchrl.samplers."
        )
    return (
        "use a sampler that draws pairs, such as NeighborPairSampler, add "
        "sample_unit=NeighborPairs() to the buffer, or leave the fold out."
    )
