"""Types for `make_replay_buffer`: its options, and the sampler of its buffer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Generic, Literal, Required, TypeAlias, TypedDict

import torch
from tensordict import NestedKey, TensorDictBase
from torchrl.data import TensorDictReplayBuffer
from torchrl.data.replay_buffers import Storage
from torchrl.envs.transforms import Transform

from nmer_torchrl.methods.base import S
from nmer_torchrl.methods.options import (
    DistanceOption,
    FractionOption,
    InterpolationName,
    MetricOption,
)
from nmer_torchrl.neighbors import SearchOption

TransformOption: TypeAlias = Transform | Callable[[TensorDictBase], TensorDictBase]

# The names of the methods, by the type of their buffer's sampler.
Single = Literal["uniform", "s4rl", "ras"]
Prioritized = Literal["per"]
Spread = Literal["noisy"]
Learned = Literal["ero"]
RandomPair = Literal["mixup", "mixreg"]
NeighborPair = Literal["nmer", "1nn", "interpolated_rewards"]
Neighborhood = Literal["neighborhood", "gp"]
PrioritizedPair = Literal["per_nmer"]
TemporalPair = Literal["ct", "tuned_ct"]

MethodName = Literal[
    Single,
    Prioritized,
    Spread,
    Learned,
    RandomPair,
    NeighborPair,
    Neighborhood,
    PrioritizedPair,
    TemporalPair,
]
"""The names of the methods that `make_replay_buffer` accepts."""


class BufferOptions(TypedDict, total=False):
    """The keyword arguments of `make_replay_buffer` for a method object."""

    batch_size: Required[int]
    capacity: int | None
    device: torch.device | str | None
    storage: Storage | None
    transform: TransformOption | None
    prefetch: int | None
    pin_memory: bool
    shared: bool
    generator: torch.Generator | None


class NamedOptions(BufferOptions, total=False):
    """The keyword arguments of `make_replay_buffer` for a method's name, with its options."""

    keys: Sequence[NestedKey]
    value_keys: Sequence[NestedKey]
    terminated_key: NestedKey
    anchor_keys: Sequence[NestedKey]
    same_keys: Sequence[NestedKey]
    k: int
    search: SearchOption
    metric: MetricOption
    alpha: float
    first_alpha: float
    interpolation: InterpolationName
    fraction: FractionOption
    max_distance: DistanceOption | None
    priority_alpha: float
    priority_beta: float
    priority_eps: float
    lengthscale: float
    noise_variance: float
    max_variance: float
    sigma: float
    action_bounds: tuple[float, float] | None
    min_factor: float
    max_factor: float


if TYPE_CHECKING:

    class TypedReplayBuffer(TensorDictReplayBuffer, Generic[S]):
        """A `TensorDictReplayBuffer` whose `sampler` has a known type.

        Only type checkers see this class. At run time the buffer is a `TensorDictReplayBuffer`.
        """

        @property
        def sampler(self) -> S:
            """Returns the sampler of the buffer."""
            ...
