"""The sampler and the transform of each kind of buffer."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from tensordict import NestedKey
from torchrl.data.replay_buffers import RandomSampler, Sampler, Storage, TensorStorage
from torchrl.envs.transforms import Transform

from nmer_torchrl.buffers.options import (
    DistanceOption,
    FractionOption,
    MetricOption,
    make_gates,
    make_metric,
)
from nmer_torchrl.gaussian_process import GaussianProcess
from nmer_torchrl.keys import POINT_KEYS, TERMINATED_KEY, VALUE_KEYS, Roles, as_roles
from nmer_torchrl.metrics import ProductNorm
from nmer_torchrl.neighbors import NeighborSearch
from nmer_torchrl.samplers import (
    CheckedPrioritizedSampler,
    NeighborhoodSampler,
    NeighborPairSampler,
    PrioritizedNeighborPairSampler,
    RandomPairSampler,
    ReplayOptimizationSampler,
    SpreadSampler,
    TemporalPairSampler,
)
from nmer_torchrl.transforms import (
    AmplitudeScaling,
    DeltaMixup,
    GaussianNoise,
    GaussianProcessMixup,
    MeanMixup,
    MixReg,
    NeighborhoodMixup,
    PairMixup,
    RewardMean,
    RowCheck,
    StateMixup,
    TunedMixup,
)


class Options(NamedTuple):
    """What depends on the kind, with its default."""

    k: int = 10
    alpha: float = 0.75
    tuned: bool = False
    search: str | NeighborSearch = "auto"
    metric: MetricOption = "euclidean"
    interpolation: str = "beta"
    fraction: FractionOption = 1.0
    max_distance: DistanceOption | None = None
    lengthscale: float = GaussianProcess.lengthscale
    noise: float = GaussianProcess.noise
    max_variance: float = GaussianProcess.max_variance
    keys: tuple[NestedKey, ...] = POINT_KEYS
    value_keys: tuple[NestedKey, ...] = VALUE_KEYS
    terminated_key: NestedKey = TERMINATED_KEY
    sigma: float = 0.1
    action_bounds: tuple[float, float] = (-1.0, 1.0)
    low: float = 0.6
    high: float = 1.2
    priority_alpha: float = 0.6
    priority_beta: float = 0.4
    priority_eps: float = 1e-6

    @property
    def roles(self) -> Roles:
        """Which of the keys are observations, actions and rewards."""
        return as_roles(self.keys, self.value_keys)


def make_sampler(kind: str, capacity: int, options: Options) -> Sampler:
    """Who is drawn, and with whom."""
    keys: dict[str, Any] = {"keys": options.keys, "value_keys": options.value_keys}
    near: dict[str, Any] = {"search": options.search, "metric": make_metric(options.metric), **keys}
    priority: dict[str, Any] = {
        "alpha": options.priority_alpha,
        "beta": options.priority_beta,
        "eps": options.priority_eps,
    }
    match kind:
        case "per":
            return CheckedPrioritizedSampler(capacity, **priority)
        case "mixup" | "mixreg":
            return RandomPairSampler(**keys)
        case "1nn":
            return NeighborPairSampler(1, **near)
        case "nmer" | "interpolated_rewards":
            return NeighborPairSampler(options.k, **near)
        case "per_nmer":
            return PrioritizedNeighborPairSampler(capacity, options.k, **near, **priority)
        case "neighborhood" | "gp":
            if kind == "gp" and isinstance(near["metric"], ProductNorm):
                raise ValueError(
                    "A 'gp' buffer predicts in a Euclidean space, which metric='product' has not; "
                    "use 'euclidean' or 'mahalanobis'."
                )
            return NeighborhoodSampler(options.k, **near)
        case "ct":
            return TemporalPairSampler(**keys)
        case "noisy":
            return SpreadSampler(keys=(*options.keys, *options.value_keys))
        case "ero":
            rewards = options.roles.rewards
            if len(rewards) != 1:
                raise ValueError(
                    f"An 'ero' buffer scores rows by one reward, but `value_keys` names {rewards} "
                    "besides next observations; name exactly one."
                )
            return ReplayOptimizationSampler(reward_key=rewards[0])
        case _:
            return RandomSampler()


def make_transform(
    kind: str,
    sampler: Sampler,
    storage: Storage,
    generator: torch.Generator | None,
    options: Options,
) -> Transform | None:
    """What becomes of it."""
    if kind in ("uniform", "per", "ero"):
        return RowCheck() if isinstance(storage, TensorStorage) else None  # a list takes any row
    end = options.terminated_key
    if kind == "interpolated_rewards":
        return RewardMean(reward_keys=options.roles.rewards, terminated_key=end)
    own = _spawn(generator)
    match kind:
        case "mixreg":
            return MixReg(options.alpha, generator=own, mix_keys=options.keys)
        case "s4rl":
            observations = options.roles.observations
            return StateMixup(options.alpha, generator=own, observation_keys=observations)
        case "ras":
            return AmplitudeScaling(
                options.low,
                options.high,
                generator=own,
                observation_keys=options.roles.observations,
            )
        case "noisy":
            assert isinstance(sampler, SpreadSampler)
            return GaussianNoise(
                options.sigma,
                spread=sampler.spread,
                generator=own,
                action_keys=options.roles.actions,
                action_bounds=options.action_bounds,
                terminated_key=end,
            )
        case "ct" if options.tuned:
            return TunedMixup(
                options.alpha,
                generator=own,
                keys=options.keys,
                value_keys=options.value_keys,
                terminated_key=end,
            )
        case "gp":
            return GaussianProcessMixup(
                cast(NeighborhoodSampler, sampler),
                options.alpha,
                process=GaussianProcess(options.lengthscale, options.noise, options.max_variance),
                generator=own,
                keys=options.keys,
                value_keys=options.value_keys,
                terminated_key=end,
                gates=make_gates(options.fraction, options.max_distance, sampler),
            )
        case "neighborhood":
            return NeighborhoodMixup(options.alpha, **_fold_arguments(sampler, own, options))
        case _:
            return _make_pair_fold(sampler, own, options)


def _make_pair_fold(
    sampler: Sampler, generator: torch.Generator | None, options: Options
) -> Transform:
    arguments = _fold_arguments(sampler, generator, options)
    match options.interpolation:
        case "mean":
            return MeanMixup(**arguments)
        case "uniform":
            return PairMixup(1.0, **arguments)
        case "delta":
            observations = options.roles.observations
            return DeltaMixup(options.alpha, observation_keys=observations, **arguments)
        case _:
            return PairMixup(options.alpha, **arguments)


def _fold_arguments(
    sampler: Sampler, generator: torch.Generator | None, options: Options
) -> dict[str, Any]:
    return {
        "generator": generator,
        "mix_keys": (*options.keys, *options.value_keys),
        "terminated_key": options.terminated_key,
        "gates": make_gates(options.fraction, options.max_distance, sampler),
    }


def _spawn(generator: torch.Generator | None) -> torch.Generator | None:
    """A new generator whose seed is drawn from the given one."""
    if generator is None:
        return None
    device = generator.device
    seed = torch.randint(2**62, (), generator=generator, device=device, dtype=torch.int64)
    return torch.Generator(device).manual_seed(int(seed))
