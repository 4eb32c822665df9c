"""Defines which settings a recipe has, and which values each may take."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf

from nmer_recipes.errors import UsageError
from nmer_recipes.methods import registered_methods, settings_of

CONF = Path(__file__).parents[1] / "conf"


@dataclass(frozen=True)
class Range:
    """The numbers that a setting accepts.

    Args:
        least: Smallest value.
        most: Largest value.
        whole: Whether it is an integer.
        above: Whether `least` itself is excluded.
        each: Whether the setting is a list of such numbers.
        null: What null means, or None if the setting cannot be null.
    """

    least: float = -math.inf
    most: float = math.inf
    whole: bool = False
    above: bool = False
    each: bool = False
    null: str | None = None

    def holds(self, value: Any) -> bool:
        """Returns whether the setting accepts this value."""
        if value is None:
            return self.null is not None
        if isinstance(value, list | ListConfig):
            return self.each and all(self._holds_number(entry) for entry in value)
        return not self.each and self._holds_number(value)

    def _holds_number(self, value: Any) -> bool:
        kinds = int if self.whole else int | float
        if isinstance(value, bool) or not isinstance(value, kinds) or not math.isfinite(value):
            return False
        return self.least <= value <= self.most and not (self.above and value == self.least)

    def __str__(self) -> str:
        noun = "integer" if self.whole else "number"
        text = f"a list of {noun}s, each" if self.each else f"a{'n' * self.whole} {noun}"
        if math.isinf(self.least):
            text = text.replace("a number", "a finite number")
        elif self.above:
            text += f" above {self.least:g}" + (f", at most {self.most:g}" * (self.most < math.inf))
        elif math.isinf(self.most):
            text += f"{',' * (not self.each)} at least {self.least:g}"
        else:
            text += f" from {self.least:g} to {self.most:.10g}"
        return text + (f", or null {self.null}" if self.null else "")


_COUNT = Range(1, whole=True)
_SIZE = Range(0)  # a number, at least 0
_POSITIVE = Range(0, above=True)

# Every number in `recipes/conf`, except those in the mapping `methods`. The package checks those
# and the options of `replay`.
RANGES: dict[str, Range] = {
    "seed": Range(0, 2**32 - 1, whole=True),
    "total_frames": _COUNT,
    "total_updates": _COUNT,
    "random_frames": _COUNT,
    "replay_ratio": _SIZE,
    "actor_l2": _SIZE,
    "grad_clip": Range(0, above=True, null="for no clipping"),
    "buffer_size": _COUNT,
    "batch_size": _COUNT,
    "hidden": Range(1, whole=True, each=True),
    "critic_hidden": Range(1, whole=True, each=True),
    "lr": Range(0, 1, above=True),
    "gamma": Range(0, 1),
    "tau": Range(0, 1, above=True),
    "threads": Range(1, 1024, whole=True),
    "eval_every": _COUNT,
    "eval_episodes": _COUNT,
    "checkpoint_every": _COUNT,
    # SAC, REDQ, CrossQ and SUNRISE
    "alpha_init": _POSITIVE,
    "target_entropy": Range(null="for minus the number of action dimensions"),
    # TD3, REDQ and CrossQ
    "policy_delay": _COUNT,
    # TD3 and TD3+BC; the last also for DDPG
    "target_interval": _COUNT,
    "target_noise": _SIZE,
    "target_noise_clip": _SIZE,
    "exploration_noise": _SIZE,
    # REDQ
    "num_critics": _COUNT,
    "num_target_critics": _COUNT,
    "dropout": Range(0, 0.99),
    # CrossQ
    "adam_beta": Range(0, 0.999),
    "norm_momentum": Range(0, 1, above=True),
    "norm_warm_up": Range(0, whole=True),
    # SUNRISE
    "members": _COUNT,
    "mask_share": Range(0, 1),
    "backup_temperature": _SIZE,
    "ucb_bonus": _SIZE,
    # Fixed data
    "data.share": Range(0, 1, null="for half of each batch"),
    "data.rows": Range(2, whole=True, null="for all rows"),
    "data.max_steps": Range(1, whole=True, null="if the data has time limits"),
    "bc_alpha": _SIZE,
    "expectile": Range(0.5, 0.999),
    "temperature": _SIZE,
    # The on-manifold error
    "sizes": Range(2, whole=True, each=True),
    "rows": _COUNT,
    "repeats": _COUNT,
    "stretch": _COUNT,
    "alpha": _POSITIVE,
    # Groups
    "env.count": _COUNT,
    "env.max_steps": Range(1, whole=True, null="for the task's own limit"),
    "collector.workers": _COUNT,
    "collector.frames_per_batch": _COUNT,
    "collector.cpus": Range(0.01),
    "collector.patience": _SIZE,
}
CHOICES: dict[str, Sequence[bool | str | None]] = {
    "compile": (True, False, "auto"),
    "losses": ("direct", "torchrl"),
    "precision": ("float32", "bf16"),
    "critic_loss": ("squared", "huber"),
    "layer_norm": (True, False),
    "normalize": (True, False),
    "data.part": ("spread", "last"),
    "data.clip": (True, False),
    "data.across": (True, False),
    "storage": ("memory", "memmap"),
    "video": (True, False),
    "collector.kind": ("local", "torchrl", "multiprocess", "ray"),
    "collector.sync": (True, False),
    "logger.mode": ("online", "offline", "disabled", None),
}
TEXTS = (
    "data.source",
    "data.cache",
    "env.id",
    "env.name",
    "name",
    "run_dir",
    "resume",
    "cache",
    "out",
    "collector.address",
)
_OPEN = {"env.kwargs", "methods"}  # mappings to which users may add entries
TASK_PAGE = "docs/howto/own_task.md"
_ABSENT = object()


def check_values(cfg: DictConfig) -> None:
    """Raises a `UsageError` for a value of the wrong type or outside its range."""
    for name, numbers in RANGES.items():
        value = OmegaConf.select(cfg, name, default=_ABSENT)
        if value is not _ABSENT and not numbers.holds(value):
            raise UsageError(f"{name}={show(value)} is not valid; give {numbers}.")
    for name, choices in CHOICES.items():
        value = OmegaConf.select(cfg, name, default=_ABSENT)
        if value is not _ABSENT and not any(
            value is choice or (isinstance(choice, str) and value == choice) for choice in choices
        ):
            *others, last = map(show, choices)
            raise UsageError(
                f"{name}={show(value)} is not valid; give {', '.join(others)} or {last}."
            )
    for name in TEXTS:
        value = OmegaConf.select(cfg, name)
        if not isinstance(value, str | None):
            raise UsageError(
                f"{name}={show(value)} is not text; put it in quotes: {name}=\"'{value}'\"."
            )


def check_names(cfg: DictConfig, recipe: str, choices: Mapping[str, str | None]) -> None:
    """Raises a `UsageError` for settings that the recipe does not have, or that are missing.

    Hydra's `+name=value` adds settings that nothing reads, and `~name` removes settings that are
    needed.

    Args:
        cfg: The composed config.
        recipe: The recipe's name.
        choices: The chosen file of each group.
    """
    reference, defaults = _read(recipe)
    for group in defaults:
        choice = choices.get(group)
        if choice is not None and choice in _choices(group):
            reference[group] |= _settings(group, choice)
        elif choice is not None:  # a user's own file defines its settings
            reference[group] = OmegaConf.to_container(cfg[group])
    given = OmegaConf.to_container(cfg)
    assert isinstance(given, dict)
    for name in _beyond(given, reference):
        _raise_unknown(name, reference, choices)
    for name in _beyond(reference, given):
        raise UsageError(f"The setting {name} is missing; do not remove it with `~`.")
    if given.get("algorithm", recipe) != recipe:
        raise UsageError(
            f"algorithm={given['algorithm']} cannot be set: {recipe}.py trains {recipe}."
        )


def check_words(words: Sequence[str], recipe: str) -> None:
    """Raises a `UsageError` for an override of a setting that the recipe does not have.

    Hydra also refuses it, but suggests adding it.

    Args:
        words: The command line.
        recipe: The recipe's name.
    """
    if any(word.startswith(("-c", "--config", "hydra.searchpath")) for word in words):
        return  # a user's own config files may have other settings
    reference, choices = _read(recipe)
    overrides = [word for word in words if "=" in word and not word.startswith("-")]
    choices |= {name: value for name, _, value in (word.partition("=") for word in overrides)}
    _check_task(choices["env"])
    for group in reference.keys() & _groups():
        known = _choices(group)
        for choice in known & set(choices[group].split(",")) or known:
            reference[group] |= _settings(group, choice)
    for word in overrides:
        name = word.partition("=")[0].lstrip("+~")
        if name in ("collector.kind", "logger.kind"):
            group, value = name.partition(".")[0], word.partition("=")[2]
            raise UsageError(f"{name} cannot be set by itself; choose {group}={value} instead.")
        if "/" in name or name.split(".")[0] == "hydra":
            continue
        tree: Any = None
        for part in reversed(name.split(".")):
            tree = {part: tree}
        if any(_beyond(tree, reference)):
            _raise_unknown(name, reference, choices)


def _check_task(chosen: str) -> None:
    """Raises a `UsageError` for a task that is not in the group `env`; `a,b` chooses two."""
    known = sorted(_choices("env"))
    for name in chosen.split(","):
        if re.fullmatch(r"[\w.:/-]+", name) and name not in (*known, "null"):
            near = difflib.get_close_matches(name, known, n=1)
            hint = f" Did you mean {near[0]}?" if near else ""
            raise UsageError(
                f"There is no env={name}.{hint} The tasks are: {', '.join(known)}. For your own "
                f"task, give env=gym env.id={name} (see {TASK_PAGE})."
            )


def find_choices(cfg: Mapping[str, Any]) -> dict[str, str]:
    """Returns the chosen file of each group, as far as the settings show it.

    Args:
        cfg: The resolved config of a run.
    """
    found = {}
    for group in sorted(_groups() & cfg.keys()):
        for choice in (cfg[group].get("kind"), cfg[group].get("name")):
            if choice and (choice in _choices(group) or group == "replay"):
                found[group] = choice
                break
    return found


def _read(recipe: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Returns a recipe's settings without its groups', and the groups with their defaults."""
    settings = _load(CONF / f"{recipe}.yaml")
    reference: dict[str, Any] = {}
    choices: dict[str, str] = {}
    for entry in settings.pop("defaults"):
        if isinstance(entry, dict):
            choices |= {group: choice for group, choice in entry.items() if group in _groups()}
        elif entry != "_self_":
            reference = _merge(reference, _load(CONF / f"{entry}.yaml"))
    # The recipe's own settings of a group apply to each of the group's files.
    reference = _merge(reference, settings)
    reference |= {group: reference.get(group, {}) for group in choices}
    del reference["hydra"]
    reference.pop("defaults", None)
    return reference, choices


def _merge(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Merges two settings trees; the second takes precedence."""
    merged = OmegaConf.to_container(OmegaConf.merge(first, second))
    assert isinstance(merged, dict)
    return {str(name): value for name, value in merged.items()}


def _load(path: Path) -> dict[str, Any]:
    loaded = OmegaConf.to_container(OmegaConf.load(path))
    assert isinstance(loaded, dict)
    return {str(name): value for name, value in loaded.items()}


def _groups() -> set[str]:
    return {"replay", *(path.name for path in CONF.iterdir() if path.is_dir())}


def _choices(group: str) -> set[str]:
    if group == "replay":
        return registered_methods()
    return {path.stem for path in (CONF / group).glob("*.yaml")}


def _settings(group: str, choice: str) -> dict[str, Any]:
    return settings_of(choice) if group == "replay" else _load(CONF / group / f"{choice}.yaml")


def _beyond(tree: Mapping[Any, Any], other: Mapping[Any, Any], prefix: str = "") -> Iterator[str]:
    """Yields the settings of a tree that the other one does not have."""
    for name, value in tree.items():
        path = f"{prefix}{name}"
        if name not in other:
            yield path
        elif path not in _OPEN and isinstance(value, Mapping) and isinstance(other[name], Mapping):
            yield from _beyond(value, other[name], f"{path}.")


def _names(tree: Mapping[Any, Any], prefix: str = "") -> Iterator[str]:
    """Yields the full name of every setting of a tree."""
    for name, value in tree.items():
        path = f"{prefix}{name}"
        if path not in _OPEN and isinstance(value, Mapping):
            yield from _names(value, f"{path}.")
        else:
            yield path


def _raise_unknown(name: str, reference: Mapping[Any, Any], choices: Mapping[str, Any]) -> None:
    """Raises an error with the nearest name and the other names of its group."""
    names = sorted(_names(reference))
    near = difflib.get_close_matches(name, names, n=1)
    hint = f" Did you mean {near[0]}?" if near else ""
    group = name.partition(".")[0]
    if "." in name and isinstance(reference.get(group), Mapping):
        where = f" with {group}={choices[group]}" if choices.get(group) else ""
        known = ", ".join(other for other in names if other.startswith(f"{group}."))
    else:
        where, known = "", ", ".join(other for other in names if "." not in other)
    raise UsageError(f"There is no setting {name}{where}.{hint} The settings are: {known}.")


def show(value: Any) -> str:
    """Formats a value as on the command line."""
    words = {None: "null", True: "true", False: "false"}
    return words[value] if value is None or isinstance(value, bool) else str(value)
