from dataclasses import dataclass, fields

import pytest
from helpers import make_transitions
from hydra import compose, initialize
from hydra.core.config_store import ConfigStore
from hydra.utils import instantiate
from omegaconf import MissingMandatoryValue, OmegaConf
from torchrl.data import RandomSampler
from torchrl.trainers.algorithms.configs.data import ReplayBufferBaseConfig, SamplerConfig
from torchrl.trainers.algorithms.configs.transforms import TransformConfig

from nmer_torchrl import (
    Method,
    NeighborPairSampler,
    PairMixup,
    PrioritizedNeighborPairSampler,
    RandomPairSampler,
)
from nmer_torchrl.buffers import PairPrioritizedReplayBuffer
from nmer_torchrl.configs import make_config
from nmer_torchrl.methods import METHODS, option_names
from nmer_torchrl.methods.groups import Keyed
from nmer_torchrl.samplers import NeighborhoodSampler
from nmer_torchrl.transforms import MeanMixup

KEYED = [name for name, method in METHODS.items() if issubclass(method, Keyed)]


def test_configs_are_torchrls_kind():
    assert issubclass(make_config(NeighborPairSampler), SamplerConfig)
    assert issubclass(make_config(PairMixup), TransformConfig)
    for name in METHODS:
        node = ConfigStore.instance().load(f"replay_buffer/{name}.yaml").node
        assert issubclass(OmegaConf.get_type(node), ReplayBufferBaseConfig)


def test_configs_make_their_objects():
    sampler = instantiate(
        make_config(NeighborPairSampler)(
            k=4, search="torch", keys=["state", ["robot", "q"]], value_keys=[["next", "reward"]]
        )
    )
    assert isinstance(sampler, NeighborPairSampler)
    assert "k=4, keys=('state', ('robot', 'q'))" in repr(sampler)
    assert isinstance(instantiate(make_config(RandomPairSampler)()), RandomPairSampler)
    assert "keys=('state',)" in repr(instantiate(make_config(RandomPairSampler)(keys="state")))
    graph = {"_target_": "nmer_torchrl.neighbors.NeighborGraph", "k": 4, "exact": True}
    config = make_config(NeighborPairSampler)(k=4, search=graph)
    assert instantiate(config).unit._chosen.exact
    fold = instantiate(
        make_config(PairMixup)(alpha=0.2, mix_keys=["x"], terminated_key=["next", "end"])
    )
    assert isinstance(fold, PairMixup)
    assert (fold.alpha, fold.mix_keys, fold.terminated_key) == (0.2, ("x",), ("next", "end"))


def test_parts_of_parts_are_named_by_their_target():
    metric = {"_target_": "nmer_torchrl.Mahalanobis", "shrinkage": 0.1}
    sampler = instantiate(make_config(NeighborhoodSampler)(k=4, metric=metric))
    assert (type(sampler), sampler.metric.shrinkage) == (NeighborhoodSampler, 0.1)
    gate = {"_target_": "nmer_torchrl.transforms.Fraction", "share": 0.5}
    fold = instantiate(make_config(MeanMixup)(gates=[gate]))
    assert (type(fold), fold.gates[0].share) == (MeanMixup, 0.5)
    cap = {"_target_": "nmer_torchrl.pairs.QuantileCap", "quantile": 0.9}
    sampler = instantiate(make_config(NeighborPairSampler)(max_distance=cap))
    assert sampler.unit.cap.max_distance.quantile == 0.9


def test_an_argument_without_a_default_is_missing():
    config = make_config(PrioritizedNeighborPairSampler)
    assert instantiate(config(max_capacity=9, beta=0.7)).beta == 0.7
    with pytest.raises(MissingMandatoryValue, match="max_capacity"):
        instantiate(config())


def test_a_method_of_ones_own_has_a_config():
    @dataclass(frozen=True)
    class Own(Method[RandomSampler]):
        size: int = 3

        def make_sampler(self, capacity):
            return RandomSampler()

    config = make_config(Own)
    assert [field.name for field in fields(config)] == ["size", "_target_", "_convert_"]
    assert config().size == 3


@pytest.mark.no_cover  # Hydra composes all of TorchRL's configs, five times as slowly with it
@pytest.mark.parametrize("name", METHODS)
def test_every_method_is_a_replay_buffer_by_its_name(name):
    options = ["capacity=50", "batch_size=8", "keys=[observation,action]"]
    if "k" in option_names(METHODS[name]):
        options.append("k=3")
    given = [f"++replay_buffer.{option}" for option in options[: None if name in KEYED else 2]]
    with initialize(version_base=None):
        config = compose(overrides=[f"+replay_buffer={name}", *given])
    buffer = instantiate(config.replay_buffer)
    assert type(buffer.sampler) is type(METHODS[name]().make_sampler(50))
    buffer.extend(make_transitions(20))
    assert buffer.sample().batch_size == (8,)
    if "k" in option_names(METHODS[name]):
        assert buffer.sampler.k == 3


@pytest.mark.parametrize(
    ("group", "name"),
    [
        ("sampler", "neighborhood"),
        ("transform", "mean_mixup"),
        ("transform", "neighborhood_mixup"),
        ("sampler", "temporal_pair"),
        ("transform", "state_mixup"),
        ("transform", "amplitude_scaling"),
        ("transform", "mixreg"),
        ("transform", "reward_mean"),
    ],
)
def test_each_is_found_by_its_name(group, name):
    with initialize(version_base=None):
        config = compose(overrides=[f"+{group}={name}"])
    assert type(instantiate(config[group])).__module__.startswith("nmer_torchrl")


def test_a_hydra_config_picks_them_by_name():
    ConfigStore.instance().store(
        name="test_nmer",
        node={"defaults": [{"sampler": "neighbor_pair"}, {"transform": "pair_mixup"}, "_self_"]},
    )
    with initialize(version_base=None):
        config = compose("test_nmer", overrides=["sampler.k=3", "transform.alpha=1.5"])
    assert instantiate(config.sampler).k == 3
    assert instantiate(config.transform).alpha == 1.5


def test_a_hydra_config_puts_a_prioritized_buffer_together():
    ConfigStore.instance().store(
        name="test_per_nmer",
        node={
            "defaults": [
                {"replay_buffer": "pair_prioritized"},
                {"sampler@replay_buffer.sampler": "prioritized_neighbor_pair"},
                {"transform@replay_buffer.transform": "pair_mixup"},
                {"storage@replay_buffer.storage": "lazy_tensor"},
                "_self_",
            ]
        },
    )
    changes = ["sampler.k=3", "sampler.beta=0.5", "sampler.max_capacity=50", "batch_size=8"]
    with initialize(version_base=None):
        config = compose(
            "test_per_nmer",
            overrides=[
                "replay_buffer.storage.max_size=50",
                *(f"replay_buffer.{change}" for change in changes),
            ],
        )
    buffer = instantiate(config.replay_buffer)
    assert isinstance(buffer, PairPrioritizedReplayBuffer)
    assert isinstance(buffer.sampler, PrioritizedNeighborPairSampler)
    assert (buffer.sampler.k, buffer.sampler.beta, buffer.sampler.max_size) == (3, 0.5, 50)
    buffer.extend(make_transitions(20))
    assert buffer.sample()["priority_weight"].shape == (8,)
