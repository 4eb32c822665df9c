"""Gates, which decide which of the drawn rows are mixed, and schedules of the mixed share.

A gate gets a batch of anchors and partners and returns which anchors may be mixed. The others are
used as stored, with a weight of 1. A fold accepts any number of gates as `gates=`. Any callable of
this form is a gate. If it has `state_dict` and `load_state_dict`, it is saved with its buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from nmer_torchrl import _compat
from nmer_torchrl.checks import SHARE, Number
from nmer_torchrl.functional import any_feature
from nmer_torchrl.keys import as_keys, get_entry
from nmer_torchrl.transforms.rows import device_of

_ROWS = Number(least=1)  # configs write large numbers as 1e6


class Gate(Protocol):
    """Decides which anchors may be mixed with their partners.

    Examples:
        >>> from nmer_torchrl import PairMixup
        >>> def both_rewarded(batch, generator):
        ...     return (batch["next", "reward"] > 0).flatten(1).all(-1)
        >>> fold = PairMixup(0.75, gates=[both_rewarded])
    """

    def __call__(self, batch: TensorDictBase, generator: torch.Generator | None) -> Tensor:
        """Returns booleans `[*B]`: which of rows `[*B, 1 + m]`, anchor first, may be mixed."""
        ...


class Fraction:
    """Allows each row to be mixed with a probability, independently of the others.

    Args:
        share: The probability, from 0 to 1, or a schedule such as `LinearFraction(1.0, 0.0, rows)`,
            which computes it from the number of rows that this gate has seen so far.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> gate = Fraction(0.25)
        >>> pairs = TensorDict(batch_size=[100_000, 2])
        >>> mixed = gate(pairs, torch.Generator().manual_seed(0))
        >>> round(float(mixed.float().mean()), 2)
        0.25
    """

    def __init__(self, share: float | Schedule) -> None:
        self.share = share if callable(share) else float(SHARE("share", share))
        self.drawn = 0  # rows seen so far

    def __call__(self, batch: TensorDictBase, generator: torch.Generator | None) -> Tensor:
        """See `Gate`."""
        share = self.share(self.drawn) if callable(self.share) else self.share
        shape = batch.shape[:-1]
        self.drawn += shape.numel()
        return torch.rand(shape, generator=generator, device=device_of(batch, generator)) < share

    def state_dict(self) -> dict[str, Any]:
        """Returns the number of rows seen so far."""
        return {"drawn": self.drawn}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the number of rows seen so far."""
        self.drawn = int(state["drawn"])

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.share!r})"


class Same:
    """Allows only rows to be mixed that equal all their partners in some entries.

    Use it for entries that cannot be mixed, such as discrete actions. Leave these out of the
    entries that are measured and mixed, and mix only rows in which they are equal.

    Args:
        keys: Entries that must be equal, of any dtype.

    Examples:
        >>> from nmer_torchrl import NeighborPairSampler, PairMixup
        >>> values = ["observation", ("next", "observation"), ("next", "reward")]
        >>> sampler = NeighborPairSampler(k=10, keys=["observation"])
        >>> fold = PairMixup(0.75, mix_keys=values, gates=[Same("action")])
    """

    def __init__(self, *keys: NestedKey) -> None:
        self.keys = as_keys(keys, "keys")
        if not self.keys:
            raise ValueError('Same() names no entry; name at least one, as in Same("action").')

    def __call__(self, batch: TensorDictBase, generator: torch.Generator | None) -> Tensor:
        """See `Gate`."""
        dims = batch.ndim - 1
        entries = (get_entry(batch, key) for key in self.keys)
        return ~torch.stack(
            [any_feature(entry != entry.narrow(dims, 0, 1), dims) for entry in entries]
        ).any(0)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(repr, self.keys))})"


def as_gates(gates: Sequence[Gate]) -> tuple[Gate, ...]:
    """Returns the gates as a tuple; raises an error if one is not a gate."""
    if callable(gates):
        raise TypeError(f"gates={gates!r} is a single gate; give a list, as in gates=[{gates!r}].")
    for gate in gates:
        if not callable(gate):
            raise TypeError(
                f"`gates` holds {gate!r}, which is not callable; give gates such as Fraction(0.5)."
            )
    return tuple(gates)


class Schedule(Protocol):
    """Computes the share of mixed rows from the number of rows drawn so far.

    Examples:
        >>> from nmer_torchrl import PairMixup
        >>> from nmer_torchrl.transforms import Fraction
        >>> fold = PairMixup(0.75, gates=[Fraction(lambda drawn: 1.0 if drawn < 1e6 else 0.5)])
    """

    def __call__(self, drawn: int) -> float:
        """Returns the share, from 0 to 1."""
        ...


@dataclass(frozen=True)
class LinearFraction:
    """Changes the share linearly from `first` to `last` over a number of drawn rows.

    After that it stays at `last`. A batch of 256 counts as 256 rows.

    Examples:
        >>> schedule = LinearFraction(1.0, 0.2, rows=1_000)
        >>> [schedule(drawn) for drawn in (0, 500, 5_000)]
        [1.0, 0.6, 0.2]
    """

    first: float
    last: float
    rows: int

    def __post_init__(self) -> None:
        _check_ends(self.first, self.last)
        _ROWS("rows", self.rows)

    def __call__(self, drawn: int) -> float:
        """See `Schedule`."""
        return _between(self.first, self.last, drawn / self.rows)


@dataclass(frozen=True)
class ExponentialFraction:
    """Changes the share from `first` half of the way to `last` in each `half_life` drawn rows.

    Examples:
        >>> schedule = ExponentialFraction(1.0, 0.0, half_life=1_000)
        >>> [schedule(drawn) for drawn in (0, 1_000, 2_000)]
        [1.0, 0.5, 0.25]
    """

    first: float
    last: float
    half_life: int

    def __post_init__(self) -> None:
        _check_ends(self.first, self.last)
        _ROWS("half_life", self.half_life)

    def __call__(self, drawn: int) -> float:
        """See `Schedule`."""
        return self.last + (self.first - self.last) * 0.5 ** (drawn / self.half_life)


@dataclass(frozen=True)
class DensityFraction:
    """Changes the share from `first` to `last` as the buffer fills to a number of rows.

    After that it stays at `last`. With more stored rows, neighbors are nearer and mixes are better.
    The rows of the buffer that draws are counted; in an ensemble, the rows of all members.

    Examples:
        >>> from nmer_torchrl import make_replay_buffer
        >>> fraction = DensityFraction(0.0, 1.0, rows=100_000)
        >>> buffer = make_replay_buffer("nmer", capacity=1_000, batch_size=32, fraction=fraction)
    """

    first: float
    last: float
    rows: int

    def __post_init__(self) -> None:
        _check_ends(self.first, self.last)
        _ROWS("rows", self.rows)

    def __call__(self, drawn: int) -> float:
        """See `Schedule`."""
        buffer = _compat.buffer_that_draws()
        if buffer is None:
            raise RuntimeError(
                "DensityFraction counts the rows of its buffer, but it was called outside of a "
                "buffer's `sample()`; use it in a buffer's transform, and sample from that buffer."
            )
        return _between(self.first, self.last, _compat.stored_rows(buffer) / self.rows)


def _check_ends(first: float, last: float) -> None:
    SHARE("first", first)
    SHARE("last", last)


def _between(first: float, last: float, way: float) -> float:
    return last if way >= 1 else first + (last - first) * way
