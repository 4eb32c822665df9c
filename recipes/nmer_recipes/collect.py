"""Acting in the environment, one frame at a time."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import gymnasium
import numpy as np
import torch
from omegaconf import DictConfig
from tensordict import TensorDict
from tensordict.nn import TensorDictModuleBase
from torch import Tensor
from tqdm import tqdm

from nmer_recipes import envs
from nmer_recipes.seeding import Stream

if TYPE_CHECKING:
    from nmer_recipes.remote import RemoteCollector


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
        from nmer_recipes.remote import RemoteCollector

        return RemoteCollector(cfg, policy, make_copy, seed=seed["environment"], stream=stream)
    return FrameCollector(
        env,
        policy,
        seed=seed["environment"],
        random_frames=cfg.random_frames,
        stream=stream,
        device=device,
        storage_device=torch.device(cfg.storage_device),
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
        device: Of the policy.
        storage_device: Of the rows; that of the policy unless given.
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
        storage_device: torch.device | None = None,
    ) -> None:
        self.env, self.policy, self.stream = env, policy, stream
        self.device, self.storage_device = device, storage_device or device
        self.random_frames = random_frames
        self.frames = 0
        self.episode_return = 0.0
        self.ended: float | None = None  # the return of an episode that ended with the last frame
        self.returns: list[float] = []  # of episodes that ended since someone took them
        self._host = _host_memory(2 * env.observation_space.shape[0] + 2, self.storage_device)
        (self._observation,) = self._upload(env.reset(seed=seed)[0])

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
                seen = observation.to(self.device, non_blocking=True)
                action = self.policy(TensorDict(observation=seen))["action"]
        chosen = action.cpu()  # the only wait of a frame, for what the device has to do until here
        after, reward, terminated, truncated, _ = self.env.step(chosen.numpy())
        self.frames += 1
        self.episode_return += float(reward)
        self.ended, start = None, np.empty(0)
        if terminated or truncated:
            self.ended, self.episode_return = self.episode_return, 0.0
            self.returns.append(self.ended)
            start = self.env.reset()[0]
        ends = terminated and not truncated
        following, rest, start = self._upload(after, np.array([reward, ends]), start)
        self._observation = following if self.ended is None else start
        step = TensorDict(observation=following, reward=rest[:1], terminated=rest[1:].bool())
        action = chosen if self.storage_device.type == "cpu" else action
        return TensorDict(observation=observation, action=action, next=step)

    def _upload(self, *arrays: np.ndarray) -> tuple[Tensor, ...]:
        """Copies vectors to where rows are stored as float32, at once and without waiting.

        They go through memory of the host that is used again by the next call. By then the device
        has read it, since an action was waited for in between.
        """
        widths = [len(array) for array in arrays]
        host = self._host[: sum(widths)]
        host.copy_(torch.from_numpy(np.concatenate(arrays)))
        return host.to(self.storage_device, non_blocking=True, copy=True).split(widths)

    def state_dict(self) -> dict[str, Any]:
        """Where the episode stands, and what has been counted."""
        return {
            "env": envs.get_state(self.env),
            "observation": self._observation.clone(),  # alone, without what came with it
            "frames": self.frames,
            "episode_return": self.episode_return,
            "returns": list(self.returns),
            "stream": self.stream.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from there, in the middle of the episode where that can be restored."""
        self.env.reset()
        if "env" in state and envs.set_state(self.env, state["env"]):
            self._observation = state["observation"].to(self.storage_device)
            self.episode_return = state["episode_return"]
        else:
            tqdm.write(
                "The episode cannot be restored; the run goes on with a new one.", file=sys.stderr
            )
            (self._observation,), self.episode_return = self._upload(self.env.reset()[0]), 0.0
        self.frames, self.returns = state["frames"], list(state["returns"])
        self.stream.load_state_dict(state["stream"])


def _host_memory(size: int, device: torch.device) -> Tensor:
    """Returns float32 memory that CUDA can copy from in the background, where there is some."""
    try:
        return torch.empty(size, pin_memory=device.type == "cuda")
    except RuntimeError:  # the system lets no more be pinned: copies are right, and may wait
        return torch.empty(size)
