"""Neighborhood Mixup Experience Replay (NMER) for TorchRL.

A sampler draws pairs of neighboring transitions, and a transform mixes them.
"""

from importlib import metadata

from nmer_torchrl import methods
from nmer_torchrl.buffers import make_replay_buffer
from nmer_torchrl.methods import NMER, Method
from nmer_torchrl.metrics import Euclidean, FeatureSpace, Mahalanobis, ProductNorm
from nmer_torchrl.pairs import Neighborhoods, NeighborPairs, RandomPairs, SuccessorPairs
from nmer_torchrl.samplers import (
    NeighborPairSampler,
    PrioritizedNeighborPairSampler,
    RandomPairSampler,
    TemporalPairSampler,
)
from nmer_torchrl.storages import PairStorage
from nmer_torchrl.transforms import GaussianNoise, PairMixup, StateMixup

try:
    __version__ = metadata.version("nmer-torchrl")
except metadata.PackageNotFoundError:  # imported from the source tree, not installed
    __version__ = "unknown"

__all__ = [
    "NMER",
    "Euclidean",
    "FeatureSpace",
    "GaussianNoise",
    "Mahalanobis",
    "Method",
    "NeighborPairSampler",
    "NeighborPairs",
    "Neighborhoods",
    "PairMixup",
    "PairStorage",
    "PrioritizedNeighborPairSampler",
    "ProductNorm",
    "RandomPairSampler",
    "RandomPairs",
    "StateMixup",
    "SuccessorPairs",
    "TemporalPairSampler",
    "make_replay_buffer",
    "methods",
]
