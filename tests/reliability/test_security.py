"""Reading a file never executes it, no run uses the network unasked or writes a secret."""

import argparse
import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import make_transitions
from omegaconf import OmegaConf
from recipe_helpers import SMALL, command, environment, make_config
from soak import SOAK

from nmer_torchrl import make_replay_buffer
from nmer_torchrl.methods import METHODS

from benchmarks import experience  # isort: skip
from nmer_recipes import checkpoint, directories  # isort: skip
from nmer_recipes.errors import UsageError  # isort: skip
from nmer_recipes.reporting.read import BadRunError, find_runs, make_run, read_directory  # isort: skip

import graph  # isort: skip


class Payload:
    """Makes a directory when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


@pytest.fixture
def payload(tmp_path):
    """Provides an object that leaves a mark if executed, and checks that there is none."""
    marker = tmp_path / "executed"
    assert pickle.loads(pickle.dumps(Payload(marker))) is None
    assert marker.is_dir()  # it would
    marker.rmdir()
    yield Payload(marker)
    assert not marker.exists()


def write_pickle(content, path: Path) -> None:
    path.write_bytes(pickle.dumps(content, protocol=2))


EVERY_FORM = pytest.mark.parametrize("write", [torch.save, write_pickle])


@EVERY_FORM
def test_checkpoints_of_a_run(payload, tmp_path, write):
    write({"run": payload}, tmp_path / checkpoint.CHECKPOINT)
    with pytest.raises(UsageError, match="cannot be read as a checkpoint"):
        checkpoint.Checkpoint(tmp_path, run=None).load()


@EVERY_FORM
def test_rows_that_the_manifold_recipe_kept(payload, tmp_path, write):
    cfg = make_config(
        "on_manifold",
        "env=InvertedPendulum",
        "total_frames=20",
        "hidden=[8,8]",
        f"cache={tmp_path}",
    )
    experience.collect(cfg)
    (path,) = tmp_path.glob("*.pt")
    write({"rows": payload}, path)
    with pytest.raises(UsageError, match=r"cannot be read as a checkpoint .*; delete it"):
        experience.collect(cfg)


@pytest.mark.parametrize("bench", [graph.bench_feed, graph.bench_recall, graph.bench_save])
def test_streams_of_the_benchmarks(payload, tmp_path, bench):
    args = argparse.Namespace(stream=[tmp_path / "stream.npz"], rows=10, rounds=1)
    np.savez(args.stream[0], points=np.array([payload], dtype=object))
    with pytest.raises(ValueError, match="allow_pickle=False"):
        bench(args)
    write_pickle({"points": payload}, args.stream[0])
    with pytest.raises(ValueError, match=r"allow_pickle|pickled"):
        bench(args)


@EVERY_FORM
@pytest.mark.parametrize("kind", METHODS)
def test_samplers_and_transforms_of_a_dump(payload, tmp_path, kind, write):
    buffer = make_replay_buffer(kind, capacity=20, batch_size=4)
    buffer.extend(make_transitions(10))
    buffer.sample()
    buffer.dumps(tmp_path / "saved")
    other = make_replay_buffer(kind, capacity=20, batch_size=4)
    other.loads(tmp_path / "saved")
    for name in ("sampler/sampler.pt", "transform.t"):
        path = tmp_path / "saved" / name
        if path.exists():  # of uniform and per, TorchRL saves numbers and tensors alone
            whole = path.read_bytes()
            write({"state": payload}, path)
            with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
                other.loads(tmp_path / "saved")
            path.write_bytes(whole)
    assert (tmp_path / "saved" / "transform.t").exists()


@EVERY_FORM
def test_states_as_the_docs_load_them(payload, tmp_path, write):
    write({"_storage": payload}, tmp_path / "state.pt")
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        torch.load(tmp_path / "state.pt", weights_only=True)


@pytest.mark.parametrize(
    "text",
    [
        "seed: !!python/object/apply:os.mkdir [{marker}]",
        "seed: !!python/name:os.mkdir",
        "seed: {{a: 1",
    ],
)
def test_configs_of_run_directories(payload, tmp_path, text):
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text(text.format(marker=payload.marker))
    (run / "metrics.csv").write_text("frames,eval/return\n1,2\n")
    (run / checkpoint.CHECKPOINT).touch()
    with pytest.raises(BadRunError, match=r"config.yaml cannot be read"):
        read_directory(run, print)
    told = []
    assert find_runs(tmp_path, told.append) == []
    assert len(told) == 1
    with pytest.raises(UsageError, match=r"config.yaml cannot be read .*move the directory away"):
        directories.find_directory(make_config("td3", f"resume={run}"))


def test_configs_of_run_directories_are_not_resolved(tmp_path, monkeypatch):
    """An interpolation in a file from elsewhere does not read environment variables."""
    monkeypatch.setenv("SECRET", "s3cret")
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text("seed: ${oc.env:SECRET}")
    (run / checkpoint.CHECKPOINT).touch()
    with pytest.raises(UsageError, match=r"seed=\$\{oc.env:SECRET\}") as error:
        directories.find_directory(make_config("td3", f"resume={run}"))
    assert "s3cret" not in str(error.value)


def test_results_from_the_network_are_numbers_or_left_out(payload):
    code = f"__import__('os').mkdir({str(payload.marker)!r})"
    cfg = OmegaConf.to_container(make_config("td3"), resolve=True)
    for value in (code, payload, [1.0], {"value": 1.0}):
        with pytest.raises(BadRunError, match="not a number"):
            make_run("run", cfg, [{"frames": 1, "eval/return": value}])


# -- network and secrets ---------------------------------------------------------------------------

GUARD = """
import atexit, os, sys
def guard(event, args):
    if event in ("socket.connect", "socket.getaddrinfo", "socket.sendto"):
        with open(os.environ["GUARD_LOG"], "a") as file:
            file.write(f"{event} {args[1:]}\\n")
        raise RuntimeError("no network")
sys.addaudithook(guard)
"""
SECRETS = {
    "WANDB_API_KEY": "0123456789abcdef0123456789abcdef01234567",
    "AWS_SECRET_ACCESS_KEY": "aws+secret/9f8e7d6c5b4a",
    "HF_TOKEN": "hf_9f8e7d6c5b4a39281706",
    "GITHUB_TOKEN": "ghp_9f8e7d6c5b4a39281706",
    "DATABASE_URL": "postgres://user:pa55word9f8e@host/db",
}
RUN = ["env=InvertedPendulum", "total_frames=40", "random_frames=20", "eval_every=20", *SMALL]


def guarded(folder: Path) -> dict[str, str]:
    """Provides an environment whose Python raises and records any connection."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(GUARD)
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(paths), "GUARD_LOG": str(folder / "log")}


def start(arguments: list[str], folder: Path, **variables: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        arguments,
        cwd=folder,
        env=environment() | variables,
        capture_output=True,
        text=True,
        timeout=240,
    )


def assert_no_secret(folder: Path, result: subprocess.CompletedProcess) -> int:
    """Checks the files for the secret; returns their number."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    texts = [result.stdout.encode(), result.stderr.encode(), *(p.read_bytes() for p in files)]
    for name, secret in SECRETS.items():
        assert not any(secret.encode() in text for text in texts), name
    return len(files)


def test_the_guard_sees_a_connection(tmp_path):
    variables = guarded(tmp_path / "guard")
    code = "import socket; socket.create_connection(('127.0.0.1', 9))"
    result = start([sys.executable, "-c", code], tmp_path, **variables)
    assert "RuntimeError: no network" in result.stderr
    assert len((tmp_path / "guard" / "log").read_text().splitlines()) == 1


@pytest.mark.parametrize("logger", ["csv", "none"] if SOAK > 1 else ["csv"])
def test_a_run_without_a_logger_of_the_network_connects_to_nothing(tmp_path, logger):
    """Importing the package does not either; it is a part of the run."""
    variables, folder = guarded(tmp_path / "guard"), tmp_path / "work"
    folder.mkdir()
    arguments = command("td3", *RUN, f"logger={logger}", "run_dir=run")
    result = start(arguments, folder, **variables, **SECRETS)
    assert result.returncode == 0, result.stderr
    assert not (tmp_path / "guard" / "log").exists()
    assert assert_no_secret(folder, result) >= 4  # config, metrics, summary, checkpoint


def test_offline_files_of_wandb_hold_no_secret(tmp_path):
    arguments = command("td3", *RUN, "logger=wandb", "run_dir=run")
    result = start(arguments, tmp_path, **SECRETS, WANDB_MODE="offline")
    assert result.returncode == 0, result.stderr
    assert_no_secret(tmp_path, result)
    (file,) = tmp_path.rglob("*.wandb")
    assert b"InvertedPendulum" in file.read_bytes()  # what it does hold can be read
