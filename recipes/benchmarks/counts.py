"""Counts the operations that a sample dispatches, and how often the host waits for a device.

    python recipes/benchmarks/counts.py

Counts have no noise and need no GPU. Operations are those of one sample on the CPU, without views,
which compute nothing. Reads are numbers or shapes that the host waits for. They are counted on the
tests' pretended device, and not counted if there is a real one. Prints two tables, of single calls
and of a recipe's frame with one update, and writes a CSV of each.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from measure import make_rows, write_table
from torch.utils._python_dispatch import TorchDispatchMode
from torchrl.data import TensorDictReplayBuffer

from nmer_torchrl import make_replay_buffer
from nmer_torchrl.methods import METHODS

sys.path.append(str(Path(__file__).parents[1]))
sys.path.append(str(Path(__file__).parents[2] / "tests"))
from nmer_recipes import collect, config, replay, runs
from pretend_cuda import Waits, pretend_cuda

ROOT = Path(__file__).parents[2]

BATCH, ROWS = 256, 2_000
CASES = [("uniform", None), ("nmer", "graph"), ("nmer", "keops"), ("nmer", "torch")]


TITLES = {
    "to_host": "copies to the host",
    "keops": "KeOps's wait",
    "item": "numbers read",
    "sent": "copies to the device, not waited for",
}
# A few frames of a recipe, with one update each and no evaluation or checkpoint between.
FRAMES = [
    "env=InvertedPendulum",
    "total_frames=44",
    "random_frames=40",
    "replay_ratio=1",
    "hidden=[8,8]",
    "batch_size=8",
    "eval_every=44",
    "eval_episodes=1",
    "checkpoint_every=44",
    "logger=none",
    "compile=false",
    "device=cuda:0",
]


class Operations(TorchDispatchMode):
    """Counts the operations that are dispatched in the block, except views."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operation, and counts it if it computes or reads something."""
        aliases = [result.alias_info for result in func._schema.returns]
        view = any(alias is not None and not alias.is_write for alias in aliases)
        self.count += not view and "_unsafe_view" not in str(func)
        return func(*args, **(kwargs or {}))


def fill(kind: str, search: str | None, device: str) -> TensorDictReplayBuffer:
    """Returns a buffer with free space, whose neighbor lists are built."""
    options = {} if search is None else {"search": search}
    buffer = make_replay_buffer(kind, capacity=2 * ROWS, batch_size=BATCH, device=device, **options)
    buffer.extend(rows(ROWS).to(device))
    if search is not None:
        for _ in range(2):  # the second pass finds that no list is missing
            buffer.sampler.neighbors(buffer.storage, torch.arange(ROWS, device=device))
    buffer.sample()
    return buffer


def rows(n: int) -> Any:
    """Returns transitions with HalfCheetah's shapes and the entries that the recipes store."""
    return make_rows(n, 17, 6).exclude(("next", "truncated"), ("next", "done"))


def count_operations(kind: str, search: str | None) -> int:
    """Returns the number of operations of one sample."""
    buffer = fill(kind, search, "cpu")
    with Operations() as operations:
        buffer.sample()
    return operations.count


def count_reads(kind: str, search: str | None, waits: Waits) -> dict[str, int]:
    """Returns the number of reads of each call; `store` is how the recipes add a row."""
    buffer, reads = fill(kind, search, "cuda:0"), {}

    some = rows(10).to("cuda:0")
    for name, call in (
        ("sample", buffer.sample),
        ("add", lambda: buffer.add(some[0])),
        ("extend", lambda: buffer.extend(some)),
        ("sample after writes", buffer.sample),
        ("store", lambda: replay.store(buffer, rows(1)[0].to("cuda:0"), None)),
        ("sample after store", buffer.sample),
    ):
        waits.clear()
        call()
        reads[name] = waits.reads
    return reads


@contextlib.contextmanager
def watch_frames(waits: Waits) -> Iterator[list[dict[str, int]]]:
    """Yields the waits of each frame of a run in the block, without evaluations and checkpoints.

    `"sent"` is the number of copies to the device that do not wait.
    """
    frames: list[dict[str, int]] = []
    step, count = collect.FrameCollector.step, runs.Run.count

    def begin(self: Any) -> Any:
        waits.clear()
        return step(self)

    def end(self: Any, frame: int) -> None:
        frames.append({**waits, "sent": waits.sent})
        count(self, frame)

    with (
        mock.patch.object(collect.FrameCollector, "step", begin),
        mock.patch.object(runs.Run, "count", end),
    ):
        yield frames


def count_frame(method: str, search: str | None, waits: Waits) -> dict[str, int]:
    """Returns the waits of a TD3 frame with one update, the last of a few."""
    import td3
    from hydra import compose, initialize_config_dir

    config.register_resolvers()
    options = [*FRAMES, f"replay={method}"]
    options += [] if search is None else [f"replay.search={search}"]
    with tempfile.TemporaryDirectory() as folder:
        with initialize_config_dir(str(ROOT / "recipes" / "conf"), version_base="1.3"):
            cfg = compose("td3", overrides=[*options, f"run_dir={folder}/run"])
        with watch_frames(waits) as frames, contextlib.redirect_stdout(io.StringIO()):
            td3.train(cfg)
    return frames[-1]


def main() -> None:
    """Counts, prints and writes the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    folder, text = Path("docs/benchmarks"), "output directory (default: %(default)s)"
    parser.add_argument("--out", type=Path, default=folder, help=text)
    args = parser.parse_args()
    logging.getLogger("torchrl").setLevel(logging.WARNING)
    torch.set_num_threads(1)
    table = []
    for kind, search in CASES:
        torch.manual_seed(0)
        row: dict[str, Any] = {"method": kind, "search": search or ""}
        row["operations"] = count_operations(kind, search)
        if not torch.cuda.is_available():
            with pretend_cuda() as waits:
                reads = count_reads(kind, search, waits)
            row |= {f"reads: {name}": count for name, count in reads.items()}
        table.append(row)
    write_table(table, args.out / "counts.csv")
    if torch.cuda.is_available():
        return
    warnings.filterwarnings("ignore", module="torchrl|tensordict|gymnasium")
    frames = []
    by_default = [(method, None) for method in sorted(METHODS)]
    for method, search in [*by_default, ("nmer", "graph"), ("nmer", "torch")]:
        with pretend_cuda() as waits:
            found = count_frame(method, search, waits)
        columns = {name: found.get(name, 0) for name in ("to_host", "keops", "item", "sent")}
        row = {"method": method, "search": search or ("keops" if columns["keops"] else "")}
        row |= {title: columns[name] for name, title in TITLES.items()}
        row["other waits"] = sum(found.values()) - sum(columns.values())
        frames.append(row)
    write_table(frames, args.out / "frames.csv")


if __name__ == "__main__":
    main()
