"""The table and the picture of recipes/manifold.py."""

from __future__ import annotations

import itertools
import statistics
from pathlib import Path
from typing import Any

from benchmarks.measure import to_markdown

PARTS = ("state", "reward")
_MARKERS = "osD^vP*X<>"


def summarize(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for each size and method: means over the repeats, with their standard errors."""
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
    """A line for each method, a column for each size, as Markdown."""
    sizes = sorted({row["size"] for row in rows})
    cells = {(row["method"], row["size"]): row for row in rows}
    methods = dict.fromkeys(row["method"] for row in rows)
    names = ["method", *(f"{part}, {size:,}" for part in PARTS for size in sizes)]
    lines = [
        [method, *(_cell(cells[method, size], part) for part in PARTS for size in sizes)]
        for method in methods
    ]
    path.write_text(to_markdown(names, lines) + "\n")


def _cell(row: dict[str, Any], part: str) -> str:
    """Mean and two standard errors."""
    mean, spread = row[part], 2 * row[f"{part} se"]
    return f"{mean:.3g}" if spread != spread else f"{mean:.3g} ± {spread:.1g}"


def draw_figure(rows: list[dict[str, Any]], path: Path, title: str, *, floor: str) -> None:
    """Error against buffer size, a line for each method, on logarithmic axes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import colormaps, pyplot

    methods = [name for name in dict.fromkeys(row["method"] for row in rows) if name != floor]
    near = [name for name in methods if name.startswith("nmer")]
    colors = {name: colormaps["viridis"](i / len(near)) for i, name in enumerate(near)}
    others = [name for name in methods if name not in near]
    colors |= {name: colormaps["Set1"](i % 9) for i, name in enumerate(others)}
    figure, panels = pyplot.subplots(1, 2, figsize=(10, 4.5), layout="constrained")
    for axes, part in zip(panels, PARTS, strict=True):
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
        lowest = [row[part] for row in rows if row["method"] == floor]
        axes.axhline(max(lowest), color="black", linestyle="--", label=floor)
        axes.set(xscale="log", yscale="log", xlabel="buffer size", title=f"{title}: {part}")
        axes.set_ylabel("error, in standard deviations")
        axes.grid(alpha=0.3, which="both")
    panels[1].legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
