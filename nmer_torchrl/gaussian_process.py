"""Gaussian process regression in batches of small neighborhoods."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nmer_torchrl.checks import POSITIVE


@dataclass(frozen=True)
class GaussianProcess:
    """Predicts outputs by Gaussian process regression from n points, in batches.

    The kernel is squared exponential.

    The kernel is `k(x, y) = exp(-|x - y|**2 / (2 l**2))`, where `l` is the lengthscale times the
    mean distance between the points of a neighborhood. With `K` the kernel between the points plus
    `noise_variance` on its diagonal, `k` the kernel between the points and the query, and `m` the
    mean of the outputs, the prediction is `m + k^T K^-1 (Y - m)`. Its variance is
    `1 - k^T K^-1 k`, as a share of the prior variance of the outputs. All computations are in
    float64, with one Cholesky factor `[n, n]` for each neighborhood.

    Args:
        lengthscale: Length scale of the kernel, in mean distances between points. Larger values
            make predictions more linear.
        noise_variance: Variance of the noise in outputs, as a share of their prior variance. It
            also separates duplicate points.
        max_variance: Variance, from 0 to 1, above which a prediction should not be used.

    Examples:
        >>> import torch
        >>> x = torch.linspace(0, 1, 9).reshape(1, 9, 1)
        >>> process = GaussianProcess(noise_variance=1e-6)
        >>> mean, variance = process.predict(x, x**2, torch.tensor([[0.3]]))
        >>> round(mean.item(), 3), variance.item() < 1e-3
        (0.09, True)
    """

    lengthscale: float = 2.0
    noise_variance: float = 1e-4
    max_variance: float = 1.0

    def __post_init__(self) -> None:
        POSITIVE("lengthscale", self.lengthscale)
        POSITIVE("noise_variance", self.noise_variance)
        if not 0 < self.max_variance <= 1:
            raise ValueError(
                f"max_variance={self.max_variance!r} is out of range; give a share of the prior "
                "variance of the outputs, above 0 and at most 1 (1 uses every prediction)."
            )

    def predict(self, points: Tensor, outputs: Tensor, query: Tensor) -> tuple[Tensor, Tensor]:
        """Predicts outputs `[*B, e]` at queries `[*B, d]` from points and their outputs.

        Points are `[*B, n, d]`, their outputs `[*B, n, e]`. Also returns the variance `[*B]`. Both
        are NaN where a non-finite number prevents a prediction.
        """
        outputs, n = outputs.double(), points.shape[-2]
        squared = _squared_distances(torch.cat([points, query.unsqueeze(-2)], -2).double())
        among = squared[..., :n, :n]
        spread = among.sqrt().sum((-2, -1)) / max(n * (n - 1), 1) * self.lengthscale
        factor = -0.5 / torch.where(spread > 0, spread, 1.0).square()[..., None, None]
        kernel = (among * factor).exp()
        kernel.diagonal(dim1=-2, dim2=-1).add_(self.noise_variance)
        near = (squared[..., :n, n:] * factor).exp()
        mean = outputs.mean(-2, keepdim=True)
        root, failed = torch.linalg.cholesky_ex(kernel)
        weights = torch.cholesky_solve(near, root)
        predicted = (mean + weights.mT @ (outputs - mean)).squeeze(-2)
        variance = (1.0 - (weights * near).sum((-2, -1))).clamp_min(0.0)
        bad = failed != 0
        return (
            predicted.masked_fill(bad.unsqueeze(-1), torch.nan),
            variance.masked_fill(bad, torch.nan),
        )


def _squared_distances(points: Tensor) -> Tensor:
    """Returns squared distances `[*B, n, n]` of points `[*B, n, d]`, from products.

    The products are relative to the first point.
    """
    points = points - points[..., :1, :]
    products = points @ points.mT
    norms = products.diagonal(dim1=-2, dim2=-1)
    return (norms.unsqueeze(-1) + norms.unsqueeze(-2) - 2.0 * products).clamp_min(0.0)
