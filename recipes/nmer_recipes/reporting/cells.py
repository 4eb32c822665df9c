"""Groups runs into seeds of one setting, and chooses which settings to compare."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nmer_recipes import paper
from nmer_recipes.reporting.agents import Agent, find_agent
from nmer_recipes.reporting.read import RunData, Tell


@dataclass(frozen=True, order=True)
class Task:
    """The task that methods are compared on; other versions and budgets are other tasks."""

    agent: Agent
    env: str  # the id without its version; the whole name if the task has options
    version: str
    frames: int

    @property
    def name(self) -> str:
        """The full name, as in `Hopper-v5`."""
        return f"{self.env}-{self.version}" if self.version else self.env


@dataclass(frozen=True, eq=False)
class Cell:
    """The seeds of one setting, all scored at the same step."""

    task: Task
    method: str
    replay_ratio: float
    setting: str  # distinguishes it from others with this task, method and replay ratio
    runs: tuple[RunData, ...]

    @property
    def scores(self) -> NDArray[np.float64]:
        """The score of each run, `[n]`."""
        return np.array([run.score for run in self.runs])

    @property
    def mean(self) -> float:
        """The mean of the scores."""
        return float(self.scores.mean())

    @property
    def std(self) -> float:
        """The unbiased standard deviation of the scores; NaN for a single run."""
        return float(self.scores.std(ddof=1)) if len(self.runs) > 1 else np.nan

    @property
    def label(self) -> str:
        """The name for notices."""
        words = [self.task.agent.key, self.task.name, self.method]
        words.append(f"replay_ratio={self.replay_ratio:g}")
        return " ".join([*words, self.setting] if self.setting else words)


@dataclass(frozen=True, eq=False)
class Comparison:
    """A set of cells of one agent, at most one for each task and method."""

    agent: Agent
    name: str  # `best`, or for example `ratio-20`
    cells: tuple[Cell, ...]

    @property
    def title(self) -> str:
        """The title for readers."""
        how = f"replay ratio {self.name.removeprefix('ratio-')}"
        if self.name == "best":
            how = "each method at its best"
        return f"{self.agent.name}, {how}"

    @property
    def tasks(self) -> list[Task]:
        """The tasks, sorted."""
        return sorted({cell.task for cell in self.cells})

    @property
    def methods(self) -> list[str]:
        """The methods: uniform first, then NMER, then others by name."""
        first = {"uniform": 0, "nmer": 1}
        return sorted({c.method for c in self.cells}, key=lambda name: (first.get(name, 2), name))

    def cell(self, task: Task, method: str) -> Cell | None:
        """Returns the cell of a task and a method, if there is one."""
        for cell in self.cells:
            if (cell.task, cell.method) == (task, method):
                return cell
        return None


def make_cells(runs: Iterable[RunData], tell: Tell, *, at: int | None = None) -> list[Cell]:
    """Groups runs into cells.

    Runs whose configs differ in more than the seed are never averaged: each setting is a cell, and
    a notice says so. All runs of a cell are scored at the same step: `at`, or the budget. Runs that
    have not reached it are left out. If none has, the cell is scored at the step that all have
    reached.
    """
    settings: dict[tuple, list[RunData]] = defaultdict(list)
    for run in runs:
        settings[run.setting].append(run)
    drafts: dict[tuple, list[tuple[RunData, ...]]] = defaultdict(list)
    for group in settings.values():
        for task, members in _at_one_step(_one_per_seed(group, tell), tell, at):
            ratio = float(members[0].config["replay_ratio"])
            drafts[task, members[0].method, ratio].append(members)
    cells = []
    for (task, method, ratio), groups in drafts.items():
        names = _differing(groups)
        for members in groups:
            setting = " ".join(f"{name}={members[0].config.get(name)}" for name in names)
            cells.append(Cell(task, method, ratio, setting, members))
        if len(groups) > 1:
            made = cells[-len(groups) :]
            counts = "; ".join(f"{cell.setting} (seeds: {len(cell.runs)})" for cell in made)
            tell(
                f"Mixed configs: {task.agent.key} {task.name} {method} replay_ratio={ratio:g} was "
                f"run with {counts}. They are not averaged; each has its own row."
            )
    return sorted(cells, key=lambda c: (c.task, c.method, c.replay_ratio, c.setting))


def _one_per_seed(group: list[RunData], tell: Tell) -> list[RunData]:
    """Returns the longest run of each seed, since a repeated seed is not a new sample."""
    seeds: dict[int, RunData] = {}
    for run in sorted(group, key=lambda run: (run.frames[-1], run.source)):
        if (other := seeds.get(run.seed)) is not None:
            tell(f"{other.source} is left out: {run.source} has the same config and seed.")
        seeds[run.seed] = run
    return [seeds[seed] for seed in sorted(seeds)]


def _at_one_step(
    group: list[RunData], tell: Tell, at: int | None
) -> list[tuple[Task, tuple[RunData, ...]]]:
    """Returns the runs that reach the scoring step, cut there; empty if none does."""
    first = group[0]
    step = at or first.total_frames
    there = [run for run in group if run.reaches(step)]
    short = [run for run in group if not run.reaches(step)]
    for run in short if there or at else []:
        tell(
            f"{run.source} is left out: it has {run.frames[-1]:,} of {step:,} frames; "
            f"`--at {run.frames[-1]}` scores every run at that step."
        )
    if not there and at is None:
        there, step = group, int(min(run.frames[-1] for run in group))
        names = ", ".join(run.source for run in group)
        tell(
            f"Unfinished: none of {names} has reached {first.total_frames:,} frames; "
            f"scored at {step:,} frames, which all of them have reached."
        )
    cut = [run.until(step) for run in there]
    for run in cut:
        if not len(run.frames):
            tell(f"{run.source} is left out: it was not evaluated up to {step:,} frames.")
    ended = tuple(run for run in cut if len(run.frames))
    if not ended:
        return []
    return [(Task(find_agent(first.config), *_split(first.config["env.task"]), step), ended)]


def _split(task: str) -> tuple[str, str]:
    """Splits an id into name and version; a task with options keeps its whole name."""
    found = re.fullmatch(r"(\S+)-(v\d+)", task)
    return (found[1], found[2]) if found else (task, "")


def _differing(groups: list[tuple[RunData, ...]]) -> list[str]:
    """Returns the names of the settings that differ between groups."""
    settings = [dict(members[0].setting) for members in groups]
    names = sorted(set().union(*settings))
    return [name for name in names if len({setting.get(name) for setting in settings}) > 1]


def compare(cells: Iterable[Cell]) -> list[Comparison]:
    """Compares each agent's methods at their best settings and at each replay ratio.

    The best setting is the one with the highest mean score. With a single replay ratio, only that
    ratio is compared, unless the paper's result tables have numbers for these runs that its
    ablations do not have. Among several ratios, one with a single method is left out.
    """
    agents: dict[Agent, list[Cell]] = defaultdict(list)
    for cell in cells:
        agents[cell.task.agent].append(cell)
    comparisons = []
    for agent, members in sorted(agents.items()):
        ratios = sorted({cell.replay_ratio for cell in members})
        if len(ratios) > 1 or any(map(_only_in_result_tables, members)):
            comparisons.append(Comparison(agent, "best", _best(members)))
        for ratio in ratios:
            equal = _best(cell for cell in members if cell.replay_ratio == ratio)
            if len(ratios) == 1 or len({cell.method for cell in equal}) > 1:
                comparisons.append(Comparison(agent, f"ratio-{ratio:g}", equal))
    return comparisons


def _only_in_result_tables(cell: Cell) -> bool:
    """Returns whether a cell has the paper's budget and ratio, but no result in its ablations."""
    place = (cell.task.agent.key, cell.task.env, cell.method)
    result = paper.result(*place)
    if result is None or cell.task.frames != paper.FRAMES:
        return False
    if cell.replay_ratio != paper.setting("replay_ratio", *place):
        return False
    ablation = paper.result_at(*place, cell.replay_ratio)
    return ablation is None or (ablation.mean, ablation.std) != (result.mean, result.std)


def _best(cells: Iterable[Cell]) -> tuple[Cell, ...]:
    best: dict[tuple[Task, str], Cell] = {}
    for cell in cells:
        other = best.get((cell.task, cell.method))
        if other is None or cell.mean > other.mean:
            best[cell.task, cell.method] = cell
    return tuple(best.values())
