"""Replay buffers, ready to use."""

from nmer_torchrl.buffers.make import KINDS, make_replay_buffer
from nmer_torchrl.buffers.prioritized import PairPrioritizedReplayBuffer

__all__ = ["KINDS", "PairPrioritizedReplayBuffer", "make_replay_buffer"]
