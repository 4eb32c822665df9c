"""Updates per second of the recipes beside a plain PyTorch loop and Stable-Baselines3.

    pip install stable-baselines3
    python recipes/benchmarks/loops.py               # TD3 and SAC at replay ratios 1 and 20
    python recipes/benchmarks/loops.py --algorithms sac --ratios 1

Uniform replay on HalfCheetah-v5 with equal networks, batches and replay ratios, one thread. Each
loop runs in a process of its own, in turns, and is timed over whole frames after some for warming
up: environment, storing, sampling and updates count, evaluation does not.
"""

from __future__ import annotations

import argparse
import csv
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from measure import write_table
from plain import SAC, TD3
from tqdm import tqdm

RECIPES = Path(__file__).parents[1]
BATCH = {"td3": 100, "sac": 256}
HIDDEN = {"td3": (400, 300), "sac": (256, 256)}
LOOPS = ("plain", "stable-baselines3", "recipe", "recipe, compiled")
UPDATES = 1_500  # that are timed
WARM_UP = 200


def time_plain(algorithm: str, ratio: int) -> float:
    """Seconds for each update of a hand-written loop with a ring of NumPy arrays."""
    env = gymnasium.wrappers.RescaleAction(gymnasium.make("HalfCheetah-v5"), -1.0, 1.0)
    agent = (TD3 if algorithm == "td3" else SAC)(17, 6, HIDDEN[algorithm])
    frames, warm_up = UPDATES // ratio, WARM_UP // ratio
    keys = ("observation", "action", ("next", "observation"), ("next", "reward"))
    ring: dict[Any, np.ndarray] = {
        key: np.empty((2 * frames, width), np.float32)
        for key, width in zip(keys, (17, 6, 17, 1), strict=True)
    }
    ring["next", "terminated"] = np.empty((2 * frames, 1), bool)
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
            index = np.random.randint(frame + 1, size=BATCH[algorithm])
            agent.update({key: torch.from_numpy(array[index]) for key, array in ring.items()})
    return (time.perf_counter() - begin) / (frames * ratio)


def time_stable_baselines(algorithm: str, ratio: int) -> float:
    """Seconds for each update of Stable-Baselines3."""
    import stable_baselines3
    from stable_baselines3.common.callbacks import BaseCallback

    frames, warm_up = UPDATES // ratio, WARM_UP // ratio
    times: dict[int, float] = {}

    class Watch(BaseCallback):
        def _on_step(self) -> bool:
            times[self.num_timesteps] = time.perf_counter()
            return True

    make = stable_baselines3.TD3 if algorithm == "td3" else stable_baselines3.SAC
    model = make(
        "MlpPolicy",
        gymnasium.make("HalfCheetah-v5"),
        buffer_size=2 * frames,
        learning_starts=frames - warm_up,
        batch_size=BATCH[algorithm],
        train_freq=1,
        gradient_steps=ratio,
        policy_kwargs={"net_arch": list(HIDDEN[algorithm])},
        device="cpu",
    )
    model.learn(2 * frames + 1, callback=Watch())
    return (times[2 * frames + 1] - times[frames + 1]) / (frames * ratio)


def time_recipe(algorithm: str, ratio: int, *, compiled: bool) -> float:
    """Seconds for each update of a recipe, as its own metrics tell."""
    frames, warm_up = UPDATES // ratio, WARM_UP // ratio
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
            "compile": compiled,
            "device": "cpu",
            "run_dir": f"{folder}/run",
        }
        if algorithm == "td3":
            options["target_interval"] = 2  # with the actor, as the others do
        command = [sys.executable, f"{RECIPES}/{algorithm}.py"]
        subprocess.run(
            command + [f"{name}={value}" for name, value in options.items()],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        with open(f"{folder}/run/metrics.csv") as file:
            row = list(csv.DictReader(file))[1]
    busy = 1.0 - float(row["time/share_evaluation"])
    return busy / float(row["time/updates_per_second"])


def time_loop(loop: str, algorithm: str, ratio: int) -> float:
    """Seconds for each update of one of `LOOPS`, in this process."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if loop == "plain":
        return time_plain(algorithm, ratio)
    if loop == "stable-baselines3":
        return time_stable_baselines(algorithm, ratio)
    return time_recipe(algorithm, ratio, compiled=loop == "recipe, compiled")


def main() -> None:
    """Runs the loops in turns and writes a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--algorithms", nargs="+", choices=BATCH, default=list(BATCH))
    parser.add_argument("--ratios", type=int, nargs="+", default=[1, 20])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("docs/benchmarks"))
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        loop, algorithm, ratio = args.one
        print(time_loop(loop, algorithm, int(ratio)))
        return
    args.out.mkdir(parents=True, exist_ok=True)
    tasks = [(a, r) for a in args.algorithms for r in args.ratios]
    times: dict[tuple[str, int, str], list[float]] = {}
    bar = tqdm(total=args.rounds * len(tasks) * len(LOOPS), unit="loop")
    for _ in range(args.rounds):
        for algorithm, ratio in tasks:
            for loop in LOOPS:
                command = [sys.executable, __file__, "--one", loop, algorithm, str(ratio)]
                done = subprocess.run(
                    command,
                    check=True,
                    capture_output=True,
                    text=True,
                    env=os.environ | {"OMP_NUM_THREADS": "1"},
                )
                seconds = float(done.stdout.split()[-1])
                times.setdefault((algorithm, ratio, loop), []).append(seconds)
                bar.update()
    bar.close()
    results = []
    for algorithm, ratio in tasks:
        medians = {loop: statistics.median(times[algorithm, ratio, loop]) for loop in LOOPS}
        row: dict[str, Any] = {"algorithm": algorithm.upper(), "replay ratio": ratio}
        row |= {f"{loop}, updates/s": 1 / seconds for loop, seconds in medians.items()}
        for loop in LOOPS[2:]:
            row[f"{loop} / plain"] = medians[loop] / medians["plain"]
            row[f"{loop} / SB3"] = medians[loop] / medians["stable-baselines3"]
        results.append(row)
    write_table(results, args.out / "loops.csv")


if __name__ == "__main__":
    main()
