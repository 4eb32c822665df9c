"""Collects rows of a real training run, together with the simulator's state."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from nmer_recipes.checkpoint import read_state
from nmer_recipes.envs import get_state, make_env, set_state
from nmer_recipes.files import write_state
from nmer_recipes.seeding import seeds
from omegaconf import DictConfig
from tensordict import TensorDict
from torch import Tensor
from tqdm import tqdm

from benchmarks.plain import TD3

_BATCH = 100
_NOISE = 0.1


def collect(cfg: DictConfig) -> TensorDict:
    """Returns the rows `[total_frames]` that TD3 stores while it learns, in order.

    They are kept in a file in `cfg.cache`, from which a killed run also continues.
    """
    torch.manual_seed(seeds(cfg.seed)["networks"])
    run = TrainingRun(cfg)
    hidden = "x".join(str(width) for width in cfg.hidden)
    settings = f"frames{cfg.total_frames}-random{cfg.random_frames}-ratio{cfg.replay_ratio:g}"
    path = Path(cfg.cache) / f"{cfg.env.id}-seed{cfg.seed}-{settings}-hidden{hidden}.pt"
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        run.load_state_dict(read_state(path, "delete it to start again"))
    every = max(1, cfg.total_frames // 10)
    with tqdm(
        total=cfg.total_frames, initial=run.frame, desc=cfg.env.id, mininterval=1, disable=None
    ) as bar:
        while run.frame < cfg.total_frames:
            run.step()
            if run.frame % every == 0 or run.frame == cfg.total_frames:
                write_state(path, run.state_dict())
            if run.returns:
                bar.set_postfix({"return": f"{run.returns[-1]:.0f}"}, refresh=False)
            bar.update()
    run.env.close()
    return run.rows


class TrainingRun:
    """Plain TD3 during its training; a restored run continues with identical numbers."""

    def __init__(self, cfg: DictConfig) -> None:
        self.cfg = cfg
        self.env = make_env(cfg.env)
        self.observation = self.env.reset(seed=seeds(cfg.seed)["environment"])[0]
        observations, actions = self.env.observation_space.shape[0], self.env.action_space.shape[0]
        self.agent = TD3(observations, actions, tuple(cfg.hidden))
        self.frame = 0
        self.episode_return = 0.0
        self.returns: list[float] = []  # of the finished episodes
        self.rows = _make_rows(cfg.total_frames, observations, actions, _joints(self.env))
        self._columns = {key: entry.numpy() for key, entry in self.rows.items(True, True)}

    def step(self) -> None:
        """Acts for one frame and takes the gradient steps that are due."""
        cfg, agent = self.cfg, self.agent
        before = _joints(self.env)
        if self.frame < cfg.random_frames:
            action = (2 * torch.rand(self.env.action_space.shape) - 1).numpy()
        else:
            action = agent.act(self.observation, noise=_NOISE)
        after, reward, terminated, truncated, _ = self.env.step(action)
        ends = terminated and not truncated  # a time limit is not a termination
        following = {"observation": after, "reward": reward, "terminated": ends}
        row = {"observation": self.observation, "action": action, **before}
        row |= {("next", key): value for key, value in (following | _joints(self.env)).items()}
        for key, value in row.items():
            self._columns[key][self.frame] = value
        self.frame += 1
        self.episode_return += float(reward)
        self.observation = after
        if terminated or truncated:
            self.returns.append(self.episode_return)
            self.episode_return = 0.0
            self.observation = self.env.reset()[0]
        due = math.floor((self.frame - cfg.random_frames) * cfg.replay_ratio)
        while agent.updates < due:
            agent.update(self.rows[torch.randint(self.frame, (_BATCH,))])

    def state_dict(self) -> dict[str, Any]:
        """Returns the whole state, for `torch.load(..., weights_only=True)`."""
        return {
            "agent": {name: part.state_dict() for name, part in _parts(self.agent).items()},
            "updates": self.agent.updates,
            "env": get_state(self.env),
            "observation": torch.from_numpy(np.asarray(self.observation)),
            "random": torch.get_rng_state(),
            "frame": self.frame,
            "episode_return": self.episode_return,
            "returns": self.returns,
            "rows": self.rows.to_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores a saved state."""
        for name, part in _parts(self.agent).items():
            part.load_state_dict(state["agent"][name])
        self.agent.updates = state["updates"]
        set_state(self.env, state["env"])
        self.observation = state["observation"].numpy()
        torch.set_rng_state(state["random"])
        self.frame, self.returns = state["frame"], list(state["returns"])
        self.episode_return = state["episode_return"]
        self.rows.update_(state["rows"])


def _parts(agent: TD3) -> dict[str, Any]:
    names = ("actor", "critics", "targets", "actor_optimizer", "critic_optimizer")
    return {name: getattr(agent, name) for name in names}


def _joints(env: gymnasium.Env) -> dict[str, np.ndarray]:
    """Returns the joints' positions and velocities in a MuJoCo task; empty for other tasks."""
    data = getattr(env.unwrapped, "data", None)
    return {} if data is None else {"qpos": data.qpos.copy(), "qvel": data.qvel.copy()}


def _make_rows(
    n: int, observations: int, actions: int, joints: dict[str, np.ndarray]
) -> TensorDict:
    def empty(size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros(n, size, dtype=dtype)

    states = {name: empty(len(part)) for name, part in joints.items()}
    following = TensorDict(
        observation=empty(observations),
        reward=empty(1),
        terminated=empty(1, torch.bool),
        **{name: part.clone() for name, part in states.items()},
        batch_size=[n],
    )
    first = {"observation": empty(observations), "action": empty(actions), **states}
    return TensorDict({**first, "next": following}, batch_size=[n])
