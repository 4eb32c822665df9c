"""Real training streams: the (observation, action) pairs that a TD3 agent stores, in order.

python recipes/benchmarks/streams.py --env HalfCheetah-v5 --frames 30000 --out stream.npz
"""

from __future__ import annotations

import argparse
import copy
from pathlib import Path

import gymnasium
import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor, nn
from tqdm import tqdm

from nmer_torchrl import make_replay_buffer


def mlp(inputs: int, outputs: int, hidden: tuple[int, int]) -> nn.Sequential:
    """Two hidden layers."""
    first, second = nn.Linear(inputs, hidden[0]), nn.Linear(*hidden)
    return nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), nn.Linear(hidden[1], outputs))


class TD3:
    """Twin delayed DDPG in plain PyTorch, with the usual settings."""

    def __init__(
        self, observations: int, actions: int, hidden: tuple[int, int] = (256, 256)
    ) -> None:
        self.actor = nn.Sequential(mlp(observations, actions, hidden), nn.Tanh())
        self.critics = nn.ModuleList(mlp(observations + actions, 1, hidden) for _ in range(2))
        self.targets = copy.deepcopy(nn.ModuleList([self.actor, self.critics]))
        self.actor_optimizer = torch.optim.Adam(self.actor.parameters(), lr=1e-3, foreach=True)
        self.critic_optimizer = torch.optim.Adam(self.critics.parameters(), lr=1e-3, foreach=True)
        self.updates = 0

    @torch.no_grad()
    def act(self, observation: np.ndarray, noise: float = 0.1) -> np.ndarray:
        """An action in [-1, 1] with exploration noise."""
        action = self.actor(torch.as_tensor(observation, dtype=torch.float32))
        return (action + noise * torch.randn_like(action)).clamp(-1, 1).numpy()

    def update(self, batch: TensorDict) -> None:
        """One gradient step."""
        self.updates += 1
        target_actor, target_critics = self.targets
        state, action, after = batch["observation"], batch["action"], batch["next", "observation"]
        with torch.no_grad():
            noise = (0.2 * torch.randn_like(action)).clamp(-0.5, 0.5)
            inputs = torch.cat([after, (target_actor(after) + noise).clamp(-1, 1)], -1)
            value = torch.minimum(*(critic(inputs) for critic in target_critics))
            going_on = ~batch["next", "terminated"]
            goal = batch["next", "reward"] + 0.99 * going_on * value
        inputs = torch.cat([state, action], -1)
        loss: Tensor = sum((critic(inputs) - goal).square().mean() for critic in self.critics)
        self.critic_optimizer.zero_grad()
        loss.backward()
        self.critic_optimizer.step()
        if self.updates % 2 == 0:
            inputs = torch.cat([state, self.actor(state)], -1)
            self.actor_optimizer.zero_grad()
            (-self.critics[0](inputs).mean()).backward()
            self.actor_optimizer.step()
            online = [*self.actor.parameters(), *self.critics.parameters()]
            with torch.no_grad():
                torch._foreach_lerp_(list(self.targets.parameters()), online, 0.005)


def record(name: str, frames: int, *, random_frames: int = 1_000, seed: int = 0) -> np.ndarray:
    """Trains for that many frames; returns the points `[frames, d]`, float32."""
    torch.manual_seed(seed)
    env = gymnasium.wrappers.RescaleAction(gymnasium.make(name), -1.0, 1.0)
    env.action_space.seed(seed)
    observation, _ = env.reset(seed=seed)
    agent = TD3(env.observation_space.shape[0], env.action_space.shape[0])
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
