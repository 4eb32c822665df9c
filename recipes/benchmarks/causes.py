"""Measures which change made the recipes faster, one change after another.

    python recipes/benchmarks/causes.py
    python recipes/benchmarks/causes.py --updates 20 --rounds 1  # whether all of it runs

Each stage runs the recipe with uniform replay on HalfCheetah-v5 in a process of its own, on one
core and in turns, as `loops.py` does. A stage has the settings of those before it, and its own.
"""

from __future__ import annotations

import argparse
import os
import statistics
from pathlib import Path
from typing import Any

from loops import AGENTS, stay_on_one_core, time_recipe
from measure import write_table
from tqdm import tqdm

STAGES: dict[str, dict[str, Any]] = {
    "TorchRL's collector and losses": {
        "collector": "torchrl",
        "collector.frames_per_batch": 1,
        "losses": "torchrl",
        "compile": False,
    },
    "acting in the task itself": {"collector": "local"},
    "losses without tensordicts": {"losses": "direct"},
    "one compiled gradient step": {"compile": True},
    "products of wide layers in bfloat16": {"precision": "bf16"},  # which rounds more
}


def settings_of(stage: str) -> dict[str, Any]:
    """Returns the settings of a stage: its own, and those of the stages before it."""
    settings: dict[str, Any] = {}
    for name, changed in STAGES.items():
        settings |= changed
        if changed.get("collector") == "local":
            settings.pop("collector.frames_per_batch", None)  # which only TorchRL's has
        if name == stage:
            break
    return settings


def main(arguments: list[str] | None = None) -> None:
    """Runs the stages in turns and writes a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add, default = parser.add_argument, " (default: %(default)s)"
    add("--algorithms", nargs="+", choices=("td3", "sac"), default=["td3", "sac"], help="agents")
    add("--updates", type=int, default=600, help=f"updates that are timed{default}")
    add("--rounds", type=int, default=2, help=f"rounds{default}")
    add("--out", type=Path, default=Path("docs/benchmarks"), help=f"directory of the CSV{default}")
    args = parser.parse_args(arguments)
    os.environ["OMP_NUM_THREADS"] = "1"
    stay_on_one_core()
    cells = [(a, ratio) for a in args.algorithms for ratio in AGENTS[a].ratios]
    times: dict[tuple[str, int, str], list[float]] = {
        (*cell, stage): [] for cell in cells for stage in STAGES
    }
    with tqdm(total=args.rounds * len(times), unit="run") as bar:
        for _ in range(args.rounds):
            for (algorithm, ratio, stage), found in times.items():
                found.append(time_recipe(algorithm, ratio, args.updates, **settings_of(stage)))
                bar.update()
    rows = []
    for algorithm, ratio in cells:
        before = 0.0
        for stage in STAGES:
            seconds = statistics.median(times[algorithm, ratio, stage])
            row = {"algorithm": AGENTS[algorithm].name, "replay ratio": ratio, "change": stage}
            saved = 1 - seconds / before if before else float("nan")
            rows.append(row | {"ms per update": 1e3 * seconds, "saved": saved})
            before = seconds
    write_table(rows, args.out / "causes.csv")


if __name__ == "__main__":
    main()
