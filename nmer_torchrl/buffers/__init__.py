"""Replay buffers, ready to use."""

from nmer_torchrl.buffers.make import KINDS, make_replay_buffer

__all__ = ["KINDS", "make_replay_buffer"]
