"""Checks numbers; unlike in Python, booleans are not numbers here."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real
from typing import Any, TypeGuard


def is_integer(value: object) -> TypeGuard[int]:
    """Returns whether the value is an integer and not a boolean."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> TypeGuard[float]:
    """Returns whether the value is a real number and not a boolean."""
    return isinstance(value, Real) and not isinstance(value, bool)


@dataclass(frozen=True)
class Number:
    """Checks that an option is a number in some range, and describes that range in errors.

    Args:
        least: Smallest allowed value.
        above: Value that the number must exceed.
        most: Largest allowed value.
        whole: Whether the number must be an integer.

    Examples:
        >>> Number(above=0)("alpha", 0.75)
        0.75
        >>> Number(above=0)("alpha", -1)
        Traceback (most recent call last):
        ...
        ValueError: alpha=-1 is out of range; give a finite number above 0.
    """

    least: float = -math.inf
    above: float = -math.inf
    most: float = math.inf
    whole: bool = False

    def __call__(self, name: str, value: Any) -> Any:
        """Returns the value if it is allowed; otherwise raises an error that uses `name`."""
        if not (is_integer(value) if self.whole else is_number(value)):
            noun = "an integer" if self.whole else "a number"
            raise TypeError(f"{name}={value!r} is not {noun}; give {self}.")
        if not (math.isfinite(value) and self.least <= value <= self.most and value > self.above):
            raise ValueError(f"{name}={value!r} is out of range; give {self}.")
        return value

    def __str__(self) -> str:
        limits = [f"above {self.above:g}"] if self.above > -math.inf else []
        limits += [f"at least {self.least:g}"] if self.least > -math.inf else []
        limits += [f"at most {self.most:g}"] if self.most < math.inf else []
        noun = "an integer" if self.whole else "a finite number"
        return " ".join([noun, " and ".join(limits)]).strip()


COUNT = Number(least=1, whole=True)
POSITIVE = Number(above=0)
NOT_NEGATIVE = Number(least=0)
SHARE = Number(least=0, most=1)
