"""Reads runs from a run directory, or from rows and a config from elsewhere."""

from __future__ import annotations

import csv
import io
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from nmer_recipes.directories import FREE, find_added, flatten
from nmer_recipes.scores import WINDOW

Tell = Callable[[str], None]

# A run needs these to be placed in a table; the rest of its config only distinguishes settings.
_NEEDED = ("algorithm", "env.name", "replay.kind", "replay_ratio", "seed", "total_frames")
_FREE = FREE | {"name", "seed"}  # settings that may differ between seeds of one setting
# Settings of a task that its name includes.
_OF_TASK = re.compile(r"env\.(name|version|id|kwargs(\..*)?|wrappers|max_steps)$")
# Settings of remote workers, which act with older weights than the learner's.
_REMOTE = ("collector.kind", "collector.workers", "collector.frames_per_batch", "collector.sync")


class BadRunError(Exception):
    """Raised for something that cannot be read as a run; the message says why."""


@dataclass(frozen=True, eq=False)
class RunData:
    """A run: its flat config, and its evaluations in order of frames, each `[n]`."""

    source: str
    config: Mapping[str, Any]
    frames: NDArray[np.int64]
    returns: NDArray[np.float64]
    seconds: NDArray[np.float64]  # since the start; NaN if unknown
    updates: NDArray[np.float64]  # since the start; NaN if unknown

    @property
    def seed(self) -> int:
        """The run's seed."""
        return int(self.config["seed"])

    @property
    def total_frames(self) -> int:
        """The planned number of frames, whether or not the run reached it."""
        return int(self.config["total_frames"])

    @property
    def method(self) -> str:
        """The replay method."""
        return str(self.config["replay.kind"])

    @property
    def finished(self) -> bool:
        """Whether the budget's last evaluation exists."""
        return self.reaches(self.total_frames)

    @property
    def setting(self) -> tuple[tuple[str, str], ...]:
        """The config without settings that may differ between seeds."""
        names = {name for name in self.config if not {name, name.split(".")[0]} & _FREE}
        if self.config.get("collector.kind", "local") != "local":
            names |= self.config.keys() & set(_REMOTE)
        values = ((name, self.config[name]) for name in sorted(names))
        return tuple((name, _plain(value)) for name, value in values if value is not None)

    def reaches(self, frames: int) -> bool:
        """Returns whether the run has every evaluation up to `frames`."""
        every = int(self.config.get("eval_every") or self.frames[0])
        return bool(self.frames[-1] + every > frames)

    def until(self, frames: int) -> RunData:
        """Returns the same run, cut at `frames`."""
        there = self.frames <= frames
        return replace(
            self,
            frames=self.frames[there],
            returns=self.returns[there],
            seconds=self.seconds[there],
            updates=self.updates[there],
        )

    @property
    def score(self) -> float:
        """The mean of the last evaluations, over the paper's window."""
        return float(self.returns[-WINDOW:].mean())

    @property
    def area(self) -> float:
        """The mean of all evaluations after the random frames; NaN if there are none."""
        after = self.returns[self.frames > int(self.config.get("random_frames") or 0)]
        return float(after.mean()) if len(after) else math.nan

    @property
    def smooth_returns(self) -> NDArray[np.float64]:
        """The score at each evaluation, `[n]`; the last one is `score`."""
        ends = range(1, len(self.returns) + 1)
        return np.array([self.returns[max(0, end - WINDOW) : end].mean() for end in ends])


def _plain(value: Any) -> str:
    """Formats 1 and 1.0 alike: W&B passes configs through JSON, which does not distinguish them."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return str(float(value)) if number else str(value)


def _name_task(flat: Mapping[str, Any]) -> str:
    """Returns a task's id, with the arguments, wrappers and limit that make it a different task."""
    version = flat.get("env.version")
    whole = f"{flat['env.name']}-{version}" if version else flat["env.name"]
    words = [str(flat.get("env.id") or whole)]  # older configs have no id
    for name in sorted(flat):
        if name.startswith("env.kwargs."):
            value = _plain(flat[name]).removesuffix(".0")
            words.append(f"{name.removeprefix('env.kwargs.')}={value}")
    words += map(str, flat.get("env.wrappers") or [])
    if limit := flat.get("env.max_steps"):
        words.append(f"max_steps={_plain(limit).removesuffix('.0')}")
    return " ".join(words)


def _name_data(flat: Mapping[str, Any]) -> str:
    """Returns the name of a run's data, and how many of their rows it used if not all."""
    name = PurePath(str(flat["data.source"])).name
    if (count := flat.get("data.rows")) is None:
        return name
    part = "" if flat.get("data.part") == "spread" else f"{flat.get('data.part')} "
    return f"{part}{int(count):,} rows of {name}"


_RENAMED = {
    "replay.noise": "replay.noise_variance",
    "replay.low": "replay.min_factor",
    "replay.high": "replay.max_factor",
}


def _up_to_date(flat: dict[str, Any]) -> dict[str, Any]:
    """Returns a run's config with the current names of the `replay` options."""
    flat = {_RENAMED.get(name, name): value for name, value in flat.items()}
    if flat.pop("replay.tuned", False):
        flat |= {"replay.kind": "tuned_ct", "replay.first_alpha": flat.pop("replay.alpha", 1.0)}
    if "replay.alpha" in flat:  # null used to mean the default
        flat["replay.alpha"] = flat["replay.alpha"] or 0.75
    return flat


def make_run(source: str, config: Any, rows: Iterable[Mapping[str, Any]]) -> RunData:
    """Builds a run from its config and its rows of metrics; raises a `BadRunError`."""
    if not isinstance(config, Mapping):
        raise BadRunError("its config is not a mapping of names to values")
    flat = flatten(config)
    groups = {name.rpartition(".")[0] for name in flat}
    flat = {name: flat[name] for name in flat.keys() - groups}  # without a sweep's `replay: nmer`
    flat = flatten(find_added(flat)) | _up_to_date(flat)
    if flat.get("data.source") is None:  # the other data settings then mean nothing
        flat = {name: value for name, value in flat.items() if not name.startswith("data.")}
    if "total_updates" in flat:
        flat["replay_ratio"] = 1  # an update counts as a frame
    if missing := [name for name in _NEEDED if flat.get(name) is None]:
        raise BadRunError(f"its config has no {', '.join(missing)}")
    task = _name_task(flat)
    if flat.get("data.source") is not None:  # runs on other data are a different task
        task += f" with {_name_data(flat)}"
    flat = {name: value for name, value in flat.items() if not _OF_TASK.match(name)}
    flat["env.task"] = task
    rows = list(rows)
    if not rows:
        raise BadRunError("it has no evaluation yet")
    for name in ("frames", "eval/return"):
        if any(name not in row for row in rows):
            raise BadRunError(f"its metrics have no column {name}")
    for name in ("seed", "total_frames", "eval_every", "replay_ratio"):
        value = flat.get(name) or 0
        if not isinstance(value, (int, float)) or not math.isfinite(value):
            raise BadRunError(f"its config has {name}={value}, which is not a number")
    frames = _column(rows, "frames")
    if not np.isfinite(frames).all():
        raise BadRunError("its column frames has an entry that is not a number")
    run = RunData(
        source,
        flat,
        frames.astype(np.int64),
        *(_column(rows, name) for name in ("eval/return", "time/seconds", "train/updates")),
    )
    if (np.diff(run.frames) <= 0).any():
        raise BadRunError("its frames do not always increase; perhaps two runs wrote to the file")
    if not np.isfinite(run.returns).all():
        first = run.frames[~np.isfinite(run.returns)][0]
        raise BadRunError(f"its eval/return is not finite at {first:,} frames; it has diverged")
    return run


def _column(rows: list[Mapping[str, Any]], name: str) -> NDArray[np.float64]:
    """Returns a column's numbers; entries that the score does not need may be missing."""
    absent = () if name in ("frames", "eval/return") else (None, "")
    try:
        values = [row.get(name) for row in rows]
        return np.array([np.nan if value in absent else float(value) for value in values])  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise BadRunError(f"its column {name} has an entry that is not a number") from None


def read_directory(directory: Path, tell: Tell) -> RunData:
    """Reads the run in a directory; reports and leaves out a truncated last line."""
    for name in ("config.yaml", "metrics.csv"):
        if not (directory / name).is_file():
            raise BadRunError(f"it has no {name}")
    try:
        config = OmegaConf.to_container(OmegaConf.load(directory / "config.yaml"))
    except (yaml.YAMLError, OmegaConfBaseException, OSError, UnicodeDecodeError) as error:
        reason = str(error).splitlines()[0]
        raise BadRunError(f"its config.yaml cannot be read ({reason})") from None
    try:
        text = (directory / "metrics.csv").read_bytes().decode()
        header, *lines = list(csv.reader(io.StringIO(text))) or [[]]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise BadRunError(f"its metrics.csv cannot be read ({error})") from None
    if lines and not text.endswith("\n"):
        tell(f"{directory}: the last line of metrics.csv is truncated and is left out.")
        lines.pop()
    if any(len(line) != len(header) for line in lines):
        raise BadRunError("its metrics.csv has lines that do not fit its header")
    return make_run(
        str(directory), config, (dict(zip(header, line, strict=True)) for line in lines)
    )


def find_runs(root: Path, tell: Tell) -> list[RunData]:
    """Returns every run below `root`; reports each directory that should be one but is not."""
    runs = []
    for place, directories, files in os.walk(root):
        directory = Path(place)
        if not directories and not files:
            tell(f"{directory} is left out: it is empty.")
        # Skip the copies of a config that Hydra and W&B keep.
        directories[:] = sorted(d for d in directories if d != "wandb" and not d.startswith("."))
        if not {"config.yaml", "metrics.csv"} & set(files):
            continue
        try:
            runs.append(read_directory(directory, tell))
        except BadRunError as error:
            tell(f"{directory} is left out: {error}.")
    return runs
