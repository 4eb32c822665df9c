"""Recovers the state of a task from its observation, where that determines it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

Array = np.ndarray
_CLIPPED = 10.0  # limit at which Gymnasium clips velocities in some tasks
_ELBOW = 3.0  # limit of the second angle of Reacher


class Recovered(NamedTuple):
    """States of `n` observations, and which of them the observation determines.

    Attributes:
        states: `[n, s]`: positions and velocities of all joints, in the simulator's order.
        known: Boolean `[n]`: whether the observation determines the state.
    """

    states: Array
    known: Array


Recovery = Callable[[Array], Recovered]


def _joints(positions: int, velocities: int, *, hidden: int, bound: float = np.inf) -> Recovery:
    """Builds the recovery for tasks that show their joints directly, positions then velocities.

    The first `hidden` positions are not shown: those of the root on the plane. Neither the dynamics
    nor the reward, a difference, depends on them, so they are 0 here. Other entries (contact
    forces, inertias) follow from the last step and are not part of the state.
    """

    def recover(observation: Array) -> Recovered:
        shown = observation[:, : positions - hidden + velocities]
        states = np.concatenate([np.zeros((len(shown), hidden)), shown], 1)
        return Recovered(states, (np.abs(states[:, positions:]) < bound).all(1))

    return recover


def _double_pendulum(observation: Array) -> Recovered:
    """Recovers states from the cart, sines and cosines of two angles, velocities and forces."""
    cart, sine, cosine, velocity = np.split(observation, [1, 3, 5, 8], 1)[:4]
    states = np.concatenate([cart, np.arctan2(sine, cosine), velocity], 1)
    return Recovered(states, (np.abs(velocity) < _CLIPPED).all(1))


def _reacher(observation: Array) -> Recovered:
    """Recovers states from cosines and sines of two angles, target, velocities and distance."""
    cosine, sine, target, velocity = np.split(observation, [2, 4, 6, 8], 1)[:4]
    angle, still = np.arctan2(sine, cosine), np.zeros_like(target)  # targets do not move
    states = np.concatenate([angle, target, velocity, still], 1)
    # An elbow beyond its limit may have come from either side: limits are soft, and it passes pi.
    return Recovered(states, np.abs(angle[:, 1]) <= _ELBOW)


def _pendulum(observation: Array) -> Recovered:
    """Recovers states from cosine, sine and velocity."""
    cosine, sine, velocity = np.split(observation, 3, 1)
    return _all_known(np.concatenate([np.arctan2(sine, cosine), velocity], 1))


def _all_known(states: Array) -> Recovered:
    return Recovered(states, np.ones(len(states), dtype=bool))


# By the task's name without its version; v4 and v5 are the same here.
RECOVERIES: dict[str, Recovery] = {
    "Ant": _joints(15, 14, hidden=2),
    "HalfCheetah": _joints(9, 9, hidden=1),
    "Hopper": _joints(6, 6, hidden=1, bound=_CLIPPED),
    "Humanoid": _joints(24, 23, hidden=2),
    "HumanoidStandup": _joints(24, 23, hidden=2),
    "InvertedDoublePendulum": _double_pendulum,
    "InvertedPendulum": _joints(2, 2, hidden=0),
    "MountainCarContinuous": _all_known,
    "Pendulum": _pendulum,
    "Reacher": _reacher,
    "Swimmer": _joints(5, 5, hidden=2),
    "Walker2d": _joints(9, 9, hidden=1, bound=_CLIPPED),
}
# Reasons why the observation of another task does not determine its state.
REASONS: dict[str, str] = {
    "Pusher": "its observation leaves out the velocity of the object that is pushed",
}
