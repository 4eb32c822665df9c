import pytest
from helpers import make_transitions
from hydra import compose, initialize
from hydra.core.config_store import ConfigStore
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from torchrl.trainers.algorithms.configs.data import (
    SamplerConfig,
    TensorDictReplayBufferConfig,
)
from torchrl.trainers.algorithms.configs.transforms import TransformConfig

from nmer_torchrl import (
    AmplitudeScaling,
    DeltaMixup,
    MeanMixup,
    MixReg,
    NeighborhoodMixup,
    NeighborhoodSampler,
    NeighborPairSampler,
    PairMixup,
    PairPrioritizedReplayBuffer,
    PrioritizedNeighborPairSampler,
    RandomPairSampler,
    RewardMean,
    StateMixup,
    TemporalPairSampler,
)
from nmer_torchrl.configs import (
    AmplitudeScalingConfig,
    DeltaMixupConfig,
    MeanMixupConfig,
    MixRegConfig,
    NeighborhoodMixupConfig,
    NeighborhoodSamplerConfig,
    NeighborPairSamplerConfig,
    PairMixupConfig,
    PairPrioritizedReplayBufferConfig,
    PrioritizedNeighborPairSamplerConfig,
    RandomPairSamplerConfig,
    RewardMeanConfig,
    StateMixupConfig,
    TemporalPairSamplerConfig,
)


def test_configs_are_torchrls_kind():
    assert issubclass(NeighborPairSamplerConfig, SamplerConfig)
    assert issubclass(RandomPairSamplerConfig, SamplerConfig)
    assert issubclass(PairMixupConfig, TransformConfig)
    assert issubclass(PrioritizedNeighborPairSamplerConfig, SamplerConfig)
    assert issubclass(PairPrioritizedReplayBufferConfig, TensorDictReplayBufferConfig)


def test_configs_make_their_objects():
    sampler = instantiate(
        NeighborPairSamplerConfig(
            k=4, search="torch", keys=["state", ["robot", "q"]], value_keys=[["next", "reward"]]
        )
    )
    assert isinstance(sampler, NeighborPairSampler)
    assert "k=4, keys=('state', ('robot', 'q'))" in repr(sampler)
    assert isinstance(instantiate(RandomPairSamplerConfig()), RandomPairSampler)
    assert "keys=('state',)" in repr(instantiate(RandomPairSamplerConfig(keys="state")))
    graph = {"_target_": "nmer_torchrl.neighbors.NeighborGraph", "k": 4, "exact": True}
    assert instantiate(NeighborPairSamplerConfig(k=4, search=graph))._neighborhood._chosen.exact
    fold = instantiate(PairMixupConfig(alpha=0.2, mix_keys=["x"], terminated_key=["next", "end"]))
    assert isinstance(fold, PairMixup)
    assert (fold.alpha, fold.mix_keys, fold.terminated_key) == (0.2, ("x",), ("next", "end"))


def test_configs_of_other_folds_make_their_objects():
    sampler = instantiate(
        TemporalPairSamplerConfig(
            keys=["state"],
            value_keys=[["next", "state"]],
            end_keys=[["next", "end"]],
            trajectory_key=["ids", "episode"],
        )
    )
    assert isinstance(sampler, TemporalPairSampler)
    succession = sampler._succession
    assert (succession.observations, succession.end_keys) == (("state",), (("next", "end"),))
    assert succession.trajectory_key == ("ids", "episode")
    state = instantiate(StateMixupConfig(alpha=0.4, observation_keys=[["robot", "q"]]))
    assert isinstance(state, StateMixup)
    assert (state.alpha, state.observation_keys) == (0.4, (("robot", "q"),))
    scaling = instantiate(AmplitudeScalingConfig(high=1.5))
    assert isinstance(scaling, AmplitudeScaling)
    assert (scaling.low, scaling.high) == (0.6, 1.5)
    mixreg = instantiate(MixRegConfig(alpha=0.4))
    assert isinstance(mixreg, MixReg)
    assert mixreg.alpha == 0.4
    rewards = instantiate(RewardMeanConfig(terminated_key=["next", "end"]))
    assert isinstance(rewards, RewardMean)
    assert rewards.terminated_key == ("next", "end")


def test_configs_of_metrics_and_interpolations_make_their_objects():
    sampler = instantiate(
        NeighborhoodSamplerConfig(k=4, metric={"mahalanobis": {"shrinkage": 0.1}})
    )
    assert isinstance(sampler, NeighborhoodSampler)
    assert (sampler.k, sampler.metric.shrinkage) == (4, 0.1)
    prioritized = PrioritizedNeighborPairSamplerConfig(max_capacity=9, metric="product", beta=0.7)
    made = instantiate(prioritized)
    assert (repr(made.metric), made.beta) == ("ProductNorm(action_keys=('action',))", 0.7)
    delta = instantiate(DeltaMixupConfig(alpha=0.4, fraction=0.5))
    assert isinstance(delta, DeltaMixup)
    assert (delta.alpha, delta.gates[0].share) == (0.4, 0.5)
    linear = {"linear": {"first": 1.0, "last": 0.0, "rows": 10}}
    mean = instantiate(MeanMixupConfig(fraction=linear, terminated_key=["next", "end"]))
    assert isinstance(mean, MeanMixup)
    assert (mean.gates[0].share(10), mean.terminated_key) == (0.0, ("next", "end"))
    assert isinstance(instantiate(NeighborhoodMixupConfig()), NeighborhoodMixup)
    density = {"density": {"first": 0.0, "last": 1.0, "rows": 10}}
    with pytest.raises(InstantiationException, match="make the buffer by make_replay_buffer"):
        instantiate(PairMixupConfig(fraction=density))


@pytest.mark.parametrize(
    ("group", "name"),
    [
        ("sampler", "neighborhood"),
        ("transform", "delta_mixup"),
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
