"""Uniform replay."""

from __future__ import annotations

from dataclasses import dataclass

from torchrl.data.replay_buffers import RandomSampler

from nmer_torchrl.methods.base import Method


@dataclass(frozen=True, kw_only=True)
class Uniform(Method[RandomSampler]):
    """Draws stored rows uniformly.

    Source: L.-J. Lin, *Self-improving reactive agents based on reinforcement learning, planning and
    teaching*, Machine Learning, 1992.

    Examples:
        >>> from nmer_torchrl import make_replay_buffer
        >>> make_replay_buffer(Uniform(), capacity=1_000, batch_size=32).sampler
        RandomSampler()
    """

    any_storage = True

    def make_sampler(self, capacity: int) -> RandomSampler:
        """Builds TorchRL's uniform sampler."""
        return RandomSampler()
