"""Converts options given as names, numbers or mappings, as in config files, to objects."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, cast, get_args

from tensordict import NestedKey

from nmer_torchrl.checks import POSITIVE, SHARE, is_number
from nmer_torchrl.keys import as_keys
from nmer_torchrl.metrics import Euclidean, Mahalanobis, Metric, ProductNorm
from nmer_torchrl.neighbors import check_search
from nmer_torchrl.pairs import QuantileCap
from nmer_torchrl.transforms import (
    DensityFraction,
    ExponentialFraction,
    Fraction,
    Gate,
    LinearFraction,
    Schedule,
)

InterpolationName = Literal["beta", "uniform", "mean"]
MetricName = Literal["euclidean", "mahalanobis", "product"]
FractionName = Literal["linear", "exponential", "density"]

METRICS: dict[MetricName, Callable[..., Metric]] = {
    "euclidean": Euclidean,
    "mahalanobis": Mahalanobis,
    "product": ProductNorm,
}
"""The metrics by name. A `FeatureSpace` needs a function, so it is given as an object."""

# A mapping is `{name: {argument: value}}`.
MetricOption = MetricName | Mapping[MetricName, Mapping[str, Any] | None] | Metric
FractionOption = float | Mapping[FractionName, Mapping[str, Any]] | Schedule
DistanceOption = float | Mapping[Literal["quantile"], float] | QuantileCap


def make_metric(option: MetricOption) -> Metric:
    """Builds a metric from its name or `{name: {argument: value}}`; returns a metric unchanged.

    Examples:
        >>> make_metric("mahalanobis")
        Mahalanobis(shrinkage=0.01)
        >>> make_metric({"euclidean": {"weights": {"action": 0.5}}})
        Euclidean(weights={'action': 0.5})
    """
    if isinstance(option, Metric):
        return option
    return cast(Metric, _named("metric", option, METRICS))


def make_fraction(option: FractionOption) -> list[Gate]:
    """Builds the gate that mixes a share of the rows; returns no gate if the share is 1.

    Examples:
        >>> make_fraction({"linear": {"first": 1, "last": 0, "rows": 1e6}})
        [Fraction(LinearFraction(first=1, last=0, rows=1000000.0))]
    """
    if callable(option):
        return [Fraction(option)]
    if is_number(option):
        share = SHARE("fraction", option)
        return [] if share == 1 else [Fraction(share)]
    known: dict[str, Callable[..., Schedule]] = {
        "linear": LinearFraction,
        "exponential": ExponentialFraction,
        "density": DensityFraction,
    }
    return [Fraction(_named("fraction", option, known, "a number from 0 to 1, "))]


def make_cap(option: DistanceOption | None) -> float | QuantileCap | None:
    """Converts the option to a distance limit, as pairings accept it.

    Examples:
        >>> make_cap({"quantile": 0.9})
        QuantileCap(quantile=0.9, window=8192)
    """
    if option is None or isinstance(option, QuantileCap):
        return option
    if is_number(option):
        return cast(float, POSITIVE("max_distance", option))
    if not isinstance(option, Mapping) or set(option) != {"quantile"}:
        raise ValueError(
            f"max_distance={option!r} is not valid; give a distance above 0, or a share of pairs "
            "as in {'quantile': 0.9}."
        )
    return QuantileCap(option["quantile"])


def _named(name: str, option: Any, known: Mapping[Any, Callable[..., Any]], other: str = "") -> Any:
    """Builds an object from its name or `{name: {argument: value}}`."""
    if isinstance(option, str):
        option = {option: {}}
    if not isinstance(option, Mapping) or len(option) != 1:
        raise ValueError(
            f"{name}={option!r} is not valid; give {other}one of {', '.join(known)}, with "
            f"arguments as in {{{next(iter(known))!r}: {{...}}}}."
        )
    ((word, arguments),) = option.items()
    if word not in known:
        raise ValueError(f"Unknown {name} {word!r}; the known ones are {', '.join(known)}.")
    try:
        return known[word](**(arguments or {}))
    except TypeError as error:
        raise ValueError(f"{name}={word!r} with {dict(arguments or {})}: {error}.") from None


# Functions for `option`: from an option's name and value to the value that the method keeps.


def read_keys(name: str, value: Any) -> tuple[NestedKey, ...]:
    """Validates a sequence of keys."""
    return as_keys(value, name)


def read_key(name: str, value: Any) -> NestedKey:
    """Validates one key."""
    return as_keys([value], name)[0]


def read_interpolation(name: str, value: Any) -> InterpolationName:
    """Validates the name of an interpolation."""
    known = get_args(InterpolationName)
    if value not in known:
        raise ValueError(f"Unknown {name} {value!r}; the known ones are {', '.join(known)}.")
    return cast(InterpolationName, value)


def _keeps(check: Callable[[Any], object]) -> Callable[[str, Any], Any]:
    """Returns a function that runs the check and returns the value unchanged."""

    def read(name: str, value: Any) -> Any:
        check(value)
        return value

    return read


read_search = _keeps(check_search)
read_metric = _keeps(make_metric)
read_fraction = _keeps(make_fraction)
read_distance = _keeps(make_cap)
