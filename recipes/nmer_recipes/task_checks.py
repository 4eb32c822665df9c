"""Checks a task before a run, and refuses in one line what the recipes cannot train on."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from nmer_recipes.errors import UsageError
from nmer_recipes.settings import TASK_PAGE


def check_spaces(env: gymnasium.Env, name: str) -> None:
    """Raises a `UsageError` for observations or actions that the recipes cannot use."""
    _check_observations(env.observation_space, name)
    space = env.action_space
    if not isinstance(space, spaces.Box) or not np.issubdtype(space.dtype, np.floating):
        raise UsageError(
            f"{name} has actions in {space}, but the recipes need a Box of floats; "
            "convert them with a wrapper (env.wrappers), or choose another task."
        )
    with np.errstate(over="ignore"):
        widths = np.float32(space.high) - np.float32(space.low)
    if not np.isfinite(widths).all():
        raise UsageError(
            f"{name} has unbounded actions, which cannot be rescaled to [-1, 1]; "
            "bound them with a wrapper."
        )
    if len(space.shape) != 1 or not space.shape[0]:
        raise UsageError(
            f"{name} has actions of shape {space.shape}, but the recipes need shape [n]; reshape "
            "them with a wrapper."
        )
    if not (space.low < space.high).all():
        raise UsageError(
            f"{name} has actions from {space.low} to {space.high}, some of which are fixed; remove "
            "these with a wrapper."
        )


def _check_observations(space: spaces.Space, name: str, *, entry: bool = False) -> None:
    """Raises unless a space is a Box of shape [n], or a Dict of these and of single numbers."""
    if isinstance(space, spaces.Dict):
        for key, part in space.items():
            _check_observations(part, f"{name}, entry {key!r},", entry=True)
        return
    if not isinstance(space, spaces.Box):
        remedy = "convert them to a Box, or a Dict of boxes, with a wrapper"
    elif space.dtype == np.uint8 and len(space.shape) > 1:
        remedy = "remove images, or encode them as floats, with a wrapper"
    elif not np.issubdtype(space.dtype, np.floating):
        remedy = "convert integers to floats with a wrapper"
    elif not (entry and space.shape == ()) and (len(space.shape) != 1 or not space.shape[0]):
        remedy = "flatten them with env.wrappers=[gymnasium.wrappers.FlattenObservation]"
    else:
        return
    raise UsageError(
        f"{name} has observations in {_describe(space)}, but the recipes need floats of shape [n], "
        f"or a Dict of these and of single numbers; {remedy}."
    )


def _describe(space: spaces.Space) -> str:
    """Describes a space in short: the bounds of an image take many lines."""
    if isinstance(space, spaces.Box):
        return f"Box({space.shape}, {space.dtype})"
    return str(space)


def check_time_limit(env: gymnasium.Env, name: str) -> None:
    """Raises a `UsageError` if a task is not known to end its episodes."""
    layer, limited = env, name.startswith("dm_control/")  # dm_control's tasks end by themselves
    while isinstance(layer, gymnasium.Wrapper):
        limited |= isinstance(layer, gymnasium.wrappers.TimeLimit)
        layer = layer.env
    if not limited:
        raise UsageError(
            f"{name} has no time limit, so an evaluation might never end; set one with "
            f"env.max_steps=1000 (see {TASK_PAGE})."
        )


def check_steps(env: gymnasium.Env, name: str) -> None:
    """Resets and steps a task once; raises a `UsageError` if the results do not fit its spaces."""
    low, high = env.action_space.low, env.action_space.high
    action = ((low.astype(np.float64) + high) / 2).astype(env.action_space.dtype)
    try:  # at least one wrapper is there, which unpacks what the task returns
        start, _ = env.reset(seed=0)
        observation, reward, terminated, truncated, _ = env.step(action)
    except ValueError as error:
        if "values to unpack" not in str(error):
            raise
        raise UsageError(
            f"{name}: reset() must return (observation, info), and step() must return "
            f"(observation, reward, terminated, truncated, info); one of them did not: {error}."
        ) from error
    _check_observation(start, env.observation_space, f"{name}: reset()")
    _check_observation(observation, env.observation_space, f"{name}: step()")
    number = not np.ndim(reward) and np.issubdtype(np.asarray(reward).dtype, np.number)
    if not number or not np.isfinite(reward):
        raise UsageError(
            f"{name}: step() returned the reward {reward!r}, but a reward must be one finite "
            "number; return a float."
        )
    for flag in (terminated, truncated):
        if np.ndim(flag):
            raise UsageError(
                f"{name}: step() returned the flag {flag!r}, but a flag must be one bool."
            )


def _check_observation(observation: Any, space: spaces.Space, where: str) -> None:
    """Raises unless the observation is finite and has the space's shape; ignores bounds."""
    if isinstance(space, spaces.Dict):
        if not isinstance(observation, dict) or observation.keys() != space.spaces.keys():
            found = list(observation) if isinstance(observation, dict) else type(observation)
            raise UsageError(
                f"{where} returned {found}, but the observation space has the entries "
                f"{list(space)}."
            )
        for key, part in space.items():
            _check_observation(observation[key], part, f"{where}, entry {key!r},")
    elif np.shape(observation) != space.shape:
        raise UsageError(
            f"{where} returned an observation of shape {np.shape(observation)}, but the "
            f"observation space has shape {space.shape}."
        )
    elif not np.isfinite(observation).all():
        raise UsageError(f"{where} returned an observation that is not finite: {observation}.")
