"""Records real training streams: the (observation, action) pairs that a TD3 agent stores, in order.

python recipes/benchmarks/streams.py --env HalfCheetah-v5 --frames 30000 --out stream.npz
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
import torch
from omegaconf import OmegaConf
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parents[1]))

from nmer_recipes.seeding import seeds

from benchmarks.experience import TrainingRun


def record(name: str, frames: int, *, seed: int = 0, ratio: float = 1) -> np.ndarray:
    """Trains for `frames` frames, with `ratio` updates each; returns points `[frames, d]`."""
    torch.manual_seed(seeds(seed)["networks"])
    settings = {"total_frames": frames, "random_frames": 1_000, "replay_ratio": ratio}
    settings |= {"env": {"id": name}, "hidden": [256, 256], "seed": seed}
    run = TrainingRun(OmegaConf.create(settings))
    for _ in tqdm(range(frames), desc=name, unit="frame", mininterval=1):
        run.step()
    run.env.close()
    return torch.cat([run.rows["observation"], run.rows["action"]], -1).numpy()


def main() -> None:
    """Records one stream."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    default = " (default: %(default)s)"
    add = parser.add_argument
    add("--env", default="HalfCheetah-v5", help=f"Gymnasium id of the task{default}")
    add("--frames", type=int, default=30_000, help=f"frames to record{default}")
    add("--seed", type=int, default=0, help=f"seed of the run{default}")
    add("--ratio", type=float, default=1, help=f"updates per frame{default}")
    add("--out", type=Path, default=Path("stream.npz"), help=f"output file{default}")
    args = parser.parse_args()
    torch.set_num_threads(1)
    points = record(args.env, args.frames, seed=args.seed, ratio=args.ratio)
    np.savez_compressed(args.out, points=points)
    print(f"{args.out}: {points.shape[0]} points of {points.shape[1]} dimensions")


if __name__ == "__main__":
    main()
