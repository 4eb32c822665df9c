"""Transforms of a replay buffer: how a pair becomes one row, and what is done to a row."""

from nmer_torchrl.transforms.amplitude import AmplitudeScaling
from nmer_torchrl.transforms.mixreg import MixReg
from nmer_torchrl.transforms.noise import GaussianNoise
from nmer_torchrl.transforms.pair_mixup import PairMixup
from nmer_torchrl.transforms.reward import RewardMean
from nmer_torchrl.transforms.state_mixup import StateMixup
from nmer_torchrl.transforms.tuned_mixup import TunedMixup

__all__ = [
    "AmplitudeScaling",
    "GaussianNoise",
    "MixReg",
    "PairMixup",
    "RewardMean",
    "StateMixup",
    "TunedMixup",
]
