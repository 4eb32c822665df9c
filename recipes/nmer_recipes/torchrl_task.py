"""Wraps a TorchRL environment as a Gymnasium task, which the recipes act in."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from tensordict import NestedKey, TensorDictBase, unravel_key
from torchrl.data import Bounded, TensorSpec, Unbounded
from torchrl.envs import EnvBase, step_mdp

from nmer_recipes.errors import UsageError
from nmer_recipes.imports import import_callable
from nmer_recipes.seeding import Stream

_NEVER = torch.zeros(1, dtype=torch.bool)
_COUNTER = "step_count"  # of TorchRL's StepCounter; not an observation


class TorchRLTask(gymnasium.Env):
    """Acts in a TorchRL environment with no batch dimension.

    The observation is the entry `observation` if there is one, else a Dict of all entries of the
    observation spec.

    TorchRL's environments may draw from torch's global generator. Here they draw from their own
    stream, which each episode seeds from `np_random`, as Gymnasium's tasks are seeded.

    Args:
        path: `MODULE.NAME` of a TorchRL environment, or of a function that returns one.
        options: The keyword arguments that it is called with.
    """

    def __init__(self, path: str, options: dict[str, Any]) -> None:
        made = import_callable(path, f"env.id={path}")(**options)
        if not isinstance(made, EnvBase):
            raise UsageError(
                f"env.id={path} returned {type(made).__name__}, but env=torchrl needs a TorchRL "
                "environment, or a function that returns one; for a Gymnasium task, give env=gym."
            )
        if made.batch_size:
            raise UsageError(
                f"env.id={path} has batch size {list(made.batch_size)}, but the recipes act in one "
                "environment at a time; create it without a batch dimension."
            )
        self.env = made.to("cpu")
        leaves = made.observation_spec.keys(include_nested=True, leaves_only=True)
        keys = sorted(map(unravel_key, leaves), key=str)
        self._keys: list[NestedKey] = (
            ["observation"] if "observation" in keys else [key for key in keys if key != _COUNTER]
        )
        if not self._keys:
            raise UsageError(
                f"env.id={path} has no observation in its observation spec; add one, or give "
                "another environment."
            )
        boxes = {
            _name(key): _as_box(made.observation_spec[key], f"{path}: observation {key!r}")
            for key in self._keys
        }
        whole = self._keys == ["observation"]
        self.observation_space = boxes["observation"] if whole else spaces.Dict(boxes)
        self.action_space = _as_box(made.action_spec, f"{path}: action")
        self._stream = Stream(0, torch.device("cpu"))
        self._state: TensorDictBase | None = None

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Starts an episode."""
        super().reset(seed=seed)
        draw = int(self.np_random.integers(2**31))
        with self._stream:
            torch.manual_seed(draw)
            self.env.set_seed(draw)
            self._state = self.env.reset()
        return self._observe(self._state), {}

    def step(self, action: np.ndarray) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Acts for one step."""
        assert self._state is not None
        spec = self.env.action_spec
        chosen = torch.as_tensor(action, dtype=spec.dtype).reshape(spec.shape)
        with self._stream, torch.no_grad():
            stepped = self.env.step(self._state.set(self.env.action_key, chosen))
        after = stepped["next"]
        self._state = step_mdp(stepped)
        reward = after[self.env.reward_key].numpy()
        single = float(reward.item()) if reward.size == 1 else reward  # the checks refuse others
        ends = [bool(after.get(name, _NEVER).any()) for name in ("terminated", "truncated")]
        return self._observe(after), single, *ends, {}

    def _observe(self, data: TensorDictBase) -> Any:
        found = {
            _name(key): np.atleast_1d(data[key].detach().cpu().numpy().copy()) for key in self._keys
        }
        if isinstance(self.observation_space, spaces.Dict):
            return found
        return found["observation"]

    def close(self) -> None:
        """Closes the environment."""
        if not self.env.is_closed:
            self.env.close()


def _name(key: NestedKey) -> str:
    return key if isinstance(key, str) else ".".join(key)


def _as_box(spec: TensorSpec, what: str) -> spaces.Box:
    """Converts a spec to a Gymnasium space; a scalar gets shape [1]."""
    if not isinstance(spec, Bounded | Unbounded) or not spec.dtype.is_floating_point:
        raise UsageError(
            f"env.id={what} is {type(spec).__name__} of {spec.dtype}, but the recipes need floats; "
            "convert it with a transform, or leave it out."
        )
    low, high = (np.atleast_1d(edge.cpu().numpy()) for edge in (spec.space.low, spec.space.high))
    if not isinstance(spec, Bounded):
        low, high = np.full_like(low, -np.inf), np.full_like(high, np.inf)
    return spaces.Box(low, high, dtype=low.dtype.type)
