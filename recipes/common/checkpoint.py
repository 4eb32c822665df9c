"""Checkpoints that a kill at any moment leaves whole."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from common.errors import UsageError

FILE = "checkpoint.pt"


class Checkpoint:
    """Saves the state of some parts into one file, and loads it.

    Args:
        directory: Of the run.
        parts: Anything with `state_dict` and `load_state_dict`, by name.
    """

    def __init__(self, directory: Path, **parts: Any) -> None:
        self.path, self.parts = directory / FILE, parts

    def save(self) -> None:
        """Writes beside the last checkpoint and then takes its place, in one step."""
        state = {name: part.state_dict() for name, part in self.parts.items()}
        draft = self.path.with_suffix(".tmp")
        with draft.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(self.path)

    def load(self) -> None:
        """Restores every part."""
        state = read_state(self.path, "start a new run without `resume`")
        if missing := self.parts.keys() - state.keys():
            raise UsageError(f"{self.path} lacks {', '.join(sorted(missing))}; start a new run.")
        for name, part in self.parts.items():
            part.load_state_dict(state[name])


def read_state(path: Path, remedy: str) -> dict[str, Any]:
    """What was saved in a file, of which nothing is executed."""
    try:
        return torch.load(path, weights_only=True, map_location="cpu")
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UsageError(f"{path} cannot be read as a checkpoint ({reason}); {remedy}.") from None
