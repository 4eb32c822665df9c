"""Hydra configurations in TorchRL's manner, registered when this module is imported.

After `import nmer_torchrl.configs`, a TorchRL config may say `sampler: neighbor_pair` and
`transform: pair_mixup` in its defaults, next to TorchRL's own entries of those groups. For
priorities it says `replay_buffer: pair_prioritized` and `sampler: prioritized_neighbor_pair`. Noise
is left to `make_replay_buffer`, since its sampler and its transform share an object, as are caps on
distances and Gaussian processes for the same reason, `per` and `ero`, and a tuned alpha.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING
from tensordict import NestedKey
from torchrl.trainers.algorithms.configs.data import SamplerConfig, TensorDictReplayBufferConfig
from torchrl.trainers.algorithms.configs.transforms import TransformConfig

from nmer_torchrl.buffers.options import make_gates, make_metric
from nmer_torchrl.samplers import (
    NeighborhoodSampler,
    NeighborPairSampler,
    PrioritizedNeighborPairSampler,
    RandomPairSampler,
    TemporalPairSampler,
)
from nmer_torchrl.transforms import (
    AmplitudeScaling,
    DeltaMixup,
    MeanMixup,
    MixReg,
    NeighborhoodMixup,
    PairMixup,
    RewardMean,
    StateMixup,
)


@dataclass
class NeighborPairSamplerConfig(SamplerConfig):
    """Configuration of `NeighborPairSampler`.

    Examples:
        >>> from hydra.utils import instantiate
        >>> instantiate(NeighborPairSamplerConfig(k=5))
        NeighborPairSampler(k=5, keys=('observation', 'action'))
    """

    k: int = 10
    search: Any = "auto"
    keys: Any = None
    value_keys: Any = None
    metric: Any = "euclidean"
    _target_: str = "nmer_torchrl.configs._make_neighbor_pair_sampler"


@dataclass
class NeighborhoodSamplerConfig(NeighborPairSamplerConfig):
    """Configuration of `NeighborhoodSampler`.

    Examples:
        >>> from hydra.utils import instantiate
        >>> instantiate(NeighborhoodSamplerConfig(k=5, metric="mahalanobis")).metric
        Mahalanobis(shrinkage=0.01)
    """

    _target_: str = "nmer_torchrl.configs._make_neighborhood_sampler"


@dataclass
class RandomPairSamplerConfig(SamplerConfig):
    """Configuration of `RandomPairSampler`.

    Examples:
        >>> from hydra.utils import instantiate
        >>> instantiate(RandomPairSamplerConfig())
        RandomPairSampler(keys=('observation', 'action'))
    """

    keys: Any = None
    value_keys: Any = None
    _target_: str = "nmer_torchrl.configs._make_random_pair_sampler"


@dataclass
class PrioritizedNeighborPairSamplerConfig(SamplerConfig):
    """Configuration of `PrioritizedNeighborPairSampler`.

    Examples:
        >>> from hydra.utils import instantiate
        >>> instantiate(PrioritizedNeighborPairSamplerConfig(max_capacity=1_000, k=5))
        PrioritizedNeighborPairSampler(k=5, alpha=0.6, beta=0.4, keys=('observation', 'action'))
    """

    max_capacity: int = MISSING
    k: int = 10
    alpha: float = 0.6
    beta: float = 0.4
    eps: float = 1e-6
    search: Any = "auto"
    keys: Any = None
    value_keys: Any = None
    metric: Any = "euclidean"
    _target_: str = "nmer_torchrl.configs._make_prioritized_neighbor_pair_sampler"


@dataclass
class PairPrioritizedReplayBufferConfig(TensorDictReplayBufferConfig):
    """Configuration of `PairPrioritizedReplayBuffer`; its fields are TorchRL's.

    Examples:
        >>> from torchrl.data import LazyTensorStorage
        >>> from hydra.utils import instantiate
        >>> sampler = PrioritizedNeighborPairSamplerConfig(max_capacity=1_000, k=5)
        >>> config = PairPrioritizedReplayBufferConfig(
        ...     sampler=sampler, transform=PairMixupConfig(), batch_size=32
        ... )
        >>> type(instantiate(config, storage=LazyTensorStorage(1_000))).__name__
        'PairPrioritizedReplayBuffer'
    """

    _target_: str = "nmer_torchrl.PairPrioritizedReplayBuffer"


@dataclass
class TemporalPairSamplerConfig(SamplerConfig):
    """Configuration of `TemporalPairSampler`.

    Examples:
        >>> from hydra.utils import instantiate
        >>> instantiate(TemporalPairSamplerConfig())
        TemporalPairSampler(observations=('observation',))
    """

    keys: Any = None
    value_keys: Any = None
    end_keys: Any = None
    trajectory_key: Any = None
    _target_: str = "nmer_torchrl.configs._make_temporal_pair_sampler"


@dataclass
class PairMixupConfig(TransformConfig):
    """Configuration of `PairMixup`.

    Examples:
        >>> from hydra.utils import instantiate
        >>> instantiate(PairMixupConfig(alpha=1.0))
        PairMixup(alpha=1.0)
    """

    alpha: float = 0.75
    mix_keys: Any = None
    terminated_key: Any = None
    fraction: Any = 1.0
    _target_: str = "nmer_torchrl.configs._make_pair_mixup"


@dataclass
class DeltaMixupConfig(PairMixupConfig):
    """Configuration of `DeltaMixup`.

    Examples:
        >>> from hydra.utils import instantiate
        >>> instantiate(DeltaMixupConfig(alpha=1.0))
        DeltaMixup(alpha=1.0)
    """

    observation_keys: Any = None
    _target_: str = "nmer_torchrl.configs._make_delta_mixup"


@dataclass
class MeanMixupConfig(TransformConfig):
    """Configuration of `MeanMixup`.

    Examples:
        >>> from hydra.utils import instantiate
        >>> instantiate(MeanMixupConfig())
        MeanMixup()
    """

    mix_keys: Any = None
    terminated_key: Any = None
    fraction: Any = 1.0
    _target_: str = "nmer_torchrl.configs._make_mean_mixup"


@dataclass
class NeighborhoodMixupConfig(PairMixupConfig):
    """Configuration of `NeighborhoodMixup`.

    Examples:
        >>> from hydra.utils import instantiate
        >>> instantiate(NeighborhoodMixupConfig(alpha=1.0))
        NeighborhoodMixup(alpha=1.0)
    """

    _target_: str = "nmer_torchrl.configs._make_neighborhood_mixup"


@dataclass
class StateMixupConfig(TransformConfig):
    """Configuration of `StateMixup`.

    Examples:
        >>> from hydra.utils import instantiate
        >>> instantiate(StateMixupConfig(alpha=1.0))
        StateMixup(alpha=1.0)
    """

    alpha: float = 0.75
    observation_keys: Any = None
    _target_: str = "nmer_torchrl.configs._make_state_mixup"


@dataclass
class AmplitudeScalingConfig(TransformConfig):
    """Configuration of `AmplitudeScaling`.

    Examples:
        >>> from hydra.utils import instantiate
        >>> instantiate(AmplitudeScalingConfig(low=0.8))
        AmplitudeScaling(low=0.8, high=1.2)
    """

    low: float = 0.6
    high: float = 1.2
    observation_keys: Any = None
    _target_: str = "nmer_torchrl.configs._make_amplitude_scaling"


@dataclass
class MixRegConfig(TransformConfig):
    """Configuration of `MixReg`.

    Examples:
        >>> from hydra.utils import instantiate
        >>> instantiate(MixRegConfig())
        MixReg(alpha=0.2)
    """

    alpha: float = 0.2
    mix_keys: Any = None
    _target_: str = "nmer_torchrl.configs._make_mixreg"


@dataclass
class RewardMeanConfig(TransformConfig):
    """Configuration of `RewardMean`.

    Examples:
        >>> from hydra.utils import instantiate
        >>> instantiate(RewardMeanConfig())
        RewardMean()
    """

    reward_keys: Any = None
    terminated_key: Any = None
    _target_: str = "nmer_torchrl.configs._make_reward_mean"


def _given(**options: Any) -> dict[str, Any]:
    """The keys that were given; Hydra's lists within lists as nested keys."""
    return {
        name: value if isinstance(value, str) else [_key(key) for key in value]
        for name, value in options.items()
        if value is not None
    }


def _key(key: Any) -> NestedKey:
    return key if isinstance(key, str) else tuple(key)


def _make_neighbor_pair_sampler(
    k: int, search: Any, metric: Any, **keys: Any
) -> NeighborPairSampler:
    return NeighborPairSampler(k, search=search, metric=make_metric(metric), **_given(**keys))


def _make_neighborhood_sampler(
    k: int, search: Any, metric: Any, **keys: Any
) -> NeighborhoodSampler:
    return NeighborhoodSampler(k, search=search, metric=make_metric(metric), **_given(**keys))


def _make_random_pair_sampler(**keys: Any) -> RandomPairSampler:
    return RandomPairSampler(**_given(**keys))


def _make_prioritized_neighbor_pair_sampler(
    max_capacity: int, k: int, search: Any, metric: Any, keys: Any, value_keys: Any, **priority: Any
) -> PrioritizedNeighborPairSampler:
    given = _given(keys=keys, value_keys=value_keys)
    return PrioritizedNeighborPairSampler(
        max_capacity, k, search=search, metric=make_metric(metric), **given, **priority
    )


def _given_key(**options: Any) -> dict[str, Any]:
    """The single keys that were given."""
    return {name: _key(value) for name, value in options.items() if value is not None}


def _make_temporal_pair_sampler(trajectory_key: Any, **keys: Any) -> TemporalPairSampler:
    return TemporalPairSampler(**_given(**keys), **_given_key(trajectory_key=trajectory_key))


def _fold(mix_keys: Any, terminated_key: Any, fraction: Any) -> dict[str, Any]:
    """The arguments that folds share."""
    keys = _given(mix_keys=mix_keys) | _given_key(terminated_key=terminated_key)
    return {**keys, "gates": make_gates(fraction, None, None)}


def _make_pair_mixup(alpha: float, **options: Any) -> PairMixup:
    return PairMixup(alpha, **_fold(**options))


def _make_delta_mixup(alpha: float, observation_keys: Any, **options: Any) -> DeltaMixup:
    return DeltaMixup(alpha, **_fold(**options), **_given(observation_keys=observation_keys))


def _make_mean_mixup(**options: Any) -> MeanMixup:
    return MeanMixup(**_fold(**options))


def _make_neighborhood_mixup(alpha: float, **options: Any) -> NeighborhoodMixup:
    return NeighborhoodMixup(alpha, **_fold(**options))


def _make_state_mixup(alpha: float, **keys: Any) -> StateMixup:
    return StateMixup(alpha, **_given(**keys))


def _make_amplitude_scaling(low: float, high: float, **keys: Any) -> AmplitudeScaling:
    return AmplitudeScaling(low, high, **_given(**keys))


def _make_mixreg(alpha: float, **keys: Any) -> MixReg:
    return MixReg(alpha, **_given(**keys))


def _make_reward_mean(reward_keys: Any, terminated_key: Any) -> RewardMean:
    keys = _given(reward_keys=reward_keys) | _given_key(terminated_key=terminated_key)
    return RewardMean(**keys)


def register() -> None:
    """Adds the configurations to Hydra's store, under TorchRL's groups.

    Examples:
        >>> register()
        >>> "neighbor_pair.yaml" in ConfigStore.instance().list("sampler")
        True
    """
    store = ConfigStore.instance().store
    store(group="sampler", name="neighbor_pair", node=NeighborPairSamplerConfig)
    store(group="sampler", name="neighborhood", node=NeighborhoodSamplerConfig)
    store(group="sampler", name="random_pair", node=RandomPairSamplerConfig)
    store(
        group="sampler",
        name="prioritized_neighbor_pair",
        node=PrioritizedNeighborPairSamplerConfig,
    )
    store(group="replay_buffer", name="pair_prioritized", node=PairPrioritizedReplayBufferConfig)
    store(group="sampler", name="temporal_pair", node=TemporalPairSamplerConfig)
    store(group="transform", name="pair_mixup", node=PairMixupConfig)
    store(group="transform", name="delta_mixup", node=DeltaMixupConfig)
    store(group="transform", name="mean_mixup", node=MeanMixupConfig)
    store(group="transform", name="neighborhood_mixup", node=NeighborhoodMixupConfig)
    store(group="transform", name="state_mixup", node=StateMixupConfig)
    store(group="transform", name="amplitude_scaling", node=AmplitudeScalingConfig)
    store(group="transform", name="mixreg", node=MixRegConfig)
    store(group="transform", name="reward_mean", node=RewardMeanConfig)


register()
