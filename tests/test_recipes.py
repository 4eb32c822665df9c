"""The recipes themselves, as a user starts them, on small budgets."""

import csv
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

RECIPES = Path(__file__).parents[1] / "recipes"
SMALL = ["hidden=[16,16]", "batch_size=16", "eval_episodes=2", "logger=none"]


def command(recipe: str, *arguments: str) -> list[str]:
    return [sys.executable, str(RECIPES / f"{recipe}.py"), *arguments]


def environment(**variables: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WANDB")}
    return kept | {"OMP_NUM_THREADS": "1"} | variables


def run(recipe: str, *arguments: str, cwd: Path, code: int = 0) -> subprocess.CompletedProcess:
    result = subprocess.run(
        command(recipe, *arguments),
        cwd=cwd,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert result.returncode == code, result.stderr
    return result


def metrics(directory: Path) -> list[dict[str, str]]:
    with (directory / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


def without_times(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in rows]


def wait_for(condition, process: subprocess.Popen) -> None:
    start = time.monotonic()
    while not condition():
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() - start < 120
        time.sleep(0.01)


def rows_written(directory: Path) -> int:
    path = directory / "metrics.csv"
    return len(path.read_text().splitlines()) - 1 if path.exists() else 0


KILLED = [
    "total_frames=300",
    "random_frames=60",
    "replay_ratio=2",
    "eval_every=20",
    "checkpoint_every=50",
    *SMALL,
]


@pytest.mark.parametrize(
    ("recipe", "task"),
    [
        pytest.param(
            "sac", ["env=Hopper", "replay=nmer"], marks=pytest.mark.xdist_group("recipes_sac")
        ),
        pytest.param(
            "td3", ["env=Pendulum", "replay=mixup"], marks=pytest.mark.xdist_group("recipes_td3")
        ),
    ],
)
def test_a_killed_run_goes_on_number_for_number(tmp_path, recipe, task):
    run(recipe, *task, *KILLED, "run_dir=whole", cwd=tmp_path)
    killed = tmp_path / "killed"
    process = subprocess.Popen(
        command(recipe, *task, *KILLED, "run_dir=killed"),
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    # Past a checkpoint at 150 and in front of the one at 200, so that rows must come again.
    wait_for(lambda: rows_written(killed) >= 8, process)
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert not (killed / "summary.json").exists()
    lost = torch.load(killed / "checkpoint.pt", weights_only=True)["collector"]["frames"]
    assert 100 <= lost < 300

    run(recipe, *task, *KILLED, "run_dir=killed", "resume=auto", cwd=tmp_path)
    whole, again = metrics(tmp_path / "whole"), metrics(killed)
    assert [int(row["frames"]) for row in again] == list(range(20, 301, 20))
    assert len({row["eval/return"] for row in whole}) > 5
    assert without_times(again) == without_times(whole)

    summary = json.loads((killed / "summary.json").read_text())
    last = [float(row["eval/return"]) for row in whole[-11:]]
    assert summary["score"] == pytest.approx(sum(last) / 11)
    assert summary["updates"] == 480 == int(again[-1]["train/updates"])
    for name in ("config.yaml", "metrics.csv", "curve.png", "summary.json", "checkpoint.pt"):
        assert (killed / name).stat().st_size > 0


@pytest.mark.xdist_group("recipes_td3")
def test_ctrl_c_writes_a_checkpoint_and_says_how_to_go_on(tmp_path):
    arguments = ["env=InvertedPendulum", "total_frames=100000", "random_frames=50", "eval_every=20"]
    process = subprocess.Popen(
        command("td3", *arguments, *SMALL),
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    folder = tmp_path / "runs" / "td3-InvertedPendulum-nmer-seed0"
    wait_for(lambda: any(rows_written(d) >= 3 for d in folder.glob("*")), process)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in errors
    (directory,) = folder.glob("*")
    assert f"resume={directory.relative_to(tmp_path)}" in errors
    state = torch.load(directory / "checkpoint.pt", weights_only=True)
    assert state["collector"]["frames"] >= 60
    assert not (directory / "summary.json").exists()

    refused = run(
        "td3", *arguments, *SMALL, "gamma=0.9", f"resume={directory}", cwd=tmp_path, code=1
    )
    assert "another config" in refused.stderr
    assert "gamma=0.99" in refused.stderr


@pytest.mark.xdist_group("recipes_sac")
def test_the_replay_method_changes_neither_networks_nor_random_frames(tmp_path):
    arguments = ["env=Reacher", "total_frames=80", "random_frames=60", "eval_every=20", *SMALL]
    for kind in ("uniform", "nmer"):
        run("sac", *arguments, f"replay={kind}", f"run_dir={kind}", cwd=tmp_path)
    uniform, nmer = metrics(tmp_path / "uniform"), metrics(tmp_path / "nmer")
    for column in ("eval/return", "eval/q_value", "train/return"):
        assert [row[column] for row in uniform[:3]] == [row[column] for row in nmer[:3]]
    assert uniform[3]["eval/return"] != nmer[3]["eval/return"]
    assert float(uniform[3]["replay/mixed"]) == 0
    assert float(nmer[3]["replay/mixed"]) > 0.9  # Reacher never terminates
    assert float(nmer[3]["replay/neighbor_distance"]) > 0
    assert nmer[2]["train/loss_qvalue"] == ""
    assert math.isfinite(float(nmer[3]["train/loss_qvalue"]))
    shares = [float(v) for k, v in nmer[3].items() if k.startswith("time/share_")]
    assert len(shares) == 5
    assert all(share > 0 for share in shares)
    assert sum(shares) <= 1

    # The same states in the same order: the uniform buffer's random rows are the other's.
    stored = [
        torch.load(tmp_path / kind / "checkpoint.pt", weights_only=True)["buffer"]["_storage"]
        for kind in ("uniform", "nmer")
    ]
    first, second = (rows["_storage"]["observation"][:61] for rows in stored)
    assert torch.equal(first, second)
    assert first.abs().max() > 0

    refused = run("sac", *arguments, "run_dir=nmer", cwd=tmp_path, code=1)
    assert "not overwritten" in refused.stderr


@pytest.mark.xdist_group("recipes_td3")
def test_td3_learns_pendulum(tmp_path):
    run(
        "td3",
        "env=Pendulum",
        "replay=nmer",
        "total_frames=3000",
        "random_frames=500",
        "hidden=[64,64]",
        "lr=0.002",
        "eval_every=500",
        "logger=none",
        "run_dir=run",
        cwd=tmp_path,
    )
    returns = [float(row["eval/return"]) for row in metrics(tmp_path / "run")]
    assert returns[0] < -700
    assert max(returns[-2:]) > -400


@pytest.mark.xdist_group("recipes_sac")
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["env=Hoper"], ["Hoper", "Hopper", "Walker2d"]),
        (["replay=best"], ["best", "nmer", "uniform"]),
        (["env.id=CartPole-v1"], ["Discrete", "Box action space"]),
        (["total_frames=5000"], ["random_frames=10000", "total_frames=5000"]),
    ],
)
def test_bad_input_says_what_is_wrong(tmp_path, arguments, words):
    errors = run("sac", *arguments, "logger=none", cwd=tmp_path, code=1).stderr
    for word in words:
        assert word in errors
    assert "Traceback" not in errors
    assert not list(tmp_path.iterdir())
