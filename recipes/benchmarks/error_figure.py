"""Writes the table and the figure of recipes/on_manifold.py."""

from __future__ import annotations

import itertools
import statistics
from pathlib import Path
from typing import Any

from benchmarks.measure import to_markdown

PARTS = ("state", "reward")
_MARKERS = "osD^vP*X<>"


def summarize(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns a row per size and method: means over the repeats, with their standard errors."""
    groups: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for result in results:
        groups.setdefault((result["size"], result["method"]), []).append(result)
    rows = []
    for (size, method), group in groups.items():
        row: dict[str, Any] = {"size": size, "method": method, "repeats": len(group)}
        for name in group[0].keys() - {"size", "method", "repeat"}:
            row[name] = statistics.fmean(result[name] for result in group)
        for name in PARTS:
            row[f"{name} se"] = _standard_error([result[name] for result in group])
        rows.append({name: row[name] for name in _order(row)})
    return rows


def _order(row: dict[str, Any]) -> list[str]:
    first = ["size", "method", "repeats", "state", "state se", "reward", "reward se"]
    return [*first, *sorted(row.keys() - set(first))]


def _standard_error(values: list[float]) -> float:
    return statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else float("nan")


def write_summary(rows: list[dict[str, Any]], path: Path) -> None:
    """Writes a Markdown table with a line per method and a column per size."""
    sizes = sorted({row["size"] for row in rows})
    cells = {(row["method"], row["size"]): row for row in rows}
    methods = dict.fromkeys(row["method"] for row in rows)
    columns = [(part, size) for part in (*PARTS, "moved") for size in sizes]
    names = ["method", *(f"{part}, {size:,}" for part, size in columns)]
    lines = [
        [method, *(_cell(cells[method, size], part) for part, size in columns)]
        for method in methods
    ]
    path.write_text(to_markdown(names, lines) + "\n")


def _cell(row: dict[str, Any], part: str) -> str:
    """Formats the mean, and two standard errors if known."""
    mean, spread = row[part], 2 * row.get(f"{part} se", float("nan"))
    return f"{mean:.3g}" if spread != spread else f"{mean:.3g} ± {spread:.1g}"


def draw_figure(rows: list[dict[str, Any]], path: Path, title: str, *, floor: str) -> None:
    """Draws the error by buffer size, a line per method, on logarithmic axes.

    The floor is orders of magnitude lower, and has its own strip below.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import colormaps, pyplot, ticker

    methods = [name for name in dict.fromkeys(row["method"] for row in rows) if name != floor]
    near = [name for name in methods if name.startswith("nmer")]
    colors = {name: colormaps["viridis"](i / len(near)) for i, name in enumerate(near)}
    others = [name for name in methods if name not in near]
    colors |= {name: colormaps["Dark2"](i % 8) for i, name in enumerate(others)}
    layout = {"height_ratios": [7, 1], "hspace": 0.02}
    figure, panels = pyplot.subplots(
        2, 2, sharex=True, figsize=(10, 5.5), layout="constrained", gridspec_kw=layout
    )
    for (axes, strip), part in zip(panels.T, PARTS, strict=True):
        for method, marker in zip(methods, itertools.cycle(_MARKERS), strict=False):
            points = [row for row in rows if row["method"] == method]
            axes.errorbar(
                [row["size"] for row in points],
                [row[part] for row in points],
                [2 * row[f"{part} se"] for row in points],
                marker=marker,
                markersize=5,
                capsize=3,
                label=method,
                color=colors[method],
            )
        lowest = max(row[part] for row in rows if row["method"] == floor)
        axes.plot([], [], color="black", linestyle="--", label=floor)
        strip.axhline(lowest, color="black", linestyle="--")
        axes.set(xscale="log", yscale="log", title=f"{title}: {part}")
        axes.set_ylabel("error, in standard deviations")
        axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter(ticker.NullFormatter())
        strip.set(yscale="log", ylim=(lowest / 5, lowest * 5), xlabel="buffer size")
        strip.set_yticks([lowest], [f"{lowest:.0e}"])
        strip.set_yticks([], minor=True)
        for panel in (axes, strip):
            panel.grid(alpha=0.3, which="both")
    panels[0, 1].legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
