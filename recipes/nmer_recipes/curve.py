"""Draws the learning curve of a run."""

from __future__ import annotations

from pathlib import Path


def draw_curve(path: Path, rows: list[dict[str, float]], name: str) -> None:
    """Draws the returns of a run over its frames."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
    for column, label in (("train/return", "training"), ("eval/return", "evaluation")):
        points = [(row["frames"], row[column]) for row in rows if column in row]
        marker = "." if len(points) == 1 else None  # which a line would not show
        axes.plot(*zip(*points, strict=True), label=label, marker=marker) if points else None
    axes.set(title=name, xlabel="environment frames", ylabel="return")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
