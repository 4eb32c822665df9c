"""Noisy replay."""

from __future__ import annotations

from dataclasses import dataclass

from nmer_torchrl.checks import NOT_NEGATIVE
from nmer_torchrl.methods.base import option
from nmer_torchrl.methods.groups import Ending
from nmer_torchrl.samplers import SpreadSampler
from nmer_torchrl.transforms import GaussianNoise


@dataclass(frozen=True, kw_only=True)
class Noisy(Ending[SpreadSampler]):
    """Adds Gaussian noise to each number of a row: `x + sigma * std * n`, `n ~ N(0, 1)`.

    `std` is the standard deviation of the number's dimension among all rows stored now. Terminal
    rows are not changed. The options are those below and those of `Keyed` and `Ending`.

    Source: R. Sander et al., *Neighborhood mixup experience replay*, L4DC, 2022.

    Keyword Args:
        sigma: Standard deviation of the noise, as a share of each dimension's standard deviation.
        action_bounds: Least and greatest value to which noisy actions are clipped. None does not
            clip.

    Examples:
        >>> from nmer_torchrl import make_replay_buffer
        >>> make_replay_buffer(Noisy(sigma=0.2), capacity=1_000, batch_size=32).transform[0]
        GaussianNoise(sigma=0.2)
    """

    sigma: float = option(0.1, NOT_NEGATIVE)
    action_bounds: tuple[float, float] | None = (-1.0, 1.0)

    def __post_init__(self) -> None:
        """Builds the transform once, which checks the bounds."""
        super().__post_init__()
        self.make_transform(self.make_sampler(1))

    def make_sampler(self, capacity: int) -> SpreadSampler:
        """Builds the sampler, which tracks the standard deviations."""
        return SpreadSampler(keys=(*self.keys, *self.value_keys))

    def make_transform(self, sampler: SpreadSampler) -> GaussianNoise:
        """Builds the transform that adds noise, scaled by the sampler's standard deviations."""
        return GaussianNoise(
            self.sigma,
            spread=sampler.spread,
            action_keys=self.roles.actions,
            action_bounds=self.action_bounds,
            terminated_key=self.terminated_key,
        )
