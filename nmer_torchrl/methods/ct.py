"""Continuous Transition, with a fixed alpha."""

from __future__ import annotations

from dataclasses import dataclass

from nmer_torchrl.methods.groups import Pairs
from nmer_torchrl.samplers import TemporalPairSampler


@dataclass(frozen=True, kw_only=True)
class CT(Pairs[TemporalPairSampler]):
    """Mixes each row with the one that followed it in its episode.

    The mix is `w * anchor + (1 - w) * successor` with `w ~ Beta(alpha, alpha)`. This is Continuous
    Transition as the NMER paper evaluates it; `TunedCT` learns alpha.

    The options are those of `Keyed`, `Ending`, `Gated`, `Folding` and `Pairs`.

    Source: J. Lin et al., *Continuous transition: Improving sample efficiency for continuous
    control problems via mixup*, ICRA, 2021.

    Examples:
        >>> from nmer_torchrl import make_replay_buffer
        >>> make_replay_buffer(CT(), capacity=1_000, batch_size=32).sampler
        TemporalPairSampler(observations=('observation',))
    """

    def make_sampler(self, capacity: int) -> TemporalPairSampler:
        """Builds the sampler that pairs rows with their successors."""
        return TemporalPairSampler(
            keys=self.keys, value_keys=self.value_keys, end_keys=self.end_keys
        )
