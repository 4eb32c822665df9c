"""Environments: the task with actions in [-1, 1], and its state in the middle of an episode."""

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

# Wrappers of Gymnasium that keep nothing from step to step, or, the time limit, what we restore.
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
    """The task that `cfg.env` names, as it is or with flat observations and actions in [-1, 1]."""
    env = _wrap(_make_task(cfg, render_mode), cfg)
    check_spaces(env, cfg.id)
    if not rescale:
        return env
    with np.errstate(over="ignore"):  # of bounds that float32 cannot hold
        if isinstance(env.observation_space, gymnasium.spaces.Dict):
            env = wrappers.FlattenObservation(env)
        return wrappers.RescaleAction(env, np.float32(-1.0), np.float32(1.0))


def _make_task(cfg: DictConfig, render_mode: str | None) -> gymnasium.Env:
    """The task of Gymnasium or TorchRL, with its time limit."""
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
            warnings.simplefilter("ignore")  # that v4 is old is why one asks for it
            if cfg.id.startswith("dm_control/"):
                import shimmy  # noqa: F401, registers these tasks
            return gymnasium.make(cfg.id, disable_env_checker=True, **options)
    except (gymnasium.error.Error, ImportError) as error:
        remedy = "Choose one of recipes/conf/env, or another version by env.version."
        if "version" not in cfg:
            remedy = (
                "For a task of your own give env.id=MODULE:NAME; modules are looked for in the "
                f"current directory and on PYTHONPATH: {TASK_PAGE}."
            )
        raise UsageError(f"The environment {cfg.id} cannot be made: {error} {remedy}") from None
    except (TypeError, ValueError) as error:
        reason = str(error).splitlines()[0].partition(" was raised from the environment creator")[0]
        if render_mode is not None:  # without it, the task has passed its checks
            raise UsageError(f"{cfg.id} cannot be filmed: {reason}; leave the video out.") from None
        given = f"with {', '.join(options)}" if options else "without arguments"
        raise UsageError(
            f"{cfg.id} cannot be constructed {given}: {reason}; give the arguments that its "
            "constructor takes by env.kwargs.NAME=VALUE."
        ) from error


def _wrap(env: gymnasium.Env, cfg: DictConfig) -> gymnasium.Env:
    """Puts the wrappers of `env.wrappers` around a task, the first one innermost."""
    for path in cfg.get("wrappers") or ():
        given = f"env.wrappers={path}"
        wrapper = import_callable(path, given)
        try:
            wrapped = wrapper(env)
        except TypeError as error:
            raise UsageError(
                f"{given} cannot be put around {cfg.id}: {error}; it takes the task alone. Name a "
                "function of your own that gives it more."
            ) from error
        if not isinstance(wrapped, gymnasium.Env):
            raise UsageError(
                f"{given} returned {type(wrapped).__name__}, but a wrapper returns a gymnasium.Env."
            )
        env = wrapped
    return env


def check_task(cfg: DictConfig) -> None:
    """Raises a `UsageError` for a task that the recipes cannot train on; makes one to try."""
    with make_env(cfg, rescale=False) as env:
        check_time_limit(env, cfg.id)
        check_steps(env, cfg.id)


def get_state(env: gymnasium.Env) -> dict[str, Any]:
    """The state of a task in the middle of an episode, as tensors and plain values.

    The episode is in it if the state of every layer is known: of Gymnasium's own MuJoCo and classic
    tasks, and of each task and wrapper that offers `get_state()` and `set_state(state)`. Else only
    the generator is kept, and a resumed run goes on with a new episode: an attribute such as
    `state` need not be all that determines a task. Tasks of dm_control change their model at a
    reset.
    """
    task, layers = env.unwrapped, _layers(env)
    start = {"random": _get_random_state(task.np_random)}  # of the next episode
    state: dict[str, Any] = start | {"elapsed": [each._elapsed_steps for each in _limits(env)]}
    holders = [layer for layer in layers if _offers_state(layer)]
    others = [layer for layer in layers if not _offers_state(layer)]
    if others not in ([], [task]):
        return start  # a wrapper may have a state that nobody knows
    if others:
        known = _get_known_state(task)
        if not known:
            return start
        state |= known
    own = [layer.get_state() for layer in holders]
    try:
        return state | {"own": as_plain(own)}
    except TypeError:  # a value that a checkpoint cannot hold
        return start


def set_state(env: gymnasium.Env, state: dict[str, Any]) -> bool:
    """Restores what `get_state` returned, after a reset; False if the episode was not in it."""
    task = env.unwrapped
    _set_random_state(task.np_random, state["random"])
    holders = [layer for layer in _layers(env) if _offers_state(layer)]
    own = state.get("own", [])  # not in checkpoints of version 0.1
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
    elapsed = state.get("elapsed", [])  # one number in checkpoints of version 0.1
    elapsed = elapsed if isinstance(elapsed, list) else [elapsed]
    for limit, steps in zip(_limits(env), elapsed, strict=True):
        limit._elapsed_steps = steps
    return True


def _get_known_state(task: gymnasium.Env) -> dict[str, Any]:
    """What determines a task of Gymnasium itself; empty for another.

    MuJoCo's integration state alone is not enough: rewards of Ant and Humanoid read the positions
    of the bodies before the step, which it leaves out.
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
    """Whether the very class of a task is Gymnasium's; a subclass may have more state."""
    return type(task).__module__.startswith(f"gymnasium.envs.{kind}.")


def _layers(env: gymnasium.Env) -> list[gymnasium.Env]:
    """The wrappers that may have a state, and at last the task itself."""
    return [layer for layer in _chain(env) if type(layer) not in _STATELESS]


def _offers_state(layer: gymnasium.Env) -> bool:
    """Whether a task or wrapper has `get_state()` and `set_state(state)`.

    `set_state(qpos, qvel)` of Gymnasium's MuJoCo tasks is another function.
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
    """Returns the state of a task's generator as text; it is NumPy's, new or old, or not known."""
    if isinstance(generator, np.random.Generator):
        state = generator.bit_generator.state
    elif isinstance(generator, np.random.RandomState):  # of dm_control
        state = generator.get_state(legacy=False)
    else:
        state = {}
    return json.dumps(state, default=np.ndarray.tolist)


def _set_random_state(generator: Any, text: str) -> None:
    """Restores what `_get_random_state` returned."""
    state = json.loads(text)
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(state)


def _limits(env: gymnasium.Env) -> list[wrappers.TimeLimit]:
    return [layer for layer in _chain(env) if isinstance(layer, wrappers.TimeLimit)]


def _chain(env: gymnasium.Env) -> Iterator[gymnasium.Env]:
    """All wrappers from the outermost on, and the task."""
    while isinstance(env, gymnasium.Wrapper):
        yield env
        env = env.env
    yield env
