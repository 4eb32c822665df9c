"""Converts values to a form that `torch.load` reads without executing anything."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

_ARRAY = "numpy array"


def as_plain(value: Any) -> Any:
    """Converts nested mappings, lists, numbers, texts, arrays and tensors for saving.

    Raises a `TypeError` for any other value.
    """
    if value is None or isinstance(value, bool | int | float | str | torch.Tensor):
        return value.clone() if isinstance(value, torch.Tensor) else value
    if isinstance(value, np.ndarray):
        return {_ARRAY: torch.from_numpy(value.copy())}  # TypeError if it holds objects
    if isinstance(value, np.generic):
        return as_plain(value.item())
    if isinstance(value, dict):
        return {as_plain(name): as_plain(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [as_plain(entry) for entry in value]
    raise TypeError(f"A checkpoint cannot hold {type(value).__name__}.")


def from_plain(value: Any) -> Any:
    """Reverses `as_plain`, with lists for tuples."""
    if isinstance(value, dict):
        if value.keys() == {_ARRAY}:
            return value[_ARRAY].numpy().copy()
        return {name: from_plain(entry) for name, entry in value.items()}
    return [from_plain(entry) for entry in value] if isinstance(value, list) else value
