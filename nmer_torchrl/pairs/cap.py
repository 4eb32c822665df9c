"""Limits on the distance of a partner."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from nmer_torchrl.checks import COUNT, POSITIVE, Number


@dataclass(frozen=True)
class QuantileCap:
    """Limits distances to a quantile of the distances of recent pairs.

    The current batch counts among the recent pairs. With 0.9, about 10% of the pairs, those that
    are farthest apart, are not mixed. An anchor that is paired with itself has a distance of 0.

    Args:
        quantile: Share of pairs within the limit, above 0 and up to 1.
        window: Number of recent pairs over which the quantile is computed.

    Examples:
        >>> from nmer_torchrl import NeighborPairSampler
        >>> sampler = NeighborPairSampler(k=10, max_distance=QuantileCap(0.9))
    """

    quantile: float
    window: int = 8_192

    def __post_init__(self) -> None:
        Number(above=0, most=1)("quantile", self.quantile)
        COUNT("window", self.window)


class Cap:
    """Checks which distances are within a limit, and stores recent ones to compute a quantile.

    Args:
        max_distance: The limit, or a quantile that determines it.
    """

    def __init__(self, max_distance: float | QuantileCap) -> None:
        if not isinstance(max_distance, QuantileCap):
            POSITIVE("max_distance", max_distance)
        self.max_distance = max_distance
        self.clear()

    def clear(self) -> None:
        """Forgets all distances."""
        self.recent = torch.empty(0, dtype=torch.float64)  # from oldest to newest

    @property
    def limit(self) -> float | Tensor:
        """Returns the current limit; infinite before any distance was seen."""
        cap, count = self.max_distance, len(self.recent)
        if not isinstance(cap, QuantileCap):
            return cap
        return self.recent.kthvalue(math.ceil(cap.quantile * count)).values if count else math.inf

    def near(self, distances: Tensor) -> Tensor:
        """Returns which distances are within the limit, without a device synchronization."""
        if isinstance(self.max_distance, QuantileCap):
            seen = torch.cat([self.recent.to(distances.device), distances.flatten()])
            self.recent = seen[-self.max_distance.window :]
        return distances <= self.limit
