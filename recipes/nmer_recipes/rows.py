"""Stores rows in files, for buffers that are larger than the host's memory."""

from __future__ import annotations

import shutil
import weakref
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from torchrl.data import LazyMemmapStorage

FOLDER = "rows"


class RowFiles(LazyMemmapStorage):
    """Keeps rows in memory-mapped files in a run's directory.

    The files are deleted when the run ends or is stopped, since its checkpoint also holds the rows.
    Files that a killed run leaves behind are deleted when it is resumed.

    Args:
        capacity: Number of rows.
        directory: The run's directory.
    """

    def __init__(self, capacity: int, directory: Path) -> None:
        folder = directory / FOLDER
        shutil.rmtree(folder, ignore_errors=True)
        super().__init__(capacity, scratch_dir=str(folder), auto_cleanup=False)
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads saved rows into files of the directory."""
        saved = state_dict["_storage"]
        if saved and not self.initialized:  # otherwise TorchRL puts the files elsewhere
            rows = TensorDict().load_state_dict(saved, strict=False)
            self.set(torch.arange(1), rows[:1])
        super().load_state_dict(state_dict)
