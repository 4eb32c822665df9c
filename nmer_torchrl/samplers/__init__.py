"""Samplers choose which rows are drawn, and which rows they are mixed with.

A pair sampler returns an index `[B, 2]` of storage positions, anchor and partner. The storage then
yields a `[B, 2]` batch, which a fold such as `PairMixup` turns into `[B]`. An anchor without a
partner is paired with itself. A neighborhood sampler does the same with `[B, 1 + k]`.
"""

from nmer_torchrl.samplers.optimization import ReplayOptimizationSampler
from nmer_torchrl.samplers.prioritized import (
    CheckedPrioritizedSampler,
    PrioritizedNeighborPairSampler,
)
from nmer_torchrl.samplers.spread import SpreadSampler
from nmer_torchrl.samplers.uniform import (
    NeighborhoodSampler,
    NeighborPairSampler,
    PairSampler,
    RandomPairSampler,
    TemporalPairSampler,
)

__all__ = [
    "CheckedPrioritizedSampler",
    "NeighborPairSampler",
    "NeighborhoodSampler",
    "PairSampler",
    "PrioritizedNeighborPairSampler",
    "RandomPairSampler",
    "ReplayOptimizationSampler",
    "SpreadSampler",
    "TemporalPairSampler",
]
