"""Abstract base classes of methods, each with options that several methods share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tensordict import NestedKey
from torchrl.envs.transforms import Transform

from nmer_torchrl.checks import NOT_NEGATIVE, POSITIVE
from nmer_torchrl.keys import END_KEYS, POINT_KEYS, TERMINATED_KEY, VALUE_KEYS, Roles, as_roles
from nmer_torchrl.methods.base import Method, S, option
from nmer_torchrl.methods.options import (
    DistanceOption,
    FractionOption,
    InterpolationName,
    MetricOption,
    make_cap,
    make_fraction,
    make_metric,
    read_distance,
    read_fraction,
    read_interpolation,
    read_key,
    read_keys,
    read_metric,
    read_search,
)
from nmer_torchrl.neighbors import SearchOption
from nmer_torchrl.transforms import Gate, MeanMixup, PairMixup, Same

_ENDS = ("done", "truncated")  # further flags beside `terminated_key`
ALPHA = 0.75  # default in NMER's released code; used here by all methods that mix pairs


@dataclass(frozen=True, kw_only=True)
class Keyed(Method[S]):
    """Holds the options of methods that read entries of rows.

    Keyword Args:
        keys: Observations and actions. Distances are measured over these entries.
        value_keys: Entries that are mixed besides `keys`: next observations and rewards.
    """

    keys: Sequence[NestedKey] = option(POINT_KEYS, read_keys)
    value_keys: Sequence[NestedKey] = option(VALUE_KEYS, read_keys)

    @property
    def roles(self) -> Roles:
        """Returns which of the keys are observations, actions and rewards."""
        return as_roles(self.keys, self.value_keys)


@dataclass(frozen=True, kw_only=True)
class Ending(Keyed[S]):
    """Holds the options of methods that do not change terminal rows.

    Keyword Args:
        terminated_key: Entry that marks a terminal row.
    """

    terminated_key: NestedKey = option(TERMINATED_KEY, read_key)

    @property
    def end_keys(self) -> tuple[NestedKey, ...]:
        """Returns the flags that end an episode; those that are not stored are ignored."""
        key = self.terminated_key
        beside = () if isinstance(key, str) else tuple((*key[:-1], name) for name in _ENDS)
        return tuple(dict.fromkeys([*END_KEYS, key, *beside]))


@dataclass(frozen=True, kw_only=True)
class Near(Keyed[S]):
    """Holds the options of methods that search for neighbors.

    Keyword Args:
        search: The neighbor search (see `NeighborPairSampler`).
        metric: The distance between rows: the name of a metric, such as `"mahalanobis"`, a name
            with arguments, as in `{"euclidean": {"weights": {"action": 0.5}}}`, or a metric object.
        max_distance: Rows whose neighbors are farther away than this are not mixed.
            `{"quantile": 0.9}` derives the limit from the distances of recent pairs. None sets no
            limit.
    """

    search: SearchOption = option("auto", read_search)
    metric: MetricOption = option("euclidean", read_metric)
    max_distance: DistanceOption | None = option(None, read_distance)

    def __post_init__(self) -> None:
        """Raises an error if the metric does not fit the search or the keys."""
        super().__post_init__()
        make_metric(self.metric).check(self.search, tuple(self.keys))

    def search_options(self) -> dict[str, Any]:
        """Returns the keyword arguments of a neighbor sampler."""
        return {
            "search": self.search,
            "metric": make_metric(self.metric),
            "max_distance": make_cap(self.max_distance),
            "keys": self.keys,
            "value_keys": self.value_keys,
        }


@dataclass(frozen=True, kw_only=True)
class Gated(Ending[S]):
    """Holds the options of methods that choose which rows they mix.

    Keyword Args:
        fraction: Share of rows that are mixed. A schedule such as `LinearFraction(...)`, or
            `{"linear": {...}}`, `{"exponential": {...}}`, `{"density": {...}}` with its arguments,
            changes it during training.
        anchor_keys: Entries besides `keys` that are not mixed on purpose. A warning names all other
            observations that are not mixed.
        same_keys: Entries that must be equal for rows to be mixed, such as discrete actions (see
            `Same`).
    """

    fraction: FractionOption = option(1.0, read_fraction)
    anchor_keys: Sequence[NestedKey] = option((), read_keys)
    same_keys: Sequence[NestedKey] = option((), read_keys)

    def make_gates(self) -> list[Gate]:
        """Builds the gates, which decide which rows are mixed."""
        same: list[Gate] = [Same(*self.same_keys)] if self.same_keys else []
        return same + make_fraction(self.fraction)

    def fold_options(self) -> dict[str, Any]:
        """Returns the keyword arguments of a fold."""
        return {
            "mix_keys": (*self.keys, *self.value_keys),
            "terminated_key": self.terminated_key,
            "gates": self.make_gates(),
            "anchor_keys": self.anchor_keys,
        }


@dataclass(frozen=True, kw_only=True)
class Folding(Gated[S]):
    """Holds the options of methods that mix rows with random weights.

    Keyword Args:
        alpha: Parameter of the Beta distribution of the weights, or of the Dirichlet distribution
            if more than two rows are mixed. Small values give nearly all weight to one row, large
            values give nearly equal weights.
    """

    alpha: float = option(ALPHA, POSITIVE)


@dataclass(frozen=True, kw_only=True)
class Pairs(Folding[S]):
    """Mixes pairs: `w * anchor + (1 - w) * partner`. A subclass chooses the pairs.

    Keyword Args:
        interpolation: How pairs are mixed: `"beta"` with weights `w ~ Beta(alpha, alpha)`,
            `"uniform"` with weights that are uniform in [0, 1] (SMOTE), `"mean"` with weights of
            one half.
    """

    interpolation: InterpolationName = option("beta", read_interpolation)

    def __post_init__(self) -> None:
        """Raises an error if `alpha` is given but the interpolation ignores it."""
        super().__post_init__()
        if self.interpolation != "beta" and self.alpha != ALPHA:
            raise ValueError(
                f"interpolation={self.interpolation!r} ignores alpha={self.alpha!r}; remove one "
                "of the two."
            )

    def make_transform(self, sampler: S) -> Transform:
        """Builds the transform that mixes the pairs."""
        if self.interpolation == "mean":
            return MeanMixup(**self.fold_options())
        alpha = 1.0 if self.interpolation == "uniform" else self.alpha
        return PairMixup(alpha, **self.fold_options())


@dataclass(frozen=True, kw_only=True)
class Prioritized(Method[S]):
    """Holds the options of methods that draw rows by priority.

    Batches carry importance weights `[B]` under `"priority_weight"`. New TD errors, written to the
    batch under `"td_error"`, become priorities by `buffer.update_tensordict_priority(batch)`.
    TorchRL's schedulers anneal `buffer.sampler.beta`.

    Keyword Args:
        priority_alpha: Exponent of the priorities: 0 draws uniformly, 1 in proportion to them.
        priority_beta: Exponent of the importance weights: 0 means no correction, 1 full correction.
        priority_eps: Constant that is added to each priority, so that every row can be drawn.
    """

    priority_alpha: float = option(0.6, NOT_NEGATIVE)
    priority_beta: float = option(0.4, NOT_NEGATIVE)
    priority_eps: float = option(1e-6, POSITIVE)

    def priority_options(self) -> dict[str, Any]:
        """Returns the keyword arguments of a prioritized sampler."""
        return {
            "alpha": self.priority_alpha,
            "beta": self.priority_beta,
            "eps": self.priority_eps,
        }
