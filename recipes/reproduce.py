"""Prints the commands behind each table of the paper, their cost, and their time on this machine.

python recipes/reproduce.py                    # lists the tables and their costs
python recipes/reproduce.py main               # prints the commands; `| sh` runs them
python recipes/reproduce.py main --estimate    # measures for a minute, then prints the hours
python recipes/reproduce.py main --seeds 2 --launcher submitit_slurm
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import importlib
import io
import itertools
import logging
import math
import os
import shlex
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from nmer_recipes import paper

FRAMES, SEEDS, SECONDS = paper.FRAMES, paper.SEEDS, 60.0
EVALUATIONS, EPISODES, LIMIT = 100, 5, 1_000  # evaluations, episodes of each, steps of each
_KINDS = {name: kind for kind, name in paper.KINDS.items()}
_SETTINGS = {"k": "replay.k"} | {n: n for n in ("replay_ratio", "actor_l2", "grad_clip")}


@dataclass(frozen=True)
class Setting:
    """A setting of a table, run with several seeds; `given` differs from the defaults."""

    algorithm: str
    env: str
    kind: str
    given: tuple[str, ...] = field(default=())

    @property
    def updates(self) -> int:
        """Number of gradient steps of a run."""
        for override in self.given:
            if override.startswith("replay_ratio="):
                ratio = float(override.partition("=")[2])
                break
        else:
            ratio = float(self._default("replay_ratio") or 0)
        return math.floor((FRAMES - int(self._default("random_frames") or 0)) * ratio)

    def _default(self, name: str) -> int | float | None:
        return paper.setting(name, self.algorithm, self.env, self.kind)


def tables() -> dict[str, list[Setting]]:
    """Returns the cells of each table, by the table's name."""
    with (Path(paper.__file__).parent / "paper.csv").open() as file:
        rows = list(csv.DictReader(file))
    cells = {"main": [_cell(row) for row in rows if row["best"] == "1"]}
    # These tables are not among the ablations: all methods use NMER's settings.
    five = [env for env in paper.LOCOMOTION if env != "Humanoid"]
    kinds = ("1nn", "mixup", "s4rl", "noisy", "nmer")
    cells["additional"] = [Setting("td3", env, kind) for env in five for kind in kinds]
    cells["sunrise"] = [Setting("td3", env, "nmer") for env in five if env != "Swimmer"]
    for row in rows:
        name = f"{row['algorithm'].lower()}-{row['env']}"
        cells.setdefault(name, []).append(_cell(row))
    return cells


def _cell(row: dict[str, str]) -> Setting:
    """Converts a row of the ablations; leaves out defaults, so that tables share their runs."""
    algorithm, env, kind = row["algorithm"].lower(), row["env"], _KINDS[row["replay"]]
    given = []
    for column, name in _SETTINGS.items():
        default = paper.setting(column, algorithm, env, kind)
        if row[column]:
            value = float(row[column])
            if value != default:
                given.append(f"{name}={value:g}")
        elif column == "grad_clip" and default is not None:
            given.append("grad_clip=null")
    return Setting(algorithm, env, kind, tuple(given))


def commands(cells: list[Setting], seeds: int, launcher: str) -> list[str]:
    """Returns the fewest command lines that run exactly these cells."""
    methods: dict[tuple[str, tuple[str, ...], str], list[str]] = {}
    for cell in cells:
        methods.setdefault((cell.algorithm, cell.given, cell.env), []).append(cell.kind)
    envs: dict[tuple[str, tuple[str, ...], tuple[str, ...]], list[str]] = {}
    for (algorithm, given, env), kinds in methods.items():
        envs.setdefault((algorithm, given, tuple(kinds)), []).append(env)
    lines = []
    for (algorithm, given, kinds), tasks in envs.items():
        overrides = [f"env={','.join(tasks)}", "env.version=v4", f"replay={','.join(kinds)}"]
        overrides += [*given, f"seed=range({seeds})", f"hydra/launcher={launcher}"]
        recipe = os.path.relpath(Path(__file__).with_name(f"{algorithm}.py"))
        lines.append(shlex.join(["python", recipe, "-m", *overrides]))
    return lines


@dataclass(frozen=True)
class Costs:
    """Seconds per frame, per update and per step of an evaluation's episodes."""

    frame: float
    update: float
    step: float

    def seconds(self, cell: Setting) -> float:
        """Returns the time of one run of a cell, if evaluation episodes last to their limit."""
        steps = EVALUATIONS * EPISODES * LIMIT
        return FRAMES * self.frame + cell.updates * self.update + steps * self.step


def measure(cell: Setting, seconds: float) -> Costs:
    """Runs a cell at its settings for about `seconds`, then stops it."""
    from hydra import compose, initialize_config_dir
    from nmer_recipes.config import register_resolvers
    from omegaconf import OmegaConf

    ratio = cell.updates / FRAMES
    every = math.ceil(200 / ratio)  # one evaluation per 200 updates
    register_resolvers()
    recipe = importlib.import_module(cell.algorithm)
    logging.getLogger("torchrl").setLevel(logging.WARNING)
    with tempfile.TemporaryDirectory() as folder, _interrupted(Path(folder), seconds):
        with initialize_config_dir(str(Path(__file__).parent / "conf"), version_base="1.3"):
            overrides = [f"env={cell.env}", "env.version=v4", f"replay={cell.kind}", *cell.given]
            overrides += [f"random_frames={every}", f"eval_every={every}", f"run_dir={folder}/run"]
            overrides += ["buffer_size=20000", "compile=false", "logger=none"]
            cfg = compose(cell.algorithm, overrides)
        OmegaConf.resolve(cfg)
        with (
            warnings.catch_warnings(),
            contextlib.suppress(SystemExit),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            warnings.simplefilter("ignore")
            recipe.train(cfg)
        with (Path(folder) / "run" / "metrics.csv").open() as file:
            rows = [{k: float(v or 0) for k, v in row.items()} for row in csv.DictReader(file)]
    return costs(rows)


def costs(rows: list[dict[str, float]]) -> Costs:
    """Computes the costs from a run's metrics; the first row is from before any update."""
    spent = dict.fromkeys(("environment", "upkeep", "sample", "update", "evaluation"), 0.0)
    for before, row in itertools.pairwise(rows):
        passed = row["time/seconds"] - before["time/seconds"]
        for part in spent:
            spent[part] += row[f"time/share_{part}"] * passed
    frames = rows[-1]["frames"] - rows[0]["frames"]
    steps = sum(row["eval/length"] for row in rows[1:]) * EPISODES
    return Costs(
        (spent["environment"] + spent["upkeep"]) / frames,
        (spent["sample"] + spent["update"]) / rows[-1]["train/updates"],
        spent["evaluation"] / steps,
    )


@contextlib.contextmanager
def _interrupted(folder: Path, seconds: float) -> Iterator[None]:
    """Stops a run as Ctrl-C does, once time is up and it has logged a row with updates."""

    def stop(*_: object) -> None:
        path = folder / "run" / "metrics.csv"
        if path.exists() and len(path.read_text().splitlines()) >= 3:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.raise_signal(signal.SIGINT)

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def estimate(cells: list[Setting], seeds: int) -> None:
    """Measures each algorithm at the setting with the most updates, and prints hours."""
    algorithms = sorted({cell.algorithm for cell in cells})
    total = 0.0
    for algorithm in algorithms:
        its = [cell for cell in cells if cell.algorithm == algorithm]
        most = max(its, key=lambda cell: (cell.updates, cell.kind == "nmer"))
        clocks = time.perf_counter(), time.process_time()
        found = measure(most, SECONDS / len(algorithms))
        share = (time.process_time() - clocks[1]) / (time.perf_counter() - clocks[0])
        seconds = [found.seconds(cell) for cell in its]
        total += sum(seconds) * seeds
        print(
            f"{algorithm}: {1 / found.update:.0f} updates/s and {1 / found.frame:.0f} frames/s, "
            f"measured with env={most.env} replay={most.kind}; a run takes "
            f"{min(seconds) / 3600:.1f} to {max(seconds) / 3600:.1f} h"
        )
        if share < 0.8:
            print(f"  measured with {share:.0%} of a core; an idle machine is faster")
    print(
        f"all {len(cells) * seeds} runs: {total / 3600:,.0f} h one after the other, on one thread "
        "each and without torch.compile"
    )


def describe(name: str, cells: list[Setting], seeds: int) -> str:
    """Describes in one line how much a table computes."""
    runs, updates = len(cells) * seeds, sum(cell.updates for cell in cells) * seeds
    return f"{name}: {runs} runs, {runs * FRAMES:,} frames, {updates:,} gradient steps"


def main(arguments: list[str] | None = None) -> None:
    """Lists the tables, or prints the commands of one, or estimates its hours."""
    known = tables()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = " (default: %(default)s)"
    add = parser.add_argument
    table = "table of the paper; without it, all tables are listed"
    add("table", nargs="?", choices=list(known), metavar="TABLE", help=table)
    add("--estimate", action="store_true", help="measure, and print the time for all runs")
    add("--seeds", type=int, default=SEEDS, help=f"number of seeds for each cell{default}")
    add("--launcher", default="joblib", help=f"Hydra launcher{default}")
    options = parser.parse_args(arguments)
    if options.seeds < 1:
        parser.error(f"--seeds {options.seeds} is out of range; give an integer, at least 1")
    if options.table is None:
        if options.estimate:
            parser.error("--estimate needs a table, as in `reproduce.py main --estimate`")
        for name, cells in known.items():
            print(describe(name, cells, options.seeds))
        return
    cells = known[options.table]
    # Only commands go to standard output, so that it can be piped into a shell.
    print(describe(options.table, cells, options.seeds), file=sys.stderr)
    if options.estimate:
        estimate(cells, options.seeds)
    else:
        print("\n".join(commands(cells, options.seeds, options.launcher)))


if __name__ == "__main__":
    main()
