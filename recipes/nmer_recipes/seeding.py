"""Provides random streams that are independent of each other."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from nmer_torchrl.generators import seed_from

_NAMES = ("networks", "environment", "exploration", "replay", "data")


def seeds(seed: int) -> dict[str, int]:
    """Returns a separate seed for each stream, derived from the run's seed."""
    children = np.random.SeedSequence(seed).spawn(len(_NAMES))
    return {
        name: int(child.generate_state(1)[0] % 2**31)
        for name, child in zip(_NAMES, children, strict=True)
    }


class Stream:
    """A context in which torch's global generators use this stream's state.

    TorchRL's policies and losses draw from the global generators. With its own stream, a run's
    exploration does not depend on how much the losses have drawn.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self._cuda = device if device.type == "cuda" else None
        outside = self._get()
        torch.manual_seed(seed)
        self._state = self._get()
        self._set(outside)
        self._outside: list[torch.Tensor] = []

    def _get(self) -> list[torch.Tensor]:
        states = [torch.get_rng_state()]
        return states if self._cuda is None else [*states, torch.cuda.get_rng_state(self._cuda)]

    def _set(self, states: list[torch.Tensor]) -> None:
        torch.set_rng_state(states[0])
        if self._cuda is not None:
            torch.cuda.set_rng_state(states[1], self._cuda)

    def __enter__(self) -> None:
        self._outside = self._get()
        self._set(self._state)

    def __exit__(self, *_: Any) -> None:
        self._state = self._get()
        self._set(self._outside)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of this stream and of the global generators outside it."""
        return {"stream": self._state, "outside": self._get()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores both; states from a different kind of device seed new ones."""
        self._state = self._fit(state["stream"])
        self._set(self._fit(state["outside"]))

    def _fit(self, states: list[torch.Tensor]) -> list[torch.Tensor]:
        """Returns states that fit the generators of this device."""
        outside = self._get()
        if len(states) == len(outside):
            return states
        torch.manual_seed(seed_from(states[-1]))  # the last state belongs to the device that drew
        fitting = self._get()
        self._set(outside)
        return fitting
