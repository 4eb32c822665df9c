"""Neighborhood Mixup Experience Replay (NMER) for TorchRL: a pair sampler and a transform."""

from nmer_torchrl.buffers import make_replay_buffer
from nmer_torchrl.samplers import NeighborPairSampler, RandomPairSampler, TemporalPairSampler
from nmer_torchrl.standardize import RunningStandardizer
from nmer_torchrl.storages import PairStorage
from nmer_torchrl.transforms import PairMixup

__all__ = [
    "NeighborPairSampler",
    "PairMixup",
    "PairStorage",
    "RandomPairSampler",
    "RunningStandardizer",
    "TemporalPairSampler",
    "make_replay_buffer",
]
