"""Tracks mean and standard deviation of a set of points as points are added and removed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nmer_torchrl.functional import finite_rows

# A NumPy array on the CPU, where operations on small arrays take a quarter of the time; a tensor on
# any other device. Both use the same operations in the same order.
Array = Any

_SPLIT = 2.0**27 + 1.0  # Dekker's constant for float64
_CONSTANT = 1e-8  # a standard deviation below this share of the magnitude is rounding
_LEAST = 1e-30  # below this, the reciprocal is too large for searches in float32
_CANCELS = 1e-3  # a variance below this share of the squared mean needs the exact formula
_ROUNDING = 64 * 2.0**-106  # relative error of a sum in pairs of float64
_CHUNK = 512  # number of rows that fit into a processor's cache
_DEVICE_CHUNK = 65_536
DOUBT = 1e-9  # relative rounding error of a variance above which it is recomputed
_LOOK = 256  # writes between two checks on a device; each check waits for the device


def recompute_if_doubtful(statistics: Any, stored: Callable[[], Tensor]) -> None:
    """Recomputes statistics from the stored points `[n, d]` if the rounding error is too large."""
    if statistics.doubt > DOUBT:
        statistics.recompute(stored())


def looks_every(device: torch.device) -> int:
    """Returns the number of writes between two checks on a device; 1 where checks do not wait."""
    return 1 if device.type == "cpu" else _LOOK


class RunningStandardizer:
    """Tracks the population mean and standard deviation of a changing set of points.

    The sums have about 32 digits (pairs of float64), so that removed points leave no error behind:
    after millions of updates the result equals a recomputation from the remaining points, even when
    widely spread data was replaced by narrow data. If that is not enough, such as after a point of
    1e30 was added and removed, `doubt` is large: call `recompute` with the current points.

    Args:
        d: Number of dimensions.
        device: Device of the sums. Default: the CPU. If it is the device of the points, `replace`,
            `mean`, `std` and `scale` never wait for it.

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

    def __init__(self, d: int, device: torch.device | None = None) -> None:
        if d < 1:
            raise ValueError(f"RunningStandardizer needs at least one dimension, but d={d}.")
        self.d = d
        self.device = torch.device("cpu") if device is None else device
        self._xp: Any = np if self.device.type == "cpu" else torch
        self.clear()

    def clear(self) -> None:
        """Forgets all points."""
        self._count = self._zeros()  # number of points
        self._shift: Array | None = None  # the mean of the first points
        self._sum = self._zeros(2, self.d)  # rows: sum of y and sum of y**2, with y = x - shift
        self._rest = self._zeros(2, self.d)  # the parts of these sums beyond float64
        self._error = self._zeros(self.d)  # bound on the error of the sum of y**2
        self._moments: tuple[Array, Array] | None = None  # cached mean and std
        self._scale: Tensor | None = None  # cached `scale`
        self._unchecked = 0  # calls that removed points since rounding was last checked

    @property
    def count(self) -> int:
        """Returns the number of points."""
        return int(self._count)

    def update(self, added: Tensor, removed: Tensor | None = None) -> None:
        """Adds the points `[n, d]` and removes `[m, d]` points that were added before."""
        parts = {"added": added} if removed is None else {"added": added, "removed": removed}
        for name, points in parts.items():
            if points.ndim != 2 or points.shape[1] != self.d:
                raise ValueError(
                    f"RunningStandardizer takes [n, {self.d}] points, "
                    f"but {name} has shape {tuple(points.shape)}."
                )
            if not finite_rows(points).all():
                raise ValueError(
                    "RunningStandardizer was given a non-finite number; leave such points out."
                )
        there, gone = self.count + len(added), 0 if removed is None else len(removed)
        if gone > there:
            raise ValueError(f"Cannot remove {gone} points from a set of {there}.")
        self.replace(added, added[:0] if removed is None else removed)

    def replace(self, points: Tensor, before: Tensor) -> None:
        """Adds the points `[n, d]` and removes `[m, d]` points that were added before.

        Rows with a non-finite number are ignored in both. The arguments are not checked.
        """
        size, step = max(len(points), len(before)), _CHUNK if self._xp is np else _DEVICE_CHUNK
        for start in range(0, size, step):
            part = slice(start, start + step)
            self._accumulate(points[part], before[part])
        self._moments = self._scale = None
        self._unchecked += len(before) > 0

    def recompute(self, points: Tensor) -> None:
        """Computes everything again from the points `[n, d]`; ignores non-finite rows."""
        self.clear()
        self.replace(points, points[:0])

    def settle(self, stored: Callable[[], Tensor]) -> None:
        """Recomputes from the stored points `[n, d]` if the rounding error is too large.

        Call it after `replace`. On a device it checks every 256th removal only; a check waits.
        """
        if self._unchecked >= looks_every(self.device):
            self._unchecked = 0
            recompute_if_doubtful(self, stored)

    @property
    def doubt(self) -> float:
        """Returns a bound on the relative rounding error of any variance.

        For a constant dimension it is relative to the smallest variance that would count.
        """
        mean, std = self._mean_and_std()
        least = self._larger(self._larger(std, _CONSTANT * self._xp.abs(mean)), _LEAST)
        return float((self._error / least**2).max() / self._larger(self._count, 1.0))

    def _accumulate(self, added: Tensor, removed: Tensor) -> None:
        xp, n = self._xp, len(added)
        points = torch.cat([added, removed]) if len(removed) else added
        x: Array = points.detach().to(self.device, torch.float64)
        x = x.numpy() if xp is np else x
        there = (x - x).sum(-1) == 0  # infinity minus itself is NaN
        if self._shift is None:
            self._shift = self._center(x, there[:, None])
        if xp is torch or not there.all():
            x = xp.where(there[:, None], x, self._shift)  # adds zero to the sums
        values = xp.stack([x, x], 1)
        rests = xp.empty_like(values)
        y, rest = _two_sum(x, -self._shift)
        values[:, 0], rests[:, 0] = y, rest
        values[:, 1], rests[:, 1] = _exact_product(y, y)
        rests[:, 1] += 2.0 * y * rest
        self._error = self._error + _ROUNDING * (xp.abs(self._sum[1]) + values[:, 1].sum(0))
        self._count = self._count + there[:n].sum()
        if len(removed):
            self._count = self._count - there[n:].sum()
            values[n:] *= -1.0
            rests[n:] *= -1.0
        total, rest = _exact_sum(values, rests)
        self._sum, error = _two_sum(self._sum, total)
        self._rest = self._rest + error + rest

    def _center(self, x: Array, there: Array) -> Array:
        """Returns the mean `[d]` of the finite rows, or 0 if there are none."""
        counted = self._xp.where(there, x, 0.0)
        return _exact_sum(counted, 0.0 * counted)[0] / self._larger(1.0 * there.sum(), 1.0)

    def _zeros(self, *shape: int) -> Array:
        if self._xp is np:
            return np.zeros(shape)
        return torch.zeros(shape, dtype=torch.float64, device=self.device)

    def _tensor(self, array: Array) -> Tensor:
        return torch.from_numpy(array) if self._xp is np else array

    def _larger(self, a: Array, b: Array | float) -> Array:
        return np.maximum(a, b) if self._xp is np else torch.where(a > b, a, b)

    @property
    def mean(self) -> Tensor:
        """Returns the mean `[d]` in float64; zero without points."""
        return self._tensor(self._mean_and_std()[0] + 0.0)

    @property
    def std(self) -> Tensor:
        """Returns the population standard deviation `[d]` in float64; 0 for constant dimensions."""
        return self._tensor(self._mean_and_std()[1] + 0.0)

    @property
    def scale(self) -> Tensor:
        """Returns `1 / std`, `[d]` in float64, and 1 for a constant dimension.

        It is the same tensor until an update. For a constant above 1e8 in magnitude it is the
        reciprocal of 1e-8 times the magnitude, the smallest standard deviation that would count.
        Otherwise rounding errors there would outweigh all other dimensions, or overflow.
        """
        if self._scale is None:
            mean, std = self._mean_and_std()
            constant = self._larger(_CONSTANT * self._xp.abs(mean), 1.0)
            self._scale = self._tensor(1.0 / self._xp.where(std == 0, constant, std))
        return self._scale

    def _mean_and_std(self) -> tuple[Array, Array]:
        """Returns cached mean and standard deviation `[d]`, which must not be changed in place."""
        if self._moments is None:
            self._moments = self._compute_moments()
        return self._moments

    def _compute_moments(self) -> tuple[Array, Array]:
        xp, shift = self._xp, self._shift
        if shift is None or (xp is np and not self._count):
            return self._zeros(self.d), self._zeros(self.d)
        n = self._larger(self._count, 1.0)
        (first, second), (first_rest, second_rest) = self._sum, self._rest
        # After large numbers were added and removed, the result may be in the rests.
        offset = (first + first_rest) / n
        square = offset * offset
        variance = (second + second_rest) / n - square
        quick = (variance > _CANCELS * square).all()  # no two terms are nearly equal
        mean, std = shift + offset, variance
        if xp is torch or not quick:
            exact_mean, exact_variance = self._exact_moments(n)
            mean, std = xp.where(quick, mean, exact_mean), xp.where(quick, std, exact_variance)
        std = xp.sqrt(std)
        constant = std <= self._larger(_CONSTANT * (xp.abs(mean) + std), _LEAST)
        if xp is np:
            std[constant] = 0.0
            return mean, std
        none = self._count < 1
        return torch.where(none, 0.0, mean), torch.where(constant | none, 0.0, std)

    def _exact_moments(self, n: Array) -> tuple[Array, Array]:
        """Returns mean and variance without the cancellation of the simple formula."""
        (first, second), (first_rest, second_rest) = self._sum, self._rest
        offset = first / n
        back, back_rest = _exact_product(offset, n)
        mean, error = _two_sum(self._shift, offset)
        mean = mean + (error + (((first - back) - back_rest) + first_rest) / n)
        # n**2 * variance = n * sum(y**2) - sum(y)**2
        left, left_rest = _exact_product(second, n)
        right, right_rest = _exact_product(first, first)
        rest = (left_rest + n * second_rest) - (right_rest + 2.0 * first * first_rest)
        return mean, self._larger((left - right) + rest, 0.0) / n / n


def _two_sum(a: Array, b: Array) -> tuple[Array, Array]:
    """Returns `a + b` rounded, and the exact rounding error (Knuth)."""
    total = a + b
    shadow = total - a
    return total, (a - (total - shadow)) + (b - shadow)


def _exact_product(a: Array, b: Array) -> tuple[Array, Array]:
    """Returns `a * b` rounded, and the exact rounding error (Dekker)."""
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
    """Sums `values + rests` over axis 0 pairwise; returns the rounded sum and its rest."""
    while len(values) > 1:
        half = len(values) // 2
        total, error = _two_sum(values[:half], values[half : 2 * half])
        rests_total = rests[:half] + rests[half : 2 * half] + error
        if len(values) % 2:
            join = np.concatenate if isinstance(values, np.ndarray) else torch.cat
            total = join([total, values[-1:]])
            rests_total = join([rests_total, rests[-1:]])
        values, rests = total, rests_total
    return values[0], rests[0]
