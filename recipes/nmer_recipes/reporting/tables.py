"""Computes the numbers of a comparison, as frames that a CSV file holds unrounded."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence

import numpy as np
import pandas as pd

from nmer_recipes import paper
from nmer_recipes.reporting.cells import Cell, Comparison, Task
from nmer_recipes.reporting.estimates import (
    LEAST,
    REPS,
    Scores,
    change,
    improvement,
    interquartile_mean,
    mean_difference,
    normalize,
)

_SAME_RANGE = "dm_control/"  # tasks whose returns all lie between 0 and 1,000


def paper_figure(comparison: Comparison, task: Task, method: str) -> paper.Figure | None:
    """Returns the paper's result: at the method's best, or from the ablations at that ratio."""
    if comparison.name == "best":
        return paper.result(task.agent.key, task.env, method)
    ratio = float(comparison.name.removeprefix("ratio-"))
    return paper.result_at(task.agent.key, task.env, method, ratio)


def make_table(comparison: Comparison, *, reps: int = REPS) -> pd.DataFrame:
    """Returns a row per task and method, and at the paper's budget the results it quotes."""
    rows = []
    for env in dict.fromkeys(task.env for task in comparison.tasks):
        for task in comparison.tasks:
            for method in comparison.methods if task.env == env else ():
                if (cell := comparison.cell(task, method)) is not None:
                    rows.append(_row(comparison, cell, reps))
        for method, figure in _quoted(comparison, env).items():
            row = _place(comparison, Task(comparison.agent, env, "", paper.FRAMES), method)
            ours, theirs = _quoted_changes(comparison, env, figure)
            changes = {"change_percent": ours, "paper_change_percent": theirs}
            rows.append(row | _printed(figure) | changes)
    return pd.DataFrame(rows)


def _quoted(comparison: Comparison, env: str) -> dict[str, paper.Figure]:
    """Returns the results on an environment that the paper quotes, if its budget was run."""
    budgets = {task.frames for task in comparison.tasks if task.env == env}
    return paper.quoted(env) if paper.FRAMES in budgets else {}


def _quoted_changes(comparison: Comparison, env: str, figure: paper.Figure) -> tuple[float, float]:
    """Returns the change of a quoted result in percent against our NMER and the paper's.

    It is NaN at equal replay ratio, since quoted results have no replay ratio. It is also NaN
    against our NMER if that was run on several versions of the task.
    """
    tasks = [task for task in comparison.tasks if (task.env, task.frames) == (env, paper.FRAMES)]
    if comparison.name != "best":
        return math.nan, math.nan
    cells = [cell for task in tasks if (cell := comparison.cell(task, "nmer"))]
    reference = paper_figure(comparison, tasks[0], "nmer")
    return (
        change(figure.mean, cells[0].mean) if len(cells) == 1 else math.nan,
        change(figure.mean, reference.mean) if reference else math.nan,
    )


def _place(comparison: Comparison, task: Task, method: str) -> dict[str, object]:
    return {
        "comparison": comparison.name,
        "algorithm": task.agent.key,
        "env": task.env,
        "version": task.version,
        "frames": task.frames,
        "method": method,
    }


def _printed(figure: paper.Figure) -> dict[str, object]:
    return {"paper_mean": figure.mean, "paper_std": figure.std, "paper_table": figure.table}


def _row(comparison: Comparison, cell: Cell, reps: int) -> dict[str, object]:
    scores, task = cell.scores[:, None], cell.task
    middle = interquartile_mean(scores, reps=reps)
    row = _place(comparison, task, cell.method) | {
        "replay_ratio": cell.replay_ratio,
        "setting": cell.setting,
        "seeds": len(cell.runs),
        "mean": cell.mean,
        "std": cell.std,
        "iqm": middle.value,
        "iqm_low": middle.low,
        "iqm_high": middle.high,
    }
    uniform, nmer = comparison.cell(task, "uniform"), comparison.cell(task, "nmer")
    enough = uniform is not None and min(len(cell.runs), len(uniform.runs)) >= LEAST
    if uniform is not None and uniform is not cell and enough:
        row["p_improvement"] = improvement(scores, uniform.scores[:, None], reps=0).value
    if nmer is not None:
        row["change_percent"] = change(cell.mean, nmer.mean)
    if (figure := paper_figure(comparison, task, cell.method)) is not None:
        row |= _printed(figure)
        if (reference := paper_figure(comparison, task, "nmer")) is not None:
            row["paper_change_percent"] = change(figure.mean, reference.mean)
    seconds = np.array([run.seconds[-1] for run in cell.runs])
    updates = np.array([run.updates[-1] for run in cell.runs])
    return row | {
        "seconds_per_run": seconds.mean(),
        "updates_per_second": updates.sum() / seconds.sum(),
    }


def make_paired_table(comparison: Comparison) -> pd.DataFrame:
    """Returns a row per task and pair of methods: the score differences by seed.

    NMER is compared with every other method, with uniform replay first, and then every other method
    with uniform replay. The same seed gives the recipes' methods the same networks, random frames
    and resets. The area is the mean return of all evaluations after the random frames. A method is
    ahead or behind if the interval of the score's difference lies above or below zero.

    If the returns of all tasks have the same range, the last rows are of the mean over the tasks.
    """
    rows, by_pair = [], {}
    for task, pair in itertools.product(comparison.tasks, _pairs(comparison.methods)):
        cell, other = (comparison.cell(task, method) for method in pair)
        if cell is None or other is None:
            continue
        others = {run.seed: run for run in other.runs}
        gaps = {
            run.seed: np.subtract(
                (run.score, run.area), (others[run.seed].score, others[run.seed].area)
            )
            for run in cell.runs
            if run.seed in others
        }
        if gaps:
            rows.append(_paired_row(comparison, task, *pair, list(gaps.values())))
            by_pair.setdefault(pair, {})[task] = gaps
    return pd.DataFrame(rows + _paired_means(comparison, by_pair))


def _pairs(methods: Sequence[str]) -> list[tuple[str, str]]:
    """Returns the pairs of methods that are compared, those of NMER first."""
    others = [method for method in methods if method not in ("nmer", "uniform")]
    pairs = [("nmer", "uniform"), *(("nmer", other) for other in others)]
    pairs += [(other, "uniform") for other in others]
    return [pair for pair in pairs if set(pair) <= set(methods)]


def _paired_means(
    comparison: Comparison, by_pair: dict[tuple[str, str], dict[Task, dict[int, Scores]]]
) -> list[dict[str, object]]:
    """Returns a row per pair of methods: the differences of the mean over all tasks, by seed."""
    tasks = comparison.tasks
    alike = len({task.frames for task in tasks}) == 1 < len(tasks)
    if not alike or not all(task.env.startswith(_SAME_RANGE) for task in tasks):
        return []
    mean, rows = Task(comparison.agent, f"mean of {len(tasks)} tasks", "", tasks[0].frames), []
    for pair, gaps in by_pair.items():
        seeds = set.intersection(*map(set, gaps.values())) if len(gaps) == len(tasks) else set()
        means = [np.mean([gaps[task][seed] for task in tasks], axis=0) for seed in sorted(seeds)]
        if means:
            rows.append(_paired_row(comparison, mean, *pair, means))
    return rows


def _paired_row(
    comparison: Comparison, task: Task, method: str, against: str, gaps: list[Scores]
) -> dict[str, object]:
    """Returns the row of one pair of methods from each seed's differences in score and area."""
    row = _place(comparison, task, method) | {"against": against, "seeds": len(gaps)}
    for name, values in zip(("score", "area"), np.transpose(gaps), strict=True):
        estimate = mean_difference(values)
        row |= {name: estimate.value, f"{name}_low": estimate.low}
        row |= {f"{name}_high": estimate.high, f"{name}_ahead": int((values > 0).sum())}
        row[f"{name}_by_seed"] = " ".join(f"{value:.6g}" for value in values)
    return row | {"verdict": _judge(row["score_low"], row["score_high"])}


def _judge(low: float, high: float) -> str:
    """Returns what an interval of differences shows; it is NaN for a single seed."""
    return "ahead" if low > 0 else "behind" if high < 0 else "not shown"


def pool(comparison: Comparison) -> tuple[list[Task], dict[str, Scores]]:
    """Returns the tasks that all methods were run on, and each method's scores `[runs, tasks]`.

    If some tasks have more seeds than others, only the first ones count: a matrix has no gaps.
    """
    methods = comparison.methods
    tasks = [
        task for task in comparison.tasks if all(comparison.cell(task, name) for name in methods)
    ]
    scores = {}
    for method in methods if tasks else []:
        columns = [cell.scores for task in tasks if (cell := comparison.cell(task, method))]
        least = min(len(column) for column in columns)
        scores[method] = np.stack([column[:least] for column in columns], axis=1)
    return tasks, scores


def has_enough(scores: dict[str, Scores]) -> bool:
    """Returns whether there are enough seeds to pool all tasks."""
    return bool(scores) and min(len(matrix) for matrix in scores.values()) >= LEAST


def make_pooled_table(comparison: Comparison, *, reps: int = REPS) -> pd.DataFrame:
    """Returns a row per method, over all tasks; methods that the paper quotes come last."""
    tasks, scores = pool(comparison)
    normal = normalize(scores) if scores else {}
    enough = has_enough(scores)
    rows = []
    for method in comparison.methods:
        row: dict[str, object] = {
            "comparison": comparison.name,
            "algorithm": comparison.agent.key,
            "method": method,
        }
        if tasks:
            row |= {"tasks": len(tasks), "seeds": len(scores[method])}
        if enough:
            middle = interquartile_mean(normal[method], reps=reps)
            row |= {"iqm": middle.value, "iqm_low": middle.low, "iqm_high": middle.high}
        if enough and "uniform" in scores and method != "uniform":
            better = improvement(scores[method], scores["uniform"], reps=reps)
            row |= {"p_improvement": better.value}
            row |= {"p_low": better.low, "p_high": better.high}
        rows.append(row | _mean_changes(*_changes(comparison, method)))
    return pd.DataFrame(rows + _pool_quoted(comparison))


def _pool_quoted(comparison: Comparison) -> list[dict[str, object]]:
    """Returns a row per method that the paper quotes, with its mean changes only."""
    changes: dict[str, list[tuple[float, float]]] = {}
    for env in dict.fromkeys(task.env for task in comparison.tasks):
        for method, figure in _quoted(comparison, env).items():
            changes.setdefault(method, []).append(_quoted_changes(comparison, env, figure))
    place = {"comparison": comparison.name, "algorithm": comparison.agent.key}
    rows = [
        place | {"method": method} | _mean_changes(*map(_known, zip(*pairs, strict=True)))
        for method, pairs in changes.items()
    ]
    return [row for row in rows if row["change_tasks"] or row["paper_change_tasks"]]


def _changes(comparison: Comparison, method: str) -> tuple[list[float], list[float]]:
    """Returns changes in percent against NMER on each task that has both: ours, and the paper's."""
    ours, theirs = [], []
    for task in comparison.tasks:
        cell, nmer = comparison.cell(task, method), comparison.cell(task, "nmer")
        if cell is not None and nmer is not None:
            ours.append(change(cell.mean, nmer.mean))
        figure, reference = (paper_figure(comparison, task, name) for name in (method, "nmer"))
        if cell is not None and figure is not None and reference is not None:
            theirs.append(change(figure.mean, reference.mean))
    return _known(ours), _known(theirs)


def _known(values: Iterable[float]) -> list[float]:
    return [value for value in values if not math.isnan(value)]


def _mean_changes(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, object]:
    return {
        "change_percent": _mean(ours),
        "change_tasks": len(ours),
        "paper_change_percent": _mean(theirs),
        "paper_change_tasks": len(theirs),
    }


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else np.nan
