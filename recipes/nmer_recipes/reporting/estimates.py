"""Computes statistics over seeds and tasks with rliable's bootstrap.

rliable's own statistics are rewritten as a few NumPy calls. Score matrices are `[runs, tasks]`.
Intervals are 95 % percentile intervals of a stratified bootstrap: the runs of each task are
resampled with replacement, and the tasks stay fixed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from rliable import library
from scipy.stats import t

Scores = NDArray[np.float64]
REPS = 2_000  # bootstrap samples
FEW = 10  # seeds below which no ranking of methods is settled
LEAST = 3  # seeds below which a probability or a normalized score means nothing


@dataclass(frozen=True)
class Estimate:
    """A number with its interval; the bounds are NaN if there are too few runs to resample."""

    value: float
    low: float = np.nan
    high: float = np.nan


@dataclass(frozen=True, eq=False)
class Profile:
    """The share of runs with a score above each of `thresholds`, and its interval; all `[n]`."""

    thresholds: Scores
    share: Scores
    low: Scores
    high: Scores


@contextmanager
def _seeded() -> Iterator[None]:
    """Seeds NumPy's global generator, which rliable always draws from."""
    state = np.random.get_state()
    np.random.seed(0)
    try:
        yield
    finally:
        np.random.set_state(state)


def _estimate(function: Callable[..., float], reps: int, *scores: Scores) -> Estimate:
    value = float(function(*scores))
    if min(len(matrix) for matrix in scores) < 2:
        return Estimate(value)
    given = scores[0] if len(scores) == 1 else list(scores)
    with _seeded():
        _, intervals = library.get_interval_estimates(
            {"": given}, lambda *drawn: np.array([function(*drawn)]), reps=reps
        )
    low, high = intervals[""][:, 0]
    return Estimate(value, float(low), float(high))


def interquartile_mean(scores: Scores, *, reps: int = REPS) -> Estimate:
    """Returns the mean of the middle half of all runs on all tasks."""
    return _estimate(_trimmed_mean, reps, scores)


def _trimmed_mean(scores: Scores) -> float:
    """Computes rliable's `aggregate_iqm` without SciPy's checks, which take most of its time."""
    count = scores.size
    cut = int(0.25 * count)
    middle = np.partition(scores.ravel(), (cut, count - cut - 1))[cut : count - cut]
    return float(middle.mean())


def improvement(scores: Scores, baseline: Scores, *, reps: int = REPS) -> Estimate:
    """Returns the probability that a run beats a run of the baseline, averaged over tasks.

    A tie counts as half. `reps=0` leaves out the interval, which takes seconds.
    """
    if not reps:
        return Estimate(_probability(scores, baseline))
    return _estimate(_probability, reps, scores, baseline)


def _probability(scores: Scores, baseline: Scores) -> float:
    """Computes `rliable.metrics.probability_of_improvement` for all tasks in one call."""
    pairs = scores[:, None], baseline[None]
    wins = np.greater(*pairs).sum((0, 1)) + np.equal(*pairs).sum((0, 1)) / 2
    return float(wins.mean() / (len(scores) * len(baseline)))


def mean_difference(differences: Scores) -> Estimate:
    """Returns the mean of paired differences `[n]`, with Student's interval."""
    mean, n = float(differences.mean()), len(differences)
    if n < 2:
        return Estimate(mean)
    half = float(t.ppf(0.975, n - 1) * differences.std(ddof=1) / np.sqrt(n))
    return Estimate(mean, mean - half, mean + half)


def profiles(scores: Mapping[str, Scores], *, reps: int = REPS) -> dict[str, Profile]:
    """Returns each method's profile over normalized scores.

    For single runs, the interval is the share itself.
    """
    thresholds = np.linspace(0, 1, 101)
    with _seeded():
        shares, intervals = library.create_performance_profile(
            dict(scores), thresholds, custom_profile_func=_shares_above, reps=reps
        )
    return {name: Profile(thresholds, shares[name], *intervals[name]) for name in scores}


def _shares_above(scores: Scores, thresholds: Scores) -> Scores:
    """Computes the same as rliable's own, which calls a function for each threshold."""
    return np.asarray((scores[..., None] > thresholds).mean((0, 1)))


def normalize(scores: Mapping[str, Scores]) -> dict[str, Scores]:
    """Scales each task to 0 for the lowest and 1 for the highest run of all methods.

    All are 0.5 if all runs are equal. Returns differ by orders of magnitude between tasks, and may
    be negative, so they can only be pooled after scaling.
    """
    low = np.min([matrix.min(0) for matrix in scores.values()], axis=0)
    spread = np.max([matrix.max(0) for matrix in scores.values()], axis=0) - low
    return {
        name: np.where(spread > 0, (matrix - low) / np.where(spread > 0, spread, 1), 0.5)
        for name, matrix in scores.items()
    }


def change(mean: float, reference: float) -> float:
    """Returns the paper's change in percent against NMER: `100 * (mean - reference) / reference`.

    It is at least -100, which is needed to reproduce the paper's rows for methods with negative
    returns. It is NaN if the reference is not positive, since a percentage of it means nothing.
    """
    if not reference > 0:
        return np.nan
    return max(100 * (mean - reference) / reference, -100.0)
