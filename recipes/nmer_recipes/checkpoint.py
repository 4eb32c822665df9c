"""Writes checkpoints that stay intact if the run is killed at any moment."""

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
    """Saves the state of several parts to one file, and loads it.

    Args:
        directory: The run's directory.
        parts: Objects with `state_dict` and `load_state_dict`, by name.
    """

    def __init__(self, directory: Path, **parts: Any) -> None:
        self.path, self.parts = directory / CHECKPOINT, parts

    def save(self, *, last: bool = False) -> None:
        """Replaces the previous checkpoint atomically.

        If writing fails, for example on a full disk, the previous checkpoint stays. The run then
        continues, unless this is the `last` checkpoint.
        """
        state = {name: part.state_dict() for name, part in self.parts.items()}
        with stopped_by_errors(self.path.parent) if last else told_of_errors(self.path):
            write_state(self.path, state)

    def load(self) -> None:
        """Restores every part."""
        # Rows that do not fit into memory are read page by page.
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
                if name == "data":
                    self._check_data(part, state[name])
                fit_capacity(part, state[name])
            part.load_state_dict(state[name])

    def _check_data(self, buffer: ReplayBuffer, state: dict[str, Any]) -> None:
        """Raises a `UsageError` if the recorded rows are not those that the run began with."""
        saved = TensorDict().load_state_dict(state["_storage"]["_storage"], strict=False)
        before, now = saved[: state["_storage"]["_len"]], buffer.storage.get(slice(len(buffer)))
        if len(before) != len(now) or not (before == now).all():
            raise UsageError(
                f"The data has changed since the run in {self.path.parent} began: it had "
                f"{len(before):,} rows, and now has {len(now):,} rows or other values. Restore it, "
                "or start a new run without `resume`."
            )


def fit_device(buffer: ReplayBuffer, state: dict[str, Any]) -> None:
    """Moves a saved buffer state to the buffer's device, which may differ from the saved one.

    TorchRL would leave the rows where they are, and create a generator for the saved device.
    """
    state["_storage"] = move_state(state["_storage"], buffer.storage.device)
    generator = buffer.sampler._rng
    if state.get("_rng") is not None and generator is not None:
        restored = torch.Generator(generator.device)
        restore_generator(restored, state["_rng"][0])
        state["_rng"] = (restored.get_state(), str(generator.device))


def fit_capacity(buffer: ReplayBuffer, state: dict[str, Any]) -> None:
    """Fits the saved state of a smaller buffer to this one, as when a run is extended.

    Rows get the positions that they would have if the buffer had always been this large. The rest
    of the state depends only on the stored rows.
    """
    saved, storage = state["_storage"], buffer.storage
    if not saved["_storage"]:
        return
    rows = TensorDict().load_state_dict(saved["_storage"], strict=False)
    if len(rows) > storage.max_size:
        raise UsageError(
            f"The run's buffer has room for {len(rows):,} rows, but would now have room for "
            f"{storage.max_size:,}; if its data has changed, restore it, or start a new run "
            "without `resume`."
        )
    if len(rows) < storage.max_size:
        stored = saved["_len"]
        storage.set(torch.arange(stored), rows[:stored])  # allocates the whole storage
        state["_storage"] = storage.state_dict()
        state["_writer"]["_cursor"] = stored  # the cursor of a full buffer was back at 0


def read_state(path: Path, remedy: str, *, mapped: bool = False) -> dict[str, Any]:
    """Loads a saved file without executing anything; `mapped` reads the data on use."""
    try:
        return torch.load(path, weights_only=True, map_location="cpu", mmap=mapped)
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UsageError(f"{path} cannot be read as a checkpoint ({reason}); {remedy}.") from None
