"""Acting in the environment, one frame at a time."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torchrl.envs import ExplorationType, TransformedEnv, set_exploration_type

from common import envs
from common.streams import Stream

ROW = ("observation", "action", ("next", "observation"), ("next", "reward"), ("next", "terminated"))


class FrameCollector:
    """Steps a TorchRL environment by one frame, and can stop and go on within an episode.

    TorchRL's `Collector` spends several milliseconds on a batch of one frame, and its state leaves
    out the observation to act on next, without which a resumed run takes another path.

    Args:
        env: The environment.
        policy: What acts, with its exploration, after the random frames.
        random_frames: Number of first frames with uniform actions.
        stream: Where exploration draws from.
        device: Of the policy and of the rows.
    """

    def __init__(
        self,
        env: TransformedEnv,
        policy: TensorDictModuleBase,
        *,
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
        self._carrier = env.reset()

    @torch.no_grad()
    def step(self) -> TensorDictBase:
        """Acts once; the transition is a batch `[1]` of the entries that are worth storing."""
        carrier = self._carrier
        with self.stream, set_exploration_type(ExplorationType.RANDOM):
            if self.frames < self.random_frames:
                action = self.env.action_spec.rand()
            else:
                seen = TensorDict(observation=carrier["observation"].to(self.device))
                action = self.policy(seen)["action"].cpu()  # environments are there
        transition, self._carrier = self.env.step_and_maybe_reset(carrier.set("action", action))
        self.frames += 1
        self.episode_return += float(transition["next", "reward"])
        self.ended = None
        if transition["next", "done"].item():
            self.ended, self.episode_return = self.episode_return, 0.0
            self.returns.append(self.ended)
        return transition.select(*ROW).unsqueeze(0).to(self.device)

    def state_dict(self) -> dict[str, Any]:
        """Where the episode stands, and what has been counted."""
        carrier = self._carrier.select("observation", "done", "terminated", "truncated")
        return {
            "env": envs.get_state(self.env.base_env._env),
            "carrier": carrier.to_dict(retain_none=False),
            "frames": self.frames,
            "episode_return": self.episode_return,
            "returns": list(self.returns),
            "stream": self.stream.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from there, in the middle of the episode where the task can be restored."""
        fresh = self.env.reset()
        if envs.set_state(self.env.base_env._env, state["env"]):
            self._carrier = fresh.update(state["carrier"])
            self.episode_return = state["episode_return"]
        else:
            self._carrier, self.episode_return = fresh, 0.0
        self.frames, self.returns = state["frames"], list(state["returns"])
        self.stream.load_state_dict(state["stream"])
