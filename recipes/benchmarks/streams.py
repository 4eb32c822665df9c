"""Real training streams: the (observation, action) pairs that a TD3 agent stores, in order.

python recipes/benchmarks/streams.py --env HalfCheetah-v5 --frames 30000 --out stream.npz
"""

from __future__ import annotations

import argparse
from pathlib import Path

import gymnasium
import numpy as np
import torch
from plain import TD3
from tensordict import TensorDict
from tqdm import tqdm

from nmer_torchrl import make_replay_buffer


def record(name: str, frames: int, *, random_frames: int = 1_000, seed: int = 0) -> np.ndarray:
    """Trains for that many frames; returns the points `[frames, d]`, float32."""
    torch.manual_seed(seed)
    env = gymnasium.wrappers.RescaleAction(gymnasium.make(name), -1.0, 1.0)
    env.action_space.seed(seed)
    observation, _ = env.reset(seed=seed)
    agent = TD3(env.observation_space.shape[0], env.action_space.shape[0], (256, 256))
    buffer = make_replay_buffer("uniform", capacity=frames, batch_size=100)
    points = []
    for frame in tqdm(range(frames), desc=name, unit="frame", mininterval=1):
        explore = frame < random_frames
        action = env.action_space.sample() if explore else agent.act(observation)
        after, reward, terminated, truncated, _ = env.step(action)
        row = {
            "observation": torch.as_tensor(observation, dtype=torch.float32),
            "action": torch.as_tensor(action),
            "next": TensorDict(
                observation=torch.as_tensor(after, dtype=torch.float32),
                reward=torch.tensor([reward], dtype=torch.float32),
                terminated=torch.tensor([terminated]),
            ),
        }
        buffer.add(TensorDict(row))
        points.append(np.concatenate([observation, action]).astype(np.float32))
        observation = env.reset()[0] if terminated or truncated else after
        if not explore:
            agent.update(buffer.sample())
    env.close()
    return np.stack(points)


def main() -> None:
    """Records one stream."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--env", default="HalfCheetah-v5")
    parser.add_argument("--frames", type=int, default=30_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("stream.npz"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    points = record(args.env, args.frames, seed=args.seed)
    np.savez_compressed(args.out, points=points)
    print(f"{args.out}: {points.shape[0]} points of {points.shape[1]} dimensions")


if __name__ == "__main__":
    main()
