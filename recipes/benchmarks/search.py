"""Measures NMER's cost: sampling, upkeep of the neighbor graph, and the searches side by side.

    python recipes/benchmarks/search.py sample   # rb.sample() with the graph beside uniform
    python recipes/benchmarks/search.py upkeep   # a block of arrivals beside a matrix product
    python recipes/benchmarks/search.py query    # one batch of neighbors by every search

Each prints a table, writes a CSV to `--out` and draws a plot. The rows are synthetic; `graph.py`
measures the graph on real streams.
"""

from __future__ import annotations

import argparse
import logging
import math
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measure import make_clusters, make_rows, median_seconds, recall, side_by_side, write_table
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.data.replay_buffers import RandomSampler, Storage
from torchrl.envs.transforms import Transform
from tqdm import tqdm

from nmer_torchrl import PairStorage, make_replay_buffer
from nmer_torchrl.neighbors import FaissSearch, KeOpsSearch, NeighborGraph, TorchSearch
from nmer_torchrl.tracking.standardize import RunningStandardizer

TASKS = {"HalfCheetah": (17, 6), "Ant": (105, 8), "Humanoid": (348, 17)}
K = 10
BATCH = 256
CLUSTER = 64
_MANY = 2e8  # numbers in a table above which no spare copy fits into 24 GB


def clustered_graph(points: Tensor, scale: Tensor, n: int) -> NeighborGraph:
    """Returns a graph of the first n points with all lists built, which is cheap in clusters.

    Only the way the lists are built is a shortcut. They are the lists that the graph would build
    itself, which takes hours for a million rows of Humanoid.
    """
    graph = NeighborGraph(K)
    graph.write(torch.arange(n, device=points.device), points[:n])
    graph.query(torch.arange(1, device=points.device), K, scale)  # adds all points to the graph
    c = graph.candidates
    for start in tqdm(range(0, n, CLUSTER * 64), desc="lists", leave=False, mininterval=1):
        end = min(start + CLUSTER * 64, n) // CLUSTER * CLUSTER
        index = torch.arange(start, end, device=points.device)
        if not len(index):
            continue
        rows = (points[index] * scale.to(points.device)).float().view(-1, CLUSTER, points.shape[1])
        distances = torch.cdist(rows, rows, compute_mode="donot_use_mm_for_euclid_dist").square_()
        distances.diagonal(dim1=1, dim2=2).fill_(torch.inf)
        best, column = distances.topk(c + 1, largest=False)
        first = index.view(-1, CLUSTER, 1)[:, :1]
        lists = graph._lists
        lists.positions[index] = (column + first)[..., :-1].reshape(-1, c).int()
        lists.distances[index] = best[..., :-1].reshape(-1, c)
        lists.reach[index] = best[..., -1].flatten()
        lists.listed[index] = True
    return graph


class TablePairs(RandomSampler):
    """A sampler that pairs rows from a fixed table `[n, k]` of neighbors, without a search."""

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.table = table

    def sample(self, storage: Storage, batch_size: int) -> tuple[Tensor, dict[str, Any]]:
        """Returns uniform anchors, each with one of its neighbors."""
        anchor, info = super().sample(storage, batch_size)
        column = torch.randint(self.table.shape[1], (batch_size,))
        return torch.stack([anchor, self.table[anchor, column]], -1), info


class BareFold(Transform):
    """Mixes pairs in a minimal way: no checks, and no rule except for terminal rows."""

    def __init__(self) -> None:
        super().__init__(in_keys=[], out_keys=[])
        self.beta = torch.distributions.Beta(0.75, 0.75, validate_args=False)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Folds `[B, 2]` to `[B]`."""
        anchor, partner = tensordict.unbind(-1)
        ends = anchor["next", "terminated"] | partner["next", "terminated"]
        weight = self.beta.sample(ends.shape).masked_fill_(ends, 1.0)
        for key in ("observation", "action", ("next", "observation"), ("next", "reward")):
            anchor[key] = torch.lerp(partner[key], anchor[key], weight)
        return anchor


def bench_sample(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Times `rb.sample()`: uniform, and NMER with every list built and 0 or 31 rows waiting.

    For comparison, `bare` pairs rows from a fixed table and folds them plainly: the least time that
    TorchRL takes.
    """
    results = []
    for task, (observations, actions) in TASKS.items():
        d = observations + actions
        for n in (size for size in args.sizes if size * d <= args.most):
            rows = make_rows(n, observations, actions)
            points = make_clusters(n, d)
            rows["observation"] = points[:n, :observations].clone()
            rows["action"] = points[:n, observations:].clone()
            plain, pairs = LazyTensorStorage(n), PairStorage(n)
            storages = {"nmer": pairs, "nmer, plain storage": plain}
            if n * d > _MANY:
                del storages["nmer, plain storage"]
            buffers = {"uniform": TensorDictReplayBuffer(storage=plain, batch_size=BATCH)}
            buffers["uniform"].extend(rows)
            pairs.set(torch.arange(n), rows)
            del rows
            stats = RunningStandardizer(d)
            stats.update(points[:n])
            graph = clustered_graph(points, stats.scale, n)
            table = graph.query(torch.arange(n), K, stats.scale)
            buffers["bare"] = TensorDictReplayBuffer(
                storage=plain, sampler=TablePairs(table), transform=BareFold(), batch_size=BATCH
            )
            state = graph.state_dict()
            del graph
            for name, storage in storages.items():
                buffer = make_replay_buffer("nmer", capacity=n, batch_size=BATCH, storage=storage)
                buffer.sampler.load_state_dict(state)
                buffer.sample()
                assert buffer.sampler.unit.search.stats()["lists"] > n - CLUSTER, "not loaded"
                buffers[name] = buffer
            del state, points
            calls = {name: buffer.sample for name, buffer in buffers.items()}
            times = side_by_side(calls, rounds=args.rounds, repeat=200)
            buffers["nmer"].extend(
                make_rows(31, observations, actions)
            )  # too few to insert: they wait
            buffers["nmer"].sample()
            calls = {name: calls[name] for name in ("uniform", "nmer")}
            waiting = side_by_side(calls, rounds=args.rounds, repeat=200)
            results.append(
                {
                    "task": task,
                    "d": d,
                    "rows": n,
                    "uniform us": 1e6 * times["uniform"],
                    "nmer us": 1e6 * times["nmer"],
                    "ratio": times["nmer"] / times["uniform"],
                    "ratio, bare": times["bare"] / times["uniform"],
                    "ratio, 31 waiting": waiting["nmer"] / waiting["uniform"],
                    "ratio, plain storage": times.get("nmer, plain storage", math.nan)
                    / times["uniform"],
                }
            )
            print(results[-1], flush=True)
    return results


def bench_upkeep(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Times inserting 128 arrivals into the graph, beside a matrix product of those shapes."""
    results = []
    for task, (observations, actions) in TASKS.items():
        d, n, block, blocks = observations + actions, args.rows, 128, 12
        points = make_clusters(n, d)
        new = points[torch.randperm(n)[: block * blocks]]
        points = torch.cat([points, new + 0.1 * torch.randn_like(new)])
        scale = 1 / points.double().std(0)
        graph = clustered_graph(points, scale, n)
        graph.write(torch.arange(n, n + 1), points[n : n + 1])
        left, out = points[:block].clone(), torch.empty(block, n)

        def product(left: Tensor = left, out: Tensor = out, graph: Any = graph, n: int = n) -> None:
            torch.mm(left, graph.table.points[:n].T, out=out)

        inserted, multiplied = [], []
        for start in range(n, n + block * blocks, block):
            multiplied.append(median_seconds(product, repeat=3, warm_up=1))
            graph.write(torch.arange(start, start + block), points[start : start + block])
            begin = time.perf_counter()
            graph.query(torch.tensor([0]), K, scale)
            inserted.append(time.perf_counter() - begin)
        insert, multiply = np.median(inserted), np.median(multiplied)
        results.append(
            {
                "task": task,
                "d": d,
                "rows": n,
                "product ms per row": 1e3 * float(multiply) / block,
                "upkeep ms per row": 1e3 * float(insert) / block,
                "ratio": float(insert / multiply),
            }
        )
        print(results[-1])
    return results


class HNSW:
    """A common approximate index; it becomes stale when the scale moves."""

    def __init__(self, points: Tensor, scale: Tensor) -> None:
        import faiss

        self.points = (points * scale).float().numpy()
        self.index = faiss.IndexHNSWFlat(points.shape[1], 32)
        self.index.add(self.points)

    def query(self, index: Tensor, k: int, scale: Tensor) -> Tensor:
        """Returns the k nearest, without the row itself."""
        found = torch.from_numpy(self.index.search(self.points[index.numpy()], k + 1)[1])
        order = (found == index.unsqueeze(1)).int().argsort(dim=1, stable=True)
        return found.gather(1, order)[:, :k]


def bench_query(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Times one batch of 256 x 10 neighbors with every search, and measures its recall."""
    results = []
    for task, (observations, actions) in TASKS.items():
        d = observations + actions
        for n in (size for size in args.sizes if size * d <= args.most):
            points = make_clusters(n, d)
            scale = 1 / points.double().std(0)
            index = torch.randint(n // CLUSTER * CLUSTER, (BATCH,))
            searches: dict[str, Any] = {"graph": clustered_graph(points, scale, n)}
            makers = {"torch": TorchSearch, "faiss": FaissSearch}
            if n * d <= 5e7:
                makers["keops"] = KeOpsSearch
            for name, make in makers.items():
                searches[name] = make()
                searches[name].write(torch.arange(n), points)
            if n * d <= 5e6:  # above, building the index alone takes many minutes
                searches["hnsw"] = HNSW(points, scale)
            row: dict[str, Any] = {"task": task, "d": d, "rows": n}
            for name in ("graph", "torch", "keops", "faiss", "hnsw"):
                if name not in searches:
                    row[f"{name} ms"] = row[f"{name} recall"] = float("nan")
                    continue
                search = searches[name]
                row[f"{name} recall"] = recall(points, index, search.query(index, K, scale), scale)
                row[f"{name} ms"] = 1e3 * median_seconds(
                    partial(search.query, index, K, scale),
                    repeat=50 if name in ("graph", "hnsw") else 2,
                    warm_up=1,
                )
            results.append(row)
            print(row)
    return results


def plot(name: str, results: list[dict[str, Any]], path: Path) -> None:
    """Plots the results."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6.4, 3.8), layout="constrained")
    if name == "upkeep":
        axes.bar([f"{r['task']}\nd={r['d']}" for r in results], [r["ratio"] for r in results])
        axes.set_ylabel("upkeep / matrix product")
    else:
        columns = ["ratio", "ratio, bare", "ratio, 31 waiting", "ratio, plain storage"]
        if name == "query":
            columns = [f"{s} ms" for s in ("graph", "torch", "keops", "faiss", "hnsw")]
        for task, style in zip(TASKS, ("-", "--", ":"), strict=True):
            rows = [r for r in results if r["task"] == task]
            for color, column in enumerate(columns):
                axes.plot(
                    [r["rows"] for r in rows],
                    [r[column] for r in rows],
                    style,
                    marker="o",
                    color=f"C{color}",
                    label=f"{column.removesuffix(' ms')}, {task}",
                )
        axes.set_xscale("log")
        axes.set_xlabel("rows stored")
        axes.set_ylabel("NMER / uniform, one sample" if name == "sample" else "ms for 256 queries")
        if name == "query":
            axes.set_yscale("log")
        axes.legend(fontsize=6, ncol=2 if name == "sample" else 3)
    figure.savefig(path, dpi=150)
    print(f"plot in {path}")


def main() -> None:
    """Runs one benchmark."""
    benches = {
        "sample": bench_sample,
        "upkeep": bench_upkeep,
        "query": bench_query,
    }
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", choices=benches)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sizes", type=int, nargs="+", default=[10_000, 100_000, 200_000, 10**6])
    parser.add_argument(
        "--most",
        type=float,
        default=math.inf,
        help="skip tables of more numbers; a million rows of Humanoid take 22 GB",
    )
    parser.add_argument("--rows", type=int, default=200_000, help="for upkeep")
    parser.add_argument("--out", type=Path, default=Path("docs/benchmarks"))
    args = parser.parse_args()
    logging.getLogger("torchrl").setLevel(logging.WARNING)
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    args.out.mkdir(parents=True, exist_ok=True)
    results = benches[args.name](args)
    write_table(results, args.out / f"{args.name}.csv")
    plot(args.name, results, args.out / f"{args.name}.png")


if __name__ == "__main__":
    main()
