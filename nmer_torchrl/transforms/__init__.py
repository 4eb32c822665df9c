"""Transforms of a replay buffer: folds that mix pairs to one row, and changes to single rows."""

from nmer_torchrl.transforms.amplitude import AmplitudeScaling
from nmer_torchrl.transforms.fold import Fold
from nmer_torchrl.transforms.gates import (
    DensityFraction,
    ExponentialFraction,
    Fraction,
    Gate,
    LinearFraction,
    Same,
    Schedule,
)
from nmer_torchrl.transforms.gaussian_process_mixup import GaussianProcessMixup, Geometry
from nmer_torchrl.transforms.mean_mixup import MeanMixup
from nmer_torchrl.transforms.mixreg import MixReg
from nmer_torchrl.transforms.n_step import FlattenRows
from nmer_torchrl.transforms.neighborhood_mixup import NeighborhoodMixup
from nmer_torchrl.transforms.noise import GaussianNoise
from nmer_torchrl.transforms.pair_mixup import PairMixup
from nmer_torchrl.transforms.reward import RewardMean
from nmer_torchrl.transforms.row_check import RowCheck
from nmer_torchrl.transforms.state_mixup import StateMixup
from nmer_torchrl.transforms.tuned_mixup import TunedMixup

__all__ = [
    "AmplitudeScaling",
    "DensityFraction",
    "ExponentialFraction",
    "FlattenRows",
    "Fold",
    "Fraction",
    "Gate",
    "GaussianNoise",
    "GaussianProcessMixup",
    "Geometry",
    "LinearFraction",
    "MeanMixup",
    "MixReg",
    "NeighborhoodMixup",
    "PairMixup",
    "RewardMean",
    "RowCheck",
    "Same",
    "Schedule",
    "StateMixup",
    "TunedMixup",
]
