"""Neighborhood Mixup Experience Replay (NMER) for TorchRL: a pair sampler and a transform."""

from nmer_torchrl.buffers import PairPrioritizedReplayBuffer, make_replay_buffer
from nmer_torchrl.metrics import Euclidean, FeatureSpace, Mahalanobis, ProductNorm
from nmer_torchrl.samplers import (
    CheckedPrioritizedSampler,
    NeighborPairSampler,
    PrioritizedNeighborPairSampler,
    RandomPairSampler,
    ReplayOptimizationSampler,
    SpreadSampler,
    TemporalPairSampler,
)
from nmer_torchrl.standardize import RunningStandardizer
from nmer_torchrl.storages import PairStorage
from nmer_torchrl.transforms import (
    AmplitudeScaling,
    GaussianNoise,
    MixReg,
    PairMixup,
    RewardMean,
    StateMixup,
    TunedMixup,
)

__all__ = [
    "AmplitudeScaling",
    "CheckedPrioritizedSampler",
    "Euclidean",
    "FeatureSpace",
    "GaussianNoise",
    "Mahalanobis",
    "MixReg",
    "NeighborPairSampler",
    "PairMixup",
    "PairPrioritizedReplayBuffer",
    "PairStorage",
    "PrioritizedNeighborPairSampler",
    "ProductNorm",
    "RandomPairSampler",
    "ReplayOptimizationSampler",
    "RewardMean",
    "RunningStandardizer",
    "SpreadSampler",
    "StateMixup",
    "TemporalPairSampler",
    "TunedMixup",
    "make_replay_buffer",
]
