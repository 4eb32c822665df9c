"""Base class of replay methods, and the declaration of their options."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Generic, TypeVar

from torchrl.data import TensorDictReplayBuffer
from torchrl.data.replay_buffers import Sampler
from torchrl.envs.transforms import Transform

S = TypeVar("S", bound=Sampler)


@dataclass(frozen=True, kw_only=True)
class Method(ABC, Generic[S]):
    """Builds the sampler and the transform of a buffer from the options of a replay method.

    A method is a frozen dataclass. Its fields are its options with their defaults. Fields that are
    declared with `option` are checked. `S` is the type of its sampler, so that type checkers know
    the type of `buffer.sampler`.

    Examples:
        >>> from dataclasses import dataclass
        >>> from nmer_torchrl import NeighborPairSampler, PairMixup, make_replay_buffer
        >>> from nmer_torchrl.checks import POSITIVE
        >>> from nmer_torchrl.methods import Method, option
        >>> @dataclass(frozen=True)
        ... class Closest(Method[NeighborPairSampler]):
        ...     alpha: float = option(2.0, POSITIVE)
        ...
        ...     def make_sampler(self, capacity):
        ...         return NeighborPairSampler(k=1)
        ...
        ...     def make_transform(self, sampler):
        ...         return PairMixup(self.alpha)
        >>> make_replay_buffer(Closest(alpha=5.0), capacity=1_000, batch_size=32).transform[0]
        PairMixup(alpha=5.0)
        >>> Closest(alpha=0.0)
        Traceback (most recent call last):
        ...
        ValueError: alpha=0.0 is out of range; give a finite number above 0 (the default is 2.0).
    """

    buffer_class: ClassVar[type[TensorDictReplayBuffer]] = TensorDictReplayBuffer
    any_storage: ClassVar[bool] = False  # if False, the storage must hold tensors in one dimension

    def __post_init__(self) -> None:
        """Checks and converts each option with the function that it was declared with."""
        for each in fields(self):
            if (read := each.metadata.get("read")) is not None:
                try:
                    value = read(each.name, getattr(self, each.name))
                except (TypeError, ValueError) as error:
                    text = f"{str(error).rstrip('.')} (the default is {each.default!r})."
                    raise type(error)(text) from None
                object.__setattr__(self, each.name, value)

    @abstractmethod
    def make_sampler(self, capacity: int) -> S:
        """Builds the sampler of a buffer with this capacity."""

    def make_transform(self, sampler: S) -> Transform | None:
        """Builds the transform that belongs to the sampler, or None to use rows as stored.

        If the transform's attribute `generator` is None, the buffer sets a generator there, which
        it seeds from its own.
        """
        return None


def option(default: Any, read: Callable[[str, Any], Any]) -> Any:
    """Declares a field of a method together with the function that checks its value.

    Args:
        default: The default of the field.
        read: A function of the field's name and a value that returns the value to keep. It raises
            a `TypeError` or `ValueError` if the value is not allowed, as `checks.Number` does.

    Examples:
        >>> from nmer_torchrl.checks import COUNT
        >>> k: int = option(10, COUNT)  # in the body of a method
    """
    return field(default=default, metadata={"read": read})


def option_names(method: type[Method[Any]]) -> tuple[str, ...]:
    """Returns the names of a method's options.

    Examples:
        >>> from nmer_torchrl.methods import PER
        >>> option_names(PER)
        ('priority_alpha', 'priority_beta', 'priority_eps')
    """
    return tuple(each.name for each in fields(method))
