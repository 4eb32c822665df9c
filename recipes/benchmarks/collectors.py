"""Measures each collector's frames per second: acting alone, and with one update per frame.

    python recipes/benchmarks/collectors.py
    python recipes/benchmarks/collectors.py --env Humanoid --frames 512

Uses TD3's policy and updates with the recipe's networks and batches, on one thread. All collectors
are open at the same time and take turns, so that noise affects all of them alike; the others wait.
Frames that were collected meanwhile are taken before the clock starts.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from hydra import compose, initialize_config_dir
from measure import make_rows, write_table
from tqdm import tqdm

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "recipes"))

import td3  # noqa: E402
from nmer_recipes.blocks import as_block  # noqa: E402
from nmer_recipes.collect import make_collector  # noqa: E402
from nmer_recipes.config import register_resolvers  # noqa: E402
from nmer_recipes.envs import make_env  # noqa: E402
from nmer_recipes.seeding import seeds  # noqa: E402

PROCESSES = ["collector=multiprocess", "collector.workers=2"]
COLLECTORS: dict[str, list[str]] = {
    "local": [],
    "local, env.count=8": ["env.count=8"],
    "torchrl": ["collector=torchrl"],
    "torchrl, env.count=8": ["collector=torchrl", "env.count=8"],
    "multiprocess, workers=2": PROCESSES,
    "multiprocess, workers=2, env.count=8": [*PROCESSES, "env.count=8"],
    "multiprocess, workers=2, sync=false": [*PROCESSES, "collector.sync=false"],
}
CPU = torch.device("cpu")


def make(overrides: list[str], env: str) -> tuple[Any, Callable[[], None]]:
    """Builds a collector as the recipe does, past its random frames, and its policy's update."""
    with initialize_config_dir(str(ROOT / "recipes" / "conf"), version_base="1.3"):
        cfg = compose("td3", overrides=[f"env={env}", "random_frames=1", "device=cpu", *overrides])
    task = make_env(cfg.env)
    sizes = task.observation_space.shape[0], task.action_space.shape[0]
    _, explorer, agent = td3.make_agent(cfg, *sizes, CPU)
    update, _ = td3.make_update(cfg, agent)
    block = as_block(make_rows(cfg.batch_size, *sizes), cfg.batch_size, CPU)
    copy = lambda: td3.make_agent(cfg, *sizes, CPU)[1]  # noqa: E731
    return make_collector(cfg, task, explorer, copy, seeds(0)), lambda: update(block, 0)


def frames_per_second(collector: Any, update: Callable[[], Any] | None, frames: int) -> float:
    """Returns frames per second, with an update after each frame if given."""
    for _ in range(256):  # skip frames that were collected before
        collector.step()
    begin = time.perf_counter()
    for _ in range(frames):
        collector.step()
        if update is not None:
            update()
    return frames / (time.perf_counter() - begin)


def spread(values: list[float]) -> str:
    """Formats the median, the minimum and the maximum."""
    return f"{statistics.median(values):.0f} ({min(values):.0f}-{max(values):.0f})"


def main() -> None:
    """Lets the collectors take turns, and writes a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default, folder = " (default: %(default)s)", Path("docs/benchmarks")
    add = parser.add_argument
    add("--env", default="HalfCheetah", help=f"task{default}")
    add("--frames", type=int, default=256, help=f"frames per turn{default}")
    add("--rounds", type=int, default=5, help=f"turns of each collector{default}")
    add("--out", type=Path, default=folder, help=f"output directory{default}")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    register_resolvers()
    alone: dict[str, list[float]] = {name: [] for name in COLLECTORS}
    learning: dict[str, list[float]] = {name: [] for name in COLLECTORS}
    with contextlib.ExitStack() as stack:
        made = {}
        for name, overrides in tqdm(COLLECTORS.items(), desc="starting", unit="collector"):
            collector, update = make(overrides, args.env)
            stack.enter_context(collector)
            collector.step()
            made[name] = collector, update
        for _ in tqdm(range(args.rounds), desc="rounds"):
            for name, (collector, update) in made.items():
                alone[name].append(frames_per_second(collector, None, args.frames))
                learning[name].append(frames_per_second(collector, update, args.frames))
    base = {key: statistics.median(times["local"]) for key, times in _both(alone, learning)}
    rows = []
    for name in COLLECTORS:
        row: dict[str, Any] = {"collector": name}
        for key, times in _both(alone, learning):
            row[f"{key}, frames/s"] = spread(times[name])
            row[f"{key} / local"] = statistics.median(times[name]) / base[key]
        rows.append(row)
    write_table(rows, args.out / "collectors.csv")


def _both(
    alone: dict[str, list[float]], learning: dict[str, list[float]]
) -> list[tuple[str, dict[str, list[float]]]]:
    return [("acting alone", alone), ("with updates", learning)]


if __name__ == "__main__":
    main()
