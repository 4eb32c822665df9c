"""With many writers and one reader, a mix consists of two whole rows of one moment."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.process import BaseProcess

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule
from torch import Tensor
from torchrl.collectors import MultiAsyncCollector, MultiSyncCollector
from torchrl.data import (
    Composite,
    LazyMemmapStorage,
    LazyTensorStorage,
    TensorDictReplayBuffer,
    Unbounded,
)
from torchrl.envs import EnvBase

from nmer_torchrl import make_replay_buffer

pytestmark = pytest.mark.xdist_group("reliability")  # one process imports for all

CAPACITY = 256
BATCH = 256
BATCHES = 40  # in CI, for each test
_WRITER = 2**24  # serial numbers of a writer start at a multiple of this
_FACTORS = torch.tensor([math.sqrt(p) for p in (2, 3, 5, 7, 11)], dtype=torch.float64)


def entries(serial: Tensor, first: int, last: int) -> Tensor:
    """Maps serial numbers `[n]` to random-looking numbers `[n, last - first]`, all different."""
    return (serial.unsqueeze(-1) * _FACTORS[first:last]).frac()


def make_rows(serial: Tensor) -> TensorDict:
    """Builds rows in which every entry identifies the serial number."""
    n = len(serial)
    flags = torch.zeros(n, 1, dtype=torch.bool)
    return TensorDict(
        serial=serial,
        observation=entries(serial, 0, 3),
        action=entries(serial, 3, 5),
        next=TensorDict(
            observation=entries(serial + 1, 0, 3),
            reward=serial.double().unsqueeze(-1),
            terminated=flags,
            done=flags.clone(),
            batch_size=[n],
        ),
        batch_size=[n],
    )


def partners(batch: TensorDictBase) -> Tensor:
    """Returns the serial numbers `[B]` of a batch's partners, and checks each entry by them.

    The anchor's number stands in the batch. The reward, which is mixed from both, gives that of the
    partner; each other entry has to be the mix of the entries that belong to the two numbers.
    """
    weight, anchor = batch["mixup_weight"].double(), batch["serial"].double()
    assert (weight < 1 - 1e-6).all()  # else there is no telling
    reward = batch["next", "reward"].squeeze(-1)
    w = weight.squeeze(-1)
    partner = ((reward - w * anchor) / (1 - w)).round()
    anchors, others = make_rows(anchor), make_rows(partner)
    for key in ("observation", "action", ("next", "observation"), ("next", "reward")):
        expected = weight * anchors[key] + (1 - weight) * others[key]
        torn = (batch[key] - expected).abs().amax(-1) > 1e-5
        assert not torn.any(), f"{int(torn.sum())} of {len(torn)} rows have a torn {key}"
    return partner.long()


def check_together(batch: TensorDictBase) -> None:
    """Checks that both rows are whole and were stored at one moment, as far as can be known."""
    anchor, partner = batch["serial"], partners(batch)
    assert (anchor != partner).all()
    same = anchor // _WRITER == partner // _WRITER
    assert ((anchor - partner).abs()[same] < CAPACITY).all()


def make_buffer(storage=None, kind="nmer", prefetch=None) -> TensorDictReplayBuffer:
    return make_replay_buffer(
        kind,
        capacity=CAPACITY,
        batch_size=BATCH,
        alpha=20.0,  # no weight is so near 1 that the partner could not be told
        storage=storage and storage(CAPACITY),
        prefetch=prefetch,
    )


@pytest.mark.parametrize("torn", ["observation", "action", ("next", "observation"), "serial"])
def test_a_torn_row_is_noticed(torn):
    buffer = make_buffer()
    rows = make_rows(torch.arange(CAPACITY))
    buffer.extend(rows)
    check_together(buffer.sample())
    rows[torn] = rows[torn].roll(1, 0)  # entries of the row before
    buffer.storage.set(torch.arange(CAPACITY), rows)
    with pytest.raises(AssertionError, match="torn"):
        check_together(buffer.sample())


@pytest.mark.parametrize(
    ("kind", "storage"),
    [
        ("nmer", None),
        ("nmer", LazyTensorStorage),
        ("nmer", LazyMemmapStorage),
        ("per_nmer", None),
        ("mixup", None),
    ],
)
def test_prefetching_while_a_thread_writes_at_full_speed(kind, storage, soak):
    buffer = make_buffer(storage, kind, prefetch=3)
    written, stop = 0, threading.Event()

    def write() -> None:
        nonlocal written
        while not stop.is_set():
            count = 1 + written % 13
            buffer.extend(make_rows(torch.arange(written, written + count)))
            written += count

    buffer.extend(make_rows(torch.arange(CAPACITY)))
    written = CAPACITY
    writer = threading.Thread(target=write)
    writer.start()
    try:
        batches = 0
        while batches < BATCHES * soak or written < 4 * CAPACITY:
            batches += 1
            batch = buffer.sample()
            check_together(batch)
            # One writer fills the ring in order, so that a number tells the position.
            stored = torch.stack([batch["serial"], partners(batch)], -1)
            assert torch.equal(stored % CAPACITY, batch["index"])
    finally:
        stop.set()
        writer.join()
    assert_nothing_lost(buffer, {0: written})


def assert_nothing_lost(buffer: TensorDictReplayBuffer, written: dict[int, int]) -> None:
    """Checks that the ring is full of each writer's last rows, each of them whole and once."""
    assert buffer.write_count == sum(written.values())
    stored = buffer.storage[:]
    serial = stored["serial"]
    expected = make_rows(serial)
    for key in ("observation", "action", ("next", "observation"), ("next", "reward")):
        torch.testing.assert_close(stored[key], expected[key], rtol=0, atol=1e-9)
    for writer, count in written.items():
        own = serial[serial // _WRITER == writer].sort().values - writer * _WRITER
        assert torch.equal(own, torch.arange(count - len(own), count))
    assert len(serial) == CAPACITY


def _extend(buffer, writer, stop, counts) -> None:
    torch.set_num_threads(1)
    written = 0
    while not stop.is_set():
        count = 1 + written % 7
        start = writer * _WRITER + written
        buffer.extend(make_rows(torch.arange(start, start + count)))
        written += count
    counts[writer] = written


def _replace(buffer, writer, stop, counts) -> None:
    torch.set_num_threads(1)
    half = CAPACITY // 2  # of the ring belongs to this writer
    while not stop.is_set():
        serial = writer * _WRITER + int(counts[writer]) + torch.arange(16)
        buffer[serial % half + (writer - 1) * half] = make_rows(serial)
        counts[writer] += 16


@contextmanager
def two_writers(processes, write, buffer, counts) -> Iterator[list[BaseProcess]]:
    """Starts two processes that write until the end and then report the number of rows."""
    stop = processes.Event()
    writers = [
        processes.Process(target=write, args=(buffer, writer, stop, counts)) for writer in (1, 2)
    ]
    for process in writers:
        process.start()
    try:
        yield writers
    finally:
        stop.set()
        for process in writers:
            process.join()
    assert [process.exitcode for process in writers] == [0, 0]


@pytest.mark.parametrize("storage", [None, LazyMemmapStorage])
def test_two_processes_extend_while_this_one_samples(storage, soak, processes):
    buffer, counts = make_buffer(storage), processes.Array("q", 3)
    buffer.share()
    buffer.extend(make_rows(torch.arange(CAPACITY)))
    counts[0] = CAPACITY
    with two_writers(processes, _extend, buffer, counts) as writers:
        sample_beside(buffer, BATCHES * soak, lambda: all(each.is_alive() for each in writers))
    assert_nothing_lost(buffer, dict(enumerate(counts)))


def test_two_processes_replace_rows_while_this_one_samples(soak, processes):
    buffer, counts = make_buffer(), processes.Array("q", 3)
    buffer.share()
    buffer.extend(make_rows(torch.arange(CAPACITY)))
    with two_writers(processes, _replace, buffer, counts) as writers:
        batches = 0
        while batches < BATCHES * soak or min(counts[1:]) < 4 * CAPACITY:
            assert all(each.is_alive() for each in writers)
            batches += 1
            check_together(buffer.sample())


def sample_beside(buffer: TensorDictReplayBuffer, batches: int, alive) -> None:
    """Checks this many batches of a ring that other processes have filled and still write to."""
    start = time.monotonic()
    while buffer.write_count < 3 * CAPACITY:  # until then the writers are starting
        assert alive()
        assert time.monotonic() - start < 120
        time.sleep(0.01)
    before = buffer.write_count
    for _ in range(batches):
        check_together(buffer.sample())
    assert buffer.write_count > before + CAPACITY


class Counting(EnvBase):
    """An environment whose steps are the rows of `make_rows`."""

    def __init__(self, start: int) -> None:
        super().__init__()
        self.serial = start
        number = Unbounded(1, dtype=torch.float64)
        self.observation_spec = Composite(
            observation=Unbounded(3, dtype=torch.float64), serial=Unbounded((), dtype=torch.int64)
        )
        self.action_spec, self.reward_spec = Unbounded(2, dtype=torch.float64), number

    def _observe(self) -> dict[str, Tensor]:
        serial = torch.tensor(self.serial)
        return {"serial": serial, "observation": entries(serial.unsqueeze(0), 0, 3)[0]}

    def _reset(self, _: TensorDictBase | None) -> TensorDict:
        return TensorDict(self._observe())

    def _step(self, _: TensorDictBase) -> TensorDict:
        reward = torch.tensor([float(self.serial)], dtype=torch.float64)
        self.serial += 1
        ended = {name: torch.zeros(1, dtype=torch.bool) for name in ("done", "terminated")}
        return TensorDict({**self._observe(), **ended, "reward": reward})

    def _set_seed(self, seed: int | None) -> None:
        pass


def _act(serial: Tensor) -> Tensor:
    return entries(serial, 3, 5)


@pytest.mark.parametrize("collect", [MultiSyncCollector, MultiAsyncCollector])
def test_collectors_in_processes_write_while_this_one_samples(collect, soak, processes):
    logging.getLogger("torchrl").setLevel(logging.ERROR)
    buffer = make_buffer()
    collector = collect(
        [partial(Counting, writer * _WRITER) for writer in (0, 1)],
        TensorDictModule(_act, in_keys=["serial"], out_keys=["action"]),
        frames_per_batch=32,
        total_frames=-1,
        replay_buffer=buffer,
    )
    collector.start()
    try:
        sample_beside(buffer, BATCHES * soak, lambda: True)
    finally:
        collector.async_shutdown()
    stored = buffer.storage[:]["serial"]
    assert set((stored // _WRITER).tolist()) == {0, 1}
    assert len(stored.unique()) == CAPACITY
