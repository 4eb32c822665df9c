"""Acting in the environment, one frame at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import gymnasium
import numpy as np
import torch
from omegaconf import DictConfig
from tensordict import TensorDict
from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from common import envs
from common.streams import Stream

if TYPE_CHECKING:
    from common.remote import RemoteCollector


def make_collector(
    cfg: DictConfig,
    env: gymnasium.Env,
    policy: TensorDictModuleBase,
    make_copy: Callable[[], TensorDictModuleBase],
    seed: dict[str, int],
) -> FrameCollector | RemoteCollector:
    """What `cfg.collector` describes; `make_copy` makes a policy like the one given, on the CPU."""
    device = torch.device(cfg.device)
    stream = Stream(seed["exploration"], device)
    if cfg.collector.kind == "ray":
        from common.remote import RemoteCollector

        return RemoteCollector(cfg, policy, make_copy, seed=seed["environment"], stream=stream)
    return FrameCollector(
        env,
        policy,
        seed=seed["environment"],
        random_frames=cfg.random_frames,
        stream=stream,
        device=device,
    )


class FrameCollector:
    """Acts in a Gymnasium task by one frame, and can stop and go on within an episode.

    TorchRL's `Collector` spends several milliseconds on a batch of one frame, its environments one
    of them, and its state leaves out the observation to act on next, without which a resumed run
    takes another path.

    Args:
        env: The task, with actions in [-1, 1].
        policy: What acts, with its exploration, after the random frames.
        seed: Of the task.
        random_frames: Number of first frames with uniform actions.
        stream: Where exploration draws from.
        device: Of the policy and of the rows.
    """

    def __init__(
        self,
        env: gymnasium.Env,
        policy: TensorDictModuleBase,
        *,
        seed: int,
        random_frames: int,
        stream: Stream,
        device: torch.device,
    ) -> None:
        self.env, self.policy, self.stream, self.device = env, policy, stream, device
        self.random_frames = random_frames
        self.frames = 0
        self.episode_return = 0.0
        self.ended: float | None = None  # the return of an episode that ended with the last frame
        self.returns: list[float] = []  # of episodes that ended since someone took them
        self._observation = self._tensor(env.reset(seed=seed)[0])

    def __enter__(self) -> FrameCollector:
        return self

    def __exit__(self, *_: Any) -> None:
        self.env.close()

    @torch.no_grad()
    def step(self) -> TensorDict:
        """Acts once; returns the transition, which has no batch dimension.

        A step that ends by the time limit is stored as not terminated, whatever else it was.
        """
        observation = self._observation
        with self.stream:
            if self.frames < self.random_frames:
                action = 2 * torch.rand(self.env.action_space.shape, device=self.device) - 1
            else:
                action = self.policy(TensorDict(observation=observation))["action"]
        after, reward, terminated, truncated, _ = self.env.step(action.cpu().numpy())
        self._observation = following = self._tensor(after)
        self.frames += 1
        self.episode_return += float(reward)
        self.ended = None
        if terminated or truncated:
            self.ended, self.episode_return = self.episode_return, 0.0
            self.returns.append(self.ended)
            self._observation = self._tensor(self.env.reset()[0])
        ends = bool(terminated and not truncated)
        step = TensorDict(
            observation=following,
            reward=torch.tensor([reward], dtype=torch.float32, device=self.device),
            terminated=torch.tensor([ends], device=self.device),
        )
        return TensorDict(observation=observation, action=action, next=step)

    def _tensor(self, observation: np.ndarray) -> Tensor:
        """As float32 `[d]`; a copy, since tasks may write into theirs."""
        return torch.tensor(observation, dtype=torch.float32, device=self.device)

    def state_dict(self) -> dict[str, Any]:
        """Where the episode stands, and what has been counted."""
        return {
            "env": envs.get_state(self.env),
            "observation": self._observation,
            "frames": self.frames,
            "episode_return": self.episode_return,
            "returns": list(self.returns),
            "stream": self.stream.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from there, in the middle of the episode where that can be restored."""
        fresh = self.env.reset()[0]
        if "env" in state and envs.set_state(self.env, state["env"]):
            self._observation = state["observation"].to(self.device)
            self.episode_return = state["episode_return"]
        else:
            self._observation, self.episode_return = self._tensor(fresh), 0.0
        self.frames, self.returns = state["frames"], list(state["returns"])
        self.stream.load_state_dict(state["stream"])
