"""Measures the neighbor graph's cost and accuracy on streams of real training.

    python recipes/benchmarks/graph.py feed --stream stream.npz     # a whole stream, one by one
    python recipes/benchmarks/graph.py train --stream stream.npz    # TD3 beside uniform replay
    python recipes/benchmarks/graph.py denormals --stream s.npz     # what tiny numbers cost TD3
    python recipes/benchmarks/graph.py recall --stream a.npz b.npz  # all along the streams
    python recipes/benchmarks/graph.py build --stream a.npz b.npz   # all lists, beside FAISS
    python recipes/benchmarks/graph.py save --stream stream.npz     # saved lists, beside new ones

Each prints a table and writes a CSV to `--out`. Streams are made by `streams.py`.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hydra import compose, initialize_config_dir
from measure import make_rows, recall, write_table
from plain import TD3
from tensordict import TensorDict
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parents[1]))

import td3
from nmer_recipes.blocks import as_block
from nmer_recipes.collect import make_collector
from nmer_recipes.config import register_resolvers
from nmer_recipes.envs import make_env
from nmer_recipes.optim import no_denormals
from nmer_recipes.replay import Source, draw, make_buffer, store
from nmer_recipes.runs import Clock
from nmer_recipes.seeding import seeds
from nmer_recipes.settings import CONF

from nmer_torchrl import make_replay_buffer
from nmer_torchrl.neighbors import NeighborGraph
from nmer_torchrl.tracking.standardize import RunningStandardizer

K = 10
NO_TRICKS = ("actor_l2=0", "grad_clip=null", "device=cpu", "logger=none")


def bench_feed(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Feeds a stream row by row, each with a query, and times TD3 gradient steps beside it."""
    points = torch.from_numpy(np.load(args.stream[0])["points"])[: args.rows]
    d = points.shape[1]
    agents = {name: TD3(17, 6, fused=name == "fused") for name in ("default", "fused")}
    stats, graph = RunningStandardizer(d), NeighborGraph(K)
    buffer = make_replay_buffer("uniform", capacity=10_000, batch_size=100)
    buffer.extend(make_rows(10_000, 17, 6))
    batches = [buffer.sample() for _ in range(50)]
    spent = {"statistics": 0.0, "graph": 0.0}
    steps, step_time = 0, dict.fromkeys(agents, 0.0)
    for i, point in enumerate(tqdm(points.split(1), desc="feed", unit="row", mininterval=1)):
        begin = time.perf_counter()
        stats.update(point)
        scale = stats.scale
        middle = time.perf_counter()
        graph.write(torch.tensor([i]), point)
        graph.query(torch.randint(i + 1, (100,)), K, scale)
        spent["statistics"] += middle - begin
        spent["graph"] += time.perf_counter() - middle
        if i % 100 == 0:  # gradient steps in between, so that both see the same machine
            for name, agent in agents.items():
                begin = time.perf_counter()
                for batch in batches[:4]:
                    agent.update(batch)
                step_time[name] += time.perf_counter() - begin
            steps += 4
    total = spent["statistics"] + spent["graph"]
    work = {name: value for name, value in graph.stats().items() if name != "points"}
    return [
        {
            "rows": len(points),
            "d": d,
            "graph s": spent["graph"],
            "statistics s": spent["statistics"],
            **{f"TD3 step ms, {name} Adam": 1e3 * t / steps for name, t in step_time.items()},
            **{
                f"multiple of as many steps, {name} Adam": total / (t / steps * len(points))
                for name, t in step_time.items()
            },
            **work,
        }
    ]


def bench_train(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Trains TD3 on HalfCheetah-v5 with uniform replay and with NMER, in turns.

    Both begin with a buffer that holds the stream's first rows, whose lists are built before the
    clock starts, and store the rows that follow in the stream. Everything but evaluation counts, as
    in the recipe, whose functions this calls.
    """
    rows = read_rows(args.stream[0])
    loops = {kind: TrainingLoop(kind, rows, args.rows) for kind in ("uniform", "nmer")}
    results = []
    for ratio, frames in ((1, 256), (5, 128), (20, 64)):
        for loop in loops.values():
            loop.run(frames // 2, ratio)  # compiles and warms up
            loop.clock = Clock()
        parts = ("environment", "upkeep", "sample", "update")
        rounds: dict[str, list[float]] = {kind: [] for kind in loops}
        for _ in tqdm(range(args.rounds), desc=f"ratio {ratio}, rounds of {frames} frames"):
            for kind, loop in loops.items():
                begin = time.perf_counter()
                loop.run(frames, ratio)
                rounds[kind].append(time.perf_counter() - begin)
        for kind, loop in loops.items():
            by_round = np.array(rounds[kind]) / np.array(rounds["uniform"])
            each = {f"{part} ms": 1e3 * loop.clock.seconds[part] for part in parts}
            results.append(
                {
                    "replay ratio": ratio,
                    "replay": kind,
                    "rows before": args.rows,
                    "frames": frames * args.rounds,
                    "ms per frame": 1e3 * sum(rounds[kind]) / (frames * args.rounds),
                    **{name: value / (frames * args.rounds) for name, value in each.items()},
                    "ratio": sum(rounds[kind]) / sum(rounds["uniform"]),
                    "by round": f"{by_round.min():.3f} to {by_round.max():.3f}",
                }
            )
            print(results[-1], flush=True)
    return results


def read_rows(stream: Path) -> TensorDict:
    """Returns transitions of HalfCheetah with the points of a stream and random rewards."""
    points = torch.from_numpy(np.load(stream)["points"])
    rows = make_rows(len(points), 17, 6).exclude(("next", "truncated"), ("next", "done"))
    rows["observation"], rows["action"] = points[:, :17].clone(), points[:, 17:].clone()
    rows["next", "observation"] = points[:, :17].roll(-1, 0)
    return rows


def bench_denormals(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Times TD3's compiled update along two trainings, of which one has no denormal numbers."""
    rows, results = read_rows(args.stream[0]), []
    loops = {flush: TrainingLoop("uniform", rows, args.rows) for flush in (False, True)}
    for updates in (1_000, 3_000, 6_000, 12_000):
        times = {}
        for flush, loop in loops.items():
            torch.set_flush_denormal(flush)
            loop.run((updates - loop.updates) // 20, 20)
            loop.clock = Clock()
            loop.run(25, 20)
            times[flush] = loop.clock.seconds["update"] / 500
        row = {"updates before": updates, "ms": 1e3 * times[False]}
        row |= {"ms without denormals": 1e3 * times[True], "ratio": times[False] / times[True]}
        results.append(row)
        print(row, flush=True)
    return results


class TrainingLoop:
    """The loop of the TD3 recipe without evaluation, on a buffer that already holds rows."""

    def __init__(self, kind: str, rows: TensorDict, stored: int) -> None:
        settings = (f"replay={kind}", "total_frames=1000000", "random_frames=0", "compile=true")
        register_resolvers()
        with initialize_config_dir(str(CONF), version_base="1.3"):
            cfg = compose("td3", overrides=["env=HalfCheetah", *NO_TRICKS, *settings])
        seed, device = seeds(0), torch.device("cpu")
        torch.manual_seed(seed["networks"])
        _, explorer, agent = td3.make_agent(cfg, 17, 6, device)
        self.update, _ = td3.make_update(cfg, agent)
        self.collector = make_collector(cfg, make_env(cfg.env), explorer, lambda: None, seed)
        self.buffer = make_buffer(cfg, seed["replay"])
        self.buffer.extend(rows[:stored])
        self.rows = map(TensorDict.clone, rows[stored:].unbind(0))
        if kind == "nmer":
            self.buffer.sampler.build(self.buffer.storage, progress=partial(tqdm, desc="lists"))
        self.clock, self.sources, self.updates = Clock(), [Source(self.buffer, cfg.batch_size)], 0

    def run(self, frames: int, ratio: int) -> None:
        """Trains for some frames."""
        for _ in range(frames):
            row = next(self.rows)
            with self.clock("environment"):
                self.collector.step()  # for its time; what is stored is the stream
            with self.clock("upkeep"):
                store(self.buffer, row, self.collector.ended)
            for (drawn,) in draw(self.sources, ratio, self.clock):
                with self.clock("update"):
                    block = as_block(drawn, self.sources[0].rows, torch.device("cpu"))
                    self.update(block, self.updates)
                    self.updates += ratio


def bench_recall(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measures recall@10 along real streams of 30K rows, in a growing table and a ring of 10K."""
    results = []
    for path in args.stream:
        points = torch.from_numpy(np.load(path)["points"])[:30_000]
        for capacity in (len(points), 10_000):
            graph, stats = NeighborGraph(K), RunningStandardizer(points.shape[1])
            stored = torch.zeros(capacity, points.shape[1])
            scores = []
            for i, point in enumerate(tqdm(points.split(1), desc=path.stem, mininterval=1)):
                where, count = torch.tensor([i % capacity]), min(i + 1, capacity)
                stats.update(point, removed=stored[where] if i >= capacity else None)
                stored[where] = point
                graph.write(where, point)
                if i % 5 == 0:
                    graph.query(torch.randint(count, (100,)), K, stats.scale)
                if i % 500 == 499:
                    index = torch.randint(count, (512,))
                    neighbors = graph.query(index, K, stats.scale)
                    scores.append(recall(stored[:count], index, neighbors, stats.scale))
            results.append(
                {
                    "stream": path.stem,
                    "table": "growing" if capacity == len(points) else f"ring of {capacity:,}",
                    "checks": len(scores),
                    "lowest recall": min(scores),
                    "mean recall": float(np.mean(scores)),
                    "certified at the end": graph.stats()["certified"],
                }
            )
            print(results[-1], flush=True)
    return results


def bench_build(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Times building the lists of a table that was filled at once, beside FAISS's flat index.

    FAISS answers the same question: the `K` nearest of every point. `product` is only the matrix
    product of all points with all points, in blocks that stay in the cache.
    """
    import faiss

    faiss.omp_set_num_threads(args.threads)
    results = []
    for path in args.stream:
        stream = torch.from_numpy(np.load(path)["points"])
        for n in (size for size in args.sizes if size <= len(stream)):
            stats = RunningStandardizer(stream.shape[1])
            points = stream[:n]
            stats.update(points)
            row = {"stream": path.stem, "rows": n, "d": points.shape[1], "threads": args.threads}
            times: dict[str, list[float]] = {"lists s": [], "faiss s": [], "product s": []}
            for _ in range(args.rounds):
                graph = NeighborGraph(K)
                graph.write(torch.arange(n), points)
                begin = time.perf_counter()
                blocks = torch.arange(n).split(2**16)
                for index in tqdm(blocks, desc="lists", leave=False, mininterval=1):
                    graph.query(index, K, stats.scale)
                times["lists s"].append(time.perf_counter() - begin)
                scaled = (points * stats.scale).float()
                if n <= args.most:
                    begin = time.perf_counter()
                    index = faiss.IndexFlatL2(points.shape[1])
                    index.add(scaled.numpy())
                    index.search(scaled.numpy(), K + 1)
                    times["faiss s"].append(time.perf_counter() - begin)
                begin = time.perf_counter()
                multiply(scaled)
                times["product s"].append(time.perf_counter() - begin)
            asked = torch.randint(n, (512,))
            found = graph.query(asked, K, stats.scale)
            row |= {name: min(each) if each else float("nan") for name, each in times.items()}
            row["lists / faiss"] = row["lists s"] / row["faiss s"]
            row["lists / product"] = row["lists s"] / row["product s"]
            row["recall"] = recall(points, asked, found, stats.scale)
            results.append(row)
            print(row, flush=True)
    return results


def multiply(points: torch.Tensor) -> None:
    """Multiplies points `[n, d]` with each other, 128 by 8,192 at a time in the same memory."""
    out = torch.empty(8_192, 128)
    for left in tqdm(points.split(128), desc="product", leave=False, mininterval=1):
        for right in points.split(8_192):
            torch.mm(right, left.T, out=out[: len(right), : len(left)])


def bench_save(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Times saving and loading the lists with the buffer, beside rebuilding them."""
    points = torch.from_numpy(np.load(args.stream[0])["points"])[: args.rows]
    stats, n = RunningStandardizer(points.shape[1]), len(points)
    stats.update(points)
    graph, other = NeighborGraph(K), NeighborGraph(K)
    graph.write(torch.arange(n), points)
    begin = time.perf_counter()
    for index in tqdm(torch.arange(n).split(256), desc="lists", mininterval=1):
        graph.query(index, K, stats.scale)
    built = time.perf_counter() - begin
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "graph.pt"
        begin = time.perf_counter()
        torch.save(graph.state_dict(), file)
        saved, size = time.perf_counter() - begin, file.stat().st_size
        other.write(torch.arange(n), points)
        begin = time.perf_counter()
        other.load_state_dict(torch.load(file, weights_only=True))
        loaded = time.perf_counter() - begin
    assert other.stats()["lists"] == n
    row = {"rows": n, "d": points.shape[1], "making all lists s": built, "saving s": saved}
    return [row | {"loading s": loaded, "bytes per row": size / n}]


def main() -> None:
    """Runs one benchmark."""
    benches = {
        "feed": bench_feed,
        "train": no_denormals()(bench_train),  # as the recipe does
        "denormals": bench_denormals,
        "recall": bench_recall,
        "build": bench_build,
        "save": bench_save,
    }
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", choices=benches, metavar="BENCHMARK", help=", ".join(benches))
    parser.add_argument("--stream", type=Path, nargs="+", required=True, help="files of streams.py")
    parser.add_argument("--rows", type=int, default=100_000, help="for feed, train and save")
    parser.add_argument("--sizes", type=int, nargs="+", default=[30_000, 200_000], help="for build")
    parser.add_argument("--most", type=int, default=200_000, help="rows up to which FAISS is timed")
    parser.add_argument("--rounds", type=int, default=8, help="for train and build")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--name", dest="file", help="of the CSV; by default the benchmark's")
    parser.add_argument("--out", type=Path, default=Path("docs/benchmarks"))
    args = parser.parse_args()
    logging.getLogger("torchrl").setLevel(logging.WARNING)
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    args.out.mkdir(parents=True, exist_ok=True)
    write_table(benches[args.name](args), args.out / f"{args.file or args.name}.csv")


if __name__ == "__main__":
    main()
