"""Convex combinations of a row and all its neighbors."""

from __future__ import annotations

from dataclasses import dataclass

from nmer_torchrl.checks import COUNT
from nmer_torchrl.methods.base import option
from nmer_torchrl.methods.groups import Folding, Near
from nmer_torchrl.samplers import NeighborhoodSampler
from nmer_torchrl.transforms import NeighborhoodMixup


@dataclass(frozen=True, kw_only=True)
class Neighborhood(Near[NeighborhoodSampler], Folding[NeighborhoodSampler]):
    """Mixes each row with all of its k nearest neighbors.

    A row becomes `sum_i w_i * row_i` over the anchor and its neighbors, with weights
    `w ~ Dirichlet(alpha, ..., alpha)`. With `k=1` this is `OneNN`.

    The options are those below and those of `Keyed`, `Ending`, `Near`, `Gated` and `Folding`.

    Source: this project; `docs/interpolation.md` compares it with pairs.

    Keyword Args:
        k: Number of neighbors.

    Examples:
        >>> from nmer_torchrl import make_replay_buffer
        >>> make_replay_buffer(Neighborhood(k=5), capacity=1_000, batch_size=32).transform[0]
        NeighborhoodMixup(alpha=0.75)
    """

    k: int = option(10, COUNT)

    def make_sampler(self, capacity: int) -> NeighborhoodSampler:
        """Builds the sampler of neighborhoods."""
        return NeighborhoodSampler(self.k, **self.search_options())

    def make_transform(self, sampler: NeighborhoodSampler) -> NeighborhoodMixup:
        """Builds the transform that mixes neighborhoods."""
        return NeighborhoodMixup(self.alpha, **self.fold_options())
