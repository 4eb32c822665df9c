"""Measures NMER's cost on a GPU and that of uniform replay: sampling, writing, updates, frames.

    python recipes/benchmarks/gpu.py                                   # ten minutes on cuda:0
    python recipes/benchmarks/gpu.py --device cpu --sizes 10000 --minutes 3

It prints a table, and writes gpu.csv and gpu.png to `--out`. The graph's neighbor lists are built
by a shortcut, since the rows are drawn in clusters; sampling and writing work as in a real buffer.
A frame is the policy's action, its copy to the host, one row written, one sample for all gradient
steps, and those steps. It includes no simulator.
"""

from __future__ import annotations

import argparse
import csv
import logging
import math
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

import sac
import torch
from hydra import compose, initialize_config_dir
from measure import make_clusters, make_rows, to_markdown
from nmer_recipes.blocks import Batch, as_block
from nmer_recipes.config import CONF, register_resolvers
from nmer_recipes.provenance import describe_source
from nmer_recipes.replay import store
from search import TASKS, K, clustered_graph
from tensordict import TensorDict
from torchrl.data import TensorDictReplayBuffer
from tqdm import tqdm

from nmer_torchrl import make_replay_buffer
from nmer_torchrl.tracking.standardize import RunningStandardizer

METHODS = ("uniform", "nmer, keops", "nmer, torch", "nmer, graph")
BATCH = 256
BLOCKS = (1, 20)  # gradient steps per frame
_ORDER = {"sample": 0, "write": 1, "frame": 2}
_SECONDS = 0.5  # approximate duration of one measurement
_MOST = 200  # calls at most


class Measurement(NamedTuple):
    """One measurement."""

    what: str
    method: str
    d: int
    rows: int
    batches: int
    ms: float


class Agent:
    """SAC's policy and update for a task with these widths."""

    def __init__(self, args: argparse.Namespace, observations: int, actions: int) -> None:
        register_resolvers()
        self.device = torch.device(args.device)
        options = [f"device={args.device}", f"compile={args.compile}", f"batch_size={BATCH}"]
        options += ["grad_clip=null", "actor_l2=0", f"hidden=[{args.hidden},{args.hidden}]"]
        with initialize_config_dir(str(CONF), version_base="1.3"):
            cfg = compose("sac", overrides=options)
        _, self.policy, loss = sac.make_agent(cfg, observations, actions, self.device)
        self.update, _ = sac.make_update(cfg, loss)
        self.observation = torch.zeros(observations, device=self.device)

    @torch.no_grad()
    def act(self) -> torch.Tensor:
        """Returns an action on the host."""
        return self.policy(TensorDict(observation=self.observation))["action"].cpu()

    def learn(self, block: Batch) -> None:
        """Takes the gradient steps of a block."""
        self.update(block, 0)


def seconds(call: Callable[[], Any], device: torch.device, *, warm_up: int = 2) -> float:
    """Returns the mean time of a call, including the device's work."""

    def run(times: int) -> float:
        _wait(device)
        start = time.perf_counter()
        for _ in range(times):
            call()
        _wait(device)
        return (time.perf_counter() - start) / times

    run(warm_up)
    return run(max(1, min(_MOST, int(_SECONDS / max(run(1), 1e-9)))))


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def make_buffer(method: str, n: int, observations: int, actions: int, device: torch.device) -> Any:
    """Returns a full buffer of clustered rows, and rows to write to it."""
    d = observations + actions
    with torch.device(device):
        rows, points = make_rows(n, observations, actions), make_clusters(n, d)
    rows["observation"], rows["action"] = points[:, :observations], points[:, observations:]
    kind, _, search = method.partition(", ")
    options = {"k": K, "search": search} if search else {}
    buffer = make_replay_buffer(kind, capacity=n, batch_size=BATCH, device=device, **options)
    buffer.extend(rows)
    if search == "graph":
        statistics = RunningStandardizer(d)
        statistics.update(points)
        graph = clustered_graph(points, statistics.scale, n)
        buffer.sampler.load_state_dict(graph.state_dict())  # the lists, read at the first draw
    return buffer, rows[:_MOST].clone()


def measure(
    buffer: TensorDictReplayBuffer, rows: TensorDict, agent: Agent
) -> Iterator[tuple[str, int, float]]:
    """Yields the name of a measurement, the number of batches, and seconds."""
    device, count = agent.device, 0

    def write() -> None:
        nonlocal count
        count += 1
        store(buffer, rows[count % len(rows)], None)

    def draw(batches: int) -> TensorDict:
        return buffer.sample(batches * BATCH)

    def frame(batches: int) -> None:
        agent.act()
        write()
        agent.learn(as_block(draw(batches), BATCH, device))

    for batches in BLOCKS:
        yield "sample", batches, seconds(lambda batches=batches: draw(batches), device)
    yield "write", 1, seconds(write, device)
    for batches in BLOCKS:
        yield "frame", batches, seconds(lambda batches=batches: frame(batches), device, warm_up=4)


def run(args: argparse.Namespace) -> list[Measurement]:
    """Measures until everything is done or the time is up; small buffers come first."""
    device, cells = torch.device(args.device), []
    end = time.monotonic() + 60 * args.minutes
    agents = {}
    tasks = {task: widths for task, widths in TASKS.items() if sum(widths) in args.widths}
    for task, widths in tasks.items():
        agents[task] = Agent(args, *widths)
        for batches in BLOCKS:
            with torch.device(device):
                block = as_block(make_rows(batches * BATCH, *widths), BATCH, device)
            taken = seconds(lambda a=agents[task], b=block: a.learn(b), device, warm_up=4)
            cells.append(Measurement("update", "", sum(widths), 0, batches, 1e3 * taken))
    work = [(n, task, method) for n in args.sizes for task in tasks for method in args.methods]
    for n, task, method in tqdm(work, mininterval=1, disable=None):
        if time.monotonic() > end:
            print(f"Out of time: skipped {method} with {n:,} rows of {task} and all later ones.")
            break
        d = sum(TASKS[task])
        try:
            buffer, rows = make_buffer(method, n, *TASKS[task], device)
            for what, batches, taken in measure(buffer, rows, agents[task]):
                cells.append(Measurement(what, method, d, n, batches, 1e3 * taken))
        except (ImportError, torch.OutOfMemoryError) as error:
            reason = str(error).splitlines()[0]
            print(f"Skipped {method} with {n:,} rows of {task}: {reason}", file=sys.stderr)
    return cells


def describe_machine(device: torch.device) -> dict[str, str]:
    """Returns device, driver and versions."""
    names = ("nmer-torchrl", "torch", "torchrl", "tensordict", "pykeops")
    name, driver = describe_source()["processor"], ""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        result = subprocess.run(query, capture_output=True, text=True, check=False)
        driver = f"{result.stdout.split()[0]}, CUDA {torch.version.cuda}" if result.stdout else ""
    return {
        "device": name,
        "driver": driver,
        "versions": ", ".join(f"{package} {_version(package)}" for package in names),
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except ImportError:
        return "not installed"


def show(cells: list[Measurement], machine: dict[str, str]) -> str:
    """Returns a table of milliseconds with a column per method."""
    updates = {(c.d, c.batches): c.ms for c in cells if c.what == "update"}
    found = {(c.what, c.d, c.rows, c.batches, c.method): c.ms for c in cells}
    keys = dict.fromkeys((c.what, c.d, c.rows, c.batches) for c in cells if c.what != "update")
    lines = [
        [what, d, n, f"{b} x {BATCH}" if what != "write" else "1 row"]
        + [found.get((what, d, n, b, method), math.nan) for method in METHODS]
        for what, d, n, b in sorted(keys, key=lambda key: (_ORDER[key[0]], key[1], key[3], key[2]))
    ]
    table = to_markdown(["ms", "d", "rows", "of", *METHODS], lines)
    steps = to_markdown(
        ["update, ms", "d", "of"], [[ms, d, f"{b} x {BATCH}"] for (d, b), ms in updates.items()]
    )
    head = "\n".join(f"{name}: {value}" for name, value in machine.items() if value)
    return f"{head}\n\n{table}\n\n{steps}"


def write_csv(cells: list[Measurement], machine: dict[str, str], path: Path) -> None:
    """Writes a line per measurement, together with the machine's description."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*Measurement._fields, *machine])
        writer.writerows([*cell[:-1], f"{cell.ms:.4g}", *machine.values()] for cell in cells)


def plot(cells: list[Measurement], machine: dict[str, str], path: Path) -> None:
    """Plots times over the number of rows: a row per measurement, a column per width."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import LogFormatter, NullFormatter

    widths = sorted({cell.d for cell in cells})
    kinds = [("sample", 1), ("sample", 20), ("write", 1), ("frame", 1), ("frame", 20)]
    figure, grid = plt.subplots(
        len(kinds),
        len(widths),
        figsize=(3.2 * len(widths), 2.1 * len(kinds)),
        sharex=True,
        sharey="row",
        squeeze=False,
        layout="constrained",
    )
    for row, (what, batches) in zip(grid, kinds, strict=True):
        of = "one row" if what == "write" else f"{batches} x {BATCH}"
        row[0].set_ylabel(f"{what}, {of}\n[ms]")
        for axes, d in zip(row, widths, strict=True):
            some = [c for c in cells if (c.what, c.batches, c.d) == (what, batches, d)]
            for color, method in enumerate(METHODS):
                line = [(c.rows, c.ms) for c in some if c.method == method]
                if line:
                    axes.plot(*zip(*line, strict=True), marker="o", color=f"C{color}", label=method)
            steps = [c.ms for c in cells if (c.what, c.batches, c.d) == ("update", batches, d)]
            if what == "frame" and steps:
                axes.axhline(
                    steps[0], color="gray", linestyle=":", label="its gradient steps alone"
                )
            axes.set(xscale="log", yscale="log")
            for axis in (axes.xaxis, axes.yaxis):
                axis.set_major_formatter("{x:,g}")
            axes.xaxis.set_minor_formatter(NullFormatter())
            axes.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(1.5, 0.5)))
            axes.grid(alpha=0.3)
    for axes, d in zip(grid[0], widths, strict=True):
        axes.set_title(f"d = {d}")
    for axes in grid[-1]:
        axes.set_xlabel("rows stored")
    handles, labels = grid[-1][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, fontsize=8, frameon=False)
    figure.suptitle(f"{machine['device']} {machine['driver']}", fontsize=9)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> None:
    """Measures, prints a table, and writes a CSV and a plot."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = " (default: %(default)s)"
    sizes, widths = [10_000, 100_000, 1_000_000], [23, 113, 365]
    add = parser.add_argument
    add("--device", default="cuda:0", help=f"device to measure{default}")
    add("--sizes", type=int, nargs="+", default=sizes, help=f"numbers of stored rows{default}")
    add("--widths", type=int, nargs="+", default=widths, help=f"dimensions of a point{default}")
    what = f"methods to measure{default}"
    add("--methods", nargs="+", default=METHODS, choices=METHODS, metavar="METHOD", help=what)
    add("--minutes", type=float, default=10, help=f"time limit for new measurements{default}")
    add("--hidden", type=int, default=256, help=f"units of each layer{default}")
    add("--threads", type=int, default=1, help=f"CPU threads{default}")
    compiled = ("auto", "true", "false")
    add("--compile", choices=compiled, default="auto", help=f"use torch.compile{default}")
    add("--out", type=Path, default=Path(), help=f"output directory{default}")
    args = parser.parse_args()
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        raise SystemExit("gpu.py: no CUDA device was found; try --device cpu --sizes 10000.")
    logging.getLogger("torchrl").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", module="torchrl|tensordict")
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    args.out.mkdir(parents=True, exist_ok=True)
    cells, machine = run(args), describe_machine(torch.device(args.device))
    write_csv(cells, machine, args.out / "gpu.csv")
    plot(cells, machine, args.out / "gpu.png")
    print(f"\n{show(cells, machine)}\n")
    print(
        f"Wrote {args.out / 'gpu.csv'} and {args.out / 'gpu.png'}. Measurements on GPUs are "
        "welcome: please open an issue in the project's repository and attach gpu.csv."
    )


if __name__ == "__main__":
    main()
