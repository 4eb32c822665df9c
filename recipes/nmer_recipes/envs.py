"""Builds tasks with actions in [-1, 1], and saves their state in the middle of an episode."""

from __future__ import annotations

import inspect
import json
import warnings
from collections.abc import Iterator
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import wrappers
from omegaconf import DictConfig, OmegaConf

from nmer_recipes.errors import UsageError
from nmer_recipes.imports import import_callable, search_current_directory
from nmer_recipes.plain import as_plain, from_plain
from nmer_recipes.settings import TASK_PAGE
from nmer_recipes.task_checks import check_spaces, check_steps, check_time_limit
from nmer_recipes.torchrl_task import TorchRLTask

# Gymnasium's wrappers that keep no state between steps; we restore the time limit's.
_STATELESS = (
    wrappers.ClipAction,
    wrappers.ClipReward,
    wrappers.DtypeObservation,
    wrappers.FilterObservation,
    wrappers.FlattenObservation,
    wrappers.OrderEnforcing,
    wrappers.PassiveEnvChecker,
    wrappers.RescaleAction,
    wrappers.RescaleObservation,
    wrappers.ReshapeObservation,
    wrappers.TimeLimit,
)


def make_env(
    cfg: DictConfig, *, render_mode: str | None = None, rescale: bool = True
) -> gymnasium.Env:
    """Builds the task that `cfg` names; `rescale` flattens observations and rescales actions."""
    env = _wrap(_make_task(cfg, render_mode), cfg)
    check_spaces(env, cfg.id)
    if not rescale:
        return env
    with np.errstate(over="ignore"):  # float32 cannot hold some bounds
        if isinstance(env.observation_space, gymnasium.spaces.Dict):
            env = wrappers.FlattenObservation(env)
        return wrappers.RescaleAction(env, np.float32(-1.0), np.float32(1.0))


def frame_rate(env: gymnasium.Env) -> float:
    """Returns the number of steps in a second of the task's own time."""
    if env.spec is not None and env.spec.id.startswith("dm_control/"):
        return 1 / env.unwrapped.dt  # Shimmy's `render_fps` is the length of a step in milliseconds
    return env.metadata.get("render_fps", 30)


def _make_task(cfg: DictConfig, render_mode: str | None) -> gymnasium.Env:
    """Builds the task of Gymnasium or TorchRL, with its time limit."""
    options: dict[str, Any] = {}
    if cfg.get("kwargs"):
        options |= OmegaConf.to_container(cfg.kwargs, resolve=True)
    limit = cfg.get("max_steps")
    try:
        if cfg.get("kind") == "torchrl":
            env: gymnasium.Env = TorchRLTask(cfg.id, options)
            return env if limit is None else wrappers.TimeLimit(env, limit)
        if limit is not None:
            options["max_episode_steps"] = limit
        if render_mode is not None:
            options["render_mode"] = render_mode
        search_current_directory()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # v4 is deprecated, but was asked for
            if cfg.id.startswith("dm_control/"):
                import shimmy  # noqa: F401, registers these tasks
            env = gymnasium.make(cfg.id, disable_env_checker=True, **options)
        if render_mode is not None and cfg.id.startswith("dm_control/"):
            # The first camera follows a robot that walks; the default camera stands still.
            env.unwrapped.render_kwargs = {"camera_id": 0} | env.unwrapped.render_kwargs
        return env
    except (gymnasium.error.Error, ImportError) as error:
        remedy = "Choose a task from recipes/conf/env, or another version with env.version."
        if "version" not in cfg:
            remedy = (
                "For your own task, give env.id=MODULE:NAME; modules are imported from the current "
                f"directory and from PYTHONPATH (see {TASK_PAGE})."
            )
        raise UsageError(f"The environment {cfg.id} cannot be created: {error} {remedy}") from None
    except (TypeError, ValueError) as error:
        reason = str(error).splitlines()[0].partition(" was raised from the environment creator")[0]
        if render_mode is not None:  # the task itself has passed its checks
            raise UsageError(f"{cfg.id} cannot be filmed: {reason}; leave the video out.") from None
        given = f"with {', '.join(options)}" if options else "without arguments"
        raise UsageError(
            f"{cfg.id} cannot be constructed {given}: {reason}; give the arguments of its "
            "constructor as env.kwargs.NAME=VALUE."
        ) from error


def _wrap(env: gymnasium.Env, cfg: DictConfig) -> gymnasium.Env:
    """Applies the wrappers of `env.wrappers` to a task, the first one innermost."""
    for path in cfg.get("wrappers") or ():
        given = f"env.wrappers={path}"
        wrapper = import_callable(path, given)
        try:
            wrapped = wrapper(env)
        except TypeError as error:
            raise UsageError(
                f"{given} cannot wrap {cfg.id}: {error}; a wrapper is called with the task only. "
                "For more arguments, give a function of your own that passes them."
            ) from error
        if not isinstance(wrapped, gymnasium.Env):
            raise UsageError(
                f"{given} returned {type(wrapped).__name__}, but a wrapper must return a "
                "gymnasium.Env."
            )
        env = wrapped
    return env


def check_task(cfg: DictConfig) -> None:
    """Raises a `UsageError` for a task that the recipes cannot train on; builds it to check."""
    with make_env(cfg, rescale=False) as env:
        check_time_limit(env, cfg.id)
        check_steps(env, cfg.id)


def get_state(env: gymnasium.Env) -> dict[str, Any]:
    """Returns the state of a task in the middle of an episode, as tensors and plain values.

    The episode is included if the state of every layer is known. It is known for Gymnasium's own
    MuJoCo and classic tasks, and for each task and wrapper with `get_state()` and
    `set_state(state)`. Otherwise only the generator is saved, and a resumed run starts a new
    episode: an attribute such as `state` need not determine the whole task. Tasks of dm_control
    change their model at a reset.
    """
    task, layers = env.unwrapped, _layers(env)
    start = {"random": _get_random_state(task.np_random)}  # for the next episode
    state: dict[str, Any] = start | {"elapsed": [each._elapsed_steps for each in _limits(env)]}
    holders = [layer for layer in layers if _offers_state(layer)]
    others = [layer for layer in layers if not _offers_state(layer)]
    if others not in ([], [task]):
        return start  # a wrapper may have an unknown state
    if others:
        known = _get_known_state(task)
        if not known:
            return start
        state |= known
    own = [layer.get_state() for layer in holders]
    try:
        return state | {"own": as_plain(own)}
    except TypeError:  # a checkpoint cannot hold the value
        return start


def set_state(env: gymnasium.Env, state: dict[str, Any]) -> bool:
    """Restores a saved state after a reset; returns False if it has no episode."""
    task = env.unwrapped
    _set_random_state(task.np_random, state["random"])
    holders = [layer for layer in _layers(env) if _offers_state(layer)]
    own = state.get("own", [])  # missing in checkpoints of version 0.1
    if "physics" in state and _is_gymnasium(task, "mujoco"):
        import mujoco

        kind = mujoco.mjtState.mjSTATE_INTEGRATION
        mujoco.mj_setState(task.model, task.data, state["physics"].numpy(), kind)
        task.data.xpos[:] = state["xpos"].numpy()
        task.data.xipos[:] = state["xipos"].numpy()
    elif "state" in state and _is_gymnasium(task, "classic_control"):
        task.state = state["state"].numpy().copy()
    elif not own or len(own) != len(holders):
        return False
    for layer, saved in zip(holders, own, strict=True):
        layer.set_state(from_plain(saved))
    elapsed = state.get("elapsed", [])  # a single number in checkpoints of version 0.1
    elapsed = elapsed if isinstance(elapsed, list) else [elapsed]
    for limit, steps in zip(_limits(env), elapsed, strict=True):
        limit._elapsed_steps = steps
    return True


def _get_known_state(task: gymnasium.Env) -> dict[str, Any]:
    """Returns the state of one of Gymnasium's own tasks; empty for other tasks.

    MuJoCo's integration state is not enough: the rewards of Ant and Humanoid read the bodies'
    positions before the step, which it leaves out.
    """
    if _is_gymnasium(task, "classic_control"):
        return {"state": torch.from_numpy(np.array(task.state))}
    if not _is_gymnasium(task, "mujoco"):
        return {}
    import mujoco

    kind = mujoco.mjtState.mjSTATE_INTEGRATION
    physics = np.empty(mujoco.mj_stateSize(task.model, kind))
    mujoco.mj_getState(task.model, task.data, physics, kind)
    found = {"physics": physics, "xpos": task.data.xpos.copy(), "xipos": task.data.xipos.copy()}
    return {name: torch.from_numpy(value) for name, value in found.items()}


def _is_gymnasium(task: gymnasium.Env, kind: str) -> bool:
    """Returns whether the task's class is Gymnasium's own; a subclass may have more state."""
    return type(task).__module__.startswith(f"gymnasium.envs.{kind}.")


def _layers(env: gymnasium.Env) -> list[gymnasium.Env]:
    """Returns the wrappers that may have a state, and then the task."""
    return [layer for layer in _chain(env) if type(layer) not in _STATELESS]


def _offers_state(layer: gymnasium.Env) -> bool:
    """Returns whether a task or wrapper has `get_state()` and `set_state(state)`.

    `set_state(qpos, qvel)` of Gymnasium's MuJoCo tasks is a different method.
    """
    for name, arguments in (("get_state", ()), ("set_state", (None,))):
        method = getattr(layer, name, None)
        if not callable(method):
            return False
        try:
            inspect.signature(method).bind(*arguments)
        except (TypeError, ValueError):
            return False
    return True


def _get_random_state(generator: Any) -> str:
    """Returns the state of a task's NumPy generator as text; empty for other generators."""
    if isinstance(generator, np.random.Generator):
        state = generator.bit_generator.state
    elif isinstance(generator, np.random.RandomState):  # used by dm_control
        state = generator.get_state(legacy=False)
    else:
        state = {}
    return json.dumps(state, default=np.ndarray.tolist)


def _set_random_state(generator: Any, text: str) -> None:
    """Restores a state from `_get_random_state`."""
    state = json.loads(text)
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(state)


def _limits(env: gymnasium.Env) -> list[wrappers.TimeLimit]:
    return [layer for layer in _chain(env) if isinstance(layer, wrappers.TimeLimit)]


def _chain(env: gymnasium.Env) -> Iterator[gymnasium.Env]:
    """Yields all wrappers from the outermost inward, and then the task."""
    while isinstance(env, gymnasium.Wrapper):
        yield env
        env = env.env
    yield env
