"""Compares mixed transitions with the simulator."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from nmer_torchrl.diagnostics.simulate import Simulator
from nmer_torchrl.diagnostics.states import REASONS, RECOVERIES, Array, Recovered
from nmer_torchrl.keys import POINT_KEYS, VALUE_KEYS, as_keys, as_roles, get_continuous
from nmer_torchrl.tracking.standardize import RunningStandardizer

STATE_KEYS: tuple[NestedKey, NestedKey] = ("qpos", "qvel")


@dataclass(frozen=True, eq=False, repr=False)
class ManifoldError:
    """The distance of transitions from the simulator's outcomes; see `manifold_error`.

    Attributes:
        state: `[n]`, float64: error of the next observation. NaN in rows that were left out.
        reward: `[n]`, float64: error of the reward. NaN in the same rows.
        dimensions: `[n, d]`: signed error of each dimension of the next observation.
        floor: The error of the unmixed anchors, if they were given.

    Examples:
        >>> import torch
        >>> state = torch.tensor([0.1, 0.3, torch.nan], dtype=torch.float64)
        >>> error = ManifoldError(state, reward=state / 2, dimensions=state.unsqueeze(-1))
        >>> error
        ManifoldError(rows=3, left_out=1, mean_state=0.2, mean_reward=0.1)
    """

    state: Tensor
    reward: Tensor
    dimensions: Tensor
    floor: ManifoldError | None = None

    @property
    def mean_state(self) -> float:
        """Returns the mean error of the next observation over the rows that were not left out."""
        return float(self.state.nanmean())

    @property
    def mean_reward(self) -> float:
        """Returns the mean error of the reward over the rows that were not left out."""
        return float(self.reward.nanmean())

    @property
    def left_out(self) -> int:
        """Returns the number of rows with an unknown state or an unstable simulation."""
        return int(self.state.isnan().sum())

    def __repr__(self) -> str:
        floor = "" if self.floor is None else f", floor={self.floor!r}"
        return (
            f"{type(self).__name__}(rows={len(self.state)}, left_out={self.left_out}, "
            f"mean_state={self.mean_state:.3g}, mean_reward={self.mean_reward:.3g}{floor})"
        )


def manifold_error(
    env_id: str,
    transitions: TensorDictBase,
    anchors: TensorDictBase | None = None,
    *,
    reference: TensorDictBase | None = None,
    action_bounds: tuple[float, float] | None = None,
    keys: Sequence[NestedKey] = POINT_KEYS,
    value_keys: Sequence[NestedKey] = VALUE_KEYS,
    state_keys: tuple[NestedKey, NestedKey] = STATE_KEYS,
) -> ManifoldError:
    """Sets the simulator to the state of each transition, steps it, and compares the outcomes.

    For a transition `(s, a, r, s')` and the simulator's outcome `(r*, s*)` from `s` and `a`,

        state  = sqrt(mean over dimensions j of ((s'_j - s*_j) / std_j) ** 2)
        reward = |r - r*| / std_r

    where the standard deviations are those of next observations and rewards in `reference`. An
    error of 1 is one standard deviation. A constant dimension is not scaled. The floor is the same
    error of transitions that were not mixed. It comes from rounding, and from simulator state
    beyond positions and velocities. It is about 1e-7 for observations in float32. The rewards of
    Ant (0.003), Humanoid and Reacher-v4 (below 0.001) have a larger floor, because they read
    positions that lag behind the joints.

    The state is recovered from the observation where that determines it: on Ant, HalfCheetah,
    Hopper, Humanoid, HumanoidStandup, InvertedDoublePendulum, InvertedPendulum, Reacher, Swimmer
    and Walker2d, v4 and v5, and on Pendulum and MountainCarContinuous. Hopper, Walker2d and
    InvertedDoublePendulum clip velocities at 10, and Reacher does not show on which side its elbow
    exceeded its limit. Such rows are read from `state_keys` if these are stored, and left out
    otherwise. Gymnasium's other MuJoCo tasks need `state_keys` for all rows, such as Pusher, which
    hides a velocity. A mixed sine and cosine are read as the angle in their direction, a mixed
    quaternion as the rotation in its direction.

    Args:
        env_id: Id of the task, such as `"HalfCheetah-v5"`, with its default settings.
        transitions: `[n]` rows, mixed or not.
        anchors: Rows that were not mixed, for the floor.

    Keyword Args:
        reference: Rows whose standard deviations scale the errors. Default: the anchors, or the
            transitions without anchors. Use the same rows to compare several methods, since mixing
            reduces the standard deviations.
        action_bounds: Range to which the actions in the rows were rescaled, such as (-1, 1); `None`
            if they are in the task's own range.
        keys: Entries of the observation and the action.
        value_keys: Entries of the next observation and the reward.
        state_keys: Entries of the positions and velocities of all joints. To mix them in a buffer,
            add them to its `value_keys`.

    Examples:
        >>> from torchrl.envs import DoubleToFloat, TransformedEnv
        >>> from torchrl.envs.libs.gym import GymEnv
        >>> from nmer_torchrl import make_replay_buffer
        >>> from nmer_torchrl.diagnostics import manifold_error
        >>> env = TransformedEnv(GymEnv("HalfCheetah-v5"), DoubleToFloat())
        >>> buffer = make_replay_buffer("nmer", capacity=500, batch_size=100)
        >>> _ = buffer.extend(env.rollout(500))
        >>> batch = buffer.sample()
        >>> anchors = buffer.storage[batch["index"][:, 0]]
        >>> error = manifold_error("HalfCheetah-v5", batch, anchors)
        >>> error.state.shape, error.left_out
        (torch.Size([100]), 0)
        >>> error.floor.mean_state < 1e-5 < error.mean_state
        True
    """
    names = _Names.of(keys, value_keys, state_keys)
    simulator = Simulator(env_id, action_bounds)
    try:
        measured = reference if reference is not None else anchors
        measured = transitions if measured is None else measured
        scale = _scale(measured, names.next_observation), _scale(measured, names.reward)
        floor = None if anchors is None else _compare(simulator, anchors, names, scale, None)
        return _compare(simulator, transitions, names, scale, floor)
    finally:
        simulator.close()


@dataclass(frozen=True)
class _Names:
    """Holds the keys of the parts of a transition."""

    observation: NestedKey
    action: NestedKey
    next_observation: NestedKey
    reward: NestedKey
    state: tuple[NestedKey, ...]

    @classmethod
    def of(
        cls,
        keys: Sequence[NestedKey],
        value_keys: Sequence[NestedKey],
        state_keys: Sequence[NestedKey],
    ) -> _Names:
        state = as_keys(state_keys, "state_keys")
        mixed = [key for key in as_keys(value_keys, "value_keys") if key not in state]
        roles = as_roles(keys, mixed)
        if any(len(part) != 1 for part in roles):
            raise ValueError(
                "A simulator maps one observation and one action to one next observation and one "
                f"reward, but keys={tuple(keys)!r} and value_keys={tuple(value_keys)!r} name more "
                "or fewer; name exactly one of each."
            )
        return cls(
            roles.observations[0],
            roles.actions[0],
            roles.next_observations[0],
            roles.rewards[0],
            state,
        )


def _compare(
    simulator: Simulator,
    rows: TensorDictBase,
    names: _Names,
    scale: tuple[Tensor, Tensor],
    floor: ManifoldError | None,
) -> ManifoldError:
    action = _read(rows, names.action, simulator.action_size, simulator.env_id)
    states, known = _states(simulator, rows, names)
    known = known & np.isfinite(action).all(1)
    size, env_id = simulator.observation_size, simulator.env_id
    said = _read(rows, names.next_observation, size, env_id)
    said_reward = _read(rows, names.reward, 1, env_id)[:, 0]
    observation, reward = np.full_like(said, np.nan), np.full_like(said_reward, np.nan)
    observation[known], reward[known], _ = simulator.step(states[known], action[known])
    dimensions = torch.from_numpy(said - observation) * scale[0]
    return ManifoldError(
        state=dimensions.square().mean(1).sqrt(),
        reward=torch.from_numpy(said_reward - reward).abs() * scale[1],
        dimensions=dimensions,
        floor=floor,
    )


def _states(simulator: Simulator, rows: TensorDictBase, names: _Names) -> Recovered:
    """Returns the states `[n, s]` of the rows, and which of them are known."""
    env_id, size = simulator.env_id, simulator.state_size
    task = env_id.rpartition("/")[2].rpartition("-v")[0]
    observation = _read(rows, names.observation, simulator.observation_size, env_id)
    stored = all(rows.get(key, None) is not None for key in names.state)
    if task in RECOVERIES:
        states, known = RECOVERIES[task](observation)
    elif stored:
        states, known = np.empty((len(rows), size)), np.zeros(len(rows), dtype=bool)
    else:
        reason = REASONS.get(task, "the relation of its observation to its state is not known")
        raise ValueError(
            f"The state of {env_id} cannot be recovered from its observation: {reason}. Store the "
            f"positions and velocities of its joints under {names.state}, and add these keys to "
            f"the buffer's `value_keys`, or choose one of {', '.join(RECOVERIES)}."
        )
    if stored:
        whole = np.concatenate([_read(rows, key, None, env_id) for key in names.state], 1)
        _check_size(whole.shape[1], size, names.state, env_id)
        states = np.where(known[:, None], states, whole)
        known = np.ones(len(rows), dtype=bool)
    return Recovered(states, known & np.isfinite(states).all(1))


def _read(rows: TensorDictBase, key: NestedKey, size: int | None, env_id: str) -> Array:
    """Returns an entry of `[n]` rows as `[n, size]` in float64; checks the size if it is given."""
    if rows.ndim != 1:
        raise ValueError(
            f"The transitions are a batch of shape {tuple(rows.shape)}, but a vector of rows "
            "is needed; give `transitions.reshape(-1)`."
        )
    entry = _double(rows, key).numpy()
    if size is not None:
        _check_size(entry.shape[1], size, key, env_id)
    return entry


def _double(rows: TensorDictBase, key: NestedKey) -> Tensor:
    entry = get_continuous(rows, key, "keys")
    return entry.detach().cpu().double().reshape(len(rows), math.prod(entry.shape[1:]))


def _check_size(given: int, size: int, key: NestedKey, env_id: str) -> None:
    if given != size:
        raise ValueError(
            f"{key!r} has {given} numbers in each row, but {env_id} has {size}; "
            "give rows of that task."
        )


def _scale(rows: TensorDictBase, key: NestedKey) -> Tensor:
    """Returns the reciprocal standard deviation of each dimension; 1 if it is constant."""
    entry = _double(rows, key)
    entry = entry[entry.isfinite().all(1)]
    if not len(entry):
        raise ValueError(
            f"No row has a finite {key!r}, so errors cannot be scaled; "
            "give rows with finite entries as `reference`."
        )
    standardizer = RunningStandardizer(entry.shape[1])
    standardizer.update(entry)
    return standardizer.scale
