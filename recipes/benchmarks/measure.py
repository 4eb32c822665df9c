"""Provides what the benchmarks share: timing, data and tables."""

from __future__ import annotations

import csv
import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor


def median_seconds(call: Callable[[], Any], *, repeat: int, warm_up: int = 2) -> float:
    """Returns the median time of a call."""
    for _ in range(warm_up):
        call()
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def side_by_side(
    calls: dict[str, Callable[[], Any]], *, rounds: int, repeat: int
) -> dict[str, float]:
    """Returns the median times of calls, taken in turns so that noise affects all alike."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            times[name].append(median_seconds(call, repeat=repeat))
    return {name: statistics.median(values) for name, values in times.items()}


def make_rows(n: int, observations: int, actions: int) -> TensorDict:
    """Returns transitions with the entries that a MuJoCo task stores."""
    flags = torch.zeros(n, 1, dtype=torch.bool)
    following = TensorDict(
        observation=torch.randn(n, observations),
        reward=torch.randn(n, 1),
        terminated=flags,
        truncated=flags.clone(),
        done=flags.clone(),
        batch_size=[n],
    )
    return TensorDict(
        observation=torch.randn(n, observations),
        action=torch.rand(n, actions) * 2 - 1,
        next=following,
        batch_size=[n],
    )


def make_clusters(n: int, d: int, size: int = 64) -> Tensor:
    """Returns points `[n, d]` in tight clusters, which contain each point's neighbors.

    Each point has its own spread, so that distances within a cluster differ as real ones do. If
    they were alike, brute force could not tell them apart in float32.
    """
    centers = 3 * torch.randn(-(-n // size), d)
    count = len(centers) * size
    spread = 0.2 * torch.rand(count, 1)
    return (centers.repeat_interleave(size, 0) + spread * torch.randn(count, d))[:n]


def recall(points: Tensor, index: Tensor, neighbors: Tensor, scale: Tensor) -> float:
    """Returns the share of neighbors as near as the k-th found by brute force in float64."""
    scaled = points.double() * scale
    limits = []
    for rows in index.split(64):
        distances = torch.cdist(scaled[rows], scaled)
        distances.scatter_(1, rows.unsqueeze(1), torch.inf)
        limits.append(distances.topk(neighbors.shape[1], largest=False).values[:, -1:])
    found = (scaled[neighbors] - scaled[index].unsqueeze(1)).norm(dim=-1)
    return float((found <= torch.cat(limits) * (1 + 1e-6)).double().mean())


def write_table(rows: list[dict[str, Any]], path: Path) -> None:
    """Prints the rows as a Markdown table and writes them as CSV."""
    path.parent.mkdir(parents=True, exist_ok=True)
    names = list(rows[0])
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(rows)
    print(to_markdown(names, ([row[name] for name in names] for row in rows)))
    print(f"\nWrote {path}\n")


def to_markdown(names: list[str], rows: Iterable[list[Any]]) -> str:
    """Formats a Markdown table."""
    lines = [names, ["---"] * len(names), *([_show(cell) for cell in row] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _show(cell: Any) -> str:
    if isinstance(cell, float):
        return "" if cell != cell else f"{cell:.3g}"
    return f"{cell:,}" if isinstance(cell, int) else str(cell)
