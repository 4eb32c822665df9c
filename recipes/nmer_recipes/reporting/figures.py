"""Draws learning curves, interquartile means, differences seed by seed, and profiles."""

from __future__ import annotations

import math
import textwrap
from functools import reduce
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator

from nmer_recipes import paper
from nmer_recipes.reporting.cells import Cell, Comparison, Task
from nmer_recipes.reporting.estimates import Profile
from nmer_recipes.scores import WINDOW

_COLUMNS = 3  # panels side by side
_FEW = 3  # methods up to which each seed has a line of its own
# Methods that have the same color in every figure, as in docs/figures.py, and colors of the others.
_COLORS = {
    "nmer": "#0072B2",
    "uniform": "#999999",
    "ct": "#E69F00",
    "mixup": "#009E73",
    "1nn": "#D55E00",
}
_OTHERS = ["#CC79A7", "#56B4E9", "#8C564B", "#000000", "#BCBD22", "#9467BD", "#17BECF"]
# Line styles of the means, chosen by the method's place in the report, as the color is.
_STYLES = ["-", "--", "-.", ":", (0, (6, 1, 1, 1, 1, 1)), (0, (3, 1)), (0, (8, 3))]
_MEAN, _SINGLE, _SEED = 2.0, 1.1, 0.5  # line widths
_DASHES = {
    "SUNRISE": (0, (6, 2)),
    "POPLIN-P": (0, (4, 2, 1, 2)),
    "POPLIN-A": (0, (3, 2)),
    "PETS": (0, (4, 2, 1, 2, 1, 2)),
    "METRPO": (0, (1, 2)),
}


def save(figure: Figure, path: Path, *, pdf: bool = True) -> None:
    """Saves a figure as PNG for the page, and as PDF for a paper."""
    figure.savefig(path.with_suffix(".png"), dpi=110)
    if pdf:  # fonts that every publisher accepts, and no date, so that the file is reproducible
        with matplotlib.rc_context({"pdf.fonttype": 42}):
            figure.savefig(path.with_suffix(".pdf"), metadata={"CreationDate": None})


def _look(methods: list[str], method: str) -> dict[str, Any]:
    """Returns a method's color and line style."""
    place = [*_COLORS, *(name for name in methods if name not in _COLORS)].index(method)
    colors = [*_COLORS.values(), *_OTHERS]
    return {
        "color": colors[place % len(colors)],
        "linestyle": _STYLES[place % len(_STYLES)],
    }


def draw_curves(comparison: Comparison, methods: list[str]) -> Figure:
    """Draws a panel per task; `methods` lists all of the report, so that each keeps its look."""
    tasks = comparison.tasks
    columns = _count_columns(len(tasks))
    lines = math.ceil(len(tasks) / columns)
    figure = Figure(figsize=(4.2 * max(columns, 1.4), 3.2 * lines + 0.6), layout="constrained")
    grid = figure.subplots(lines, columns, squeeze=False)
    for axes, task in zip(grid.flat, tasks, strict=False):
        for method in comparison.methods:
            if (cell := comparison.cell(task, method)) is not None:
                seeds = len(comparison.methods) <= _FEW
                _draw_cell(axes, cell, _look(methods, method), seeds=seeds)
        _draw_quoted(axes, task)
        counts = [len(cell.runs) for cell in comparison.cells if cell.task == task]
        axes.set_title(_title(task, counts), fontsize=10)
        axes.set(xlabel="environment frames", xlim=(0, task.frames))
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.grid(alpha=0.3)
    for axes in grid.flat[len(tasks) :]:
        axes.set_axis_off()
    for axes in grid[:, 0]:
        axes.set_ylabel(f"return, mean of last {WINDOW} evaluations")
    figure.align_ylabels(grid[:, 0])
    handles = {
        label: handle
        for axes in grid.flat
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.suptitle(comparison.title, fontsize=11)
    figure.legend(
        list(handles.values()),
        list(handles),
        loc="outside lower center",
        ncols=5,
        fontsize=9,
        handlelength=3.5,  # long enough to tell the styles apart
    )
    return figure


def _count_columns(panels: int) -> int:
    """Returns the number of panels side by side."""
    return 2 if panels == 4 else min(_COLUMNS, panels)


def _title(task: Task, counts: list[int]) -> str:
    """Returns a title such as `Hopper-v5 (1 to 4 seeds)`."""
    least, most = min(counts), max(counts)
    seeds = str(most) if least == most else f"{least} to {most}"
    return textwrap.fill(f"{task.name} ({seeds} seed{'s' if most > 1 else ''})", 50)


def _draw_cell(axes: Axes, cell: Cell, look: dict[str, Any], *, seeds: bool) -> None:
    """Draws the mean of the smoothed returns over seeds, one standard deviation, and each seed.

    A single run is not a mean, so its line is thinner. Lines of seeds are left out where many
    methods share a panel.
    """
    frames = reduce(np.intersect1d, [run.frames for run in cell.runs])
    curves = np.stack([run.smooth_returns[np.isin(run.frames, frames)] for run in cell.runs])
    mean = curves.mean(0)
    width = _MEAN if len(curves) > 1 else _SINGLE
    axes.plot(frames, mean, label=cell.method, linewidth=width, **look)
    if len(curves) > 1:
        std, color = curves.std(0, ddof=1), look["color"]
        axes.fill_between(frames, mean - std, mean + std, color=color, alpha=0.15, linewidth=0)
        if seeds:
            axes.plot(frames, curves.T, color=color, alpha=0.5, linewidth=_SEED)


def _draw_quoted(axes: Axes, task: Task) -> None:
    """Draws the results that the paper quotes, if the budget is the paper's."""
    for name, result in paper.quoted(task.env).items() if task.frames == paper.FRAMES else ():
        axes.axhline(
            result.mean,
            color="0.35",
            linestyle=_DASHES[name],
            linewidth=1.1,
            label=f"{name} (quoted)",
        )


def draw_means(comparison: Comparison, table: pd.DataFrame, methods: list[str]) -> Figure:
    """Draws a panel for each task: each method's interquartile mean, with its interval."""
    ours = table[table["seeds"] > 0]
    panels = _by_task(comparison, ours)
    figure, grid = _make_grid(panels)
    for axes, (task, rows) in zip(grid, panels, strict=True):
        for place, row in enumerate(rows):
            color = _look(methods, row["method"])["color"]
            scores = comparison.cell(task, row["method"]).scores
            axes.plot(scores, [place] * len(scores), "|", color=color, ms=9)
            axes.plot([row["iqm_low"], row["iqm_high"]], [place] * 2, color=color)
            axes.plot(row["iqm"], place, "o", color=color)
        _finish_rows(axes, task, rows, [row["method"] for row in rows])
        axes.set_xlabel("interquartile mean of the score")
    few = ours["seeds"].max() <= 4  # so few runs that the interval is their range
    lines = "lowest to highest run" if few else "95 % bootstrap intervals"
    figure.suptitle(f"{comparison.title}: {lines}, ticks are seeds", fontsize=11)
    return figure


def draw_differences(comparison: Comparison, paired: pd.DataFrame, methods: list[str]) -> Figure:
    """Draws a panel for each task: one method's score minus another's, with its interval."""
    panels = _by_task(comparison, paired)
    figure, grid = _make_grid(panels)
    for axes, (task, rows) in zip(grid, panels, strict=True):
        for place, row in enumerate(rows):
            color, gaps = _look(methods, row["method"])["color"], row["score_by_seed"].split()
            axes.plot([float(gap) for gap in gaps], [place] * len(gaps), "|", color=color, ms=9)
            axes.plot([row["score_low"], row["score_high"]], [place] * 2, color=color)
            axes.plot(row["score"], place, "o", color=color)
        axes.axvline(0, color="0.35", linewidth=1)
        names = [f"{row['method']} − {row['against']}" for row in rows]
        _finish_rows(axes, task, rows, names)
        axes.set_xlabel("← behind    difference in score    ahead →")
    figure.suptitle(f"{comparison.title}: 95 % intervals, ticks are seeds", fontsize=11)
    return figure


_Panels = list[tuple[Task, list[dict[str, Any]]]]


def _by_task(comparison: Comparison, frame: pd.DataFrame) -> _Panels:
    """Returns each task with its rows of a table."""
    return [
        (Task(comparison.agent, *place), rows.to_dict("records"))
        for place, rows in frame.groupby(["env", "version", "frames"], sort=False)
    ]


def _make_grid(panels: _Panels) -> tuple[Figure, list[Axes]]:
    """Returns a figure with a panel for each task, high enough for all rows."""
    height = 0.3 * max(len(rows) for _, rows in panels) + 1.6
    columns = _count_columns(len(panels))
    lines = math.ceil(len(panels) / columns)
    figure = Figure(figsize=(4.2 * max(columns, 1.4), height * lines), layout="constrained")
    grid = figure.subplots(lines, columns, squeeze=False).flat
    for axes in grid[len(panels) :]:
        axes.set_axis_off()
    return figure, list(grid[: len(panels)])


def _finish_rows(axes: Axes, task: Task, rows: list[dict[str, Any]], names: list[str]) -> None:
    axes.set_yticks(range(len(rows)), names)
    axes.set_ylim(-0.6, len(rows) - 0.4)
    axes.set_title(_title(task, [int(row["seeds"]) for row in rows]), fontsize=10)
    axes.xaxis.set_major_locator(MaxNLocator(6))
    axes.invert_yaxis()
    axes.grid(axis="x", alpha=0.3)


def draw_profiles(title: str, profiles: dict[str, Profile], methods: list[str]) -> Figure:
    """Draws the share of runs above each normalized score, with 95 % bands."""
    figure = Figure(figsize=(5.2, 3.8), layout="constrained")
    axes = figure.subplots()
    for method, profile in profiles.items():
        look = _look(methods, method)
        axes.step(profile.thresholds, profile.share, where="post", label=method, **look)
        band = (profile.thresholds, profile.low, profile.high)
        axes.fill_between(*band, step="post", color=look["color"], alpha=0.2, linewidth=0)
    axes.set_title(title, fontsize=10)
    axes.set(xlabel="normalized score", ylabel="share of runs above it")
    axes.set(xlim=(0, 1), ylim=(-0.02, 1.02))
    axes.grid(alpha=0.3)
    axes.legend(fontsize=9, handlelength=3.5)
    return figure
