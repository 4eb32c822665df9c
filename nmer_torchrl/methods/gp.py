"""Mixup of inputs with outcomes predicted by a Gaussian process."""

from __future__ import annotations

from dataclasses import dataclass

from nmer_torchrl.checks import COUNT, POSITIVE, Number
from nmer_torchrl.gaussian_process import GaussianProcess
from nmer_torchrl.methods.base import option
from nmer_torchrl.methods.groups import Folding, Near
from nmer_torchrl.methods.options import make_metric
from nmer_torchrl.samplers import NeighborhoodSampler
from nmer_torchrl.transforms import GaussianProcessMixup


@dataclass(frozen=True, kw_only=True)
class GP(Near[NeighborhoodSampler], Folding[NeighborhoodSampler]):
    """Mixes observation and action, and predicts reward and next observation for the mix.

    Inputs are mixed as in `Neighborhood`. Outcomes are predicted from the anchor and its
    neighbors by `m + k^T K^-1 (Y - m)`, with variance `1 - k^T K^-1 k` (see `GaussianProcess`).

    The options are those below and those of `Keyed`, `Ending`, `Near`, `Gated` and `Folding`.

    Source: this project, based on the Gaussian processes in the code that R. Sander et al. released
    with *Neighborhood mixup experience replay*, L4DC, 2022.

    Keyword Args:
        k: Number of neighbors.
        lengthscale: Length scale of the kernel, in mean distances between neighbors.
        noise_variance: Variance of outcomes at one input, as a share of their total variance.
        max_variance: Rows whose prediction has a larger variance are not mixed.

    Examples:
        >>> from nmer_torchrl import make_replay_buffer
        >>> method = GP(max_variance=0.1)
        >>> make_replay_buffer(method, capacity=1_000, batch_size=32).transform[0].process
        GaussianProcess(lengthscale=2.0, noise_variance=0.0001, max_variance=0.1)
    """

    k: int = option(10, COUNT)
    lengthscale: float = option(GaussianProcess.lengthscale, POSITIVE)
    noise_variance: float = option(GaussianProcess.noise_variance, POSITIVE)
    max_variance: float = option(GaussianProcess.max_variance, Number(above=0, most=1))

    def __post_init__(self) -> None:
        """Raises an error if the metric has no Euclidean embedding."""
        super().__post_init__()
        if not make_metric(self.metric).embeds:
            raise ValueError(
                f"The method 'gp' needs a metric with a Euclidean embedding, but "
                f"metric={self.metric!r} has none; use 'euclidean' or 'mahalanobis'."
            )

    def make_sampler(self, capacity: int) -> NeighborhoodSampler:
        """Builds the sampler of neighborhoods."""
        return NeighborhoodSampler(self.k, **self.search_options())

    def make_transform(self, sampler: NeighborhoodSampler) -> GaussianProcessMixup:
        """Builds the transform that mixes inputs and predicts outcomes."""
        return GaussianProcessMixup(
            self.alpha,
            process=GaussianProcess(self.lengthscale, self.noise_variance, self.max_variance),
            keys=self.keys,
            value_keys=self.value_keys,
            terminated_key=self.terminated_key,
            gates=self.make_gates(),
            anchor_keys=self.anchor_keys,
        )
