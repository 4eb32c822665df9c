"""Registers Hydra configurations in TorchRL's style when this module is imported.

After `import nmer_torchrl.configs`, a TorchRL config can name a method of this package in its
defaults, as in `replay_buffer: nmer`. Its options are then `replay_buffer.k` and so on. To compose
the parts instead, name `sampler: neighbor_pair` and `transform: pair_mixup`, as with TorchRL's own
entries of those groups.

All configurations derive from the signatures of the classes and functions that they build.
`make_config` does the same for your own class.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field, make_dataclass
from inspect import Parameter, signature
from typing import Any

try:
    from hydra.core.config_store import ConfigStore
    from omegaconf import MISSING
except ImportError as error:
    raise ImportError(
        "nmer_torchrl.configs needs Hydra, which is not installed; run `pip install hydra-core`."
    ) from error
from torchrl.data.replay_buffers import Sampler
from torchrl.envs.transforms import Transform
from torchrl.trainers.algorithms.configs.data import (
    ReplayBufferBaseConfig,
    SamplerConfig,
    TensorDictReplayBufferConfig,
)
from torchrl.trainers.algorithms.configs.transforms import TransformConfig

from nmer_torchrl import samplers, transforms
from nmer_torchrl.buffers import make_replay_buffer
from nmer_torchrl.methods import METHODS

_PARTS: dict[str, type] = {
    "neighbor_pair": samplers.NeighborPairSampler,
    "neighborhood": samplers.NeighborhoodSampler,
    "random_pair": samplers.RandomPairSampler,
    "temporal_pair": samplers.TemporalPairSampler,
    "prioritized_neighbor_pair": samplers.PrioritizedNeighborPairSampler,
    "pair_mixup": transforms.PairMixup,
    "mean_mixup": transforms.MeanMixup,
    "neighborhood_mixup": transforms.NeighborhoodMixup,
    "state_mixup": transforms.StateMixup,
    "amplitude_scaling": transforms.AmplitudeScaling,
    "mixreg": transforms.MixReg,
    "reward_mean": transforms.RewardMean,
}


def make_config(target: type) -> type[Any]:
    """Builds a dataclass whose fields are the arguments of a class, for `hydra.utils.instantiate`.

    Args:
        target: The class of a sampler, transform or method, of this package or your own.

    Examples:
        >>> from hydra.utils import instantiate
        >>> from nmer_torchrl import NMER, NeighborPairSampler
        >>> instantiate(make_config(NeighborPairSampler)(k=5))
        NeighborPairSampler(k=5, keys=('observation', 'action'))
        >>> instantiate(make_config(NMER)(k=5)).k
        5
    """
    bases = {Sampler: SamplerConfig, Transform: TransformConfig}
    base = tuple(config for kind, config in bases.items() if issubclass(target, kind))
    return _derive(target, {}, target.__name__, base)


def _derive(
    target: Callable[..., Any], given: dict[str, Any], name: str, bases: tuple[type, ...]
) -> type[Any]:
    """Builds a dataclass from the arguments of `target` and the given fields."""
    # Reads `__init__`, since TorchRL's samplers hide the signature of the class.
    call: Callable[..., Any] = getattr(target, "__init__") if isinstance(target, type) else target  # noqa: B009
    arguments = {
        parameter.name: MISSING if parameter.default is Parameter.empty else parameter.default
        for parameter in signature(call).parameters.values()
        if parameter.kind != Parameter.VAR_KEYWORD and parameter.name not in ("self", "generator")
    }
    special = {"_target_": f"{target.__module__}.{target.__qualname__}", "_convert_": "all"}
    fields = arguments | given | special
    return make_dataclass(
        f"{name}Config",
        [(key, Any, field(default=value)) for key, value in fields.items()],
        bases=bases,
    )


def register() -> None:
    """Adds the configurations to Hydra's store, under TorchRL's groups.

    Examples:
        >>> register()
        >>> "nmer.yaml" in ConfigStore.instance().list("replay_buffer")
        True
    """
    store = ConfigStore.instance().store
    for name, part in _PARTS.items():
        group = "sampler" if issubclass(part, Sampler) else "transform"
        store(group=group, name=name, node=make_config(part))
    for name, method in METHODS.items():
        options = {key: each.default for key, each in signature(method).parameters.items()}
        given = {"method": name, **options}
        node = _derive(make_replay_buffer, given, method.__name__, (ReplayBufferBaseConfig,))
        store(group="replay_buffer", name=name, node=node)
    pairs = TensorDictReplayBufferConfig(
        _target_="nmer_torchrl.buffers.PairPrioritizedReplayBuffer"
    )
    store(group="replay_buffer", name="pair_prioritized", node=pairs)


register()
