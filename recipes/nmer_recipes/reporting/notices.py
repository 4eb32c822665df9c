"""Prints what a reader must know before trusting the numbers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from nmer_recipes import paper
from nmer_recipes.reporting.cells import Cell, Comparison, Task
from nmer_recipes.reporting.estimates import FEW
from nmer_recipes.reporting.read import Tell
from nmer_recipes.reporting.tables import pool

# The paper sets these for each method; all other settings should be equal.
_OF_A_METHOD = ("replay", "replay_ratio", "actor_l2", "grad_clip")


def tell_about_cells(cells: Sequence[Cell], tell: Tell) -> None:
    """Reports few seeds, several budgets or versions, and differences from the paper."""
    few = [cell for cell in cells if len(cell.runs) < FEW]
    if few:
        names = _some([f"{cell.label}: {len(cell.runs)}" for cell in few])
        tell(
            f"FEW SEEDS: {len(few)} of {len(cells)} rows have fewer than {FEW} seeds ({names}). "
            "Bootstrap intervals of so few seeds are too narrow. With two, three or four seeds, "
            "they extend at most from the lowest to the highest run, a range that contains the "
            "center of a symmetric distribution with a probability of 50, 75 or 87.5 %."
        )
    tasks = sorted({cell.task for cell in cells})
    envs: dict[tuple[str, str], list[Task]] = defaultdict(list)
    for task in tasks:
        envs[task.agent.key, task.env].append(task)
    for (agent, env), group in envs.items():
        if len({task.frames for task in group}) > 1:
            steps = ", ".join(f"{frames:,}" for frames in sorted({t.frames for t in group}))
            tell(
                f"BUDGETS DIFFER: {agent} on {env} was scored at {steps} frames. These are "
                f"separate tasks and are not compared; `--at {min(t.frames for t in group)}` "
                "scores all of them at the same step."
            )
        if len({task.version for task in group}) > 1:
            versions = ", ".join(sorted({task.version for task in group}))
            tell(
                f"ENVIRONMENT VERSIONS DIFFER: {agent} on {env} was run on {versions}. These "
                "are separate tasks and are not compared."
            )
    known = [task for task in tasks if paper.result(task.agent.key, task.env, "nmer")]
    if other := [task for task in known if task.frames != paper.FRAMES]:
        names = ", ".join(f"{task.agent.key} {task.name} {task.frames:,}" for task in other)
        tell(
            f"NOT THE PAPER'S BUDGET: the paper's results are at {paper.FRAMES:,} frames, unlike "
            f"these: {names}. Compare the rows with each other, not with the paper's column."
        )
    if other := [task for task in known if task.version != paper.VERSION]:
        names = ", ".join(sorted({task.name for task in other}))
        tell(
            f"NOT THE PAPER'S ENVIRONMENTS: the paper used {paper.VERSION}, which is no longer "
            f"available; these runs used {names}. Rewards and observations have changed since then "
            "(v4 is the closest)."
        )


def tell_about_comparison(comparison: Comparison, tell: Tell) -> None:
    """Reports unequal settings, missing references, and tasks that cannot be pooled."""
    for task in comparison.tasks:
        cells = [cell for cell in comparison.cells if cell.task == task]
        for name, values in _unequal(cells):
            tell(
                f"UNEQUAL SETTINGS: in {comparison.title}, {task.name}, the methods differ not "
                f"only in their replay: {name} is {values}."
            )
        nmer = comparison.cell(task, "nmer")
        if nmer is not None and not nmer.mean > 0:
            tell(
                f"No Δ NMER for {comparison.title}, {task.name}: NMER's mean is {nmer.mean:.1f}, "
                "but must be positive."
            )
    for method, missing in (("uniform", "P(> uniform)"), ("nmer", "Δ NMER")):
        if method not in comparison.methods:
            tell(f"No {missing} for {comparison.title}: there are no runs of {method}.")
    tasks, scores = pool(comparison)
    if left := [f"{t.name} ({t.frames:,})" for t in comparison.tasks if t not in tasks]:
        tell(
            f"{comparison.title}: pooled over {len(tasks)} of {len(comparison.tasks)} tasks, "
            f"because not every method was run on {', '.join(left)}."
        )
    for method, matrix in scores.items():
        counts = [len(cell.runs) for task in tasks if (cell := comparison.cell(task, method))]
        if max(counts) > len(matrix):
            tell(
                f"{comparison.title}: {method} has {min(counts)} to {max(counts)} seeds per task; "
                f"the first {len(matrix)} of each task are pooled."
            )


def _some(names: list[str], most: int = 6) -> str:
    more = len(names) - most
    return "; ".join(names[:most]) + (f"; and {more} more" if more > 0 else "")


def _unequal(cells: Sequence[Cell]) -> list[tuple[str, str]]:
    """Returns settings, other than the method's own, that differ between a task's cells."""
    settings = {cell.method: dict(cell.runs[0].setting) for cell in cells}
    names = sorted({name for setting in settings.values() for name in setting})
    return [
        (name, ", ".join(f"{cell.runs[0].config.get(name)} ({cell.method})" for cell in cells))
        for name in names
        if name.split(".")[0] not in _OF_A_METHOD
        and len({setting.get(name) for setting in settings.values()}) > 1
    ]
