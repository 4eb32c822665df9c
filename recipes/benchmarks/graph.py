"""Measures the neighbor graph's cost and accuracy on streams of real training.

    python recipes/benchmarks/graph.py feed --stream stream.npz     # a whole stream, one by one
    python recipes/benchmarks/graph.py train --stream stream.npz    # TD3 at replay ratio 20
    python recipes/benchmarks/graph.py recall --stream a.npz b.npz  # all along the streams
    python recipes/benchmarks/graph.py save --stream stream.npz     # saved lists, beside new ones

Each prints a table and writes a CSV to `--out`. Streams are made by `streams.py`.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measure import make_rows, recall, write_table
from omegaconf import OmegaConf
from plain import TD3
from tensordict.nn import TensorDictModule
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parents[1]))

from nmer_recipes.collect import FrameCollector
from nmer_recipes.envs import make_env
from nmer_recipes.seeding import Stream

from nmer_torchrl import make_replay_buffer
from nmer_torchrl.neighbors import NeighborGraph
from nmer_torchrl.tracking.standardize import RunningStandardizer

K = 10


def bench_feed(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Feeds a stream row by row, each with a query, and times TD3 gradient steps beside it."""
    points = torch.from_numpy(np.load(args.stream[0])["points"])
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
    """Trains TD3 on HalfCheetah-v5 at replay ratio 20, from a buffer preloaded with 100K rows."""
    points = torch.from_numpy(np.load(args.stream[0])["points"])[: args.rows]
    rows = make_rows(len(points), 17, 6).exclude(("next", "truncated"), ("next", "done"))
    rows["observation"], rows["action"] = points[:, :17].clone(), points[:, 17:].clone()
    rows["next", "observation"] = points[:, :17].roll(-1, 0)
    times: dict[str, list[float]] = {"uniform": [], "nmer": []}
    loops = {}
    for kind in times:
        torch.manual_seed(0)
        buffer = make_replay_buffer(kind, capacity=1_000_000, batch_size=100)
        buffer.extend(rows)
        agent = TD3(17, 6, hidden=(400, 300))
        if kind == "nmer":  # lists are built on request: request all before timing
            begin = time.perf_counter()
            for index in tqdm(torch.arange(len(rows)).split(256), desc="lists", mininterval=1):
                buffer.sampler.neighbors(buffer.storage, index)
            print(f"making all lists took {time.perf_counter() - begin:.0f} s")
        collector = FrameCollector(
            [make_env(OmegaConf.create({"id": "HalfCheetah-v5"}))],
            TensorDictModule(agent.actor, ["observation"], ["action"]),
            seed=0,
            random_frames=0,
            stream=Stream(0, torch.device("cpu")),
            device=torch.device("cpu"),
        )
        loops[kind] = (collector, buffer, agent)
    for _ in tqdm(range(args.rounds), desc="rounds of 50 steps"):
        for kind, (collector, buffer, agent) in loops.items():
            begin = time.perf_counter()
            for _ in range(50):
                buffer.add(collector.step())
                for _ in range(20):
                    agent.update(buffer.sample())
            times[kind].append(time.perf_counter() - begin)
    totals = {kind: sum(values) for kind, values in times.items()}
    frames = 50 * args.rounds
    return [
        {
            "replay": kind,
            "preloaded": len(rows),
            "frames": frames,
            "updates": 20 * frames,
            "ms per frame": 1e3 * totals[kind] / frames,
            "ratio": totals[kind] / totals["uniform"],
        }
        for kind in totals
    ]


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
        "train": bench_train,
        "recall": bench_recall,
        "save": bench_save,
    }
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", choices=benches)
    parser.add_argument("--stream", type=Path, nargs="+", required=True, help="files of streams.py")
    parser.add_argument("--rows", type=int, default=100_000, help="for train and save")
    parser.add_argument("--rounds", type=int, default=8, help="for train")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("docs/benchmarks"))
    args = parser.parse_args()
    logging.getLogger("torchrl").setLevel(logging.WARNING)
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    args.out.mkdir(parents=True, exist_ok=True)
    write_table(benches[args.name](args), args.out / f"{args.name}.csv")


if __name__ == "__main__":
    main()
