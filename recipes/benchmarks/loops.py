"""Updates per second of the recipes beside plain PyTorch loops, Stable-Baselines3 and SBX.

    python -m venv peers && peers/bin/pip install sbx-rl "gymnasium[mujoco]"  # both libraries
    python recipes/benchmarks/loops.py --peers peers/bin/python  # every agent
    python recipes/benchmarks/loops.py --algorithms sac redq --ratios 1
    python recipes/benchmarks/loops.py --loops plain recipe     # without what takes long to compile
    python recipes/benchmarks/loops.py --updates 20 --rounds 1  # whether all of it runs
    python recipes/benchmarks/loops.py --preload ./libmkl_amd.so  # MKL with AVX-512 on AMD, too

Uniform replay on HalfCheetah-v5 with equal networks, batches and replay ratios. Each loop runs in a
process of its own on the same core, with one thread, in turns. It is timed over whole frames after
some for warming up: environment, storing, sampling and updates count, evaluation and compiling do
not. Of the agents here, Stable-Baselines3 and SBX have TD3, SAC and DDPG.
"""

from __future__ import annotations

import argparse
import csv
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import plain
import torch
from measure import write_table
from tqdm import tqdm

RECIPES = Path(__file__).parents[1]
LOOPS = ("plain", "SB3", "SBX", "recipe", "recipe, compiled")
PEERS = {"SB3": "stable_baselines3", "SBX": "sbx"}


class Setup(NamedTuple):
    """How an agent is timed.

    Args:
        name: In the table.
        make: Makes the plain agent, given the numbers of observation entries and of action
            dimensions, and the units of its layers.
        ratios: Replay ratios by default.
        batch: Rows of a batch.
        hidden: Units of the layers.
        updates: That are timed.
        recipe: The recipe's file, if it is not named after the agent.
        options: What else the recipe needs to be told to be the same as the plain agent.
        stable: The name of the agent in Stable-Baselines3 and SBX, if they have it.
    """

    name: str
    make: Callable[[int, int, tuple[int, ...]], Any]
    ratios: tuple[int, ...]
    batch: int = 256
    hidden: tuple[int, ...] = (256, 256)
    updates: int = 1_500
    recipe: str | None = None
    options: Mapping[str, Any] = {}
    stable: str | None = None


_WIDE: dict[str, Any] = {"batch": 100, "hidden": (400, 300)}
_DROQ = {"num_critics": 2, "dropout": 0.01, "layer_norm": True, "policy_delay": 20}
AGENTS = {
    # Its targets move with its actor, as those of others do.
    "td3": Setup("TD3", plain.TD3, (1, 20), **_WIDE, options={"target_interval": 2}, stable="TD3"),
    "sac": Setup("SAC", plain.SAC, (1, 20), stable="SAC"),
    "ddpg": Setup("DDPG", plain.DDPG, (1,), **_WIDE, stable="DDPG"),
    "redq": Setup("REDQ", plain.REDQ, (20,), updates=500, options={"policy_delay": 20}),
    "droq": Setup("DroQ", plain.DroQ, (20,), recipe="redq", options=_DROQ),
    "crossq": Setup("CrossQ, critics of 256 units", plain.CrossQ, (1,)),
    "sunrise": Setup("SUNRISE", plain.SUNRISE, (1,), updates=300),
}


def count_frames(updates: int, ratio: int) -> tuple[int, int]:
    """Returns how many frames are timed, and how many with updates go before them."""
    frames = max(2, updates // ratio)
    return frames, min(math.ceil(200 / ratio), frames - 1)


def time_plain(algorithm: str, ratio: int, updates: int) -> float:
    """Returns the seconds for each update of a hand-written loop with a ring of NumPy arrays."""
    setup, (frames, warm_up) = AGENTS[algorithm], count_frames(updates, ratio)
    bounds = np.float32(-1.0), np.float32(1.0)
    env = gymnasium.wrappers.RescaleAction(gymnasium.make("HalfCheetah-v5"), *bounds)
    agent = setup.make(17, 6, setup.hidden)
    keys = ("observation", "action", ("next", "observation"), ("next", "reward"))
    ring: dict[Any, np.ndarray] = {
        key: np.empty((2 * frames, width), np.float32)
        for key, width in zip(keys, (17, 6, 17, 1), strict=True)
    }
    ring["next", "terminated"] = np.empty((2 * frames, 1), bool)
    masks: dict[Any, np.ndarray] = {}
    if algorithm == "sunrise":  # which members learn from a row; one at least does
        drawn = np.random.rand(2 * frames, len(agent.members))
        masks["mask"] = (drawn < 0.5) | (drawn == drawn.min(1, keepdims=True))
    observation, begin = env.reset(seed=0)[0], 0.0
    for frame in range(2 * frames):
        if frame == frames:
            begin = time.perf_counter()
        explore = frame < frames - warm_up
        action = env.action_space.sample() if explore else agent.act(observation)
        after, reward, terminated, truncated, _ = env.step(action)
        row = (observation, action, after, reward, terminated)
        for array, value in zip(ring.values(), row, strict=True):
            array[frame] = value
        observation = env.reset()[0] if terminated or truncated else after
        for _ in range(0 if explore else ratio):
            index = np.random.randint(frame + 1, size=setup.batch)
            entries = (ring | masks).items()
            agent.update({key: torch.from_numpy(array[index]) for key, array in entries})
    return (time.perf_counter() - begin) / (frames * ratio)


def time_peer(loop: str, algorithm: str, ratio: int, updates: int, python: str) -> float:
    """Returns the seconds for each update of Stable-Baselines3 or SBX, run by that Python."""
    setup, (frames, warm_up) = AGENTS[algorithm], count_frames(updates, ratio)
    assert setup.stable is not None
    command = [python, f"{RECIPES}/benchmarks/peers.py", PEERS[loop], setup.stable]
    numbers = {"ratio": ratio, "frames": frames, "first": warm_up, "batch": setup.batch}
    command += [f"--{name}={value}" for name, value in numbers.items()]
    command += ["--hidden", *map(str, setup.hidden)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return float(done.stdout.split()[-1])


def time_recipe(algorithm: str, ratio: int, updates: int, **settings: Any) -> float:
    """Returns the seconds for each update of a recipe with these settings, from its metrics."""
    setup, (frames, warm_up) = AGENTS[algorithm], count_frames(updates, ratio)
    with tempfile.TemporaryDirectory() as folder:
        options = {
            "env": "HalfCheetah",
            "replay": "uniform",
            "logger": "none",
            "total_frames": 2 * frames,
            "random_frames": frames - warm_up,
            "eval_every": frames,
            "eval_episodes": 1,
            "checkpoint_every": 2 * frames,
            "replay_ratio": ratio,
            "actor_l2": 0,
            "grad_clip": "null",
            "device": "cpu",
            "batch_size": setup.batch,
            "hidden": list(setup.hidden),
            "critic_hidden": list(setup.hidden),
            "run_dir": f"{folder}/run",
            **setup.options,
            **settings,
        }
        command = [sys.executable, f"{RECIPES}/{setup.recipe or algorithm}.py"]
        subprocess.run(
            command + [f"{name}={value}" for name, value in options.items()],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        with open(f"{folder}/run/metrics.csv") as file:
            row = list(csv.DictReader(file))[1]
    busy = 1.0 - float(row["time/share_evaluation"])
    return busy / float(row["time/updates_per_second"])


def time_loop(
    loop: str, algorithm: str, ratio: int, updates: int | None = None, peers: str = sys.executable
) -> float:
    """Returns the seconds for each update of one of `LOOPS`; `peers` is the Python of others."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    updates = updates or AGENTS[algorithm].updates
    if loop == "plain":
        return time_plain(algorithm, ratio, updates)
    if loop in PEERS:
        return time_peer(loop, algorithm, ratio, updates, peers)
    return time_recipe(algorithm, ratio, updates, compile=loop == "recipe, compiled")


def stay_on_one_core() -> None:
    """Keeps this process, and those that it starts, on the last core that it may use."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})


def has_loop(loop: str, algorithm: str) -> bool:
    """Returns whether an agent has such a loop."""
    return loop not in PEERS or AGENTS[algorithm].stable is not None


def make_row(algorithm: str, ratio: int, seconds: Mapping[str, float]) -> dict[str, Any]:
    """Returns a row of the table from the seconds of each loop; a loop that is missing is empty."""
    row: dict[str, Any] = {"algorithm": AGENTS[algorithm].name, "replay ratio": ratio}
    row |= {f"{loop}, updates/s": 1 / seconds[loop] if loop in seconds else "" for loop in LOOPS}
    for loop in LOOPS[3:]:
        for other in LOOPS[:3]:
            both = loop in seconds and other in seconds
            row[f"{loop} / {other}"] = seconds[loop] / seconds[other] if both else ""
    return row


def main(arguments: list[str] | None = None) -> None:
    """Runs the loops in turns and writes a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--algorithms", nargs="+", choices=AGENTS, default=list(AGENTS))
    parser.add_argument("--loops", nargs="+", choices=LOOPS, default=LOOPS)
    parser.add_argument("--ratios", type=int, nargs="+", help="by default each agent has its own")
    parser.add_argument("--updates", type=int, help="that are timed; by default 300 to 1,500")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("docs/benchmarks"))
    parser.add_argument("--name", default="loops", help="of the CSV")
    parser.add_argument("--peers", default=sys.executable, help="Python with SB3 and SBX")
    parser.add_argument(
        "--preload", help="library with which PyTorch's loops are timed again, in a second table"
    )
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.one:
        loop, algorithm, ratio = args.one
        print(time_loop(loop, algorithm, int(ratio), args.updates, args.peers))
        return
    args.out.mkdir(parents=True, exist_ok=True)
    tasks = [(a, r) for a in args.algorithms for r in args.ratios or AGENTS[a].ratios]
    loops = [(loop, None) for loop in args.loops]
    if args.preload:
        loops += [(loop, args.preload) for loop in args.loops if loop != "SBX"]  # has no PyTorch
    turns = [(*task, *loop) for task in tasks for loop in loops if has_loop(loop[0], task[0])]
    times: dict[tuple[str, int, str, str | None], list[float]] = {turn: [] for turn in turns}
    more = ["--peers", args.peers, *(["--updates", str(args.updates)] if args.updates else [])]
    bar = tqdm(total=args.rounds * len(turns), unit="loop")
    for _ in range(args.rounds):
        for turn in turns:
            times[turn].append(run_loop(*turn, more))
            bar.update()
    bar.close()
    for preload in [None, args.preload] if args.preload else [None]:
        name = f"{args.name}_preload" if preload else args.name
        results = []
        for task in tasks:
            found = {loop: times.get((*task, loop, preload)) for loop in LOOPS}
            found["SBX"] = times.get((*task, "SBX", None))
            medians = {loop: statistics.median(each) for loop, each in found.items() if each}
            results.append(make_row(*task, medians))
        write_table(results, args.out / f"{name}.csv")
        rounds = [
            {
                "algorithm": AGENTS[algorithm].name,
                "replay ratio": ratio,
                "loop": loop,
                "round": number,
                "ms": 1e3 * seconds,
            }
            for (algorithm, ratio, loop, library), found in times.items()
            for number, seconds in enumerate(found, 1)
            if library == preload
        ]
        write_table(rounds, args.out / f"{name}_rounds.csv")


def run_loop(
    algorithm: str, ratio: int, loop: str, preload: str | None, more: Sequence[str]
) -> float:
    """Returns the seconds for each update of a loop that runs in a process of its own."""
    done = subprocess.run(
        [sys.executable, __file__, "--one", loop, algorithm, str(ratio), *more],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | ({"LD_PRELOAD": preload} if preload else {}),
        preexec_fn=stay_on_one_core,
    )
    if done.returncode:
        raise SystemExit(f"{loop} of {algorithm} failed:\n{done.stderr}")
    return float(done.stdout.split()[-1])


if __name__ == "__main__":
    main()
