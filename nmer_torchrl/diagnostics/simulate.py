"""Steps a task from any given state."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np

Array = np.ndarray


class Simulator:
    """Steps a Gymnasium task, MuJoCo or classic, from given states.

    Each row starts from cleared data, so that results do not depend on earlier rows. Positions and
    velocities do not hold two parts of the state. First, MuJoCo's solver starts from the
    accelerations of the last step, which matters as far as it has not converged. Second, the
    rewards of Ant, Humanoid and Reacher-v4 read body positions from before the step, which in an
    episode lag behind the joints by a part of MuJoCo's last integration step.

    Args:
        env_id: Id of the task, such as `"HalfCheetah-v5"`.
        action_bounds: Range of the given actions, which is mapped to the task's range; `None` if
            they are in the task's own range.
    """

    def __init__(self, env_id: str, action_bounds: tuple[float, float] | None = None) -> None:
        self.env_id = env_id
        self._task = _make_task(env_id)
        self._mujoco = hasattr(self._task, "model") and hasattr(self._task, "data")
        if not self._mujoco and not hasattr(self._task, "state"):
            raise ValueError(
                f"The state of {env_id} cannot be set: it is neither one of Gymnasium's MuJoCo "
                "tasks nor a task whose attribute `state` holds its whole state. Choose another "
                "task."
            )
        space = self._task.action_space
        if space.dtype.kind != "f":
            raise ValueError(
                f"{env_id} has actions in {space}, but only continuous ones can be mixed; "
                "choose a task whose action space is a Box."
            )
        self._low, self._high = space.low.astype(float), space.high.astype(float)
        self._bounds = None if action_bounds is None else _check_bounds(action_bounds)
        self.observation_size = int(np.prod(self._task.observation_space.shape))
        self.action_size = int(np.prod(space.shape))
        if self._mujoco:
            self.state_size = int(self._task.model.nq + self._task.model.nv)
        else:
            self.state_size = len(self._task.state)

    def step(self, states: Array, actions: Array) -> tuple[Array, Array, Array]:
        """Takes one step from states `[n, s]` with actions `[n, a]`.

        Returns next observations `[n, d]`, rewards `[n]`, and booleans `[n]`: whether the
        simulation was stable.
        """
        observations = np.full((len(states), self.observation_size), np.nan)
        rewards = np.full(len(states), np.nan)
        stable = np.zeros(len(states), dtype=bool)
        for row, (state, action) in enumerate(zip(states, self._rescale(actions), strict=True)):
            self._set(state, action)
            observation, reward, *_ = self._task.step(action)
            stable[row] = self._is_stable() and np.isfinite(observation).all()
            if stable[row]:
                observations[row], rewards[row] = observation, reward
        return observations, rewards, stable

    def _rescale(self, actions: Array) -> Array:
        if self._bounds is None:
            return actions
        least, greatest = self._bounds
        share = (actions - least) / (greatest - least)
        return self._low + share * (self._high - self._low)

    def _set(self, state: Array, action: Array) -> None:
        if not self._mujoco:
            self._task.state = state.copy()
            return
        import mujoco

        model, data = self._task.model, self._task.data
        mujoco.mj_resetData(model, data)
        data.ctrl[:] = action  # the solver then starts from the right accelerations
        self._task.set_state(state[: model.nq], state[model.nq :])

    def _is_stable(self) -> bool:
        """Returns whether MuJoCo gave no warning; it resets the simulation if numbers overflow."""
        return not self._mujoco or not self._task.data.warning.number.any()

    def close(self) -> None:
        """Closes the task."""
        self._task.close()


def _make_task(env_id: str) -> Any:
    try:
        import gymnasium
    except ImportError:
        raise ImportError(
            "The on-manifold error needs Gymnasium, which is not installed; "
            'run `pip install "gymnasium[mujoco]"`.'
        ) from None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # v4 is outdated, but was chosen on purpose
            task: Any = gymnasium.make(env_id, disable_env_checker=True).unwrapped
    except gymnasium.error.DependencyNotInstalled as error:
        raise ImportError(f"{env_id} cannot be created: {error}.") from None
    except (gymnasium.error.Error, ImportError) as error:
        raise ValueError(f"{env_id} cannot be created: {error}") from None
    task.reset(seed=0)
    return task


def _check_bounds(bounds: tuple[float, float]) -> tuple[float, float]:
    least, greatest = (float(bound) for bound in bounds)
    if not least < greatest:
        raise ValueError(
            f"action_bounds={bounds!r} is not a range; give (least, greatest), such as (-1, 1)."
        )
    return least, greatest
