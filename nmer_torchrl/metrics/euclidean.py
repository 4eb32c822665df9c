"""Metrics over Z-scored dimensions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import NestedKey, unravel_key
from torch import Tensor

from nmer_torchrl.keys import as_keys
from nmer_torchrl.metrics.base import Metric, Space, View, Widths
from nmer_torchrl.neighbors import SEARCHES, PointTable, Search, SearchOption, make_search
from nmer_torchrl.neighbors.base import as_search
from nmer_torchrl.neighbors.exact import squared_norms
from nmer_torchrl.tracking.standardize import RunningStandardizer


class Euclidean(Metric):
    """Measures the norm of `weight * (a - b) / std`, by dimension: the metric of NMER.

    `std` is the standard deviation among the rows stored now, or 1 if a dimension does not vary.
    The default graph search may lag behind it by less than a percent (see `NeighborPairSampler`).
    All searches support this metric.

    Keyword Args:
        weights: Weights of entries, by key; the default is 1. A weight of 2 doubles distances in
            that entry.

    Examples:
        >>> from nmer_torchrl import NeighborPairSampler
        >>> sampler = NeighborPairSampler(metric=Euclidean(weights={"action": 0.5}))
        >>> sampler.metric
        Euclidean(weights={'action': 0.5})
    """

    def __init__(self, *, weights: Mapping[Any, float] | None = None) -> None:
        self.weights: dict[NestedKey, float] = {}
        for key, weight in (weights or {}).items():
            if not (math.isfinite(weight) and weight > 0):
                raise ValueError(
                    f"weights[{key!r}]={weight!r} is out of range; give a finite number above 0. "
                    "To ignore an entry in distances, leave it out of `keys`."
                )
            self.weights[unravel_key(key)] = float(weight)
        self.by_key = bool(self.weights)

    def check(self, search: SearchOption, keys: tuple[NestedKey, ...]) -> None:
        """See `Metric.check`."""
        for key in self.weights:
            if key not in keys:
                raise ValueError(
                    f"`weights` names {key!r}, but distances are measured in {keys}; "
                    "use one of these keys, or add it to `keys`."
                )

    def open(self, search: SearchOption, k: int, widths: Widths, device: torch.device) -> Space:
        """See `Metric.open`."""
        factors = None
        if self.weights:
            factors = _by_dimension({key: self.weights.get(key, 1.0) for key in widths}, widths)
        return ScaledSpace(make_search(search, k, device), sum(widths.values()), factors, device)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({f'weights={self.weights}' if self.weights else ''})"


class ProductNorm(Metric):
    """Measures the product of two norms of Z-scored differences, of states and of actions.

    This is an option of the code that the authors of NMER released. It is not a metric in the
    strict sense: two rows have distance 0 if their states *or* their actions are equal, so
    neighbors are near in one of the two rather than in both. It is not a norm of
    `(a - b) * scale`, which most searches need. Only `"torch"` and `"keops"` support it, by exact
    brute force; `"auto"` chooses one of them.

    Keyword Args:
        action_keys: Entries of the second norm. The sampler's other `keys` form the first norm.

    Examples:
        >>> from nmer_torchrl import NeighborPairSampler
        >>> NeighborPairSampler(metric=ProductNorm()).metric
        ProductNorm(action_keys=('action',))
    """

    by_key = True
    embeds = False

    def __init__(self, *, action_keys: Sequence[NestedKey] = ("action",)) -> None:
        self.action_keys = as_keys(action_keys, "action_keys")

    def check(self, search: SearchOption, keys: tuple[NestedKey, ...]) -> None:
        """See `Metric.check`."""
        declared = as_search(search) if not isinstance(search, str) else SEARCHES.get(search)
        if declared is not None and not declared.products:  # "auto" chooses one that supports it
            named = search if isinstance(search, str) else type(search).__name__
            raise ValueError(
                f"search={named!r} does not support ProductNorm, which is not a norm of scaled "
                'differences; use search="torch", "keops" or "auto", which chooses one of the two.'
            )
        first = [key for key in keys if key not in self.action_keys]
        if not first or len(first) == len(keys) or not set(self.action_keys) <= set(keys):
            raise ValueError(
                f"ProductNorm(action_keys={self.action_keys}) needs all of its `action_keys` and "
                f"at least one other key in the sampler's `keys`, but these are {keys}."
            )

    def open(self, search: SearchOption, k: int, widths: Widths, device: torch.device) -> Space:
        """See `Metric.open`."""
        if search == "auto":
            search = "keops" if device.type == "cuda" else "torch"
        second = _by_dimension({key: float(key in self.action_keys) for key in widths}, widths)
        factors = torch.stack([1.0 - second, second])
        return ScaledSpace(make_search(search, k, device), factors.shape[1], factors, device)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(action_keys={self.action_keys})"


def _by_dimension(values: dict[NestedKey, float], widths: Widths) -> Tensor:
    """Expands one number per key to one per dimension, `[d]` in float64."""
    return torch.cat(
        [torch.full((widths[key],), value, dtype=torch.float64) for key, value in values.items()]
    )


@dataclass(frozen=True)
class ScaledView:
    """Measures the norm of `(a - b) * scale`, or the product of g norms if scale is `[g, d]`."""

    scale: Tensor

    def embed(self, points: Tensor) -> Tensor:
        """See `View.embed`."""
        if self.scale.ndim > 1:
            raise ValueError(
                "ProductNorm cannot embed points, because it is not a Euclidean distance in any "
                "space; use Euclidean or Mahalanobis."
            )
        return points.double() * self.scale.to(points.device)

    def distances(self, first: Tensor, second: Tensor) -> Tensor:
        """See `View.distances`."""
        difference = first.double() - second.double()
        return squared_norms(difference, self.scale.to(first.device)).sqrt()


class ScaledSpace(Space):
    """A space whose scale follows the statistics of its points, times constant factors.

    Args:
        search: An empty search.
        d: Number of dimensions.
        factors: `[d]`, or `[g, d]` for a product of g norms; `None` means 1 everywhere.
        device: Device of the points and statistics. Default: the CPU.
    """

    def __init__(
        self,
        search: Search,
        d: int,
        factors: Tensor | None,
        device: torch.device | None = None,
    ) -> None:
        self.search = search
        self.statistics = RunningStandardizer(d, device)
        self.table = search.table or PointTable()
        self._factors = None if factors is None else factors.to(device)
        self._scaled: tuple[Tensor, Tensor] | None = None  # scale without and with factors

    def replace(self, index: Tensor, points: Tensor, removed: Tensor) -> None:
        """See `Space.replace`."""
        self.statistics.replace(points, removed)
        if self.search.table is not self.table:
            self.table.write(index, points)
        self.search.write(index, points)
        self.statistics.settle(self.table.present)

    @property
    def scale(self) -> Tensor:
        """Returns the scale, `[d]` or `[g, d]` in float64; the same tensor until it changes."""
        scale = self.statistics.scale
        if self._factors is None:
            return scale
        if self._scaled is None or self._scaled[0] is not scale:
            self._scaled = scale, scale * self._factors
        return self._scaled[1]

    def query(self, index: Tensor, k: int) -> Tensor:
        """See `Space.query`."""
        return self.search.query(index, k, self.scale)

    def view(self) -> View:
        """See `Space.view`."""
        return ScaledView(self.scale)
