"""Tasks of the DeepMind Control Suite as Gymnasium environments."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np

from common.errors import UsageError


class ControlSuiteTask(gymnasium.Env):
    """A task such as `cartpole-swingup`, its observations laid end to end.

    Args:
        name: Domain and task, with a hyphen between them.
        render_mode: `rgb_array` for pictures.
    """

    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012

    def __init__(self, name: str, render_mode: str | None = None) -> None:
        try:
            from dm_control import suite
        except ImportError:
            raise UsageError(
                "env=dm_control needs the package dm_control, which is not installed; "
                "`pip install dm_control`."
            ) from None
        known = ["-".join(task) for task in suite.ALL_TASKS]
        if name not in known:
            raise UsageError(f"dm_control has no task {name!r}; it has {', '.join(known)}.")
        self.render_mode = render_mode
        self._suite = suite.load(*name.split("-"), task_kwargs={"random": 0})
        self.metadata = self.metadata | {"render_fps": round(1 / self._suite.control_timestep())}
        actions = self._suite.action_spec()
        self.action_space = gymnasium.spaces.Box(
            actions.minimum.astype(np.float32), actions.maximum.astype(np.float32)
        )
        size = sum(int(np.prod(spec.shape)) for spec in self._suite.observation_spec().values())
        self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (size,), np.float64)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict]:
        """A new episode; a seed starts the task's own generator anew."""
        super().reset(seed=seed)
        if seed is not None:
            self._suite.task.random.seed(seed)
        return self._join(self._suite.reset().observation), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict]:
        """The suite ends an episode with discount 1 at its time limit, with 0 at a terminal."""
        step = self._suite.step(action)
        ended = step.last() and step.discount == 0
        observation = self._join(step.observation)
        return observation, float(step.reward), ended, step.last() and not ended, {}

    def render(self) -> np.ndarray:
        """A picture by the first camera."""
        return self._suite.physics.render(height=480, width=480, camera_id=0)

    @staticmethod
    def _join(observation: dict[str, Any]) -> np.ndarray:
        return np.concatenate([np.ravel(value) for value in observation.values()]).astype(float)
