"""Several runs by one command, on this machine and as jobs."""

import json
import re
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from recipe_helpers import make_config, metrics, run, start

from nmer_recipes import config  # isort: skip
from nmer_recipes.directories import place_in_sweep  # isort: skip

TINY = [
    "env=InvertedPendulum",
    "total_frames=60",
    "random_frames=40",
    "replay_ratio=1",
    "eval_every=30",
    "eval_episodes=1",
    "hidden=[8,8]",
    "logger=none",
]


def runs_in(folder: Path) -> dict[str, Path]:
    return {path.parent.name: path.parent for path in folder.glob("runs/td3/*/config.yaml")}


def test_a_sweep_runs_all_and_the_same_again_does_only_what_is_left(tmp_path):
    sweep = ["-m", *TINY, "replay=uniform,nmer"]
    start("td3", *sweep, cwd=tmp_path)
    runs = runs_in(tmp_path)
    assert len(runs) == 2
    for name, directory in runs.items():
        assert "env=InvertedPendulum" in name
        assert "logger" not in name
        assert [row["frames"] for row in metrics(directory)] == ["30", "60"]
        assert json.loads((directory / "summary.json").read_text())["updates"] == 20
    before = {name: (directory / "summary.json").stat() for name, directory in runs.items()}
    left = next(name for name in runs if "nmer" in name)
    (runs[left] / "summary.json").unlink()  # as if it had been killed after its checkpoint
    run("td3", *sweep, "hydra/launcher=joblib", cwd=tmp_path)  # side by side
    after = {name: (directory / "summary.json").stat() for name, directory in runs.items()}
    assert [name for name in runs if before[name] != after[name]] == [left]
    assert [row["frames"] for row in metrics(runs[left])] == ["30", "60"]


def test_jobs_of_submitit_find_the_recipes(tmp_path):
    run("td3", "-m", *TINY, "hydra/launcher=submitit_local", cwd=tmp_path)
    (directory,) = runs_in(tmp_path).values()
    assert [row["frames"] for row in metrics(directory)] == ["30", "60"]


def test_a_run_that_cannot_be_made_does_not_end_those_beside_it(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        start("td3", "-m", *TINY, "batch_size=0,8", cwd=tmp_path)
    assert ended.value.code == 1
    assert "batch_size=0 is not valid; give an integer, at least 1" in capsys.readouterr().err
    (done,) = tmp_path.glob("runs/td3/*/summary.json")
    assert "batch_size=8" in done.parent.name


def test_a_sweep_has_no_single_directory(tmp_path):
    cfg = make_config("td3", f"run_dir={tmp_path}")
    with pytest.raises(config.UsageError, match=r"leave it out, or set .* hydra.sweep.dir"):
        place_in_sweep(cfg, "runs", "seed=0")


def test_a_complete_run_of_another_config_is_not_taken_for_this_one(tmp_path):
    directory = tmp_path / "seed=3"
    directory.mkdir()
    (directory / "summary.json").write_text("{}")
    made = make_config("td3", "seed=3", "gamma=0.9")
    (directory / "config.yaml").write_text(OmegaConf.to_yaml(made, resolve=True))
    with pytest.raises(config.UsageError, match=r"holds a run with another config: gamma=0.9"):
        place_in_sweep(make_config("td3", "seed=3"), str(tmp_path), "seed=3")
    assert not place_in_sweep(made, str(tmp_path), "seed=3")


def test_jobs_on_a_cluster_are_put_back_into_the_queue(tmp_path, capsys):
    start("sac", "hydra/launcher=submitit_slurm", "--cfg", "hydra", cwd=tmp_path)
    shown = capsys.readouterr().out
    for line in ("cpus_per_task: ${threads}", "max_num_timeout: 20", "timeout_min: 720"):
        assert line in shown


def test_only_the_seeds_of_one_setting_share_a_group(tmp_path):
    groups = set()
    for k in (10, 25):
        for seed in (0, 1):
            cfg = make_config("td3", "env=Hopper", f"replay.k={k}", f"seed={seed}")
            overrides = f"env=Hopper,replay.k={k},seed={seed}"
            assert place_in_sweep(cfg, str(tmp_path), overrides)
            groups.add(cfg.logger.group)
    assert groups == {"td3-Hopper-nmer-replay.k=10", "td3-Hopper-nmer-replay.k=25"}


def test_agents_of_one_recipe_have_directories_and_groups_of_their_own(tmp_path):
    seen = set()
    for critics in ("", "num_critics=2,dropout=0.01,layer_norm=true", "critic_hidden=[512,512]"):
        cfg = make_config("redq", "env=Hopper")
        assert place_in_sweep(cfg, str(tmp_path), ",".join(filter(None, ["env=Hopper", critics])))
        seen.add((Path(cfg.run_dir).name, cfg.logger.group))
    assert seen == {
        ("env=Hopper", "redq-Hopper-nmer"),
        (
            "env=Hopper,num_critics=2,dropout=0.01,layer_norm=true",
            "redq-Hopper-nmer-num_critics=2-dropout=0.01-layer_norm=true",
        ),
        ("env=Hopper,critic_hidden=[512,512]", "redq-Hopper-nmer-critic_hidden=[512,512]"),
    }


def test_long_groups_stay_apart_and_names_have_no_escapes(tmp_path):
    groups = set()
    for last in ("a", "b"):
        cfg = make_config("td3", "env=Hopper")
        text = rf"env.id=mine\:A-v0,hidden=[8,8],run={'x' * 120}{last}"
        assert place_in_sweep(cfg, str(tmp_path), text)
        assert "\\" not in cfg.run_dir + cfg.logger.group
        assert cfg.logger.group.startswith("td3-Hopper-nmer-env.id=mine:A-v0-hidden=[8,8]-run=x")
        assert len(cfg.logger.group) <= 128
        groups.add(cfg.logger.group)
    assert len(groups) == 2


def test_a_search_that_was_killed_draws_the_same_trials_and_goes_on(tmp_path, capsys):
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper", reason="needs the extra optuna")
    space = ["replay.k=int(interval(1,9))", "replay.alpha=tag(log,interval(0.1,4))"]
    fixed = [word for word in TINY if not word.startswith("replay_ratio")]
    search = ["-m", "hydra/sweeper=optuna", *fixed, *space, "replay_ratio=1,2"]
    start("td3", *search, "hydra.sweeper.n_trials=2", cwd=tmp_path)
    runs = {path: path.stat().st_mtime_ns for path in tmp_path.glob("runs/td3/*/summary.json")}
    scores = [json.loads(path.read_text())["score"] for path in runs]
    assert len(scores) == 2
    told = capsys.readouterr().out
    best = f"Best of the search: score {max(scores):.1f} with "
    assert re.search(best + r"replay\.k=\d replay\.alpha=\S+ replay_ratio=[12];", told)
    next(iter(runs)).unlink()  # as if it had been killed after its checkpoint
    start("td3", *search, "hydra.sweeper.n_trials=2", cwd=tmp_path)
    again = {path: path.stat().st_mtime_ns for path in tmp_path.glob("runs/td3/*/summary.json")}
    assert again.keys() == runs.keys()
    assert [path for path in runs if runs[path] != again[path]] == [next(iter(runs))]
    assert told.splitlines()[-1] == capsys.readouterr().out.splitlines()[-1]
