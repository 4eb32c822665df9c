"""Where the recipes store rows and points, and what they say about the memory."""

import contextlib
import gc
from pathlib import Path
from unittest import mock

import pytest
import torch
from helpers import make_transitions
from pretend_cuda import Pretended, pretend_cuda
from recipe_helpers import ALGORITHMS, make_config, train, train_and_kill

from nmer_torchrl import make_replay_buffer
from nmer_torchrl.neighbors import DeviceSearch, NeighborGraph, TorchSearch

from nmer_recipes import checkpoint, config, directories, memory, replay  # isort: skip
from nmer_recipes.errors import UsageError  # isort: skip
from nmer_recipes.runs import Run  # isort: skip


@contextlib.contextmanager
def pretending():
    """Simulates a device whose events have always finished; tensordicts wait for one of them."""
    with pretend_cuda() as waits, mock.patch("torch.cuda.Event"):
        yield waits


SHORT = ["total_frames=60", "random_frames=30", "replay_ratio=2", "eval_every=30"]


@pytest.mark.parametrize("search", [TorchSearch, NeighborGraph])
def test_points_on_the_device_and_rows_in_host_memory(search):
    rows = make_transitions(200)
    batches = []
    for pretends in (False, True):
        with pretending() if pretends else contextlib.nullcontext() as waits:
            buffer = make_replay_buffer(
                "nmer",
                capacity=300,
                batch_size=32,
                k=5,
                search=DeviceSearch(search(), "cuda:0" if pretends else "cpu"),
                generator=torch.Generator().manual_seed(0),
            )
            buffer.extend(rows)
            buffer.sample()
            buffer.add(rows[0])
            if pretends:
                waits.clear()
            batches.append(buffer.sample())
            if pretends:
                assert waits["to_host"] >= 1  # the answer
                table = buffer.sampler.unit.search.search.table
                assert isinstance(table.points, Pretended)
    assert not isinstance(batches[1]["observation"], Pretended)
    assert torch.equal(*(batch["index"] for batch in batches))
    assert torch.equal(*(batch["observation"] for batch in batches))


@pytest.mark.filterwarnings("ignore:torch.cuda.is_current_stream_capturing")
def test_a_run_with_rows_in_host_memory_learns_what_it_learns_on_the_cpu(tmp_path):
    expected = train("sac", tmp_path / "cpu", *SHORT, "device=cpu", "replay=per")
    with pretending():
        places = [*SHORT, "device=cuda:0", "storage_device=cpu"]
        assert train("sac", tmp_path / "cuda", *places, "replay=per") == expected
        rows = train("td3", tmp_path / "nmer", *places, "replay=nmer", "replay.search=torch")
    assert (
        float(rows[-1]["replay/mixed"]) > 0.25
    )  # of 16 rows; pairs with a terminal row are not mixed


@pytest.mark.filterwarnings("ignore:torch.cuda.is_current_stream_capturing")
@pytest.mark.parametrize("recipe", ALGORITHMS)
def test_a_frame_waits_for_its_action_alone(tmp_path, recipe, monkeypatch):
    frames, count = [], Run.count
    with pretending() as waits:

        def count_waits(self, frame):
            frames.append(dict(waits))
            count(self, frame)
            waits.clear()

        monkeypatch.setattr(Run, "count", count_waits)
        every = ["checkpoint_every=60", "device=cuda:0", "replay=uniform", "replay_ratio=3"]
        train(recipe, tmp_path / "run", *SHORT, *every)
    usual = [found for number, found in enumerate(frames, 1) if number not in (1, 31)]
    assert usual == [{"to_host": 1}] * 58  # the first frame, and one after an evaluation, do more


def test_a_killed_run_with_rows_in_files_goes_on_as_if_nothing_had_happened(tmp_path, monkeypatch):
    options = ["device=cpu", "replay.search=torch", "buffer_size=20"]  # old rows are overwritten
    expected = train("td3", tmp_path / "memory", *options)
    options.append("storage=memmap")
    train_and_kill("td3", tmp_path / "files", *options)
    load, files = checkpoint.Checkpoint.load, []

    def note_files(self):
        load(self)
        rows = self.parts["buffer"].storage.get(slice(None))
        files.extend(Path(entry.filename) for entry in rows.values(True, True))

    monkeypatch.setattr(checkpoint.Checkpoint, "load", note_files)
    assert train("td3", tmp_path / "files", *options, "resume=auto") == expected
    assert {tmp_path / "files" / "rows"} < {folder for file in files for folder in file.parents}
    gc.collect()
    assert not (tmp_path / "files" / "rows").exists()


def test_rows_in_files_are_on_the_host():
    with pretending():
        cfg = make_config("sac", "device=cuda:0", "storage=memmap")
        with pytest.raises(UsageError, match="add storage_device=cpu"):
            config.check(cfg)


@pytest.mark.parametrize(
    ("search", "k", "names"),
    [("graph", 4, {"rows", "points", "neighbor lists"}), ("torch", 10, {"rows", "points"})],
)
def test_the_estimate_is_what_a_full_buffer_takes(search, k, names):
    n = 4_000
    cfg = make_config("sac", f"total_frames={n}", f"replay.search={search}", f"replay.k={k}")
    parts = {part.name: part.size for part in memory.estimate(cfg, 11, 3)}
    assert parts.keys() == names
    buffer = replay.make_buffer(cfg, 0)
    rows = make_transitions(n, observation=11, action=3).exclude("identity", ("next", "done"))
    buffer.extend(rows)
    buffer.sample()
    stored = buffer.storage.get(slice(0, n))
    assert sum(x.numel() * x.element_size() for x in stored.values(True, True)) == parts["rows"]
    made = buffer.sampler.unit.search
    kept = [made.table.points, made.table.valid]
    if search == "graph":
        lists = made._lists
        kept += [lists.positions, lists.distances, lists.reach, lists.listed]
        kept += [made._scaled.norms, made._waits]
    taken = sum(tensor.numel() * tensor.element_size() for tensor in kept)
    estimated = sum(parts.values()) - parts["rows"]
    assert taken <= estimated <= 1.1 * taken


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["device=cuda:0"], r"on cuda:0 \(rows 4 MB, points 2 MB.*storage_device=cpu"),
        (
            ["device=cuda:0", "storage_device=cpu"],
            r"on cpu \(rows 4 MB, points 2 MB.*lower buffer_size, or .*storage=memmap\.",
        ),
        (
            ["device=cpu", "storage=memmap", "replay=uniform"],
            r"12 MB on disk \(rows 4 MB; and as much for each of two .*lower buffer_size\.",
        ),
        (["device=cpu"], r"on cpu \(rows 4 MB, .*neighbor lists.*replay.search=torch"),
        (["device=cpu", "replay=uniform"], r"on cpu \(rows 4 MB\).*lower buffer_size"),
    ],
)
def test_too_much_is_refused_with_the_remedy_before_it_is_allocated(overrides, words, monkeypatch):
    cfg = make_config("sac", "total_frames=25000", *overrides)
    monkeypatch.setattr(memory, "free_memory", lambda place: 2**20)
    monkeypatch.setattr(memory, "free_space", lambda cfg: 2**20)
    with pytest.raises(UsageError, match=words):
        memory.check_memory(cfg, 17, 6)


def test_a_large_buffer_is_told_of_and_a_small_one_is_not(capsys, monkeypatch):
    for size in (10**4, 10**7):
        cfg = make_config("sac", f"total_frames={size}", "buffer_size=10000000")
        monkeypatch.setattr(memory, "free_memory", lambda place: None)
        memory.check_memory(cfg, 17, 6)
        told = capsys.readouterr().err
        assert ("GB on cpu: rows 1.6 GB" in told) == (size > 10**6)


def test_a_run_may_go_on_with_its_rows_elsewhere():
    assert {
        "device",
        "storage_device",
        "storage",
    } <= directories.FREE


def test_free_memory_of_the_host_is_known():
    assert 2**20 < memory.free_memory("cpu") < 2**50
