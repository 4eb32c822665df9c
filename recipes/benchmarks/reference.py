"""Trains an agent of SBX (Stable-Baselines in JAX), as a reference for the recipe's learning curve.

    python -m venv peers && peers/bin/pip install sbx-rl "gymnasium[mujoco]"
    peers/bin/python recipes/benchmarks/reference.py crossq --out docs/references

The agent has the recipe's networks, batch size, learning rate, replay ratio and random frames, and
SBX's defaults otherwise. It is evaluated from the same starts, and its evaluations are written to a
CSV. This script imports nothing from the project, so that SBX can have its own environment.
"""

from __future__ import annotations

import argparse
import csv
import os
import time
from pathlib import Path
from typing import Any

# JAX would use every core for a matrix product.
os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"

EPISODES = 5  # of an evaluation, as in the recipes
FIRST_SEED = 10_000  # of an evaluation's starts, as in the recipes
DROQ = {"dropout_rate": 0.01, "layer_norm": True}
# The class, the frames of a run in the study, and settings that are not the class's defaults.
AGENTS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "crossq": ("CrossQ", 50_000, {"policy_kwargs": {"net_arch": [256, 256]}}),
    "ddpg": (
        "DDPG",
        30_000,
        {"learning_rate": 1e-3, "batch_size": 100, "policy_kwargs": {"net_arch": [400, 300]}},
    ),
    "droq": (
        "SAC",
        20_000,
        {"gradient_steps": 20, "policy_delay": 20, "target_entropy": -3.0, "policy_kwargs": DROQ},
    ),
}


def train(agent: str, task: str, seed: int, frames: int | None, out: Path) -> None:
    """Trains one run; writes a row for each hundredth of its frames."""
    import gymnasium
    import numpy as np
    import sbx
    import torch
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.noise import NormalActionNoise

    torch.set_num_threads(1)
    name, usual, settings = AGENTS[agent]
    frames = frames or usual
    envs = [gymnasium.make(task) for _ in range(EPISODES)]
    rows: list[dict[str, float]] = []
    begin = time.perf_counter()

    class Watch(BaseCallback):  # type: ignore[misc]
        def _on_step(self) -> bool:
            if self.num_timesteps % max(frames // 100, 1) == 0:
                returns = [play(env, FIRST_SEED + i) for i, env in enumerate(envs)]
                row = {"frames": self.num_timesteps, "eval/return": float(np.mean(returns))}
                rows.append(row | {"time/seconds": round(time.perf_counter() - begin, 1)})
            return True

    def play(env: gymnasium.Env, seed: int) -> float:
        observation, total, ended = env.reset(seed=seed)[0], 0.0, False
        while not ended:
            action = model.predict(observation, deterministic=True)[0]
            observation, reward, terminated, truncated, _ = env.step(action)
            total, ended = total + float(reward), terminated or truncated
        return total

    env = gymnasium.make(task)
    actions = env.action_space.shape[0]
    if name == "DDPG":
        noise = NormalActionNoise(np.zeros(actions), np.full(actions, 0.1))
        settings = settings | {"action_noise": noise}
    options = {"batch_size": 256, "train_freq": 1, "learning_starts": 5_000} | settings
    model = getattr(sbx, name)("MlpPolicy", env, seed=seed, **options)
    model.learn(frames, callback=Watch(), progress_bar=True)
    out.mkdir(parents=True, exist_ok=True)
    with (out / f"{agent}-{task}-seed{seed}.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add, default = parser.add_argument, " (default: %(default)s)"
    add("agent", choices=AGENTS)
    add("--task", default="HalfCheetah-v5", help=f"Gymnasium id{default}")
    add("--seed", type=int, default=0, help=f"seed{default}")
    add("--frames", type=int, help="frames of the run (default: those of the study)")
    add("--out", type=Path, default=Path("runs/references"), help=f"directory of the CSV{default}")
    train(**vars(parser.parse_args()))
