"""Environments: the task with actions in [-1, 1], and its state in the middle of an episode."""

from __future__ import annotations

import json
import warnings
from typing import Any

import gymnasium
import numpy as np
import torch
from omegaconf import DictConfig

from nmer_recipes.errors import UsageError


def make_env(
    cfg: DictConfig, *, render_mode: str | None = None, rescale: bool = True
) -> gymnasium.Env:
    """The Gymnasium task, as it is or with flat observations and actions rescaled to [-1, 1]."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that v4 is old is why one asks for it
            if cfg.id.startswith("dm_control/"):
                import shimmy  # noqa: F401, registers these tasks
            options = {} if render_mode is None else {"render_mode": render_mode}
            env = gymnasium.make(cfg.id, disable_env_checker=True, **options)
    except (gymnasium.error.Error, ImportError) as error:
        raise UsageError(
            f"The environment {cfg.id} cannot be made: {error} "
            "Choose one of recipes/conf/env, or another version by env.version."
        ) from None
    space = env.action_space
    if not isinstance(space, gymnasium.spaces.Box):
        raise UsageError(
            f"{cfg.id} has actions in {space}, but SAC and TD3 here act in continuous boxes; "
            "choose an environment with a Box action space."
        )
    if not (np.isfinite(space.low).all() and np.isfinite(space.high).all()):
        raise UsageError(
            f"{cfg.id} has unbounded actions, which cannot be rescaled to [-1, 1]; "
            "bound them by a wrapper."
        )
    if not rescale:
        return env
    with np.errstate(over="ignore"):  # of bounds that float32 cannot hold
        if isinstance(env.observation_space, gymnasium.spaces.Dict):
            env = gymnasium.wrappers.FlattenObservation(env)
        return gymnasium.wrappers.RescaleAction(env, np.float32(-1.0), np.float32(1.0))


def get_state(env: gymnasium.Env) -> dict[str, Any]:
    """The state of a task in the middle of an episode, as tensors and plain values.

    MuJoCo's integration state alone is not enough: rewards of Ant and Humanoid read the positions
    of the bodies before the step, which it leaves out. Of other tasks than Gymnasium's MuJoCo and
    classic ones only the generator is kept (those of dm_control change their model at a reset): a
    resumed run then goes on with a new episode.
    """
    task = env.unwrapped
    state: dict[str, Any] = {"random": json.dumps(_get_random_state(task.np_random))}
    limit = _time_limit(env)
    if limit is not None:
        state["elapsed"] = limit._elapsed_steps
    if hasattr(task, "model") and hasattr(task, "data"):
        import mujoco

        kind = mujoco.mjtState.mjSTATE_INTEGRATION
        physics = np.empty(mujoco.mj_stateSize(task.model, kind))
        mujoco.mj_getState(task.model, task.data, physics, kind)
        state["physics"] = torch.from_numpy(physics)
        state["xpos"] = torch.from_numpy(task.data.xpos.copy())
        state["xipos"] = torch.from_numpy(task.data.xipos.copy())
    elif getattr(task, "state", None) is not None:
        state["state"] = torch.from_numpy(np.array(task.state))
    return state


def set_state(env: gymnasium.Env, state: dict[str, Any]) -> bool:
    """Restores what `get_state` returned, after a reset; False if the episode was not in it."""
    task = env.unwrapped
    _set_random_state(task.np_random, json.loads(state["random"]))
    if "physics" in state:
        import mujoco

        kind = mujoco.mjtState.mjSTATE_INTEGRATION
        mujoco.mj_setState(task.model, task.data, state["physics"].numpy(), kind)
        task.data.xpos[:] = state["xpos"].numpy()
        task.data.xipos[:] = state["xipos"].numpy()
    elif "state" in state:
        task.state = state["state"].numpy().copy()
    else:
        return False
    limit = _time_limit(env)
    if limit is not None:
        limit._elapsed_steps = state["elapsed"]
    return True


def _get_random_state(generator: np.random.Generator | np.random.RandomState) -> dict[str, Any]:
    """Returns the state of a task's generator; those of dm_control have NumPy's older kind."""
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    state = generator.get_state(legacy=False)
    return state | {"state": state["state"] | {"key": state["state"]["key"].tolist()}}


def _set_random_state(
    generator: np.random.Generator | np.random.RandomState, state: dict[str, Any]
) -> None:
    """Restores what `_get_random_state` returned."""
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)


def _time_limit(env: gymnasium.Env) -> gymnasium.wrappers.TimeLimit | None:
    while isinstance(env, gymnasium.Wrapper):
        if isinstance(env, gymnasium.wrappers.TimeLimit):
            return env
        env = env.env
    return None
