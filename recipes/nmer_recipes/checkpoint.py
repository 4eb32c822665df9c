"""Checkpoints that a kill at any moment leaves whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from torchrl.data import ReplayBuffer

from nmer_recipes.errors import UsageError
from nmer_recipes.files import CHECKPOINT, stopped_by_errors, told_of_errors, write_state
from nmer_recipes.rows import RowFiles
from nmer_torchrl.generators import restore_generator
from nmer_torchrl.storages import move_state


class Checkpoint:
    """Saves the state of some parts into one file, and loads it.

    Args:
        directory: Of the run.
        parts: Anything with `state_dict` and `load_state_dict`, by name.
    """

    def __init__(self, directory: Path, **parts: Any) -> None:
        self.path, self.parts = directory / CHECKPOINT, parts

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
        # Rows that have no room in memory pass through it page by page.
        mapped = any(
            isinstance(part, ReplayBuffer) and isinstance(part.storage, RowFiles)
            for part in self.parts.values()
        )
        state = read_state(self.path, "start a new run without `resume`", mapped=mapped)
        if missing := self.parts.keys() - state.keys():
            raise UsageError(f"{self.path} lacks {', '.join(sorted(missing))}; start a new run.")
        for name, part in self.parts.items():
            if isinstance(part, ReplayBuffer):
                fit_device(part, state[name])
                fit_capacity(part, state[name])
            part.load_state_dict(state[name])


def fit_device(buffer: ReplayBuffer, state: dict[str, Any]) -> None:
    """Moves a buffer's state to its device, which need not be the one that it was saved on.

    TorchRL would leave the rows where they are, and make a generator for the device of before.
    """
    state["_storage"] = move_state(state["_storage"], buffer.storage.device)
    generator = buffer.sampler._rng
    if state.get("_rng") is not None and generator is not None:
        restored = torch.Generator(generator.device)
        restore_generator(restored, state["_rng"][0])
        state["_rng"] = (restored.get_state(), str(generator.device))


def fit_capacity(buffer: ReplayBuffer, state: dict[str, Any]) -> None:
    """Makes the state of a buffer with fewer rows fit, as that of a run that is taken further.

    The rows go to where they would be if the buffer had been as large from the start. All else in
    the state depends on the stored rows alone.
    """
    saved, storage = state["_storage"], buffer.storage
    if not saved["_storage"]:
        return
    rows = TensorDict().load_state_dict(saved["_storage"], strict=False)
    if len(rows) < storage.max_size:
        stored = saved["_len"]
        storage.set(torch.arange(stored), rows[:stored])  # which allocates all of it
        state["_storage"] = storage.state_dict()
        state["_writer"]["_cursor"] = stored  # a full one had gone back to 0


def read_state(path: Path, remedy: str, *, mapped: bool = False) -> dict[str, Any]:
    """What was saved in a file, of which nothing is executed; `mapped` reads it when it is used."""
    try:
        return torch.load(path, weights_only=True, map_location="cpu", mmap=mapped)
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UsageError(f"{path} cannot be read as a checkpoint ({reason}); {remedy}.") from None
