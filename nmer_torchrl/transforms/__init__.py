"""Transforms of a replay buffer: how a pair becomes one row, and what is done to a row."""

from nmer_torchrl.transforms.pair_mixup import PairMixup
from nmer_torchrl.transforms.tuned_mixup import TunedMixup

__all__ = ["PairMixup", "TunedMixup"]
