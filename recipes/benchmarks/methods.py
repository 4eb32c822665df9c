"""Measures the cost of a sample with every replay method, and of a step with every metric.

    python recipes/benchmarks/methods.py          # compared with uniform sampling
    python recipes/benchmarks/methods.py metrics  # compared with the Euclidean metric
    python recipes/benchmarks/methods.py checks   # compared with samples without checks

The methods' rows have HalfCheetah's shapes and follow each other in episodes of 1,000. A step of
the metrics is one row written into a full ring, and a sample. Every neighbor list is built before
the clock starts. Each prints a table and writes a CSV.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from measure import make_rows, side_by_side, write_table
from torchrl.data import TensorDictReplayBuffer
from tqdm import tqdm

from nmer_torchrl import loop, make_replay_buffer
from nmer_torchrl.composition import Guard
from nmer_torchrl.methods import METHODS

BATCH = 256
EPISODE = 1_000
TASKS = {"HalfCheetah": (17, 6, 5_000), "Ant": (105, 8, 3_000), "Humanoid": (348, 17, 2_000)}
METRICS = ("euclidean", "mahalanobis")


def fill(kind: str, rows: int) -> TensorDictReplayBuffer:
    """Returns a full buffer of that kind, ready to be sampled."""
    torch.manual_seed(0)
    buffer = make_replay_buffer(kind, capacity=rows, batch_size=BATCH)
    data = make_rows(rows, 17, 6)
    follows = torch.arange(1, rows + 1) % EPISODE != 0
    following = data["observation"].roll(-1, 0)
    data["next", "observation"][follows] = following[follows]
    data["next", "truncated"][~follows] = True
    data["next", "done"][~follows] = True
    buffer.extend(data)
    if hasattr(buffer.sampler, "neighbors"):
        make_lists(buffer, kind)
    loop.finish_episode(buffer, 0.0)  # from now on, ERO chooses rows
    buffer.sample()
    return buffer


def make_lists(buffer: TensorDictReplayBuffer, name: str) -> None:
    """Builds the neighbor list of every row."""
    index = torch.arange(len(buffer)).split(BATCH)
    for some in tqdm(index, desc=name, leave=False, mininterval=1):
        buffer.sampler.neighbors(buffer.storage, some)


def bench_methods(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Times a sample with every kind."""
    buffers = {kind: fill(kind, args.rows) for kind in METHODS}
    calls = {kind: buffer.sample for kind, buffer in buffers.items()}
    times = side_by_side(calls, rounds=args.rounds, repeat=100)
    return [
        {
            "method": kind,
            "rows": args.rows,
            "us per sample": 1e6 * seconds,
            "beside uniform": seconds / times["uniform"],
        }
        for kind, seconds in times.items()
    ]


def bench_metrics(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Times a step with the metrics that the default search supports."""
    results = []
    for task, (observations, actions, rows) in TASKS.items():
        torch.manual_seed(0)
        shape = (observations, actions)
        data = make_rows(rows, *shape)
        calls = {}
        for metric in METRICS:
            buffer = make_replay_buffer("nmer", capacity=rows, batch_size=BATCH, metric=metric)
            buffer.extend(data)
            make_lists(buffer, f"{task}, {metric}")

            def step(buffer: TensorDictReplayBuffer = buffer, shape: Any = shape) -> None:
                buffer.extend(make_rows(1, *shape))
                buffer.sample()

            calls[metric] = step
        times = side_by_side(calls, rounds=args.rounds, repeat=130)  # at least one arriving block
        row: dict[str, Any] = {"task": task, "d": observations + actions, "rows": rows}
        row |= {f"{name} us": 1e6 * seconds for name, seconds in times.items()}
        results.append(row | {"ratio": times["mahalanobis"] / times["euclidean"]})
    return results


class Unguarded(Guard):
    """A guard that checks nothing."""

    def check(self, *parts: Any) -> None:
        """Does nothing."""


def bench_checks(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Times a sample with and without the check of the buffer's composition, in short turns."""
    buffers = {"with": fill("nmer", args.rows), "without": fill("nmer", args.rows)}
    buffers["without"].sampler._guard = Unguarded()
    times: dict[str, list[float]] = {name: [] for name in buffers}
    for turn in tqdm(range(400 * args.rounds), desc="checks", leave=False, mininterval=1):
        for name in sorted(buffers, reverse=bool(turn % 2)):
            start = time.thread_time()
            for _ in range(8):
                buffers[name].sample()
            times[name].append((time.thread_time() - start) / 8)
    first = {name: statistics.quantiles(values, n=4)[0] for name, values in times.items()}
    ratios = [a / b for a, b in zip(times["with"], times["without"], strict=True)]
    row: dict[str, Any] = {"rows": args.rows}
    row |= {f"{name} us": 1e6 * seconds for name, seconds in first.items()}
    for name, ratio in (
        ("first quartiles", first["with"] / first["without"]),
        ("median of turns", statistics.median(ratios)),
    ):
        row[f"cost in %, {name}"] = 100 * (ratio - 1)
    return [row]


MEASURES = {"methods": bench_methods, "metrics": bench_metrics, "checks": bench_checks}


def main() -> None:
    """Runs one of the measurements."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default, folder = " (default: %(default)s)", Path("docs/benchmarks")
    what = f"what to compare{default}"
    add = parser.add_argument
    add("what", nargs="?", choices=MEASURES, default="methods", help=what)
    add("--rows", type=int, default=20_000, help=f"stored rows{default}")
    add("--rounds", type=int, default=5, help=f"repetitions{default}")
    add("--threads", type=int, default=1, help=f"CPU threads{default}")
    add("--out", type=Path, default=folder, help=f"output directory{default}")
    args = parser.parse_args()
    logging.getLogger("torchrl").setLevel(logging.WARNING)
    torch.set_num_threads(args.threads)
    args.out.mkdir(parents=True, exist_ok=True)
    write_table(MEASURES[args.what](args), args.out / f"{args.what}.csv")


if __name__ == "__main__":
    main()
