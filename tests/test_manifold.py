"""On-manifold error: real tasks, put into given states."""

import builtins
import math
import subprocess
import sys
import warnings

import gymnasium
import numpy as np
import pytest
import torch
from tensordict import TensorDict

from nmer_torchrl import make_replay_buffer
from nmer_torchrl.diagnostics import manifold_error
from nmer_torchrl.diagnostics.simulate import Simulator
from nmer_torchrl.diagnostics.states import RECOVERIES
from nmer_torchrl.keys import VALUE_KEYS

CLASSIC = ["Pendulum-v1", "MountainCarContinuous-v0"]
MUJOCO = [
    f"{name}-{version}"
    for name in sorted(RECOVERIES)
    for version in ("v4", "v5")
    if name not in ("Pendulum", "MountainCarContinuous")
]
# Rewards that read positions from before the step, which lag behind the joints.
LAGGING = {
    "Ant-v4": 2e-2,
    "Ant-v5": 2e-2,
    "Humanoid-v4": 2e-3,
    "Humanoid-v5": 2e-3,
    "Reacher-v4": 2e-3,
}


def record(env_id: str, n: int, *, rescaled: bool = False, dtype=torch.float32) -> TensorDict:
    """Returns rows of random actions, as a buffer stores them, with the whole state."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        env = gymnasium.make(env_id, disable_env_checker=True)
    if rescaled:
        env = gymnasium.wrappers.RescaleAction(env, np.float32(-1.0), np.float32(1.0))
    env.action_space.seed(0)
    observation, _ = env.reset(seed=0)
    rows = []
    for _ in range(n):
        physics = getattr(env.unwrapped, "data", None)
        state = [] if physics is None else [physics.qpos.copy(), physics.qvel.copy()]
        action = env.action_space.sample()
        following, reward, terminated, truncated, _ = env.step(action)
        rows.append((observation, action, following, [reward], [terminated], *state))
        observation = env.reset()[0] if terminated or truncated else following
    env.close()
    columns = [torch.as_tensor(np.array(column)) for column in zip(*rows, strict=True)]
    observation, action, following, reward, terminated = columns[:5]
    data = TensorDict(
        observation=observation.to(dtype),
        action=action.to(dtype),
        next=TensorDict(
            observation=following.to(dtype),
            reward=reward.to(dtype),
            terminated=terminated,
            batch_size=[n],
        ),
        batch_size=[n],
    )
    if len(columns) > 5:
        data.set("qpos", columns[5]).set("qvel", columns[6])
    return data


def visible(rows: TensorDict) -> TensorDict:
    return rows.exclude("qpos", "qvel")


@pytest.mark.parametrize("env_id", [*MUJOCO, *CLASSIC])
def test_unmixed_transitions_have_no_error(env_id):
    rows = visible(record(env_id, 200))
    error = manifold_error(env_id, rows, rows)
    assert error.floor is not None
    assert error.left_out == 0 or env_id.startswith(("Reacher", "Walker2d"))
    assert error.left_out < 180  # random actions whirl a Walker2d
    for floor in (error, error.floor):
        assert floor.mean_state < 1e-5
        assert floor.mean_reward < LAGGING.get(env_id, 1e-5)
    assert error.state.nan_to_num().max() < 1e-3


def test_pusher_has_no_error_from_stored_states():
    rows = record("Pusher-v5", 200)
    error = manifold_error("Pusher-v5", rows)
    assert error.left_out == 0
    assert error.floor is None
    assert max(error.mean_state, error.mean_reward) < 1e-5


def test_wrong_values_have_the_error_they_should():
    rows = visible(record("HalfCheetah-v5", 100))
    wrong = rows.clone()
    spread = rows["next", "observation"].double().std(0, correction=0)
    wrong["next", "observation"][3, 5] += 2 * spread[5]
    wrong["next", "reward"][7] -= 3 * rows["next", "reward"].double().std(correction=0)
    error = manifold_error("HalfCheetah-v5", wrong, rows)
    assert error.state[3].item() == pytest.approx(2 / math.sqrt(17), rel=1e-4)
    assert error.dimensions[3, 5].item() == pytest.approx(2, rel=1e-4)
    assert error.reward[7].item() == pytest.approx(3, rel=1e-4)
    error.state[3] = error.reward[7] = 0
    assert max(error.state.max(), error.reward.max()) < 1e-4


def test_pendulum_agrees_with_its_equation():
    rows = visible(record("Pendulum-v1", 50))
    # A mix of angles 0.1 and -0.3 at rest, without torque: the angle in the middle direction.
    angles = torch.tensor([0.1, -0.3], dtype=torch.float64)
    cosine, sine = angles.cos().mean(), angles.sin().mean()
    mixed = rows[:1].clone()
    mixed["observation"] = torch.stack([cosine, sine, torch.zeros(()).double()]).unsqueeze(0)
    mixed["action"] = torch.zeros(1, 1)
    mixed["next", "observation"] = torch.zeros(1, 3).double()
    mixed["next", "reward"] = torch.zeros(1, 1).double()
    error = manifold_error("Pendulum-v1", mixed, reference=rows)
    angle = torch.atan2(sine, cosine)
    velocity = 3 * 10.0 / 2 * angle.sin() * 0.05
    after = angle + velocity * 0.05
    expected = torch.stack([after.cos(), after.sin(), velocity])
    spread = rows["next", "observation"].double().std(0, correction=0)
    torch.testing.assert_close(-error.dimensions[0] * spread, expected, rtol=1e-5, atol=1e-6)
    reward = rows["next", "reward"].double().std(correction=0)
    assert (error.reward[0] * reward).item() == pytest.approx(float(angle) ** 2, rel=1e-4)


def test_mixed_transitions_are_farther_than_the_floor_and_far_pairs_farther_than_near_ones():
    rows = visible(record("HalfCheetah-v5", 1_000))
    means = {}
    for kind in ("1nn", "mixup"):
        buffer = make_replay_buffer(
            kind, capacity=1_000, batch_size=200, generator=torch.Generator().manual_seed(0)
        )
        buffer.extend(rows)
        batch = buffer.sample()
        anchors = buffer.storage[batch["index"][:, 0]]
        error = manifold_error("HalfCheetah-v5", batch, anchors, reference=rows)
        assert error.floor.mean_state < 1e-5
        means[kind] = error.mean_state
    assert 1e-3 < means["1nn"] < means["mixup"]


@pytest.mark.parametrize("env_id", ["Humanoid-v5", "InvertedPendulum-v5", "Pendulum-v1"])
def test_rescaled_actions_are_mapped_back(env_id):
    rows = visible(record(env_id, 100, rescaled=True))
    assert manifold_error(env_id, rows, action_bounds=(-1, 1)).mean_state < 1e-5
    assert manifold_error(env_id, rows).mean_state > 1e-3


def test_rows_at_the_bound_of_a_velocity_are_left_out_unless_states_are_stored():
    rows = record("Walker2d-v5", 100)
    fast = (rows["qvel"].abs() >= 10).any(1)
    assert 0 < fast.sum() < 100, "the test needs rows on either side of the bound"
    error = manifold_error("Walker2d-v5", visible(rows))
    torch.testing.assert_close(error.state.isnan(), fast)
    torch.testing.assert_close(error.reward.isnan(), fast)
    assert error.left_out == fast.sum()
    assert f"left_out={int(fast.sum())}" in repr(error)
    whole = manifold_error("Walker2d-v5", rows)
    assert whole.left_out == 0
    assert whole.mean_state < 1e-5


def test_an_elbow_beyond_its_limit_is_left_out_unless_states_are_stored():
    rows = record("Reacher-v5", 1_000)
    beyond = rows["qpos"][:, 1].abs() > 3
    assert (rows["qpos"][:, 1].abs() > math.pi).any(), "the test needs an angle that looks another"
    error = manifold_error("Reacher-v5", visible(rows))
    torch.testing.assert_close(error.state.isnan(), beyond)
    assert error.mean_state < 1e-5
    assert manifold_error("Reacher-v5", rows).mean_state < 1e-5


def test_stored_states_are_mixed_by_a_buffer_that_is_told_to():
    rows = record("Pusher-v5", 300)
    buffer = make_replay_buffer(
        "nmer", capacity=300, batch_size=50, value_keys=[*VALUE_KEYS, "qpos", "qvel"]
    )
    buffer.extend(rows)
    batch = buffer.sample()
    anchors = buffer.storage[batch["index"][:, 0]]
    error = manifold_error("Pusher-v5", batch, anchors)
    assert error.floor.mean_state < 1e-5 < error.mean_state


def test_states_from_which_the_simulation_bursts_are_left_out(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # MuJoCo logs its warnings into the working directory
    rows = visible(record("HalfCheetah-v5", 20))
    rows["observation"][4, 8:] = 1e20
    rows["observation"][5, 0] = math.nan
    rows["action"][6, 0] = math.nan
    error = manifold_error("HalfCheetah-v5", rows)
    assert error.state.isnan().nonzero().squeeze(1).tolist() == [4, 5, 6]
    assert error.reward.isnan().nonzero().squeeze(1).tolist() == [4, 5, 6]


def test_order_of_rows_does_not_matter():
    rows = visible(record("Humanoid-v5", 60))
    backward = manifold_error("Humanoid-v5", rows.flip(0))
    torch.testing.assert_close(
        backward.state.flip(0), manifold_error("Humanoid-v5", rows).state, rtol=0, atol=0
    )


def test_entries_may_have_other_names():
    rows = visible(record("HalfCheetah-v5", 50))
    renamed = TensorDict(
        {
            ("agent", "seen"): rows["observation"],
            ("agent", "done"): rows["action"],
            ("next", "agent", "seen"): rows["next", "observation"],
            "gain": rows["next", "reward"],
        },
        batch_size=[50],
    )
    error = manifold_error(
        "HalfCheetah-v5",
        renamed,
        keys=[("agent", "seen"), ("agent", "done")],
        value_keys=[("next", "agent", "seen"), "gain"],
    )
    assert error.mean_state < 1e-5


def test_refusals_say_why_and_what_to_do():
    rows = visible(record("HalfCheetah-v5", 10))
    pusher = visible(record("Pusher-v5", 10))
    with pytest.raises(ValueError, match=r"velocity of the object.*Store the positions"):
        manifold_error("Pusher-v5", pusher)
    with pytest.raises(ValueError, match=r"only continuous ones can be mixed"):
        manifold_error("CartPole-v1", rows)
    with pytest.raises(ValueError, match=r"Nowhere-v1 cannot be created"):
        manifold_error("Nowhere-v1", rows)
    with pytest.raises(ValueError, match=r"6 numbers in each row, but Hopper-v5 has 3"):
        manifold_error("Hopper-v5", rows)
    with pytest.raises(ValueError, match=r"batch of shape \(2, 5\).*reshape"):
        manifold_error("HalfCheetah-v5", rows.reshape(2, 5))
    with pytest.raises(ValueError, match=r"is not a range"):
        manifold_error("HalfCheetah-v5", rows, action_bounds=(1, 1))
    with pytest.raises(ValueError, match=r"exactly one of each"):
        manifold_error("HalfCheetah-v5", rows, keys=["observation"])
    with pytest.raises(ValueError, match=r"No row has a finite .*`reference`"):
        manifold_error("HalfCheetah-v5", rows[:0])
    short = pusher.clone().set("qpos", torch.zeros(10, 3)).set("qvel", torch.zeros(10, 3))
    with pytest.raises(ValueError, match=r"6 numbers in each row, but Pusher-v5 has 22"):
        manifold_error("Pusher-v5", short)


def test_missing_gymnasium_is_told(monkeypatch):
    real = builtins.__import__

    def without(name, *arguments, **options):
        if name == "gymnasium":
            raise ImportError(name)
        return real(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=r"gymnasium\[mujoco\]"):
        Simulator("HalfCheetah-v5")


def test_the_simulator_is_imported_only_when_used():
    code = """
import sys, torchrl.data, torchrl.envs
before = set(sys.modules)
import nmer_torchrl.diagnostics
print(sorted({"gymnasium", "mujoco"} & (set(sys.modules) - before)))
"""
    command = [sys.executable, "-W", "ignore", "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
