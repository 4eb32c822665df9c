"""What a sample costs by every replay method, beside uniform sampling.

    python recipes/benchmarks/methods.py

Rows have the shapes of HalfCheetah and follow one another in episodes of 1,000. Every neighbour
list is made before the clock starts. Prints a table and writes a CSV.
"""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

import torch
from measure import make_rows, side_by_side, write_table
from torchrl.data import TensorDictReplayBuffer
from tqdm import tqdm

from nmer_torchrl import make_replay_buffer
from nmer_torchrl.buffers import KINDS

EPISODE = 1_000


def fill(kind: str, rows: int) -> TensorDictReplayBuffer:
    """A buffer of that kind, full, ready to be sampled."""
    torch.manual_seed(0)
    buffer = make_replay_buffer(kind, capacity=rows, batch_size=256)
    data = make_rows(rows, 17, 6)
    follows = torch.arange(1, rows + 1) % EPISODE != 0
    following = data["observation"].roll(-1, 0)
    data["next", "observation"][follows] = following[follows]
    data["next", "truncated"][~follows] = True
    data["next", "done"][~follows] = True
    buffer.extend(data)
    if hasattr(buffer.sampler, "neighbors"):
        for index in tqdm(torch.arange(rows).split(256), desc=kind, leave=False, mininterval=1):
            buffer.sampler.neighbors(buffer.storage, index)
    if kind == "ero":
        buffer.sampler.finish_episode(0.0, buffer.storage)  # has it choose rows
    buffer.sample()
    return buffer


def main() -> None:
    """Times all kinds in turns."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("docs/benchmarks"))
    args = parser.parse_args()
    logging.getLogger("torchrl").setLevel(logging.WARNING)
    torch.set_num_threads(args.threads)
    args.out.mkdir(parents=True, exist_ok=True)
    buffers = {kind: fill(kind, args.rows) for kind in KINDS}
    calls = {kind: buffer.sample for kind, buffer in buffers.items()}
    times = side_by_side(calls, rounds=args.rounds, repeat=100)
    results = [
        {
            "method": kind,
            "rows": args.rows,
            "us per sample": 1e6 * seconds,
            "beside uniform": seconds / times["uniform"],
        }
        for kind, seconds in times.items()
    ]
    write_table(results, args.out / "methods.csv")


if __name__ == "__main__":
    main()
