"""Tracks the correlation of a set of points as points are added and removed."""

from __future__ import annotations

import torch
from torch import Tensor

from nmer_torchrl.functional import finite_rows
from nmer_torchrl.tracking.standardize import RunningStandardizer

_EPS = torch.finfo(torch.float64).eps
_CHUNK = 65_536


class RunningCovariance:
    """Tracks mean, standard deviation and correlation of a changing set of points.

    Mean and standard deviation are those of `RunningStandardizer`. The products of dimensions are
    summed only in float64, since more digits would cost too much, with a bound on the accumulated
    rounding error. When `doubt` is large, call `recompute` with the current points. For data of a
    constant magnitude this is needed once in millions of updates; it is needed at once when widely
    spread data was replaced by narrow data. All state is on the CPU, and points are copied there.

    Args:
        d: Number of dimensions.

    Examples:
        >>> import torch
        >>> stats = RunningCovariance(2)
        >>> points = torch.tensor([[0.0, 0.0], [1.0, 2.0], [9.0, 0.0]])
        >>> stats.replace(points, points[:0])
        >>> stats.replace(torch.tensor([[2.0, 4.0]]), points[2:])
        >>> stats.correlation()
        tensor([[1., 1.],
                [1., 1.]], dtype=torch.float64)
    """

    def __init__(self, d: int) -> None:
        self.moments = RunningStandardizer(d)
        self._clear()

    def _clear(self) -> None:
        d = self.moments.d
        self._shift: Tensor | None = None
        self._products = torch.zeros(d, d, dtype=torch.float64)  # sum of y y^T, y = x - shift
        self._error = torch.zeros(d, dtype=torch.float64)  # bound on the error of the sums of y**2

    @property
    def count(self) -> int:
        """Returns the number of points."""
        return self.moments.count

    def replace(self, points: Tensor, before: Tensor) -> None:
        """Adds the points `[n, d]` and removes `[m, d]` points that were added before.

        Rows with a non-finite number are ignored in both.
        """
        self.moments.replace(points, before)
        self._accumulate(points, 1.0)
        self._accumulate(before, -1.0)

    def recompute(self, points: Tensor) -> None:
        """Computes everything again from the points `[n, d]`; ignores non-finite rows."""
        self.moments.recompute(points)
        self._clear()
        self._shift = self.moments.mean
        self._accumulate(points, 1.0)

    def _accumulate(self, points: Tensor, sign: float) -> None:
        points = points.detach().cpu()
        for chunk in points[finite_rows(points)].split(_CHUNK):
            if not len(chunk):
                continue
            x = chunk.double()
            if self._shift is None:
                self._shift = x.mean(0)
            y = x - self._shift
            before = self._products.diagonal().abs()
            self._products.addmm_(y.T, y, alpha=sign)
            self._error += _EPS * (before + (len(y) + 1) * y.square().sum(0))

    @property
    def doubt(self) -> float:
        """Returns a bound on the rounding error in any correlation and in the moments."""
        std, varies = self.moments.std, self.moments.std > 0
        if not varies.any() or self._shift is None:
            return self.moments.doubt
        offset = self.moments.mean - self._shift
        error = self._error / self.count + _EPS * offset.square()
        return max(float((error[varies] / std[varies].square()).max()), self.moments.doubt)

    def correlation(self) -> Tensor:
        """Returns the correlation `[d, d]`, float64; constant dimensions have none with others."""
        std = self.moments.std
        if self.count == 0 or self._shift is None:
            return torch.eye(len(std), dtype=torch.float64)
        offset = self.moments.mean - self._shift
        scale = torch.where(std > 0, 1.0 / std, 0.0)
        covariance = self._products / self.count - torch.outer(offset, offset)
        correlation = (covariance * torch.outer(scale, scale)).clamp_(-1.0, 1.0)
        return correlation.fill_diagonal_(1.0)
