"""Starts recipes, in this process or in another, and reads what they write."""

from __future__ import annotations

import contextlib
import csv
import importlib
import os
import shlex
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf
from tensordict import TensorDict

from nmer_recipes import checkpoint, config  # isort: skip

RECIPES = Path(__file__).parents[1] / "recipes"
# Recipes that train; a new one is added here.
ALGORITHMS = ("crossq", "ddpg", "redq", "sac", "sunrise", "td3")
OFFLINE = ("iql", "td3_bc")  # recipes on fixed data
STOCK = ("ddpg", "sac", "td3")  # those that can use the losses of TorchRL
TINY = [
    "env=InvertedPendulum",
    "total_frames=48",
    "random_frames=40",
    "replay_ratio=1",
    "hidden=[8,8]",
    "critic_hidden=${hidden}",
    "batch_size=8",
    "eval_every=24",
    "eval_episodes=1",
    "checkpoint_every=16",
    "logger=none",
    "compile=false",
]
SMALL = ["hidden=[16,16]", "batch_size=16", "eval_episodes=2", "logger=none"]


def recipe_configs() -> dict[str, Any]:
    """Returns the registered configs of Hydra and of the recipes.

    TorchRL registers some as well where its trainers are imported. Of those, `env` and `storage`
    are names of settings of the recipes.
    """
    known = ("hydra", "open.yaml", "replay", "_dummy_empty_config_.yaml")
    return {name: node for name, node in ConfigStore.instance().repo.items() if name in known}


def make_config(name: str, *overrides: str) -> DictConfig:
    config.register_resolvers()
    with (
        mock.patch.object(ConfigStore.instance(), "repo", recipe_configs()),
        initialize_config_dir(str(RECIPES / "conf"), version_base="1.3"),
    ):
        return compose(name, overrides=list(overrides))


def expand(lines: list[str]) -> list[tuple[str, tuple[str, ...]]]:
    """Returns recipe and overrides of every run that the command lines start."""
    found = []
    for line in lines:
        python, recipe, multirun, *overrides = shlex.split(line)
        assert (python, multirun) == ("python", "-m")
        runs: list[tuple[str, ...]] = [()]
        for override in OverridesParser.create().parse_overrides(overrides):
            key = override.key_or_group
            if override.is_hydra_override() or key in ("hydra/launcher", "hydra/sweeper"):
                continue
            if override.is_interval_sweep():  # the ends of what a search may draw
                values = [str(override.value().start), str(override.value().end)]
            elif override.is_sweep_override():
                values = list(override.sweep_string_iterator())
            else:
                values = [override.get_value_element_as_str()]
            runs = [(*run, f"{key}={value}") for run in runs for value in values]
        found += [(recipe.removeprefix("recipes/"), run) for run in runs]
    return found


def make_batch(n: int, observations: int, actions: int) -> TensorDict:
    following = TensorDict(
        observation=torch.randn(n, observations),
        reward=torch.randn(n, 1),
        terminated=torch.rand(n, 1) < 0.2,
        batch_size=[n],
    )
    return TensorDict(
        observation=torch.randn(n, observations),
        action=torch.rand(n, actions) * 2 - 1,
        next=following,
        batch_size=[n],
    )


def command(recipe: str, *arguments: str) -> list[str]:
    return [sys.executable, str(RECIPES / f"{recipe}.py"), *arguments]


def environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WANDB")}
    return kept | {"OMP_NUM_THREADS": "1", "NETRC": os.devnull}


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


def start(recipe: str, *arguments: str, cwd: Path) -> None:
    """Does what the command does, in this process, which saves the start of another one."""
    module = importlib.import_module(recipe)
    job = getattr(module, "train", None) or module.run
    with (
        mock.patch.object(ConfigStore.instance(), "repo", recipe_configs()),
        mock.patch.object(sys, "argv", [f"{recipe}.py", *arguments]),
        mock.patch.object(sys, "gettrace", return_value=None),  # Hydra sees a debugger in coverage
        mock.patch.dict(os.environ),  # to which the launchers add
        contextlib.chdir(cwd),
    ):
        config.run_recipe(job, recipe, getattr(module, "check", None))


def metrics(directory: Path) -> list[dict[str, str]]:
    with (directory / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


def without_times(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in rows]


def train(recipe: str, directory: Path, *overrides: str) -> list[dict[str, str]]:
    """Trains in this process, by default with `TINY`; returns the rows of metrics without times."""
    cfg = make_config(recipe, *TINY, f"run_dir={directory}", *overrides)
    OmegaConf.resolve(cfg)
    config.check(cfg)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Got conflicting batch_sizes")  # as recipes do
        importlib.import_module(recipe).train(cfg)
    return without_times(metrics(directory))


class Killed(BaseException):
    """Ends a run as a signal would."""


def train_and_kill(recipe: str, directory: Path, *overrides: str) -> None:
    """Trains until the second checkpoint, by default at frame 32, is written."""
    save, saved = checkpoint.Checkpoint.save, []

    def save_twice(self, *, last=False):
        save(self, last=last)
        saved.append(last)
        if len(saved) == 2:
            raise Killed

    with mock.patch.object(checkpoint.Checkpoint, "save", save_twice), pytest.raises(Killed):
        train(recipe, directory, *overrides)
