"""Checkpoints that a kill at any moment leaves whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from common.errors import UsageError
from common.files import stopped_by_errors, told_of_errors, write_state

FILE = "checkpoint.pt"


class Checkpoint:
    """Saves the state of some parts into one file, and loads it.

    Args:
        directory: Of the run.
        parts: Anything with `state_dict` and `load_state_dict`, by name.
    """

    def __init__(self, directory: Path, **parts: Any) -> None:
        self.path, self.parts = directory / FILE, parts

    def save(self, *, last: bool = False) -> None:
        """Takes the place of the checkpoint before it, in one step.

        Where that fails, on a full disk for one, the one before it stays, and the run goes on
        unless this was to be the `last`.
        """
        state = {name: part.state_dict() for name, part in self.parts.items()}
        with stopped_by_errors(self.path.parent) if last else told_of_errors(self.path):
            write_state(self.path, state)

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
