"""Schedules: the share of rows that are mixed, as training goes on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from nmer_torchrl import _compat
from nmer_torchrl.checks import SHARE, Number

_ROWS = Number(least=1)  # configs write large numbers as 1e6


class Schedule(Protocol):
    """A share of rows, from the number of rows drawn so far.

    Examples:
        >>> from nmer_torchrl import PairMixup
        >>> from nmer_torchrl.transforms import Fraction
        >>> fold = PairMixup(0.75, gates=[Fraction(lambda drawn: 1.0 if drawn < 1e6 else 0.5)])
    """

    def __call__(self, drawn: int) -> float:
        """The share, from 0 to 1."""
        ...


@dataclass(frozen=True)
class LinearFraction:
    """From `first` to `last` along a line, over a number of rows drawn; then `last`.

    Rows are those of the batches: a batch of 256 counts 256.

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
    """From `first` towards `last`, half of the way in each `half_life` rows drawn.

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
    """From `first` to `last` as a buffer fills, up to a number of rows stored; then `last`.

    The more rows are stored the nearer are neighbours, and the better is what lies between them.
    The rows are those of the buffer that draws; of an ensemble, those of all members.

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
                "DensityFraction counts the rows of the buffer that draws, but none does; use it "
                "in the transform of a buffer, and sample from that."
            )
        return _between(self.first, self.last, _compat.stored_rows(buffer) / self.rows)


def _check_ends(first: float, last: float) -> None:
    SHARE("first", first)
    SHARE("last", last)


def _between(first: float, last: float, way: float) -> float:
    return last if way >= 1 else first + (last - first) * way
