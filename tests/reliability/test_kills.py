"""Runs that are killed at any moment, or find the disk full, resume with equal numbers."""

from __future__ import annotations

import csv
import errno
import os
import random
import resource
import signal
import subprocess
import sys
import time
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch

from nmer_recipes.files import write_state  # isort: skip

pytestmark = pytest.mark.xdist_group("reliability")  # one process imports for all

SETTINGS = [
    "env=InvertedPendulum",
    "total_frames=150",
    "random_frames=60",
    "replay_ratio=1",
    "eval_every=10",
    "eval_episodes=1",
    "checkpoint_every=10",
    "hidden=[16,16]",
    "batch_size=16",
    "logger=none",
]
FRAMES = 150
DRAFT = "checkpoint.pt.tmp"
UNLIMITED = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)


def _train(log: str, limit: int | None, *arguments: str) -> None:
    """Runs the recipe in this process, with a limit on the size of files."""
    if limit is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    sys.argv = ["td3.py", *SETTINGS, *arguments]
    import td3

    td3.run_recipe(td3.train, "td3")


class Runs:
    """Starts the recipe in other processes, which have already imported it."""

    def __init__(self, folder: Path, processes: BaseContext) -> None:
        self.folder, self.processes = folder, processes
        self.seconds = 0.0  # that one takes from start to end

    def start(self, name: str, *arguments: str, limit: int | None = None) -> BaseProcess:
        log, where = str(self.folder / f"{name}.log"), f"run_dir={self.folder / name}"
        process = self.processes.Process(target=_train, args=(log, limit, where, *arguments))
        process.start()
        return process

    def finish(self, name: str, *arguments: str, limit: int | None = None) -> tuple[int, str]:
        """Returns the exit code and the output."""
        process = self.start(name, *arguments, limit=limit)
        process.join()
        assert process.exitcode is not None
        return process.exitcode, (self.folder / f"{name}.log").read_text()


@pytest.fixture(scope="module")
def runs(tmp_path_factory, processes):
    """Provides runs, of which `whole` is complete and uninterrupted."""
    runs, start = Runs(tmp_path_factory.mktemp("runs"), processes), time.monotonic()
    code, told = runs.finish("whole")
    assert code == 0, told
    runs.seconds = time.monotonic() - start
    assert len({row["eval/q_value"] for row in metrics(runs.folder / "whole")}) > 5
    return runs


def metrics(directory: Path) -> list[dict[str, str]]:
    with (directory / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in rows]


def draft_begun(directory: Path) -> int | None:
    """Returns the time of the last write to an unfinished checkpoint, if there is one."""
    try:
        return (directory / DRAFT).stat().st_mtime_ns
    except FileNotFoundError:
        return None


def kill_while_writing(process: BaseProcess, directory: Path, drafts: int) -> None:
    """Kills the run as soon as it has begun this many checkpoints, if it gets there."""
    left = draft_begun(directory)  # by the kill before
    writing = False
    while process.is_alive() and drafts:
        now = draft_begun(directory)
        begun = now not in (None, left)
        drafts -= begun and not writing
        writing = begun
        time.sleep(0.0005)
    process.kill()
    process.join()


def kill_after(process: BaseProcess, seconds: float) -> None:
    process.join(seconds)
    process.kill()
    process.join()


def test_killed_runs_go_on_number_for_number(runs, soak):
    whole = metrics(runs.folder / "whole")
    chance, kills, writing, number = random.Random(0), 0, 0, 0
    wanted, name = (3 if soak == 1 else 2 * soak), "killed0"
    while True:
        directory = runs.folder / name
        left, done = draft_begun(directory), kills >= wanted and (writing or kills > 20)
        process = runs.start(name, "resume=auto")
        if done:
            process.join()
        elif kills % 2:
            kill_after(process, chance.uniform(0, runs.seconds))
        else:
            kill_while_writing(process, directory, chance.randint(1, 4))
        if process.exitcode == -signal.SIGKILL:
            kills += 1
            writing += draft_begun(directory) not in (None, left)
            if not (directory / "summary.json").exists():  # else it was at its very end
                continue
        else:
            assert process.exitcode == 0, (runs.folder / f"{name}.log").read_text()
        assert metrics(directory) == whole
        assert (directory / "summary.json").exists()
        assert not (directory / DRAFT).exists()
        if done:
            break
        number += 1
        name = f"killed{number}"
    print(f"{kills} kills, {writing} of them while a checkpoint was written, {number + 1} runs")
    assert writing


def wait_for_log(runs: Runs, name: str, process: BaseProcess, *words: str) -> None:
    log = runs.folder / f"{name}.log"
    start = time.monotonic()
    while not (log.exists() and all(word in log.read_text() for word in words)):
        assert process.is_alive(), log.read_text()
        assert time.monotonic() - start < 120
        time.sleep(0.01)


def test_a_run_goes_on_while_the_disk_is_full_and_catches_up(runs):
    whole = runs.folder / "whole"
    process = runs.start("freed")
    files = [runs.folder / "freed" / name for name in ("metrics.csv", "checkpoint.pt")]
    # The limit holds for the log, too, which must have room for what is told.
    while not (files[1].exists() and files[0].stat().st_size > 2_000):
        assert process.is_alive(), (runs.folder / "freed.log").read_text()
        time.sleep(0.001)
    limit = files[0].stat().st_size + 10  # the next row begins to be written
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    wait_for_log(runs, "freed", process, *(f"{file} cannot be written" for file in files))
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, UNLIMITED)
    process.join()
    assert process.exitcode == 0, (runs.folder / "freed.log").read_text()
    assert metrics(runs.folder / "freed") == metrics(whole)
    assert not list((runs.folder / "freed").glob("*.tmp"))


def test_a_full_disk_leaves_the_checkpoint_before_and_ends_with_a_clear_error(runs):
    directory = runs.folder / "full"
    file = directory / "checkpoint.pt"
    kill_while_writing(runs.start("full"), directory, 4)
    before = file.read_bytes()
    code, told = runs.finish("full", "resume=auto", limit=len(before) // 2)
    assert code == 1
    assert "Traceback" not in told
    assert told.count(f"{file} cannot be written (File too large)") > 5
    assert f"Free some disk space, then resume with resume={directory}." in told.splitlines()[-1]
    assert file.read_bytes() == before
    assert not (directory / DRAFT).exists()
    assert not (directory / "summary.json").exists()
    code, told = runs.finish("full", "resume=auto")
    assert code == 0, told
    assert metrics(directory) == metrics(runs.folder / "whole")


@pytest.fixture
def small_disk(tmp_path):
    """Provides a function that mounts a separate file system; the size is in bytes."""
    disk = tmp_path / "disk"
    disk.mkdir()

    def mount(size: int, *options: str) -> Path:
        command = ["mount", "-t", "tmpfs", "-o", ",".join([f"size={size}", *options]), "tmpfs"]
        if subprocess.run([*command, str(disk)], capture_output=True).returncode:
            pytest.skip("needs the right to mount a file system")
        return disk

    yield mount
    subprocess.run(["umount", str(disk)], capture_output=True)


def test_a_run_on_a_disk_that_is_full_for_a_while(runs, small_disk, soak):
    if soak == 1:
        pytest.skip("runs in `make soak`: CI has the same with a limit on the size of files")
    size = (runs.folder / "whole" / "checkpoint.pt").stat().st_size
    directory = small_disk(size * 3 // 2) / "run"
    process = runs.start("disk", f"run_dir={directory}")
    wait_for_log(runs, "disk", process, "checkpoint.pt cannot be written (No space left on device)")
    state = torch.load(directory / "checkpoint.pt", weights_only=True)
    assert state["collector"]["frames"] < FRAMES
    small_disk(size * 10, "remount")
    process.join()
    assert process.exitcode == 0
    assert metrics(directory) == metrics(runs.folder / "whole")


@pytest.mark.parametrize("size", [1, 100_000])  # torch tells of them in different ways
def test_a_full_disk_leaves_the_file_that_was_there(tmp_path, size):
    path, draft = tmp_path / "checkpoint.pt", tmp_path / DRAFT
    write_state(path, {"kept": torch.ones(3)})
    draft.symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left") as raised:
        write_state(path, {"lost": torch.zeros(size)})
    assert raised.value.errno == errno.ENOSPC
    assert torch.load(path, weights_only=True)["kept"].sum() == 3
    assert list(tmp_path.iterdir()) == [path]
