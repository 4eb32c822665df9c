"""Neighborhood Mixup Experience Replay (NMER) for TorchRL: a pair sampler and a transform."""

from nmer_torchrl.buffers import make_replay_buffer
from nmer_torchrl.samplers import (
    NeighborPairSampler,
    RandomPairSampler,
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
)

__all__ = [
    "AmplitudeScaling",
    "GaussianNoise",
    "MixReg",
    "NeighborPairSampler",
    "PairMixup",
    "PairStorage",
    "RandomPairSampler",
    "RewardMean",
    "RunningStandardizer",
    "SpreadSampler",
    "StateMixup",
    "TemporalPairSampler",
    "make_replay_buffer",
]
