"""Neighborhood Mixup Experience Replay (NMER) for TorchRL: a pair sampler and a transform."""

from nmer_torchrl.buffers import PairPrioritizedReplayBuffer, make_replay_buffer
from nmer_torchrl.gaussian_process import GaussianProcess
from nmer_torchrl.metrics import Euclidean, FeatureSpace, Mahalanobis, ProductNorm
from nmer_torchrl.samplers import (
    CheckedPrioritizedSampler,
    NeighborhoodSampler,
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
    DeltaMixup,
    DensityFraction,
    DistanceCap,
    ExponentialFraction,
    Fraction,
    GaussianNoise,
    GaussianProcessMixup,
    LinearFraction,
    MeanMixup,
    MixReg,
    NeighborhoodMixup,
    PairMixup,
    QuantileCap,
    RewardMean,
    StateMixup,
    TunedMixup,
)

__all__ = [
    "AmplitudeScaling",
    "CheckedPrioritizedSampler",
    "DeltaMixup",
    "DensityFraction",
    "DistanceCap",
    "Euclidean",
    "ExponentialFraction",
    "FeatureSpace",
    "Fraction",
    "GaussianNoise",
    "GaussianProcess",
    "GaussianProcessMixup",
    "LinearFraction",
    "Mahalanobis",
    "MeanMixup",
    "MixReg",
    "NeighborPairSampler",
    "NeighborhoodMixup",
    "NeighborhoodSampler",
    "PairMixup",
    "PairPrioritizedReplayBuffer",
    "PairStorage",
    "PrioritizedNeighborPairSampler",
    "ProductNorm",
    "QuantileCap",
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
