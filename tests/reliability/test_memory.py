"""A full ring holds no more after many writes than after a few."""

from __future__ import annotations

import gc
import tracemalloc

import pytest
import torch
from helpers import make_transitions
from torch import Tensor

from nmer_torchrl import make_replay_buffer

WRITES = 32  # to go around the ring once


def held() -> tuple[int, int]:
    """Bytes of all tensors that are alive, and of what else the package has allocated."""
    gc.collect()
    tensors = [each for each in gc.get_objects() if issubclass(type(each), Tensor)]
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage() for each in tensors}
    ours = tracemalloc.Filter(True, "*/nmer_torchrl/*")
    objects = tracemalloc.take_snapshot().filter_traces([ours]).traces
    return sum(s.nbytes() for s in storages.values()), sum(trace.size for trace in objects)


def go_around(buffer, rows) -> None:
    """Overwrites each row once, and draws a batch after each write."""
    for some in rows.split(len(rows) // WRITES):
        buffer.extend(some.clone())
        batch = buffer.sample()
        batch["td_error"] = torch.rand(len(batch))
        buffer.update_tensordict_priority(batch)


@pytest.fixture
def _traced():
    tracemalloc.start()
    yield
    tracemalloc.stop()


# Rings large enough for the graph to insert rows, and small enough that a dict which is resized
# does not look like a leak.
@pytest.mark.usefixtures("_traced")
@pytest.mark.parametrize(("kind", "capacity"), [("nmer", 256), ("per_nmer", 256), ("ct", 64)])
def test_a_full_ring_does_not_grow_with_the_number_of_writes(kind, capacity, soak):
    buffer = make_replay_buffer(kind, capacity=capacity, batch_size=16)
    rows, laps = make_transitions(capacity, terminated=0.1), 8 * soak
    for _ in range(3):
        go_around(buffer, rows)
    tensors, objects = held()
    for _ in range(laps):
        go_around(buffer, rows)
    grown_tensors, grown_objects = held()
    # Some come and go; a number for each row or an object for each write would be more.
    assert grown_tensors - tensors < 4 * capacity * laps
    assert grown_objects - objects < 32 * WRITES * laps
