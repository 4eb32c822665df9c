"""Checks that the sampler and the transforms of a replay buffer fit together.

TorchRL tells neither a sampler nor a transform which buffer it serves, so each is checked here when
the buffer draws. A sampler or pairing that draws several rows for each anchor says so by `draws`,
and a transform that folds them to one by `folds`.
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
    """Checks the buffer that a part serves at the first draw, and again when its parts change."""

    def __init__(self) -> None:
        self._buffer: weakref.ref[ReplayBuffer] | None = None  # that was found to be right
        self._parts: tuple[Any, ...] = ()

    def check(
        self, part: Any, storage: Storage, *checks: Callable[[Any, ReplayBuffer], None]
    ) -> None:
        """Raises if one of the checks finds a fault in the buffer that draws for this part now."""
        known = None if self._buffer is None else self._buffer()
        if known is not None and self._parts == _compat.parts_around(known, storage):
            return
        buffer = _compat.buffer_that_draws()
        if buffer is None:
            return
        for check in checks:
            check(part, buffer)
        # An ensemble also draws from buffers that may be drawn from by themselves.
        if not isinstance(buffer, ReplayBufferEnsemble):
            self._buffer, self._parts = weakref.ref(buffer), _compat.parts_around(buffer, storage)

    def __reduce__(self) -> tuple[type[Guard], tuple[()]]:
        return Guard, ()  # a copy serves another buffer


def check_anchors(unit: SampleUnit, buffer: ReplayBuffer) -> None:
    """Raises if the sampler beside a pairing draws something else than single rows."""
    sampler = buffer.sampler
    name = type(sampler).__name__
    if isinstance(sampler, SliceSampler):
        raise TypeError(
            f"{name} draws slices of episodes, whose rows no longer follow each other once "
            f"{type(unit).__name__} pairs and a fold mixes them; use a sampler that draws single "
            "rows, such as RandomSampler."
        )
    if hasattr(sampler, "draws"):
        raise TypeError(
            f"{name} draws {sampler.draws} already, and {type(unit).__name__} would pair them "
            "again; leave out one of the two."
        )


def check_folded(part: Sampler | SampleUnit, buffer: ReplayBuffer) -> None:
    """Raises if no transform of the buffer can fold what a sampler or pairing draws.

    A transform or function of the user's own may be one that folds.
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
            f"one row each (its transforms: {found}); add a fold such as PairMixup(0.75), or leave "
            f"{name} out. To get the rows as they are drawn, pass transform=lambda batch: batch."
        )


def find_geometry(fold: Transform) -> Any:
    """Returns the sampler of neighbors, or the pairing, that draws for this fold now."""
    buffer = _compat.buffer_that_draws()
    if buffer is None:
        raise RuntimeError(
            f"{type(fold).__name__} measures by the sampler of the buffer that draws, but none "
            "does; sample from a buffer, or give `geometry`."
        )
    parts = (*_compat.samplers_before(buffer, fold), _compat.unit_of(buffer))
    found = [part for part in parts if hasattr(part, "embed")]
    if len(found) != 1:
        raise TypeError(
            f"{type(fold).__name__} measures by the metric of one sampler of neighbours, but "
            f"{_name_draw(buffer)} draw for it; use NeighborhoodSampler, or "
            "sample_unit=Neighborhoods(), or give `geometry`."
        )
    return found[0]


def check_spread(transform: Transform, spread: Any) -> None:
    """Raises if the spread that a transform was made with is not that of the buffer that draws.

    After `buffer.set_sampler(...)` the sampler that keeps it up is no longer told of writes.
    """
    buffer = _compat.buffer_that_draws()
    samplers = [] if buffer is None else _compat.samplers_before(buffer, transform)
    if buffer is not None and any(getattr(s, "spread", None) is not spread for s in samplers):
        raise ValueError(
            f"spread of {type(transform).__name__} belongs to another sampler, not to the "
            f"{_name_draw(buffer)} of this buffer, so it would measure other rows. Create it with "
            "the sampler of this buffer."
        )


def check_paired(fold: Transform, batch: TensorDictBase, takes: str) -> bool:
    """Raises if samplers of TorchRL have drawn a batch of single rows that looks like pairs.

    An ensemble stacks what its members draw, so two rows of each member come as `[members, 2]`.
    Returns whether a buffer has drawn the batch.
    """
    buffer = _compat.buffer_that_draws()
    if buffer is None:
        return False
    samplers = _compat.samplers_before(buffer, fold)
    if any(_compat.draws_single_rows(buffer, sampler) for sampler in samplers):
        check_drawn(fold, batch, takes)
    return True


def check_drawn(fold: Transform, batch: TensorDictBase, takes: str) -> None:
    """Raises if a replay buffer has drawn this batch, which the fold cannot take.

    Rows that were read otherwise, such as by `buffer[:]`, pass.
    """
    buffer = _compat.buffer_that_draws()
    if buffer is None:
        return
    raise TypeError(
        f"{type(fold).__name__} folds {takes}, but the batch that reaches it has shape "
        f"{tuple(batch.shape)}, drawn by {_name_draw(buffer)}; {_remedy(batch, buffer)}"
    )


def _name_draw(buffer: ReplayBuffer) -> str:
    """Names the samplers of a buffer, and the pairing beside them."""
    names = " and ".join(type(sampler).__name__ for sampler in _compat.samplers_of(buffer))
    unit = _compat.unit_of(buffer)
    return names if unit is None else f"{names} with {type(unit).__name__}"


def _remedy(batch: TensorDictBase, buffer: ReplayBuffer) -> str:
    parts = (*_compat.samplers_of(buffer), _compat.unit_of(buffer))
    drawn = any(hasattr(part, "draws") for part in parts)
    if drawn and batch.ndim >= 2:
        return (
            "use NeighborhoodMixup for whole neighborhoods, or draw pairs by NeighborPairSampler "
            "or sample_unit=NeighborPairs()."
        )
    if drawn:
        return "keep one fold, and no transform before it that folds or flattens pairs."
    if _compat.ignores_units(buffer):
        return (
            "ReplayBufferEnsemble ignores the sample_unit of its members. Give each a sampler that "
            "draws pairs, such as PairSampler(NeighborPairs()) of nmer_torchrl.samplers."
        )
    return (
        "use a sampler that draws pairs, such as NeighborPairSampler, add "
        "sample_unit=NeighborPairs() beside the sampler, or leave the fold out."
    )
