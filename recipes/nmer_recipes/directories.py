"""Run directories: where a run writes, and whether one may go on there."""

from __future__ import annotations

import os
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from nmer_recipes.errors import UsageError
from nmer_recipes.files import CHECKPOINT, write_text

# What may differ between a run and its continuation.
FREE = {"resume", "run_dir", "checkpoint_every", "video", "logger"}
FREE |= {"threads", "compile", "losses", "device", "storage_device", "storage", "collector"}
_LONGEST_GROUP = 128  # characters that W&B takes


def place_in_sweep(cfg: DictConfig, folder: str, overrides: str) -> bool:
    """Gives a run of a sweep a directory named after its overrides; False if it is complete.

    The same sweep started again finds the same directories: it skips what is complete and goes on
    with the rest. In W&B only the seeds of one setting share a group.
    """
    if cfg.run_dir is not None:
        raise UsageError(
            f"run_dir={cfg.run_dir} would be the directory of every run of the sweep; leave it "
            "out, or name the directory that holds them all by hydra.sweep.dir."
        )
    cfg.run_dir = str(Path(folder) / (overrides or cfg.name))
    cfg.resume = "auto"
    if cfg.logger.get("group") is not None:
        named = ("env=", "replay=", "seed=")  # by the group already, or not of the setting
        settings = [part for part in overrides.split(",") if part and not part.startswith(named)]
        cfg.logger.group = "-".join([cfg.logger.group, *settings])[:_LONGEST_GROUP]
    directory = Path(cfg.run_dir)
    if not (directory / "summary.json").exists():
        return True
    _raise_if_different(directory, cfg)
    return False


def place_in_wandb_sweep(cfg: DictConfig) -> None:
    """Under `wandb agent`, gives a run a directory named after the sweep and the run.

    A run that the service hands out again goes on there.
    """
    sweep, run = (os.environ.get(f"WANDB_{name}_ID") for name in ("SWEEP", "RUN"))
    if sweep and run and cfg.run_dir is None and cfg.resume is None:
        cfg.run_dir, cfg.resume = f"runs/sweep-{sweep}/{run}", "auto"


def find_directory(cfg: DictConfig) -> tuple[Path, bool]:
    """The directory that a run writes to, and whether one goes on there."""
    if cfg.resume not in (None, "auto"):
        directory = Path(cfg.resume)
        if cfg.run_dir is not None and Path(cfg.run_dir) != directory:
            raise UsageError(
                f"resume={cfg.resume} and run_dir={cfg.run_dir} name two directories; "
                "leave run_dir out."
            )
        _check_resumable(directory, cfg)
        return directory, True
    if cfg.run_dir is None:
        parent = Path("runs") / cfg.name
        if cfg.resume == "auto":
            for directory in sorted(parent.glob("*"), reverse=True):
                if _unfinished(directory) and not _differences(directory, cfg):
                    return directory, True
        return _new_directory(parent, cfg), False
    directory = Path(cfg.run_dir)
    if (directory / "config.yaml").exists():
        if cfg.resume == "auto" and not (directory / CHECKPOINT).exists():
            _raise_if_different(directory, cfg)
            return directory, False  # killed before its first checkpoint
        if cfg.resume == "auto":
            _check_resumable(directory, cfg)
            return directory, True
        raise UsageError(
            f"{directory} holds a run already, which is not overwritten; "
            "add resume=auto to go on with it, or choose another run_dir."
        )
    _create(directory, cfg)
    return directory, False


def _unfinished(directory: Path) -> bool:
    return (directory / CHECKPOINT).exists() and not (directory / "summary.json").exists()


def _new_directory(parent: Path, cfg: DictConfig) -> Path:
    stamp = datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    for number in range(1, 1_000):
        directory = parent / (stamp if number == 1 else f"{stamp}_{number}")
        try:
            _create(directory, cfg)
        except FileExistsError:
            continue
        return directory
    raise UsageError(f"No name is free for a new run in {parent}; choose one by run_dir.")


def _create(directory: Path, cfg: DictConfig) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=cfg.run_dir is not None)
        write_text(directory / "config.yaml", OmegaConf.to_yaml(cfg, resolve=True))
    except FileExistsError:
        raise
    except OSError as error:
        raise UsageError(f"run_dir={directory} cannot be made: {error}.") from None


def _check_resumable(directory: Path, cfg: DictConfig) -> None:
    if not (directory / CHECKPOINT).exists():
        raise UsageError(
            f"{directory} has no {CHECKPOINT} to resume from; "
            "start a new run without `resume`, or name the directory of another."
        )
    _raise_if_different(directory, cfg)
    if (directory / "summary.json").exists():
        raise UsageError(f"The run in {directory} is complete; its summary.json has the score.")


def _raise_if_different(directory: Path, cfg: DictConfig) -> None:
    if different := _differences(directory, cfg):
        raise UsageError(
            f"{directory} is of another config: it was made with {' '.join(different)}. "
            "Give these values to go on with it, or start a new run without `resume`."
        )


def _differences(directory: Path, cfg: DictConfig) -> list[str]:
    """What the run in the directory was made with where that is not what is asked for now."""
    try:
        there = flatten(OmegaConf.to_container(OmegaConf.load(directory / "config.yaml")))
    except (yaml.YAMLError, OmegaConfBaseException, OSError, UnicodeDecodeError) as error:
        reason = str(error).splitlines()[0]
        raise UsageError(
            f"{directory / 'config.yaml'} cannot be read ({reason}); move the directory away, or "
            "start a new run without `resume`."
        ) from None
    there = {"env.count": 1} | there  # before it could be set
    here = flatten(OmegaConf.to_container(cfg, resolve=True))
    names = sorted(there.keys() | here.keys())
    return [
        f"{name}={there.get(name, 'nothing')}"
        for name in names
        if name.split(".")[0] not in FREE and there.get(name) != here.get(name)
    ]


def flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Nested mappings to one, whose names are joined by dots."""
    if not isinstance(tree, dict):
        return {prefix[:-1]: tree}
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        flat |= flatten(value, f"{prefix}{name}.")
    return flat
