"""Mixes inputs, and predicts their outcomes by Gaussian process regression."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, final

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor
from torchrl.data.replay_buffers import Sampler, SampleUnit

from nmer_torchrl.checks import POSITIVE
from nmer_torchrl.composition import find_geometry
from nmer_torchrl.functional import combine, sample_dirichlet
from nmer_torchrl.gaussian_process import GaussianProcess
from nmer_torchrl.keys import POINT_KEYS, TERMINATED_KEY, VALUE_KEYS, as_roles
from nmer_torchrl.transforms.fold import Fold
from nmer_torchrl.transforms.gates import Gate
from nmer_torchrl.transforms.rows import anchors, device_of


class Geometry(Protocol):
    """Maps rows to points in a Euclidean space, as neighbor samplers do.

    Examples:
        >>> from nmer_torchrl.transforms import GaussianProcessMixup
        >>> class Observations:
        ...     def embed(self, batch):
        ...         return batch["observation"]
        >>> fold = GaussianProcessMixup(geometry=Observations())
    """

    def embed(self, batch: TensorDictBase) -> Tensor:
        """Maps rows `[*B]` to points `[*B, f]` whose Euclidean distance is the metric's."""
        ...


@final
class GaussianProcessMixup(Fold):
    """Folds neighborhoods `[*B, 1 + m]` to `[*B]`: mixed inputs, predicted reward and next state.

    Observation and action are mixed as in `NeighborhoodMixup`. The reward and the change of state
    for that input are predicted by Gaussian process regression from the anchor and its neighbors.
    The next observation is the mixed observation plus the predicted change. Unlike a convex
    combination, this follows outcomes that curve between neighbors. If the predictive variance is
    above `process.max_variance` or a row is terminal, the anchor is used unchanged, with weight 1.

    Use it with `NeighborhoodSampler`, whose metric the regression uses.

    Args:
        alpha: Parameter of the Dirichlet distribution of the weights.

    Keyword Args:
        geometry: Object that maps rows to points for the regression. `None` uses the sampler or
            the pairing of the buffer that draws.
        process: The regression.
        keys: Entries of the input. Those with a `("next", key)` in `value_keys` are observations.
        value_keys: Entries of the outcome.
        terminated_key: Entry that marks a terminal row; such neighborhoods are not mixed.
        generator: Generator of the weights; `None` uses torch's global one.
        gates: Further rules that decide which neighborhoods are mixed.
        anchor_keys: Entries that are not mixed on purpose, so that no warning names them.

    Examples:
        >>> from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
        >>> from nmer_torchrl.samplers import NeighborhoodSampler
        >>> buffer = TensorDictReplayBuffer(
        ...     storage=LazyTensorStorage(1_000),
        ...     sampler=NeighborhoodSampler(k=10),
        ...     transform=GaussianProcessMixup(alpha=0.75),
        ...     batch_size=32,
        ... )
        >>> buffer.transform[0].process
        GaussianProcess(lengthscale=2.0, noise_variance=0.0001, max_variance=1.0)
    """

    width = None

    def __init__(
        self,
        alpha: float = 0.75,
        *,
        geometry: Geometry | None = None,
        process: GaussianProcess | None = None,
        keys: Sequence[NestedKey] = POINT_KEYS,
        value_keys: Sequence[NestedKey] = VALUE_KEYS,
        terminated_key: NestedKey = TERMINATED_KEY,
        generator: torch.Generator | None = None,
        gates: Sequence[Gate] = (),
        anchor_keys: Sequence[NestedKey] = (),
    ) -> None:
        super().__init__(
            generator=generator,
            mix_keys=(*keys, *value_keys),
            terminated_key=terminated_key,
            gates=gates,
            anchor_keys=anchor_keys,
        )
        if isinstance(geometry, (Sampler, SampleUnit)):
            raise TypeError(
                f"geometry={geometry!r} is a sampler or a pairing, and would still be used after "
                "the buffer gets another one; leave `geometry` out to use the buffer's own."
            )
        self._roles = as_roles(keys, value_keys)
        self.alpha = float(POSITIVE("alpha", alpha))
        self.geometry = geometry
        self.process = GaussianProcess() if process is None else process

    def fold(self, rows: TensorDictBase) -> TensorDictBase:
        """Folds `[*B, 1 + m]` to `[*B]`."""
        geometry = find_geometry(self) if self.geometry is None else self.geometry
        roles, shape, entries = self._roles, rows.shape, self.schema.entries(rows)
        device, generator = device_of(rows), self.generator
        weight = sample_dirichlet(self.alpha, shape, generator=generator, device=device)
        inputs = (*roles.observations, *roles.actions)
        mixed = {key: combine(entries[key], weight) for key in inputs}
        query = geometry.embed(anchors(rows, len(shape) - 1, mixed))
        outcomes = {key: entries[key] for key in roles.rewards}
        for key, following in zip(roles.observations, roles.next_observations, strict=True):
            outcomes[following] = entries[following] - entries[key]
        joined = torch.cat([entry.double().reshape(*shape, -1) for entry in outcomes.values()], -1)
        predicted, variance = self.process.predict(geometry.embed(rows), joined, query)
        widths = [entry[(0,) * len(shape)].numel() for entry in outcomes.values()]
        for (key, entry), part in zip(outcomes.items(), predicted.split(widths, -1), strict=True):
            mixed[key] = part.reshape(*shape[:-1], *entry.shape[len(shape) :]).to(entry.dtype)
        for key, following in zip(roles.observations, roles.next_observations, strict=True):
            mixed[following] = mixed[key] + mixed[following]
        return self.mix_groups(rows, mixed, weight, variance <= self.process.max_variance)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(alpha={self.alpha}, {self.process})"
