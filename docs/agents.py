"""Draws agents.svg for the page on agents: learning curves on HalfCheetah beside references.

python docs/agents.py                 # writes docs/figures/agents.svg, and prints a table
python docs/agents.py --out other     # elsewhere

Our runs and the references of SBX are committed, as are the results that others published
(docs/references/quoted.csv, from the result files of SimbaV2 at commit 86899c2).
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib
import pandas as pd
import yaml
from figures import BLUE, GREEN, ORANGE, STYLE
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator

DOCS = Path(__file__).parent
TASK = "HalfCheetah"
# The part of the study that has an agent's runs with uniform replay on the task.
PARTS = {
    "DDPG": ("learn", "ddpg"),
    "REDQ": ("learn", "redq"),
    "DroQ": ("droq", "redq"),
    "CrossQ": ("crossq", "crossq"),
    "SUNRISE": ("learn", "sunrise"),
}


def read_runs(agent: str) -> list[pd.DataFrame]:
    """Returns the evaluations of each of our runs of an agent with uniform replay."""
    part, algorithm = PARTS[agent]
    runs = []
    for path in sorted((DOCS / "results" / part).glob("*/config.yaml")):
        config = yaml.safe_load(path.read_text())
        found = (config["algorithm"], config["env"]["name"], config["replay"]["kind"])
        if found == (algorithm, TASK, "uniform"):
            runs.append(pd.read_csv(path.with_name("metrics.csv")))
    return runs


def read_references(agent: str) -> list[pd.DataFrame]:
    """Returns the evaluations of SBX's runs of an agent."""
    files = sorted((DOCS / "references").glob(f"{agent.lower()}-{TASK}-v5-seed*.csv"))
    return [pd.read_csv(file) for file in files]


def read_quoted(agent: str) -> pd.DataFrame:
    """Returns the published results of an agent, which are of the task's version 4."""
    rows = pd.read_csv(DOCS / "references" / "quoted.csv")
    return rows[(rows.agent == agent) & (rows.task == f"{TASK}-v4")]


def draw(agents: list[str]) -> Figure:
    """Draws a panel for each agent."""
    figure = Figure(figsize=(3.6 * len(agents), 3.6), layout="constrained")
    grid = figure.subplots(1, len(agents), squeeze=False)[0]
    for axes, agent in zip(grid, agents, strict=True):
        runs = read_runs(agent)
        for kind, tables, color in (
            ("recipe", runs, BLUE),
            ("SBX", read_references(agent), ORANGE),
        ):
            for number, rows in enumerate(tables):
                label = kind if number == 0 else None
                axes.plot(rows.frames, rows["eval/return"], color=color, lw=1, label=label)
        last = runs[0].frames.iloc[-1]
        quoted = read_quoted(agent)
        quoted = quoted[quoted.frames <= last]
        if len(quoted):
            axes.errorbar(
                quoted.frames,
                quoted["mean"],
                quoted["std"],
                fmt="o",
                ms=4,
                color=GREEN,
                lw=1,
                label="quoted, mean ± std of 10",
            )
        axes.set(title=agent, xlabel="frames", xlim=(0, last))
        axes.xaxis.set_major_locator(MaxNLocator(4))
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.legend(fontsize=8)
    grid[0].set_ylabel("mean return of an evaluation")
    return figure


def make_table(agents: list[str]) -> str:
    """Returns the return around the last quoted frame, and at the end, as a Markdown table."""
    lines = [["agent", "frames", "recipe", "seeds", "SBX", "quoted"], ["---"] * 6]
    for agent in agents:
        runs, others, quoted = read_runs(agent), read_references(agent), read_quoted(agent)
        last = int(min(rows.frames.iloc[-1] for rows in runs))
        quoted = quoted[quoted.frames <= last]
        for frame in sorted({last, *quoted.frames.tail(1)}):
            ours, theirs = (
                [mean_before(rows, frame) for rows in tables] for tables in (runs, others)
            )
            (published,) = quoted["mean"][quoted.frames == frame].tolist() or [None]
            lines.append(
                [
                    agent,
                    f"{frame:,}",
                    show(ours),
                    str(len(ours)),
                    show(theirs),
                    "–" if published is None else f"{published:.0f}",
                ]
            )
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def mean_before(rows: pd.DataFrame, frame: int) -> float:
    """Returns the mean return of the last 11 evaluations up to a frame."""
    return float(rows["eval/return"][rows.frames <= frame].tail(11).mean())


def show(returns: list[float]) -> str:
    """Returns the range of some returns."""
    low, high = (f"{edge(returns):.0f}" if returns else "–" for edge in (min, max))
    return low if low == high else f"{low} to {high}"


def main(arguments: list[str] | None = None) -> None:
    """Writes the figure and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=DOCS / "figures")
    options = parser.parse_args(arguments)
    agents = [agent for agent in PARTS if read_runs(agent)]
    with matplotlib.rc_context(STYLE):
        draw(agents).savefig(options.out / "agents.svg", metadata={"Date": None})
    print(make_table(agents), end="")


if __name__ == "__main__":
    main()
