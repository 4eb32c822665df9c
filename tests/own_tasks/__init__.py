"""A package like a user's own: tasks, wrappers and a TorchRL environment."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete, Tuple
from torchrl.envs import Compose, PendulumEnv, RewardScaling, StepCounter, TransformedEnv


class Arm(gymnasium.Env):
    """Reaches for a goal. Its observations are a Dict, and it offers its state."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012
    observation_space = Dict({"goal": Box(-1, 1, (2,)), "arm": Box(-9, 9, (2,), np.float64)})
    action_space = Box(0, 5, (2,))

    def __init__(self, reach: float = 1.0, render_mode: str | None = None) -> None:
        self.reach, self.render_mode = reach, render_mode

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple:
        super().reset(seed=seed)
        self.goal = self.np_random.uniform(-1, 1, 2)
        self.arm = np.zeros(2)
        return self._observe(), {}

    def step(self, action: np.ndarray) -> tuple:
        noise = self.np_random.normal(0, 0.01, 2)
        self.arm = np.clip(self.arm + self.reach * (action - 2.5) / 25 + noise, -9, 9)
        return self._observe(), -float(np.abs(self.arm - self.goal).sum()), False, False, {}

    def render(self) -> np.ndarray:
        picture = np.zeros((32, 32, 3), np.uint8)
        picture[tuple(np.clip(16 + 8 * self.arm, 0, 31).astype(int))] = 255
        return picture

    def _observe(self) -> dict[str, np.ndarray]:
        return {"arm": self.arm.copy(), "goal": self.goal.astype(np.float32)}

    def get_state(self) -> dict[str, Any]:
        return {"goal": self.goal, "arm": self.arm, "label": ("arm", 1)}

    def set_state(self, state: dict[str, Any]) -> None:
        self.goal, self.arm = state["goal"], state["arm"]


class Goal(gymnasium.Env):
    """Has a goal in addition to `state`, which does not determine it, and offers no state."""

    observation_space = Box(-9, 9, (2,))
    action_space = Box(-1, 1, (1,))
    model, data = "a robot", {}  # not MuJoCo's

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple:
        super().reset(seed=seed)
        self.state = {"position": 0.0}
        self.goal = self.np_random.uniform(-1, 1)
        return self._observe(), {}

    def step(self, action: np.ndarray) -> tuple:
        self.state["position"] += 0.1 * float(action[0])
        return self._observe(), -abs(self.goal - self.state["position"]), False, False, {}

    def _observe(self) -> np.ndarray:
        return np.array([self.state["position"], self.goal], np.float32)


class Reused(Goal):
    """Counts its steps in one array, which it returns each time and changes in place."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple:
        super(Goal, self).reset(seed=seed)
        self.state = getattr(self, "state", np.zeros(2, np.float32))
        self.state[:] = 0
        return self.state, {}

    def step(self, action: np.ndarray) -> tuple:
        self.state += 1
        return self.state, 0.0, bool(self.state[0] >= 5), False, {}


class Faulty(Goal):
    """Has one of the faults that the recipes refuse, chosen by `fault`."""

    def __init__(self, fault: str) -> None:
        self.fault = fault
        if fault in _SPACES:
            self.observation_space = _SPACES[fault]
        if fault in _ACTIONS:
            self.action_space = _ACTIONS[fault]

    def _observe(self) -> np.ndarray:
        return np.zeros(3, np.float32) if self.fault == "shape" else super()._observe()

    def step(self, action: np.ndarray) -> tuple:
        after, reward, *rest = super().step(action)
        if self.fault == "old":
            return after, reward, False, {}
        moved = abs(self.state["position"]) > 0.2  # not yet after the step that is checked
        late = np.nan if moved else reward
        reward = {"reward": np.array([reward]), "nan": np.nan, "late": late}.get(self.fault, reward)
        return after, reward, *rest


_SPACES = {
    "matrix": Box(-1, 1, (2, 3)),
    "tuple": Tuple([Box(-1, 1, (2,)), Box(-1, 1, (2,))]),
    "image": Box(0, 255, (8, 8, 3), np.uint8),
    "integer": MultiDiscrete([3, 3]),
    "entry": Dict({"goal": Box(-1, 1, (2,)), "camera": Box(0, 255, (8, 8), np.uint8)}),
    "missing": Dict({"goal": Box(-1, 1, (2,))}),
}
_ACTIONS = {
    "unbounded": Box(-np.inf, np.inf, (1,)),
    "huge": Box(np.finfo(np.float32).min, np.finfo(np.float32).max, (1,)),
    "discrete": Discrete(3),
    "flat": Box(-1, 1, (2, 2)),
    "fixed": Box(np.float32([0, 1]), np.float32([1, 1])),
}


class Doubled(gymnasium.RewardWrapper):
    """Doubles the reward."""

    def reward(self, reward: float) -> float:
        return 2 * reward

    def get_state(self) -> None:
        """Returns None, because there is no state."""

    def set_state(self, state: None) -> None:
        """Does nothing."""


class Unspoken(Doubled):
    """Has no `get_state`."""

    get_state = None


def not_a_wrapper(env: gymnasium.Env) -> str:
    return "not a task"


def make_swing(scale: float = 1.0) -> TransformedEnv:
    """Builds an environment that exists only in TorchRL."""
    return TransformedEnv(PendulumEnv(), Compose(RewardScaling(0.0, scale), StepCounter()))


gymnasium.register("Arm-v0", Arm, max_episode_steps=20)
gymnasium.register("Goal-v0", Goal, max_episode_steps=20)
gymnasium.register("Endless-v0", Goal)
gymnasium.register("Faulty-v0", Faulty, max_episode_steps=20)
gymnasium.register("Reused-v0", Reused, max_episode_steps=20)
