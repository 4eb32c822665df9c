"""The recipes as a user starts them, with small budgets."""

import json
import math
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
from recipe_helpers import (
    SMALL,
    STOCK,
    TINY,
    command,
    environment,
    make_config,
    metrics,
    run,
    start,
    train,
    train_and_kill,
    without_times,
)

from nmer_recipes import config  # isort: skip
from nmer_recipes.runs import Run  # isort: skip


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
    "total_frames=200",
    "random_frames=60",
    "replay_ratio=2",
    "eval_every=20",
    "checkpoint_every=50",
]


SAC, TD3 = pytest.mark.xdist_group("recipes_sac"), pytest.mark.xdist_group("recipes_td3")


@SAC
def test_a_killed_run_goes_on_number_for_number(tmp_path):
    task = ["env=Hopper", "replay=nmer"]
    killed = tmp_path / "killed"
    process = subprocess.Popen(
        command("sac", *TINY, *task, *KILLED, "run_dir=killed"),
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    # Past the checkpoint at 100 and in front of that at 150, so that rows must come again.
    wait_for(lambda: rows_written(killed) >= 6, process)
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert not (killed / "summary.json").exists()
    lost = torch.load(killed / "checkpoint.pt", weights_only=True)["collector"]["frames"]
    assert 100 <= lost < 200

    whole = train("sac", tmp_path / "whole", *task, *KILLED)
    again = train("sac", killed, *task, *KILLED, "resume=auto")
    assert [int(row["frames"]) for row in again] == list(range(20, 201, 20))
    assert len({row["eval/return"] for row in whole}) > 4
    assert again == whole

    summary = json.loads((killed / "summary.json").read_text())
    last = [float(row["eval/return"]) for row in whole]
    assert summary["score"] == pytest.approx(sum(last) / 10)
    assert summary["updates"] == 280 == int(again[-1]["train/updates"])
    for name in ("config.yaml", "metrics.csv", "curve.png", "summary.json", "checkpoint.pt"):
        assert (killed / name).stat().st_size > 0


@TD3
def test_a_run_stopped_by_ctrl_c_goes_on_number_for_number(tmp_path):
    arguments = ["env=InvertedPendulum", "total_frames=160", "random_frames=50", "eval_every=20"]
    arguments += ["replay_ratio=4", "checkpoint_every=16"]
    process = subprocess.Popen(
        command("td3", *TINY, *arguments),
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
    assert 60 <= state["collector"]["frames"] < 160
    assert not (directory / "summary.json").exists()

    with pytest.raises(config.UsageError, match=r"another config.* gamma=0.99"):
        Run(make_config("td3", *TINY, *arguments, "gamma=0.9", f"resume={directory}"))

    start("td3", *TINY, *arguments, f"resume={directory}", cwd=tmp_path)
    assert without_times(metrics(directory)) == train("td3", tmp_path / "whole", *arguments)


@SAC
def test_the_replay_method_changes_neither_networks_nor_random_frames(tmp_path):
    arguments = ["env=Reacher", "total_frames=80", "random_frames=60", "eval_every=20", *SMALL]
    uniform = train("sac", tmp_path / "uniform", *arguments, "replay=uniform")
    chosen = ["replay=nmer", "logger=wandb", "run_dir=nmer"]
    errors = run("sac", *TINY, *arguments, *chosen, cwd=tmp_path).stderr
    nmer = metrics(tmp_path / "nmer")
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

    # Without a key Weights & Biases logs offline, and a line says how to send it.
    (line,) = [line for line in errors.splitlines() if "wandb sync" in line]
    place = tmp_path / line.split("wandb sync ")[1]
    (file,) = place.glob("*.wandb")
    content = file.read_bytes()
    for word in (b"eval/return", b"replay/neighbor_distance", b"sac-Reacher-nmer-seed0"):
        assert word in content
    state = torch.load(tmp_path / "nmer" / "checkpoint.pt", weights_only=True)
    assert place.name.endswith(state["run"]["logger_id"])

    with pytest.raises(config.UsageError, match="not overwritten"):
        Run(make_config("sac", *TINY, *arguments, "replay=nmer", f"run_dir={tmp_path / 'nmer'}"))
    with pytest.raises(config.UsageError, match="is complete"):
        Run(make_config("sac", *TINY, *arguments, "replay=nmer", f"resume={tmp_path / 'nmer'}"))


@pytest.mark.parametrize("recipe", STOCK)
def test_a_run_by_the_losses_of_torchrl_goes_on_by_those_of_the_recipe(recipe, tmp_path):
    train_and_kill(recipe, tmp_path, "losses=torchrl", "replay=per", "random_frames=20")
    rows = train(recipe, tmp_path, "replay=per", "random_frames=20", "resume=auto")
    assert [row["frames"] for row in rows] == ["24", "48"]
    assert all(float(row["train/loss_qvalue"]) > 0 for row in rows)


@TD3
def test_sac_learns_to_balance_for_longer(tmp_path):
    arguments = ["env=InvertedPendulum", "total_frames=1000", "random_frames=300", "eval_every=250"]
    arguments += ["replay_ratio=${paper:replay_ratio}", "batch_size=256", "eval_episodes=5"]
    rows = train("sac", tmp_path / "run", *arguments, "lr=0.002", "hidden=[64,64]")
    returns = [float(row["eval/return"]) for row in rows]
    assert returns[0] < 30  # untrained
    assert max(returns) > 60


@TD3
def test_an_unknown_environment_lists_the_known_ones(tmp_path):
    words = r"sac.py: There is no env=Hoper. Did you mean Hopper\? .*Walker2d.*own_task.md"
    with pytest.raises(SystemExit, match=words):
        start("sac", "env=Hoper", "logger=none", cwd=tmp_path)
    assert not list(tmp_path.iterdir())
