"""Parts of a replay buffer by a word, a number or a mapping, as a config file has them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

from torchrl.data.replay_buffers import Sampler

from nmer_torchrl.metrics import Euclidean, Mahalanobis, Metric, ProductNorm
from nmer_torchrl.transforms import (
    DensityFraction,
    DistanceCap,
    ExponentialFraction,
    Fraction,
    Gate,
    LinearFraction,
    QuantileCap,
    Schedule,
)

MetricOption = str | Mapping[str, Any] | Metric
FractionOption = float | Mapping[str, Any] | Schedule
DistanceOption = float | Mapping[str, Any]

INTERPOLATIONS = ("beta", "uniform", "mean", "delta")


def make_metric(option: MetricOption) -> Metric:
    """A metric from itself, its name, or `{name: {argument: value}}`.

    Examples:
        >>> make_metric("mahalanobis")
        Mahalanobis(shrinkage=0.01)
        >>> make_metric({"euclidean": {"weights": {"action": 0.5}}})
        Euclidean(weights={'action': 0.5})
    """
    if isinstance(option, Metric):
        return option
    known = {"euclidean": Euclidean, "mahalanobis": Mahalanobis, "product": ProductNorm}
    return cast(Metric, _named("metric", option, known))


def make_gates(
    fraction: FractionOption, max_distance: DistanceOption | None, sampler: Sampler | None
) -> list[Gate]:
    """Gates for the share of rows to mix, and for the distance up to which they are.

    The sampler is for those that measure or count what is stored.

    Examples:
        >>> make_gates({"linear": {"first": 1, "last": 0, "rows": 1e6}}, None, None)
        [Fraction(LinearFraction(first=1, last=0, rows=1000000.0))]
    """
    gates: list[Gate] = []
    if max_distance is not None:
        gates.append(_make_cap(max_distance, sampler))
    if callable(fraction):
        gates.append(Fraction(fraction))
    elif isinstance(fraction, (str, Mapping)):
        known: dict[str, Callable[..., Schedule]] = {
            "linear": LinearFraction,
            "exponential": ExponentialFraction,
            "density": lambda **given: DensityFraction(_counts(sampler), **given),
        }
        gates.append(Fraction(_named("fraction", fraction, known)))
    elif not isinstance(fraction, (int, float)) or fraction != 1:
        gates.append(Fraction(fraction))
    return gates


def _counts(sampler: Sampler | None) -> Any:
    """A sampler that knows how many rows are stored."""
    if not hasattr(sampler, "stored"):
        raise ValueError(
            "fraction='density' goes by how many rows are stored, which no sampler was given to "
            "tell; make the buffer by make_replay_buffer."
        )
    return sampler


def _make_cap(max_distance: DistanceOption, sampler: Sampler | None) -> Gate:
    geometry = cast(Any, sampler)
    if isinstance(max_distance, Mapping):
        if set(max_distance) != {"quantile"}:
            raise ValueError(
                f"max_distance={dict(max_distance)!r}, but it is a distance, or a share of pairs "
                "as in {'quantile': 0.9}."
            )
        return QuantileCap(geometry, max_distance["quantile"])
    if isinstance(max_distance, bool) or not isinstance(max_distance, (int, float)):
        raise ValueError(
            f"max_distance={max_distance!r}, but it is a distance, or a share of pairs as in "
            "{'quantile': 0.9}."
        )
    return DistanceCap(geometry, max_distance)


def check_interpolation(given: Mapping[str, Any]) -> None:
    """Raises if there is no such interpolation, or if it has no use for another argument."""
    interpolation = given.get("interpolation", "beta")
    if interpolation not in INTERPOLATIONS:
        raise ValueError(
            f"Unknown interpolation {interpolation!r}; the known ones are "
            f"{', '.join(INTERPOLATIONS)}."
        )
    if interpolation in ("uniform", "mean") and "alpha" in given:
        raise ValueError(
            f"interpolation={interpolation!r} has no use for alpha={given['alpha']!r}, since its "
            "weights are of no Beta distribution of yours; leave one of the two out."
        )


def _named(name: str, option: Any, known: Mapping[str, Callable[..., Any]]) -> Any:
    """What a name, or `{name: {argument: value}}`, stands for."""
    if isinstance(option, str):
        option = {option: {}}
    if not isinstance(option, Mapping) or len(option) != 1:
        raise ValueError(
            f"{name}={option!r}; it is one of {', '.join(known)}, with arguments as in "
            f"{{{next(iter(known))!r}: {{...}}}}."
        )
    ((word, arguments),) = option.items()
    if word not in known:
        raise ValueError(f"Unknown {name} {word!r}; the known ones are {', '.join(known)}.")
    try:
        return known[word](**(arguments or {}))
    except TypeError as error:
        raise ValueError(f"{name}={word!r} with {dict(arguments or {})}: {error}.") from None


def check_tuned(given: Mapping[str, Any]) -> None:
    """Raises if alpha is to be tuned along with what that does not go with."""
    if not isinstance(given.get("tuned", False), bool):
        raise TypeError(f"tuned={given['tuned']!r}, but it is True or False.")
    for name in ("interpolation", "fraction"):
        if given.get("tuned") and given.get(name) not in (None, "beta", 1):
            raise ValueError(
                f"tuned=True has no use for {name}={given[name]!r}: it learns from pairs that are "
                "mixed by Beta weights, each of them; leave one of the two out."
            )
