"""A metric over learned or computed features of rows."""

from __future__ import annotations

from collections.abc import Callable

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from nmer_torchrl.metrics.base import Metric, Space, Widths
from nmer_torchrl.metrics.euclidean import Euclidean
from nmer_torchrl.neighbors import SearchOption


class FeatureSpace(Metric):
    """Measures distances between features of rows, such as those of a learned encoder.

    This is a metric, not a `Space`. The function is called without gradients on stored rows, a
    `TensorDict` of batch size `[n]`, and returns points `[n, f]`. It is called once for each row
    that is written. When the function itself changes, such as after an encoder was trained, call
    `sampler.refresh()` to apply it to all rows again.

    Args:
        feature: The function or module that maps rows to points.
        metric: The distance between points. Default: `Euclidean()`.

    Examples:
        >>> import torch
        >>> from nmer_torchrl import NeighborPairSampler
        >>> encoder = torch.nn.Linear(3, 8)
        >>> metric = FeatureSpace(lambda rows: encoder(rows["observation"]))
        >>> sampler = NeighborPairSampler(k=10, metric=metric)
        >>> sampler.refresh()  # after each change of the encoder
    """

    by_key = True  # the function reads keys

    def __init__(
        self, feature: Callable[[TensorDictBase], Tensor], metric: Metric | None = None
    ) -> None:
        if not callable(feature):
            raise TypeError(
                f"feature={feature!r} is not callable; give a function or a module that maps a "
                "TensorDict of n rows to points [n, f]."
            )
        metric = Euclidean() if metric is None else metric
        if metric.by_key:
            raise ValueError(
                f"{metric!r} depends on the keys of entries, which features do not have; "
                "use Euclidean() or Mahalanobis()."
            )
        self.feature = feature
        self.metric = metric
        self.embeds = metric.embeds

    def check(self, search: SearchOption, keys: tuple[NestedKey, ...]) -> None:
        """See `Metric.check`."""
        self.metric.check(search, keys)

    def open(self, search: SearchOption, k: int, widths: Widths, device: torch.device) -> Space:
        """See `Metric.open`."""
        return self.metric.open(search, k, widths, device)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.feature!r}, {self.metric!r})"
