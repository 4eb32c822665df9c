"""Resumes a run from the name of its directory."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from nmer_recipes.directories import read_config
from nmer_recipes.errors import UsageError
from nmer_recipes.files import resume_word
from nmer_recipes.settings import CONF, find_choices

# Chosen again for a different device, unless given.
_BY_DEVICE = ("storage_device", "compile", "replay.search")


def add_choices(words: Sequence[str]) -> list[str]:
    """Returns the config group choices of the run in `resume=DIR`, as overrides.

    Groups that the command line sets are left out. Hydra composes the config with these choices, so
    that it knows the run's settings.

    Args:
        words: The command line.
    """
    given = {override.key_or_group: override for override in _parse(words)}
    directory = given["resume"].value() if "resume" in given else None
    if directory in (None, "auto") or given["resume"].is_sweep_override():
        return []
    choices = find_choices(read_config(Path(str(directory))))
    return [f"{group}={choice}" for group, choice in choices.items() if group not in given]


def continue_config(cfg: DictConfig, words: Sequence[str]) -> DictConfig:
    """Returns the config of the run that `cfg.resume` names, with the command line's changes.

    Choosing the group that the run has, such as `replay=nmer`, changes nothing below it.

    Args:
        cfg: The config composed from the command line.
        words: The command line as typed.
    """
    saved, composed = read_config(Path(cfg.resume)), OmegaConf.to_container(cfg)
    assert isinstance(composed, dict)
    if saved.get("algorithm") != cfg.algorithm:
        raise UsageError(
            f"{cfg.resume} holds a run of {saved.get('algorithm')}, but {cfg.algorithm}.py trains "
            f"{cfg.algorithm}; resume it with recipes/{saved.get('algorithm')}.py."
        )
    typed = {override.key_or_group: override.value() for override in _parse(words)}
    same = {group for group, choice in find_choices(saved).items() if typed.get(group) == choice}
    given = {"resume", "run_dir", *typed} - same
    if "total_updates" in given:
        given.add("total_frames")  # which follows from it
    if "device" in given and cfg.device != saved.get("device"):
        given |= {name for name in _BY_DEVICE if OmegaConf.select(cfg, name) is not None}
    # Settings that the recipes gained after the run had begun keep their defaults.
    merged = composed | saved
    for group in find_choices(saved).keys() & composed.keys():
        merged[group] = composed[group] | saved[group]
    for name in sorted(given & set(_names(composed))):  # groups come before their settings
        _copy(composed, merged, name)
    continued = OmegaConf.create(merged)
    OmegaConf.set_struct(continued, True)
    return continued


def resume_command(directory: Path, algorithm: str) -> str:
    """Returns the command that resumes a run, quoted for a shell and Hydra."""
    script = CONF.parent / f"{algorithm}.py"
    if script.is_relative_to(Path.cwd()):
        script = script.relative_to(Path.cwd())
    return f"python {shlex.quote(str(script))} {resume_word(directory)}"


def _parse(words: Sequence[str]) -> list[Override]:
    """Returns the overrides among the words of a command line."""
    overrides = [word for word in words if "=" in word and not word.startswith("-")]
    try:
        return OverridesParser.create().parse_overrides(overrides)
    except HydraException:
        return []  # Hydra reports the error


def _names(tree: dict[Any, Any], prefix: str = "") -> list[str]:
    """Returns the dotted names of all settings, and of the mappings that hold them."""
    names = []
    for name, value in tree.items():
        names.append(f"{prefix}{name}")
        if isinstance(value, dict):
            names += _names(value, f"{prefix}{name}.")
    return names


def _copy(source: dict[Any, Any], target: dict[Any, Any], name: str) -> None:
    """Copies the setting with a dotted name."""
    *path, last = name.split(".")
    for part in path:
        source, target = source[part], target.setdefault(part, {})
    target[last] = source[last]
