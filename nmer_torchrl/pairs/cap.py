"""Caps: how far away a partner may be."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from nmer_torchrl.checks import COUNT, POSITIVE, Number


@dataclass(frozen=True)
class QuantileCap:
    """A limit that follows the distances of the last pairs drawn.

    It is a quantile of their distances, the batch in question included. With 0.9, about the tenth
    of all pairs that lie farthest apart are left out, whatever the distances are. An anchor that is
    paired with itself counts with a distance of 0.

    Args:
        quantile: Share of pairs within the limit, above 0 and up to 1.
        window: Number of pairs that the quantile is taken of.

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
    """Tells which distances are within a limit, and remembers those that a quantile is taken of.

    Args:
        max_distance: The limit, or a quantile to take it from.
    """

    def __init__(self, max_distance: float | QuantileCap) -> None:
        if not isinstance(max_distance, QuantileCap):
            POSITIVE("max_distance", max_distance)
        self.max_distance = max_distance
        self.recent = torch.empty(0, dtype=torch.float64)  # the latest distances last

    @property
    def limit(self) -> float | Tensor:
        """The greatest distance for now; infinite before any was seen."""
        cap, count = self.max_distance, len(self.recent)
        if not isinstance(cap, QuantileCap):
            return cap
        return self.recent.kthvalue(math.ceil(cap.quantile * count)).values if count else math.inf

    def near(self, distances: Tensor) -> Tensor:
        """Returns which distances are within the limit. Nothing waits for a device."""
        if isinstance(self.max_distance, QuantileCap):
            seen = torch.cat([self.recent.to(distances.device), distances.flatten()])
            self.recent = seen[-self.max_distance.window :]
        return distances <= self.limit
