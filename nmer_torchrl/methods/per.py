"""Prioritized experience replay."""

from __future__ import annotations

from dataclasses import dataclass

from nmer_torchrl.methods.groups import Prioritized
from nmer_torchrl.samplers import CheckedPrioritizedSampler


@dataclass(frozen=True, kw_only=True)
class PER(Prioritized[CheckedPrioritizedSampler]):
    """Draws stored rows by priority.

    Row i has the probability `(p_i + eps) ** alpha / sum_j (p_j + eps) ** alpha` and the importance
    weight `(N * P(i)) ** -beta`, divided by the largest weight. The options are those of
    `Prioritized`.

    Source: T. Schaul et al., *Prioritized experience replay*, ICLR, 2016.

    Examples:
        >>> from nmer_torchrl import make_replay_buffer
        >>> method = PER(priority_beta=0.5)
        >>> make_replay_buffer(method, capacity=1_000, batch_size=32).sampler.beta
        0.5
    """

    any_storage = True

    def make_sampler(self, capacity: int) -> CheckedPrioritizedSampler:
        """Builds TorchRL's prioritized sampler with added checks."""
        return CheckedPrioritizedSampler(capacity, **self.priority_options())
