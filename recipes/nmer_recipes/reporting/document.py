"""Writes the report: its tables, its figures, and the page that contains them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure
from tqdm import tqdm

from nmer_recipes.reporting.cells import Cell, Comparison, compare
from nmer_recipes.reporting.estimates import REPS, normalize, profiles
from nmer_recipes.reporting.figures import (
    draw_curves,
    draw_differences,
    draw_means,
    draw_profiles,
    save,
)
from nmer_recipes.reporting.latex import latex
from nmer_recipes.reporting.notices import tell_about_cells, tell_about_comparison
from nmer_recipes.reporting.read import Tell
from nmer_recipes.reporting.tables import (
    has_enough,
    make_paired_table,
    make_pooled_table,
    make_table,
    pool,
)
from nmer_recipes.reporting.text import (
    markdown,
    show_glance,
    show_paired_table,
    show_pooled_table,
    show_table,
)
from nmer_recipes.scores import WINDOW

_LEGEND = f"""\
The score of a run is the mean of its last {WINDOW} evaluations. The mean ± standard deviation and
the interquartile mean (IQM) are over the scores of the seeds. P(> uniform) is the probability that
a run scores higher than a run of uniform replay. The 95 % intervals of the IQM and of P(> uniform)
are from a stratified bootstrap. Δ NMER is the difference from NMER's mean in percent, averaged over
the number of tasks in parentheses. Differences seed by seed are between runs with the same seed,
with Student's 95 % intervals. A method is ahead or behind if the interval of the score's difference
lies above or below zero. The area is the mean return of all evaluations after the random frames.
Normalized scores are scaled by the lowest and the highest run of each task in the comparison, so
do not quote them elsewhere. Rows without seeds are results that the paper quotes. With each method
at its best, the setting with the highest mean is chosen by the same runs that are reported, which
favors methods with more settings. At equal replay ratio, the paper's results are from its
ablations.
"""


def write_report(
    out: Path,
    cells: Sequence[Cell],
    notices: list[str],
    tell: Tell,
    *,
    reps: int = REPS,
    pdf: bool = True,
) -> None:
    """Writes the page, the tables as separate files, and the figures, also as PDF."""
    comparisons, about_runs = compare(cells), list(notices)
    tell_about_cells(cells, tell)
    for comparison in comparisons:
        tell_about_comparison(comparison, tell)
    out.mkdir(parents=True, exist_ok=True)
    methods = sorted({cell.method for cell in cells})
    tables, paired, pooled, page, tex = [], [], [], [], []
    for comparison in tqdm(comparisons, desc="statistics", unit="comparison", disable=None):
        tables.append(make_table(comparison, reps=reps))
        paired.append(make_paired_table(comparison))
        pooled.append(make_pooled_table(comparison, reps=reps))
        numbers = tables[-1], paired[-1], pooled[-1]
        section, figures = _section(comparison, *numbers, methods, reps)
        for name, figure in figures.items():
            save(figure, out / name, pdf=pdf)
        page.append(section)
        glance = show_glance(tables[-1], pooled[-1])
        title = comparison.title
        tex.append(latex(glance, f"{title}: mean ± standard deviation", keys=1))
        tex.append(latex(show_table(tables[-1]), f"{title}: all statistics", keys=3))
        if len(paired[-1]):
            shown = show_paired_table(paired[-1], by_seed=False)  # without the long list
            tex.append(latex(shown, f"{title}: differences seed by seed", keys=3))
        tex.append(latex(show_pooled_table(pooled[-1]), f"{title}: all tasks", keys=1))
    _join(tables).to_csv(out / "table.csv", index=False)
    _join(paired).to_csv(out / "paired.csv", index=False)
    _join(pooled).to_csv(out / "pooled.csv", index=False)
    _settings(cells).to_csv(out / "settings.csv", index=False)
    (out / "tables.tex").write_text("\n".join(tex))
    ordered = notices[len(about_runs) :] + about_runs  # the most important notices come first
    first = "".join(f"- {notice}\n" for notice in ordered) or "- No notices.\n"
    (out / "report.md").write_text(
        "\n".join(["# Report\n", "## Read this first\n", first, _LEGEND, *page])
    )


def _join(frames: list[pd.DataFrame]) -> pd.DataFrame:
    """Joins frames by rows; `pandas.concat` guesses about missing columns, and warns."""
    return pd.DataFrame([row for frame in frames for row in frame.to_dict("records")])


def _section(
    comparison: Comparison,
    table: pd.DataFrame,
    paired: pd.DataFrame,
    pooled: pd.DataFrame,
    methods: list[str],
    reps: int,
) -> tuple[str, dict[str, Figure]]:
    """Returns the page's section on a comparison, and its figures by file name."""
    name = f"{comparison.agent.key}-{comparison.name}"
    figures = {f"curves-{name}.png": draw_curves(comparison, methods)}
    parts = [
        f"## {comparison.title}\n",
        markdown(show_glance(table, pooled)),
        markdown(show_table(table)),
    ]
    if len(comparison.methods) > 1:
        figures[f"means-{name}.png"] = draw_means(comparison, table, methods)
        parts.append(f"![Interquartile means](means-{name}.png)\n")
    if len(paired):
        figures[f"differences-{name}.png"] = draw_differences(comparison, paired, methods)
        parts += ["Differences seed by seed:\n", markdown(show_paired_table(paired))]
        parts.append(f"![Differences seed by seed](differences-{name}.png)\n")
    parts += ["All tasks:\n", markdown(show_pooled_table(pooled))]
    parts.append(f"![Learning curves](curves-{name}.png)\n")
    _, scores = pool(comparison)
    if has_enough(scores):
        shares = profiles(normalize(scores), reps=reps)
        figures[f"profiles-{name}.png"] = draw_profiles(comparison.title, shares, methods)
        parts.append(f"![Performance profiles](profiles-{name}.png)\n")
    return "\n".join(parts), figures


def _settings(cells: Sequence[Cell]) -> pd.DataFrame:
    """Lists every cell, including those that are not their method's best, with its runs."""
    return pd.DataFrame(
        {
            "algorithm": cell.task.agent.key,
            "env": cell.task.name,
            "frames": cell.task.frames,
            "method": cell.method,
            "replay_ratio": cell.replay_ratio,
            "setting": cell.setting,
            "seeds": " ".join(str(run.seed) for run in cell.runs),
            "mean": cell.mean,
            "std": cell.std,
            "runs": " ".join(run.source for run in cell.runs),
        }
        for cell in cells
    )
