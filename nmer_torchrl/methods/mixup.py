"""Mixup with a random row."""

from __future__ import annotations

from dataclasses import dataclass

from nmer_torchrl.methods.groups import Pairs
from nmer_torchrl.samplers import RandomPairSampler


@dataclass(frozen=True, kw_only=True)
class Mixup(Pairs[RandomPairSampler]):
    """Mixes each row with a random other row.

    The mix is `w * anchor + (1 - w) * partner` with `w ~ Beta(alpha, alpha)`. The options are those
    of `Keyed`, `Ending`, `Gated`, `Folding` and `Pairs`.

    Source: H. Zhang et al., *mixup: Beyond empirical risk minimization*, ICLR, 2018.

    Examples:
        >>> from nmer_torchrl import make_replay_buffer
        >>> make_replay_buffer(Mixup(alpha=0.3), capacity=1_000, batch_size=32).transform[0]
        PairMixup(alpha=0.3)
    """

    def make_sampler(self, capacity: int) -> RandomPairSampler:
        """Builds the sampler of random pairs."""
        return RandomPairSampler(keys=self.keys, value_keys=self.value_keys)
