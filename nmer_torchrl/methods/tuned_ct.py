"""Continuous Transition, with a learned alpha."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tensordict import NestedKey

from nmer_torchrl.checks import Number
from nmer_torchrl.methods.base import option
from nmer_torchrl.methods.groups import Ending
from nmer_torchrl.methods.options import read_keys
from nmer_torchrl.samplers import TemporalPairSampler
from nmer_torchrl.transforms import TunedMixup


@dataclass(frozen=True, kw_only=True)
class TunedCT(Ending[TemporalPairSampler]):
    """Mixes each row with the one that followed it in its episode, and learns alpha.

    It is `CT` with `TunedMixup`: a learned model of the transitions estimates whether they are
    linear between the two rows. Where they are not, alpha decreases.

    The options are those below and those of `Keyed` and `Ending`.

    Source: J. Lin et al., *Continuous transition: Improving sample efficiency for continuous
    control problems via mixup*, ICRA, 2021.

    Keyword Args:
        first_alpha: Initial value of alpha.
        anchor_keys: Entries besides `keys` that are not mixed on purpose.

    Examples:
        >>> from nmer_torchrl import make_replay_buffer
        >>> make_replay_buffer(TunedCT(), capacity=1_000, batch_size=32).transform[0].alpha
        1.0
    """

    first_alpha: float = option(1.0, Number(above=0, most=1))
    anchor_keys: Sequence[NestedKey] = option((), read_keys)

    def make_sampler(self, capacity: int) -> TemporalPairSampler:
        """Builds the sampler that pairs rows with their successors."""
        return TemporalPairSampler(
            keys=self.keys, value_keys=self.value_keys, end_keys=self.end_keys
        )

    def make_transform(self, sampler: TemporalPairSampler) -> TunedMixup:
        """Builds the transform that mixes pairs and learns alpha."""
        return TunedMixup(
            self.first_alpha,
            keys=self.keys,
            value_keys=self.value_keys,
            terminated_key=self.terminated_key,
            anchor_keys=self.anchor_keys,
        )
