"""Mean and spread of what is stored now, under additions and removals."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

# NumPy rather than torch, since a small array costs it a quarter of the time per operation.
Array = np.ndarray[Any, np.dtype[np.float64]]

_SPLIT = 2.0**27 + 1.0  # Dekker's constant for float64
_CONSTANT = 1e-8  # a spread below this share of the magnitude is rounding
_LEAST = 1e-30  # a spread below this has a reciprocal that searches in float32 cannot multiply by
_CANCELS = 1e-3  # a share of the square of the mean below which a variance asks for more care
_ROUNDING = 64 * 2.0**-106  # of a sum in pairs of float64, as a share of what went into it
_CHUNK = 65_536
DOUBT = 1e-9  # rounding in a variance, as a share of it, after which to compute it anew


class RunningStandardizer:
    """Population mean and standard deviation of a changing set of points, per dimension.

    The sums behind them are kept to about 32 digits (pairs of float64), so that what is added and
    later removed leaves nothing behind: after millions of updates the result equals a recomputation
    from the points that remain, even when wide data has been replaced by narrow data. Where even
    that is not enough, since a point of 1e30 has come and gone, `doubt` says so: then `recompute`
    from the points that are there.

    Args:
        d: Number of dimensions.

    Examples:
        >>> import torch
        >>> stats = RunningStandardizer(1)
        >>> stats.update(torch.tensor([[0.0], [2.0], [100.0]]))
        >>> stats.update(torch.tensor([[4.0]]), removed=torch.tensor([[100.0]]))
        >>> stats.count, stats.mean.item()
        (3, 2.0)
        >>> round(stats.std.item() ** 2, 6)
        2.666667
    """

    def __init__(self, d: int) -> None:
        if d < 1:
            raise ValueError(f"RunningStandardizer needs at least one dimension, but d={d}.")
        self.d = d
        self.clear()

    def clear(self) -> None:
        """Forgets everything."""
        self.count = 0
        self._shift: Array | None = None  # a point near the data, set by the first update
        self._sum = np.zeros((2, self.d))  # rows: sum of y and sum of y**2, with y = x - shift
        self._rest = np.zeros((2, self.d))  # what float64 could not hold of them
        self._error = np.zeros(self.d)  # of the sum of y**2, at worst
        self._moments: tuple[Array, Array] | None = None  # mean and std, once they were asked for
        self._scale: Tensor | None = None  # what `scale` returns, likewise

    def update(self, added: Tensor, removed: Tensor | None = None) -> None:
        """Adds the points `[n, d]` and takes out `[m, d]` points that were added before."""
        parts = {"added": added} if removed is None else {"added": added, "removed": removed}
        for name, points in parts.items():
            if points.ndim != 2 or points.shape[1] != self.d:
                raise ValueError(
                    f"RunningStandardizer takes [n, {self.d}] points, "
                    f"but {name} has shape {tuple(points.shape)}."
                )
        count = self.count + len(added) - (0 if removed is None else len(removed))
        if count < 0:
            raise ValueError(
                f"{self.count + len(added) - count} points are to be removed, "
                f"but only {self.count + len(added)} are there."
            )
        before = self._shift, self._sum, self._rest, self._error
        try:
            for name, points in parts.items():
                for start in range(0, len(points), _CHUNK):
                    chunk = points[start : start + _CHUNK]
                    self._accumulate(chunk, 1.0 if name == "added" else -1.0)
        except ValueError:
            self._shift, self._sum, self._rest, self._error = before
            raise
        self.count = count
        self._moments = self._scale = None

    def recompute(self, points: Tensor) -> None:
        """Takes the points `[n, d]` that are there anew."""
        self.clear()
        self.update(points)

    @property
    def doubt(self) -> float:
        """A bound on the rounding in any variance, as a share of it or of what counts as none."""
        mean, std = self._mean_and_std()
        least = np.maximum(np.maximum(std, _CONSTANT * np.abs(mean)), _LEAST)
        return float((self._error / least**2).max()) / max(self.count, 1)

    def _accumulate(self, points: Tensor, sign: float) -> None:
        x: Array = points.detach().cpu().numpy().astype(np.float64)
        if not np.isfinite(x).all():
            raise ValueError(
                "RunningStandardizer was given a non-finite number; leave such points out."
            )
        if self._shift is None:
            self._shift = x.mean(0)
        values = np.empty((len(x), 2, self.d))
        rests = np.empty_like(values)
        y, rest = _two_sum(x, -self._shift)
        values[:, 0], rests[:, 0] = y, rest
        values[:, 1], rests[:, 1] = _exact_product(y, y)
        rests[:, 1] += 2.0 * y * rest
        total, rest = _exact_sum(values, rests)
        self._error = self._error + _ROUNDING * (np.abs(self._sum[1]) + total[1])
        self._sum, error = _two_sum(self._sum, sign * total)
        self._rest = self._rest + error + sign * rest

    @property
    def mean(self) -> Tensor:
        """`[d]`, float64; zero while nothing is there."""
        return torch.from_numpy(self._mean_and_std()[0])

    @property
    def std(self) -> Tensor:
        """`[d]`, float64, of the population; exactly zero where a dimension counts as constant."""
        return torch.from_numpy(self._mean_and_std()[1])

    @property
    def scale(self) -> Tensor:
        """`[d]`, float64: `1 / std`, and 1 for a constant dimension; one tensor until an update.

        Where a constant is above 1e8 in magnitude it is the reciprocal of 1e-8 of that, the least
        spread that would count: what rounding has left there would outweigh all else, or overflow.
        """
        if self._scale is None:
            mean, std = self._mean_and_std()
            constant = std == 0
            std[constant] = np.maximum(_CONSTANT * np.abs(mean[constant]), 1.0)
            self._scale = torch.from_numpy(1.0 / std)
        return self._scale

    def _mean_and_std(self) -> tuple[Array, Array]:
        if self._moments is None:
            self._moments = self._compute_moments()
        mean, std = self._moments
        return mean.copy(), std.copy()

    def _compute_moments(self) -> tuple[Array, Array]:
        if self.count == 0 or self._shift is None:
            return np.zeros(self.d), np.zeros(self.d)
        n = float(self.count)
        (first, second), (first_rest, second_rest) = self._sum, self._rest
        # After large numbers have come and gone, what is left may be in the rests.
        offset = (first + first_rest) / n
        square = offset * offset
        variance = (second + second_rest) / n - square
        if (variance > _CANCELS * square).all():  # no two terms are nearly equal
            mean, std = self._shift + offset, np.sqrt(variance)
        else:
            offset = first / n
            back, back_rest = _exact_product(offset, np.float64(n))
            mean, error = _two_sum(self._shift, offset)
            mean = mean + (error + (((first - back) - back_rest) + first_rest) / n)
            # n**2 * variance = n * sum(y**2) - sum(y)**2
            left, left_rest = _exact_product(second, np.float64(n))
            right, right_rest = _exact_product(first, first)
            rest = (left_rest + n * second_rest) - (right_rest + 2.0 * first * first_rest)
            std = np.sqrt(np.maximum((left - right) + rest, 0.0)) / n
        std[std <= np.maximum(_CONSTANT * (np.abs(mean) + std), _LEAST)] = 0.0
        return mean, std


def _two_sum(a: Array, b: Array) -> tuple[Array, Array]:
    """`a + b` rounded, and exactly what the rounding dropped (Knuth)."""
    total = a + b
    shadow = total - a
    return total, (a - (total - shadow)) + (b - shadow)


def _exact_product(a: Array, b: Array | np.float64) -> tuple[Array, Array]:
    """`a * b` rounded, and exactly what the rounding dropped (Dekker)."""
    product = a * b
    a_high, a_low = _split(a)
    b_high, b_low = (a_high, a_low) if a is b else _split(b)
    rest = a_low * b_low - (((product - a_high * b_high) - a_low * b_high) - a_high * b_low)
    return product, rest


def _split(a: Any) -> tuple[Any, Any]:
    scaled = _SPLIT * a
    high = scaled - (scaled - a)
    return high, a - high


def _exact_sum(values: Array, rests: Array) -> tuple[Array, Array]:
    """Sum over axis 0 of `values + rests` as a rounded sum and its rest, by halves."""
    while len(values) > 1:
        half = len(values) // 2
        total, error = _two_sum(values[:half], values[half : 2 * half])
        rests = np.concatenate([rests[:half] + rests[half : 2 * half] + error, rests[2 * half :]])
        values = np.concatenate([total, values[2 * half :]])
    return values[0], rests[0]
