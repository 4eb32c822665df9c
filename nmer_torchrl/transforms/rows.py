"""Pure functions that decide which anchors are not mixed, and that restore rows."""

from __future__ import annotations

import math
from typing import Any

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from torch import Tensor

from nmer_torchrl import _compat
from nmer_torchrl.functional import all_finite, any_feature
from nmer_torchrl.keys import get_entry
from nmer_torchrl.transforms.n_step import NONTERMINAL_KEY, STEPS_KEY


def device_of(rows: TensorDictBase, generator: torch.Generator | None = None) -> torch.device:
    """Returns the device of the rows, or of the generator if the rows have no entries."""
    if rows.device is not None:
        return rows.device
    for entry in rows.values(True, True):
        if isinstance(entry, Tensor):
            return entry.device
    return torch.device("cpu") if generator is None else generator.device


def is_terminal(rows: TensorDictBase, terminated_key: NestedKey, dims: int) -> Tensor:
    """Returns booleans `[*B]` with `dims` dimensions: whether any row beyond them is terminal."""
    ended = any_feature(get_entry(rows, terminated_key).bool(), dims)
    nonterminal = rows.get(NONTERMINAL_KEY, None)
    return ended if nonterminal is None else ended | any_feature(~nonterminal.bool(), dims)


def kept_anchors(rows: TensorDictBase, terminated_key: NestedKey | None, dims: int) -> Tensor:
    """Returns booleans `[*B]`: which anchors of rows `[*B, 1 + m]` are not mixed."""
    if terminated_key is None:
        kept = torch.zeros(rows.shape[:dims], dtype=torch.bool, device=device_of(rows))
    else:
        kept = is_terminal(rows, terminated_key, dims)
    steps = rows.get(STEPS_KEY, None)
    if steps is not None:
        kept = kept | any_feature(steps != steps.narrow(dims, 0, 1), dims)
    return kept


def restore_rows(
    changed: dict[NestedKey, Tensor], original: dict[NestedKey, Tensor], dims: int
) -> Tensor | None:
    """Restores all entries of the rows `[*B]` in which an entry became non-finite.

    Returns a mask of the rows that stay changed, or None if all do. On the CPU, checking the sum is
    enough in most cases. On a device, where a check would wait, rows are always selected.
    """
    entries = list(changed.values())
    if entries[0].device.type == "cpu":
        numbers = torch.cat([entry.reshape(-1) for entry in entries])
        # The sum itself may overflow, so a non-finite sum needs a closer check.
        if math.isfinite(numbers.sum().item()):
            return None
    rows = torch.cat([entry.reshape(*entry.shape[:dims], -1) for entry in entries], -1)
    finite = all_finite(rows, dims)
    choose_rows(finite, changed, original)
    return finite


def choose_rows(
    flags: Tensor, changed: dict[NestedKey, Tensor], original: dict[NestedKey, Tensor]
) -> None:
    """Restores the rows that are not flagged; flags are `[*B]`, entries `[*B, ...]`."""
    for key, entry in original.items():
        keep = flags[(...,) + (None,) * (entry.ndim - flags.ndim)]
        changed[key] = torch.where(keep, changed[key], entry)


def anchors(
    rows: TensorDictBase, dim: int, replaced: dict[NestedKey, Tensor], prefix: tuple[str, ...] = ()
) -> TensorDictBase:
    """Returns the first rows along `dim`, with some entries replaced, in one pass."""
    entries: dict[str, Any] = {}
    for name, value in rows.items():
        entry = replaced.get((*prefix, name) if prefix else name)
        if entry is not None:
            entries[name] = entry
        elif isinstance(value, Tensor):
            entries[name] = value.select(dim, 0)
        elif type(value) is TensorDict:
            entries[name] = anchors(value, dim, replaced, (*prefix, name))
        else:
            entries[name] = first = value[(slice(None),) * dim + (0,)]
            path = (*prefix, name)
            for key, entry in replaced.items():
                if isinstance(key, tuple) and key[: len(path)] == path:
                    first.set(key[len(path) :], entry)
    shape = rows.batch_size
    return _compat.make_tensordict(entries, shape[:dim] + shape[dim + 1 :], rows.device)
