"""Finds the directory of a run, and checks whether a run may continue there."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from nmer_recipes.errors import UsageError
from nmer_recipes.files import CHECKPOINT, DirectoryLock, resume_word, write_text

# Settings that may differ between a run and its continuation.
FREE = {"resume", "run_dir", "checkpoint_every", "video", "logger"}
FREE |= {"threads", "compile", "losses", "device", "storage_device", "storage", "collector"}
FREE |= {"replay.search", "data.cache"}  # these give the same neighbors and the same rows
_ADDED = {
    "critic_loss": "squared",
    "data": {"source": None},
    "env": {"count": 1, "kwargs": {}, "wrappers": None, "max_steps": None},
}
_TASK_ARGUMENTS = "env.kwargs."
_DECIDED = {"target_entropy"}  # null until the run has read it from its task
_LONGEST_GROUP = 128  # characters that W&B accepts
_LONGEST_NAME = 200  # bytes; most file systems accept 255
_CUT_NAME = 120  # bytes that are kept of a longer name


def find_added(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings that runs of earlier versions lack, with the values they had."""
    added = {"precision": "float32"}
    if config.get("algorithm") not in ("sac", "td3"):  # the others have always had the rest
        return added
    targets = {"target_interval": 2} if config["algorithm"] == "td3" else {}  # moved with the actor
    critics = {"layer_norm": False, "critic_hidden": config.get("hidden")}
    return added | _ADDED | critics | targets


def place_in_sweep(cfg: DictConfig, folder: str, overrides: str) -> bool:
    """Sets the directory of a sweep's run from its overrides; returns False if it is complete.

    The same sweep started again finds the same directories: it skips complete runs and continues
    the others. In W&B, only the seeds of one setting share a group.
    """
    if cfg.run_dir is not None:
        raise UsageError(
            f"run_dir={cfg.run_dir} would be shared by all runs of the sweep; leave it out, or set "
            "the sweep's directory with hydra.sweep.dir."
        )
    if cfg.resume not in (None, "auto"):
        raise UsageError(
            f"resume={cfg.resume} is a single run, but -m starts several; leave one of the two "
            "out. A sweep that is started again resumes its own runs."
        )
    overrides = re.sub(r"\\(.)", r"\1", overrides)  # remove Hydra's escapes
    cfg.run_dir = str(Path(folder) / name_directory(overrides or cfg.name, cfg.name))
    cfg.resume = "auto"
    _extend_group(cfg, overrides)
    directory = Path(cfg.run_dir)
    if not (directory / "summary.json").exists():
        return True
    _raise_if_different(directory, cfg)
    return False


def name_directory(text: str, summary: str = "") -> str:
    """Returns a text as a directory name.

    A long text, or one with a slash, is shortened: it then begins with the summary and ends with a
    hash of the whole text, so that no two texts share a directory.
    """
    if "/" not in text and len(text.encode()) <= _LONGEST_NAME:
        return text
    return _cut(",".join(filter(None, [summary, text])).replace("/", "-"), text, _CUT_NAME)


def _cut(name: str, text: str, length: int) -> str:
    """Returns the first bytes of a name, followed by a hash of the text."""
    start = name.encode()[:length].decode(errors="ignore").rstrip(",=")
    return f"{start}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def read_score(directory: Path) -> float:
    """Returns the score of a complete run."""
    try:
        return float(json.loads((directory / "summary.json").read_text())["score"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{directory / 'summary.json'} has no valid score ({error}); delete the file and start "
            "the sweep again, which completes the run from its checkpoint."
        ) from None


def _extend_group(cfg: DictConfig, overrides: str) -> None:
    """Appends the overrides to the run's W&B group, so that only seeds of one setting share it."""
    if cfg.logger.get("group") is None:
        return
    named = ("env=", "replay=", "seed=")  # in the group already, or not of the setting
    parts = re.split(r",(?![^\[{]*[\]}])", overrides)  # do not split lists
    settings = [part for part in parts if part and not part.startswith(named)]
    group = "-".join([cfg.logger.group, *settings])
    if len(group) > _LONGEST_GROUP:
        group = _cut(group, group, _LONGEST_GROUP - 9)
    cfg.logger.group = group


def place_in_wandb_sweep(cfg: DictConfig, overrides: str = "") -> None:
    """Sets the run's directory and group under `wandb agent`, from the sweep and the run.

    A run that the service hands out again continues there.
    """
    sweep, run = (os.environ.get(f"WANDB_{name}_ID") for name in ("SWEEP", "RUN"))
    if sweep and run and cfg.run_dir is None and cfg.resume is None:
        cfg.run_dir, cfg.resume = f"runs/sweep-{sweep}/{run}", "auto"
        _extend_group(cfg, re.sub(r"\\(.)", r"\1", overrides))


def find_directory(cfg: DictConfig) -> tuple[Path, bool]:
    """Returns the directory of a run, and whether a run continues there."""
    if cfg.resume not in (None, "auto"):
        directory = Path(cfg.resume)
        if cfg.run_dir is not None and Path(cfg.run_dir) != directory:
            raise UsageError(
                f"resume={cfg.resume} and run_dir={cfg.run_dir} are different directories; "
                "leave run_dir out."
            )
        _check_resumable(directory, cfg, further=True)
        return directory, True
    if cfg.run_dir is None:
        parent = Path("runs") / name_directory(cfg.name)
        if cfg.resume == "auto":
            for directory in sorted(parent.glob("*"), reverse=True):
                if _unfinished(directory) and not _differences(read_config(directory), cfg):
                    if DirectoryLock.is_held(directory):
                        continue
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
            f"{directory} already holds a run, which is not overwritten; "
            "add resume=auto to resume it, or choose another run_dir."
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
    raise UsageError(f"{parent} has no free name for a new run; choose one with run_dir.")


def _create(directory: Path, cfg: DictConfig) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=cfg.run_dir is not None)
        write_text(directory / "config.yaml", OmegaConf.to_yaml(cfg, resolve=True))
    except FileExistsError:
        raise
    except OSError as error:
        raise UsageError(f"run_dir={directory} cannot be created: {error}.") from None


def update_config(directory: Path, cfg: DictConfig) -> None:
    """Writes the settings that a run continues with; keeps `run_dir` and `resume`."""
    before, now = read_config(directory), OmegaConf.to_container(cfg, resolve=True)
    assert isinstance(now, dict)
    now |= {name: before.get(name) for name in ("run_dir", "resume")}
    write_text(directory / "config.yaml", OmegaConf.to_yaml(OmegaConf.create(now)))


def _check_resumable(directory: Path, cfg: DictConfig, *, further: bool = False) -> None:
    """Raises if no run can be resumed there; `further` allows more frames than before."""
    if not (directory / CHECKPOINT).exists():
        raise UsageError(
            f"{directory} has no {CHECKPOINT} to resume from; "
            "start a new run without `resume`, or give another run directory."
        )
    _raise_if_different(directory, cfg, further=further)
    complete = (directory / "summary.json").exists()
    if complete and not (further and _goes_further(read_config(directory), cfg)):
        total = _total(cfg)
        raise UsageError(
            f"The run in {directory} is complete; its summary.json has the score. To extend it, "
            f"give {resume_word(directory)} and a {total} above {cfg[total]}."
        )


def _total(cfg: DictConfig) -> str:
    """Returns the name of the setting for the length of a run."""
    return "total_updates" if "total_updates" in cfg else "total_frames"


def _goes_further(there: dict[str, Any], cfg: DictConfig) -> bool:
    return cfg.total_frames > there.get("total_frames", math.inf)


def _raise_if_different(directory: Path, cfg: DictConfig, *, further: bool = False) -> None:
    there = read_config(directory)
    different = _differences(there, cfg)
    if further and _goes_further(there, cfg):
        different.pop("total_frames", None)
        different.pop("total_updates", None)  # which follow from the frames
    if different:
        words = [f"{name}={before} ({now} was given)" for name, (before, now) in different.items()]
        remedy = f"To resume it, give only {resume_word(directory)}"
        if (directory / "summary.json").exists():
            total = _total(cfg)
            above = f"a {total} above {there.get(total)}"
            remedy = f"To extend it, give {resume_word(directory)} and {above}"
        raise UsageError(
            f"{directory} holds a run with another config: {', '.join(words)}. {remedy}; for a new "
            "run, choose another directory."
        )


def read_config(directory: Path) -> dict[str, Any]:
    """Returns a run's settings."""
    try:
        loaded = OmegaConf.load(directory / "config.yaml")
    except FileNotFoundError:
        raise UsageError(
            f"{directory} has no config.yaml, so it is not a run directory; give another one, or "
            "start a new run without `resume`."
        ) from None
    except (yaml.YAMLError, OmegaConfBaseException, OSError, UnicodeDecodeError) as error:
        reason = str(error).splitlines()[0]
        raise UsageError(
            f"{directory / 'config.yaml'} cannot be read ({reason}); move the directory away, or "
            "start a new run without `resume`."
        ) from None
    if not isinstance(loaded, DictConfig):
        raise UsageError(
            f"{directory / 'config.yaml'} is not the config of a run; give another one."
        )
    whole = OmegaConf.to_container(OmegaConf.merge(find_added(loaded), loaded))
    assert isinstance(whole, dict)
    return {str(name): value for name, value in whole.items()}


def _differences(saved: dict[str, Any], cfg: DictConfig) -> dict[str, tuple[Any, Any]]:
    """Returns the settings that differ, by name: the run's value and the requested one.

    Settings that the recipes gained after the run had begun are ignored.
    """
    there, here = flatten(saved), flatten(OmegaConf.to_container(cfg, resolve=True))
    different = {}
    for name in sorted(there):
        values = there[name], here.get(name, "nothing")
        decided = name in _DECIDED and None in values
        if values[0] != values[1] and not decided and not {name, name.split(".")[0]} & FREE:
            different[name] = values
    for name in sorted(here.keys() - there.keys()):
        if name.startswith(_TASK_ARGUMENTS):  # the task names them, and none was given then
            different[name] = "nothing", here[name]
    for kind in [name for name in different if name.endswith(".kind")]:  # the rest follows from it
        group = kind.removesuffix("kind")
        different = {n: v for n, v in different.items() if n == kind or not n.startswith(group)}
    return different


def flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Flattens nested mappings into one, with names joined by dots."""
    if not isinstance(tree, dict):
        return {prefix[:-1]: tree}
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        flat |= flatten(value, f"{prefix}{name}.")
    return flat
