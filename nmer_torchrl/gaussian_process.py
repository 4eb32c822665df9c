"""Gaussian process regression within small neighborhoods, many at a time."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nmer_torchrl.checks import POSITIVE


@dataclass(frozen=True)
class GaussianProcess:
    """Regression from n points, with a squared exponential kernel, for each of a batch.

    With `l` the lengthscale times the mean distance between the points of a neighborhood,
    `k(x, y) = exp(-|x - y|**2 / (2 l**2))`, `K` the kernel between the points plus `noise_variance`
    on its diagonal, `k` that between them and the query, and `m` the mean of their outputs, the
    prediction is `m + k^T K^-1 (Y - m)`, and its variance `1 - k^T K^-1 k`, as a share of the
    variance that outputs have before any is known. All is float64: one Cholesky factor of `[n, n]`
    to each.

    Args:
        lengthscale: Over how many mean distances outputs change; more makes them more linear.
        noise_variance: Variance of what outputs have of their own, as a share; keeps duplicates
            apart.
        max_variance: Variance above which a prediction is not to be used, from 0 to 1.

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
                f"max_variance={self.max_variance!r}, but it is a share of the variance that "
                "outputs have before any is known: above 0, and 1 to use every prediction."
            )

    def predict(self, points: Tensor, outputs: Tensor, query: Tensor) -> tuple[Tensor, Tensor]:
        """Points `[*B, n, d]` and outputs `[*B, n, e]` to outputs `[*B, e]` at queries `[*B, d]`.

        And the variance `[*B]`. Where there is no prediction, since something was not finite, both
        are NaN.
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
    """Between all of `[*B, n, d]`, `[*B, n, n]`; by products, relative to the first of them."""
    points = points - points[..., :1, :]
    products = points @ points.mT
    norms = products.diagonal(dim1=-2, dim2=-1)
    return (norms.unsqueeze(-1) + norms.unsqueeze(-2) - 2.0 * products).clamp_min(0.0)
