"""Neighborhood Mixup Experience Replay (NMER) for TorchRL: a pair sampler and a transform."""

from nmer_torchrl.buffers import PairPrioritizedReplayBuffer, make_replay_buffer
from nmer_torchrl.samplers import (
    CheckedPrioritizedSampler,
    NeighborPairSampler,
    PrioritizedNeighborPairSampler,
    RandomPairSampler,
    ReplayOptimizationSampler,
)
from nmer_torchrl.standardize import RunningStandardizer
from nmer_torchrl.storages import PairStorage
from nmer_torchrl.transforms import PairMixup, TunedMixup

__all__ = [
    "CheckedPrioritizedSampler",
    "NeighborPairSampler",
    "PairMixup",
    "PairPrioritizedReplayBuffer",
    "PairStorage",
    "PrioritizedNeighborPairSampler",
    "RandomPairSampler",
    "ReplayOptimizationSampler",
    "RunningStandardizer",
    "TunedMixup",
    "make_replay_buffer",
]
