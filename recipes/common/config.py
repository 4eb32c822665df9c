"""Configuration: resolvers for the paper's settings, checks, and the entry point of a recipe."""

from __future__ import annotations

import logging
import os
import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hydra
import torch
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from common import paper
from common.directories import place_in_sweep, place_in_wandb_sweep
from common.errors import UsageError

CONF = Path(__file__).parents[1] / "conf"


def _paper(name: str, *, _root_: DictConfig) -> int | float | None:
    return paper.setting(name, _root_.algorithm, _root_.env.name, _root_.replay.kind)


def _share(total: int, parts: int) -> int:
    return max(1, int(total) // parts)


def _default_device() -> str:
    return "cuda:0" if torch.cuda.is_available() else "cpu"


def register_resolvers() -> None:
    """Makes `${paper:...}`, `${share:...}` and `${default_device:}` known to OmegaConf."""
    for name, resolver in {
        "paper": _paper,
        "share": _share,
        "default_device": _default_device,
    }.items():
        OmegaConf.register_new_resolver(name, resolver, replace=True)


# What a job on a cluster gets unless `hydra.launcher.NAME=...` says otherwise. When its time is up
# it is put back into the queue, this often at most, and goes on from its last checkpoint.
_SLURM = {
    "cpus_per_task": "${threads}",
    "mem_gb": 8,
    "timeout_min": 720,
    "max_num_timeout": 20,
    "array_parallelism": 64,
}


def register_launchers() -> None:
    """Gives `hydra/launcher=submitit_slurm` defaults that suit a run, where it is installed."""
    # Jobs in other processes find the recipes' modules by this.
    paths = [str(CONF.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    Plugins.instance()  # has the plugins register theirs
    store, group, name = ConfigStore.instance(), "hydra/launcher", "submitit_slurm"
    if f"{name}.yaml" in store.list(group):
        node = OmegaConf.merge(store.load(f"{group}/{name}.yaml").node, _SLURM)
        store.store(name=name, node=node, group=group, provider="recipes")


def with_overrides(arguments: list[str], overrides: list[str]) -> list[str]:
    """A command line with some overrides before its own: Hydra takes them only all together."""
    given = (i for i, word in enumerate(arguments) if "=" in word and not word.startswith("-"))
    at = next(given, len(arguments))
    return [*arguments[:at], *overrides, *arguments[at:]]


def run_recipe(
    train: Callable[[DictConfig], None],
    name: str,
    validate: Callable[[DictConfig], None] | None = None,
) -> None:
    """Composes the config `name` from the command line, checks it and trains by it."""
    register_resolvers()
    register_launchers()
    shows = re.search(r"(--cfg|-c)[ =]job\b", " ".join(sys.argv))
    if shows and "--resolve" not in sys.argv:
        sys.argv.append("--resolve")  # so that the paper's values show

    def job(cfg: DictConfig) -> None:
        logging.getLogger("torchrl").setLevel(logging.WARNING)
        warnings.filterwarnings("ignore", module="torchrl|tensordict|gymnasium|glfw")
        task = HydraConfig.get()
        sweep = task.mode == RunMode.MULTIRUN
        try:
            OmegaConf.resolve(cfg)
            (validate or check)(cfg)
            trains = "run_dir" in cfg  # rather than measures, and has a directory of its own
            if trains and not sweep:
                place_in_wandb_sweep(cfg)
            folder, overrides = task.sweep.dir, task.job.override_dirname
            if not (sweep and trains) or place_in_sweep(cfg, folder, overrides):
                train(cfg)
            else:
                print(f"{cfg.run_dir} is complete already, and is skipped.")
        except UsageError as error:
            message = f"{name}.py: {error}"
            # One run that cannot be made must not end those beside it.
            raise (RuntimeError if sweep else SystemExit)(message) from None

    hydra.main(version_base="1.3", config_path=str(CONF), config_name=name)(job)()


# Smallest value of each number that has one.
_AT_LEAST: dict[str, float] = {
    "seed": 0,
    "total_frames": 1,
    "random_frames": 1,
    "replay_ratio": 0,
    "actor_l2": 0,
    "buffer_size": 1,
    "batch_size": 1,
    "threads": 1,
    "eval_every": 1,
    "eval_episodes": 1,
    "checkpoint_every": 1,
}
_AT_LEAST_WITH_RAY: dict[str, float] = {
    "collector.workers": 1,
    "collector.frames_per_batch": 1,
    "collector.cpus": 0.01,
    "collector.patience": 0,
}
_NUMBERS = {"replay_ratio", "actor_l2", "collector.cpus", "collector.patience"}  # others: integers


def check(cfg: DictConfig) -> None:
    """Raises a `UsageError` for a value that no run could use."""
    remote = cfg.collector.kind == "ray"
    for name, least in (_AT_LEAST | (_AT_LEAST_WITH_RAY if remote else {})).items():
        value = OmegaConf.select(cfg, name)
        kinds: Any = (int, float) if name in _NUMBERS else int
        if isinstance(value, bool) or not isinstance(value, kinds) or not value >= least:
            kind = "a number" if name in _NUMBERS else "an integer"
            raise UsageError(f"{name}={value}, but it is {kind}, at least {least}.")
    if cfg.random_frames >= cfg.total_frames:
        raise UsageError(
            f"random_frames={cfg.random_frames} of total_frames={cfg.total_frames} leave no frame "
            "to learn from; lower random_frames or raise total_frames."
        )
    if cfg.eval_every > cfg.total_frames:
        raise UsageError(
            f"eval_every={cfg.eval_every}, but the run has total_frames={cfg.total_frames}; "
            "lower eval_every, or the run is never evaluated."
        )
    if cfg.compile not in (True, False, "auto"):
        raise UsageError(f"compile={cfg.compile}; it is true, false or auto.")
    if cfg.grad_clip is not None and not cfg.grad_clip > 0:
        raise UsageError(f"grad_clip={cfg.grad_clip}; it is above 0, or null for no clipping.")
    try:
        device = torch.device(cfg.device)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise UsageError(f"device={cfg.device} is not there ({reason}); try device=cpu.") from None
