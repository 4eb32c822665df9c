"""A full ring uses no more memory after many writes than after a few."""

from __future__ import annotations

import gc
import sys
from types import FunctionType, ModuleType
from typing import Any

import pytest
import torch
from helpers import make_transitions
from torch import Tensor

from nmer_torchrl import make_replay_buffer

WRITES = 32  # to go around the ring once


def held(root: Any) -> int:
    """Returns the bytes of everything that is reachable from an object."""
    seen: set[int] = set()
    storages: dict[int, int] = {}
    total, waiting = 0, [root]
    while waiting:
        each = waiting.pop()
        if id(each) in seen or isinstance(each, type | ModuleType | FunctionType):
            continue
        seen.add(id(each))
        total += sys.getsizeof(each)
        if issubclass(type(each), Tensor):
            storages[each.untyped_storage().data_ptr()] = each.untyped_storage().nbytes()
        waiting += gc.get_referents(each)
    return total + sum(storages.values())


def go_around(buffer, rows) -> None:
    """Overwrites each row once, and draws a batch after each write."""
    for some in rows.split(len(rows) // WRITES):
        buffer.extend(some.clone())
        batch = buffer.sample()
        batch["td_error"] = torch.rand(len(batch))
        buffer.update_tensordict_priority(batch)


# Rings large enough for the graph to insert rows, and small enough that a dict which is resized
# does not look like a leak.
@pytest.mark.parametrize(("kind", "capacity"), [("nmer", 256), ("per_nmer", 256), ("ct", 64)])
def test_a_full_ring_does_not_grow_with_the_number_of_writes(kind, capacity, soak):
    buffer = make_replay_buffer(kind, capacity=capacity, batch_size=16)
    rows, laps = make_transitions(capacity, terminated=0.1), 8 * soak
    for _ in range(3):
        go_around(buffer, rows)
    before = held(buffer)
    assert before > capacity * 50  # the rows are among it
    for _ in range(laps):
        go_around(buffer, rows)
    # Some comes and goes; one number more for each write would be 40 bytes at least.
    assert held(buffer) - before < 32 * WRITES * laps
