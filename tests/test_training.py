"""TorchRL's own losses, collectors and environments on our batches."""

import pytest
import torch
from tensordict.nn import NormalParamExtractor, TensorDictModule, TensorDictSequential
from torchrl.collectors import Collector
from torchrl.envs import Compose, DoubleToFloat, TransformedEnv
from torchrl.envs.libs.gym import GymEnv
from torchrl.modules import (
    MLP,
    AdditiveGaussianModule,
    ProbabilisticActor,
    TanhModule,
    TanhNormal,
    ValueOperator,
)
from torchrl.objectives import SACLoss, SoftUpdate, TD3Loss

from nmer_torchrl import make_replay_buffer
from nmer_torchrl.methods import METHODS

OBSERVATION, ACTION = 17, 6


def make_env() -> TransformedEnv:
    env = TransformedEnv(GymEnv("HalfCheetah-v5"), Compose(DoubleToFloat()))
    env.set_seed(0)
    return env


@pytest.fixture(scope="module")
def env():
    env = make_env()
    yield env
    env.close()


def make_critic() -> ValueOperator:
    network = MLP(in_features=OBSERVATION + ACTION, out_features=1, num_cells=[32, 32])
    return ValueOperator(network, in_keys=["observation", "action"])


def make_td3(env) -> tuple[TD3Loss, TensorDictSequential]:
    actor = TensorDictSequential(
        TensorDictModule(
            MLP(in_features=OBSERVATION, out_features=ACTION, num_cells=[32, 32]),
            in_keys=["observation"],
            out_keys=["action"],
        ),
        TanhModule(in_keys=["action"], spec=env.action_spec),
    )
    loss = TD3Loss(actor, make_critic(), action_spec=env.action_spec, num_qvalue_nets=2)
    loss.make_value_estimator(gamma=0.99)
    SoftUpdate(loss, tau=0.005)
    return loss, actor


def make_sac(env) -> SACLoss:
    network = torch.nn.Sequential(
        MLP(in_features=OBSERVATION, out_features=2 * ACTION, num_cells=[32, 32]),
        NormalParamExtractor(),
    )
    actor = ProbabilisticActor(
        TensorDictModule(network, in_keys=["observation"], out_keys=["loc", "scale"]),
        in_keys=["loc", "scale"],
        spec=env.action_spec,
        distribution_class=TanhNormal,
    )
    loss = SACLoss(actor, make_critic(), action_spec=env.action_spec, num_qvalue_nets=2)
    loss.make_value_estimator(gamma=0.99)
    SoftUpdate(loss, tau=0.005)
    return loss


def filled_buffer(env, kind: str):
    buffer = make_replay_buffer(kind, capacity=1_000, batch_size=32)
    buffer.extend(env.rollout(200, break_when_any_done=False))
    return buffer


@pytest.mark.parametrize("kind", METHODS)
def test_a_td3_step_on_a_batch(env, kind):
    loss, _ = make_td3(env)
    losses = loss(filled_buffer(env, kind).sample())
    (losses["loss_actor"] + losses["loss_qvalue"]).backward()
    gradients = [p.grad for p in loss.parameters() if p.grad is not None]
    assert gradients
    assert all(g.isfinite().all() for g in gradients)


@pytest.mark.parametrize("kind", METHODS)
def test_a_sac_step_on_a_batch(env, kind):
    loss = make_sac(env)
    losses = loss(filled_buffer(env, kind).sample())
    (losses["loss_actor"] + losses["loss_qvalue"] + losses["loss_alpha"]).backward()
    gradients = [p.grad for p in loss.parameters() if p.grad is not None]
    assert gradients
    assert all(g.isfinite().all() for g in gradients)


def test_a_collector_loop_on_half_cheetah_lowers_the_loss():
    env = make_env()
    loss, actor = make_td3(env)
    policy = TensorDictSequential(
        actor, AdditiveGaussianModule(spec=env.action_spec, sigma_init=0.1, sigma_end=0.1)
    )
    optimizer = torch.optim.Adam(loss.qvalue_network_params.flatten_keys().values(), lr=3e-3)
    target = SoftUpdate(loss, tau=0.005)
    buffer = make_replay_buffer("nmer", capacity=400, batch_size=64)
    collector = Collector(
        env,
        policy,
        frames_per_batch=50,
        total_frames=600,
        auto_register_policy_transforms=True,
    )
    history = []
    for data in collector:
        buffer.extend(data.reshape(-1))
        for _ in range(20):
            batch = buffer.sample()
            assert batch.batch_size == (64,)
            value = loss(batch)["loss_qvalue"]
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
            target.step()
            history.append(float(value.detach()))
    collector.shutdown()
    assert len(buffer) == 400
    assert sum(history[-40:]) < 0.7 * sum(history[:40])
