"""Sweeps of Weights & Biases: their files, their commands, and the real `wandb agent`."""

import csv
import warnings
from pathlib import Path

import numpy as np
import pytest
import yaml
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from test_recipe_parts import RECIPES, _only_the_recipes_configs, make_config  # noqa: F401
from wandb.sdk.launch.sweeps.utils import create_sweep_command_args

from common import config  # isort: skip
from common.directories import place_in_wandb_sweep  # isort: skip

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # written for pydantic 1
    import sweeps

FILES = sorted((RECIPES / "sweeps").glob("*.yaml"))
BAYES = RECIPES / "sweeps" / "td3_bayes.yaml"


def read(path: Path) -> dict:
    return yaml.safe_load(path.read_text())


def draw(sweep: dict, most: int) -> list[dict]:
    """What the service would hand out: all runs of a grid, `most` of a search."""
    if sweep["method"] == "grid":
        drawn = [run for run in sweeps.next_runs(sweep, [], n=10_000) if run is not None]
        return [run.config for run in drawn]
    np.random.seed(0)  # the package knows no other randomness
    done: list[sweeps.SweepRun] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a Gaussian process with few points
        for _ in range(most):
            run = sweeps.next_run(sweep, done)
            k, alpha = (run.config[f"replay.{name}"]["value"] for name in ("k", "alpha"))
            score = -((k - 20) ** 2) - 1000 * (alpha - 1) ** 2
            done.append(run.copy(update={"state": "finished", "summary_metrics": {"score": score}}))
    return [run.config for run in done]


def command_line(drawn: dict) -> list[str]:
    """The arguments that `wandb agent` makes of it for `${args_no_hyphens}`."""
    plain = {
        name: {"value": getattr(v["value"], "item", lambda v=v: v["value"])()}
        for name, v in drawn.items()
    }
    return create_sweep_command_args({"args": plain})["args_no_hyphens"]


def with_new_arguments(lines: list[list[str]]) -> list[list[str]]:
    """Those lines that hold an argument which no line before holds; a line takes long to compose."""
    seen: set[str] = set()
    chosen = []
    for line in lines:
        if not seen.issuperset(line):
            chosen.append(line)
            seen.update(line)
    return chosen


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_sweep_file_is_valid_and_what_is_drawn_from_it_composes(path):
    sweep = read(path)
    assert sweeps.schema_violations_from_proposed_config(sweep) == []
    assert sweep["command"] == ["${env}", "${interpreter}", "${program}", "${args_no_hyphens}"]
    assert sweep["metric"] == {"name": "score", "goal": "maximize"}
    recipe = RECIPES.parent / sweep["program"]
    assert recipe.exists()
    lines = [command_line(drawn) for drawn in draw(sweep, most=12)]
    if sweep["method"] == "grid":
        assert f"{len(lines)} runs" in path.read_text()
    if "replay.fraction" in sweep["parameters"] and "fraction" not in make_config("td3").replay:
        pytest.skip("replay.fraction is not there yet")
    config.register_resolvers()
    with initialize_config_dir(str(RECIPES / "conf"), version_base="1.3"):
        for line in with_new_arguments(lines):
            cfg = compose(recipe.stem, overrides=line)
            config.check(cfg)
            for name, value in (argument.split("=") for argument in line):
                name = {"env": "env.name", "replay": "replay.kind"}.get(name, name)
                assert OmegaConf.select(cfg, name) == yaml.safe_load(value)


def test_the_sweeps_hold_every_value_that_the_paper_tried():
    with (RECIPES / "common" / "paper.csv").open() as file:
        rows = list(csv.DictReader(file))
    tried = {
        (row["algorithm"].lower(), name, float(row[name]))
        for row in rows
        for name in ("replay_ratio", "actor_l2", "grad_clip", "k")
        if row[name]
    }
    swept = set()
    for path in FILES:
        sweep = read(path)
        for name, parameter in sweep["parameters"].items():
            for value in parameter.get("values", []):
                if not isinstance(value, str):
                    name = name.removeprefix("replay.")
                    swept.add((Path(sweep["program"]).stem, name, float(value)))
    assert tried <= swept
    assert len(tried) == 3 + 3 + 8 + 1 + 2 + 2


def test_the_search_moves_to_where_the_score_is_best():
    drawn = draw(read(BAYES), most=30)
    ks = np.array([run["replay.k"]["value"] for run in drawn])
    assert all(isinstance(run["replay.k"]["value"], int) for run in drawn)
    assert np.abs(ks[15:] - 20).mean() < np.abs(ks[:8] - 20).mean()


def test_runs_of_a_sweep_have_a_directory_each(monkeypatch, tmp_path):
    monkeypatch.setenv("WANDB_SWEEP_ID", "abc")
    places = []
    for run in ("one", "two"):
        monkeypatch.setenv("WANDB_RUN_ID", run)
        cfg = make_config("td3")
        place_in_wandb_sweep(cfg)
        places.append((cfg.run_dir, cfg.resume))
    assert places == [("runs/sweep-abc/one", "auto"), ("runs/sweep-abc/two", "auto")]
    cfg = make_config("td3", "run_dir=mine")
    place_in_wandb_sweep(cfg)
    assert (cfg.run_dir, cfg.resume) == ("mine", None)
