"""Measures whether memory and time stay flat, and how much memory a million rows take.

    python recipes/benchmarks/soak.py ring --minutes 60  # write and sample in a full ring
    python recipes/benchmarks/soak.py million            # fill a large buffer and sample from it

Each prints a table and writes a CSV to `--out`; `ring` also writes a line per sixtieth of the time
and draws a plot. Memory is what Linux reports for the process, so this runs only on Linux.
"""

from __future__ import annotations

import argparse
import logging
import resource
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measure import make_rows, write_table
from tensordict import TensorDict
from torchrl.data import TensorDictReplayBuffer
from tqdm import tqdm

from nmer_torchrl import make_replay_buffer

OBSERVATIONS, ACTIONS = 17, 6  # HalfCheetah
BATCH = 256
_PARTS = 60  # number of parts that the time is divided into
_WARM_UP = 6  # parts after which growth is measured


def resident() -> int:
    """Returns the bytes of memory that the process holds now."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmRSS"))


def peak() -> int:
    """Returns the most bytes of memory that the process has held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def stream(step: int = 1) -> Iterator[TensorDict]:
    """Yields rows `[step]` without end; mean and spread drift, so that the statistics move."""
    n = 0
    while True:
        rows = make_rows(1_000, OBSERVATIONS, ACTIONS)
        phase = torch.arange(n, n + 1_000).unsqueeze(1) / 50_000 + torch.arange(OBSERVATIONS)
        for entry in (rows["observation"], rows["next", "observation"]):
            entry.mul_(1 + 0.5 * phase.sin()).add_(phase.cos())
        n += 1_000
        yield from rows.split(step)


def tensor_bytes(*owners: object) -> int:
    """Returns the bytes of the tensors that these objects hold as attributes."""
    return sum(v.nbytes for owner in owners for v in vars(owner).values() if torch.is_tensor(v))


def make_all_lists(buffer: TensorDictReplayBuffer) -> None:
    """Requests the neighbors of every row."""
    index = torch.arange(len(buffer))
    for some in tqdm(index.split(BATCH), desc="lists", leave=False, mininterval=1):
        buffer.sampler.neighbors(buffer.storage, some)


def bench_ring(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Writes a row and samples a batch repeatedly in a full ring, beside uniform replay."""
    kinds = ("nmer", "uniform")
    buffers = {
        kind: make_replay_buffer(kind, capacity=args.rows, batch_size=BATCH) for kind in kinds
    }
    rows = stream()
    full = torch.cat([next(rows) for _ in range(args.rows)])
    for buffer in buffers.values():
        buffer.extend(full)
    del full
    make_all_lists(buffers["nmer"])
    writes, parts = 0, []
    begun = time.monotonic()
    for part in tqdm(range(1, _PARTS + 1), desc="parts"):
        times: dict[str, list[float]] = {
            f"{kind} {what}": [] for kind in kinds for what in ("write", "sample")
        }
        while time.monotonic() < begun + part * 60 * args.minutes / _PARTS:
            row = next(rows)
            for kind, buffer in buffers.items():
                begin = time.perf_counter()
                buffer.extend(row)
                middle = time.perf_counter()
                buffer.sample()
                times[f"{kind} write"].append(middle - begin)
                times[f"{kind} sample"].append(time.perf_counter() - middle)
            writes += 1
        means = {f"{name} us": 1e6 * statistics.fmean(some) for name, some in times.items()}
        ratio = means["nmer sample us"] / means["uniform sample us"]
        minute = part * args.minutes / _PARTS
        parts.append(
            {"minute": minute, "writes": writes, "MB": resident() / 1e6, **means, "ratio": ratio}
        )
    write_table(parts, args.out / "soak_parts.csv")
    plot(parts, args.out / "soak.png")
    warm = parts[_WARM_UP:]
    first, last = warm[: len(warm) // 3], warm[-(len(warm) // 3) :]
    slope = np.polyfit([m["writes"] for m in warm], [m["MB"] for m in warm], 1)[0]

    def change(column: str) -> float:
        before, after = (statistics.median(m[column] for m in part) for part in (first, last))
        return after / before

    return [
        {
            "minutes": args.minutes,
            "rows": args.rows,
            "writes": writes,
            "times around": writes / args.rows,
            "MB after warm-up": warm[0]["MB"],
            "MB at the end": warm[-1]["MB"],
            "bytes per write": 1e6 * float(slope),
            "sample us, last / first third": change("nmer sample us"),
            "uniform sample us, last / first third": change("uniform sample us"),
            "ratio, last / first third": change("ratio"),
        }
    ]


def bench_million(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measures bytes per row of a large buffer that is filled, sampled and overwritten."""
    rows = stream(1_000)
    small = make_replay_buffer("nmer", capacity=1_000, batch_size=BATCH)
    for _ in range(3):  # exclude memory that is allocated at first use
        small.extend(next(rows))
        small.sample()
    del small
    before = resident()
    buffer = make_replay_buffer("nmer", capacity=args.rows, batch_size=BATCH)
    for _ in tqdm(range(args.rows // 1_000), desc="rows", unit="thousand", mininterval=1):
        buffer.extend(next(rows))
        buffer.sampler.neighbors(buffer.storage, torch.empty(0, dtype=torch.int64))
    filled = resident()
    for i in tqdm(range(args.batches), desc="samples", mininterval=1):
        if i % 10 == 9:
            buffer.extend(next(rows)[:1])
        buffer.sample()
    search = buffer.sampler.unit.search
    graph = tensor_bytes(search, search._scaled, search._lists)
    counted = {
        "storage": buffer.storage[:].bytes(),
        "points": tensor_bytes(search.table),
        "graph": graph,
    }
    n = args.rows
    return [
        {
            "rows": n,
            "batches": args.batches,
            "lists made": search.stats()["lists"],
            **{f"{name} bytes per row": size / n for name, size in counted.items()},
            "counted MB": sum(counted.values()) / 1e6,
            "resident MB, filled": (filled - before) / 1e6,
            "resident MB, sampled": (resident() - before) / 1e6,
            "peak MB": (peak() - before) / 1e6,
            "process at first MB": before / 1e6,
        }
    ]


def plot(parts: list[dict[str, Any]], path: Path) -> None:
    """Plots memory and time over the writes."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, (above, below) = plt.subplots(2, sharex=True, figsize=(6.4, 5), layout="constrained")
    x = [m["writes"] for m in parts]
    above.plot(x, [m["MB"] for m in parts], marker=".")
    above.set_ylim(0, 1.2 * max(m["MB"] for m in parts))
    above.set_ylabel("memory of the process, MB")
    below.plot(x, [m["ratio"] for m in parts], marker=".")
    below.set_ylim(bottom=0)
    below.set_ylabel("one sample, NMER / uniform")
    below.set_xlabel("rows written to a full ring")
    figure.savefig(path, dpi=150)
    plt.close(figure)
    print(f"Wrote {path}")


def main() -> None:
    """Runs one benchmark."""
    benches = {
        "ring": (bench_ring, 20_000, "soak.csv"),
        "million": (bench_million, 10**6, "million.csv"),
    }
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default, folder = " (default: %(default)s)", Path("docs/benchmarks")
    add = parser.add_argument
    add("name", choices=benches, help="measurement to run")
    add("--minutes", type=float, default=60, help=f"duration of `ring`{default}")
    add("--rows", type=int, help="buffer size (default: 20,000 for `ring`, else a million)")
    add("--batches", type=int, default=100, help=f"batches that `million` samples{default}")
    add("--threads", type=int, default=1, help=f"CPU threads{default}")
    add("--out", type=Path, default=folder, help=f"output directory{default}")
    args = parser.parse_args()
    bench, rows, file = benches[args.name]
    args.rows = args.rows or rows
    logging.getLogger("torchrl").setLevel(logging.WARNING)
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    args.out.mkdir(parents=True, exist_ok=True)
    write_table(bench(args), args.out / file)


if __name__ == "__main__":
    main()
