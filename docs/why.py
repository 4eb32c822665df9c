"""Draws why.svg for the results page, and prints its table, from the committed runs.

python docs/why.py                 # writes docs/figures/why.svg
python docs/why.py --out other     # elsewhere
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib
import pandas as pd
import yaml
from figures import BLUE, GREEN, GREY, ORANGE, STYLE
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy.stats import beta

from nmer_torchrl import NMER

DOCS = Path(__file__).parent
TASKS = ("HalfCheetah", "Hopper")  # NMER is ahead on the first, no difference is shown on the other
COLORS = {"uniform": GREY, "nmer": BLUE}
PAIRS = {"nmer_10": ("nmer", BLUE), "ct": ("ct", ORANGE), "mixup": ("mixup", GREEN)}


def read_runs(task: str, method: str) -> pd.DataFrame:
    """Returns the evaluations after the random frames of all seeds of the study's first part."""
    found = []
    for run in sorted((DOCS / "results" / "main").glob(f"env={task},*replay={method},*")):
        config = yaml.safe_load((run / "config.yaml").read_text())
        rows = pd.read_csv(run / "metrics.csv").assign(seed=config["seed"])
        found.append(rows[rows.frames > config["random_frames"]])
    return pd.concat(found)


def read_errors(task: str) -> pd.DataFrame:
    """Returns the on-manifold errors of mixed rows by method and number of stored rows."""
    return pd.read_csv(DOCS / "manifold" / f"{task}.csv").set_index(["method", "size"]).state


def weigh() -> float:
    """Returns the mean of `1 / (w**2 + (1 - w)**2)`, the rows that a mix of weight w counts as."""
    weight = beta(NMER().alpha, NMER().alpha)
    return float(weight.expect(lambda w: 1 / (w**2 + (1 - w) ** 2)))


def make_table() -> str:
    """Returns the measurements as a Markdown table."""
    measured: dict[str, list[str]] = {}
    for task in TASKS:
        runs = {method: read_runs(task, method) for method in COLORS}
        errors, mixed = read_errors(task), runs["nmer"]
        bias = {name: rows["eval/overestimation"].mean() for name, rows in runs.items()}
        returns = {name: rows["eval/monte_carlo"].mean() for name, rows in runs.items()}
        distance = mixed.groupby("frames")["replay/neighbor_distance"].mean()
        share = mixed["replay/mixed"].mean()
        for name, value in {
            "discounted return, uniform": f"{returns['uniform']:.0f}",
            "discounted return, NMER": f"{returns['nmer']:.0f}",
            "overestimation of Q, uniform": f"{bias['uniform']:+.1f}",
            "overestimation of Q, NMER": f"{bias['nmer']:+.1f}",
            "distance to the neighbor, 10,200 frames": f"{distance[10_200]:.2f}",
            "distance to the neighbor, 30,000 frames": f"{distance[30_000]:.2f}",
            "share of mixed rows": f"{share:.3f}",
            "rows in a batch of 100, NMER": f"{100 * (1 + share):.0f}",
            "effective rows in a batch of 100, NMER": f"{100 * (1 + share * (weigh() - 1)):.0f}",
            "on-manifold error, 10,000 rows, NMER": f"{errors['nmer_10', 10_000]:.4f}",
            "on-manifold error, 10,000 rows, `ct`": f"{errors['ct', 10_000]:.4f}",
            "on-manifold error, 10,000 rows, `mixup`": f"{errors['mixup', 10_000]:.4f}",
        }.items():
            measured.setdefault(name, []).append(value)
    lines = [["measured", *TASKS], ["---"] * (1 + len(TASKS))]
    lines += [[name, *values] for name, values in measured.items()]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def draw() -> Figure:
    """Draws overestimation, distance to neighbors and on-manifold error of both tasks."""
    figure = Figure(figsize=(11, 6), layout="constrained")
    for panels, task in zip(figure.subplots(len(TASKS), 3), TASKS, strict=True):
        for method, color in COLORS.items():
            runs = read_runs(task, method)
            _draw_mean(panels[0], runs, "eval/overestimation", color, method)
            if method == "nmer":
                _draw_mean(panels[1], runs, "replay/neighbor_distance", color, method)
        panels[0].axhline(0, color="black", lw=0.8)
        panels[0].set(title=f"{task}: Q minus return", xlabel="frames")
        panels[1].set(title="distance to the neighbor", xlabel="frames", ylim=(0, None))
        errors = read_errors(task)
        for method, (name, color) in PAIRS.items():
            line = errors[method].sort_index()
            panels[2].loglog(line.index, line, "o-", color=color, label=name)
        panels[2].set(title="on-manifold error", xlabel="stored rows")
        panels[0].legend()
        panels[2].legend()
    return figure


def _draw_mean(axes: Axes, runs: pd.DataFrame, column: str, color: str, label: str) -> None:
    by_frame = runs.groupby("frames")[column]
    mean, std = by_frame.mean(), by_frame.std()
    axes.plot(mean.index, mean, color=color, label=label)
    axes.fill_between(mean.index, mean - std, mean + std, color=color, alpha=0.2, lw=0)


def main(arguments: list[str] | None = None) -> None:
    """Writes the figure and prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=DOCS / "figures")
    options = parser.parse_args(arguments)
    with matplotlib.rc_context(STYLE):
        draw().savefig(options.out / "why.svg", metadata={"Date": None})
    print(make_table(), end="")


if __name__ == "__main__":
    main()
