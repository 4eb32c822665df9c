"""Loads recorded data into replay buffers: datasets, log files, and rows of earlier runs."""

from nmer_torchrl.offline.arrays import make_transitions
from nmer_torchrl.offline.sources import load_transitions
from nmer_torchrl.offline.transitions import Transitions

__all__ = ["Transitions", "load_transitions", "make_transitions"]
