"""Evaluates a policy without exploration, in separate environments."""

from __future__ import annotations

from collections.abc import Callable

import gymnasium
import numpy as np
import torch
from omegaconf import DictConfig
from tensordict import TensorDict
from tensordict.nn import TensorDictModuleBase
from torch import Tensor
from torchrl.envs import ExplorationType, set_exploration_type
from torchrl.objectives import LossModule

from nmer_recipes.envs import frame_rate, make_env
from nmer_recipes.networks import critics_name

_SEED = 10_000  # every run and every evaluation start from the same seeds
_CUT = 0.01  # largest discount at the time limit with which a Monte Carlo return counts as complete


class Evaluator:
    """Runs `episodes` episodes in lockstep, each from its own fixed seed.

    One policy call serves all of them, which makes an evaluation several times cheaper than running
    the episodes in sequence.
    """

    def __init__(self, cfg: DictConfig, episodes: int, *, gamma: float, device: torch.device):
        self.envs = [make_env(cfg) for _ in range(episodes)]
        self.gamma, self.device = gamma, device

    @torch.no_grad()
    def __call__(
        self,
        actor: TensorDictModuleBase,
        loss: LossModule,
        stop: Callable[[], bool] = lambda: False,
    ) -> dict[str, float] | None:
        """Returns the mean returns, and the critics' values beside the discounted returns.

        Returns None if `stop` returns True before all episodes have ended.
        """
        episodes = []
        with set_exploration_type(ExplorationType.DETERMINISTIC):
            played = self.play(actor, stop)
            if played is None:
                return None
            for steps, cut in played:
                observations, actions, rewards = zip(*steps, strict=True)
                after, left = 0.0, self.gamma ** len(rewards)
                returns = np.empty(len(rewards))
                for t in range(len(rewards) - 1, -1, -1):
                    returns[t] = after = rewards[t] + self.gamma * after
                discount = self.gamma ** np.arange(len(rewards), 0, -1)
                whole = discount <= max(_CUT, left) if cut else np.ones(len(discount), bool)
                values = q_values(
                    loss, self._tensor(np.stack(observations)), self._tensor(np.stack(actions))
                )
                episodes.append(
                    (
                        sum(rewards),
                        len(rewards),
                        values.numpy()[whole].mean(),
                        returns[whole].mean(),
                    )
                )
        total, length, q_value, monte_carlo = map(np.array, zip(*episodes, strict=True))
        return {
            "eval/return": float(total.mean()),
            "eval/return_std": float(total.std()),
            "eval/length": float(length.mean()),
            "eval/q_value": float(q_value.mean()),
            "eval/monte_carlo": float(monte_carlo.mean()),
            "eval/overestimation": float((q_value - monte_carlo).mean()),
        }

    def play(
        self, actor: TensorDictModuleBase, stop: Callable[[], bool] = lambda: False
    ) -> list[tuple[list, bool]] | None:
        """Returns the steps `(observation, action, reward)` of each episode, and if it was cut."""
        played: list[tuple[list, bool]] = [([], False) for _ in self.envs]
        running: dict[int, np.ndarray] = {
            i: env.reset(seed=_SEED + i)[0] for i, env in enumerate(self.envs)
        }
        while running:
            if stop():
                return None
            observations = np.stack(list(running.values())).astype(np.float32)
            batch = TensorDict(observation=self._tensor(observations), batch_size=[len(running)])
            actions = actor(batch)["action"].cpu().numpy()
            for (i, _), observation, action in zip(
                list(running.items()), observations, actions, strict=True
            ):
                after, reward, terminated, truncated, _ = self.envs[i].step(action)
                played[i][0].append((observation, action, float(reward)))
                running[i] = after
                if terminated or truncated:
                    played[i] = (played[i][0], bool(truncated))
                    del running[i]
        return played

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.device)

    def record(self, actor: TensorDictModuleBase, cfg: DictConfig) -> tuple[list, float]:
        """Returns images of an episode from the first fixed seed, and their rate per second."""
        env = make_env(cfg, render_mode="rgb_array")
        observer, self.envs = self.envs, [_Camera(env)]
        try:
            with torch.no_grad(), set_exploration_type(ExplorationType.DETERMINISTIC):
                self.play(actor)
            return self.envs[0].frames, frame_rate(env)
        finally:
            self.envs = observer
            env.close()


class _Camera(gymnasium.Wrapper):
    """Keeps an image of every step."""

    def __init__(self, env: gymnasium.Env) -> None:
        super().__init__(env)
        self.frames: list[np.ndarray] = []

    def step(self, action: np.ndarray) -> tuple:
        result = self.env.step(action)
        self.frames.append(self.env.render())
        return result


def q_values(loss: LossModule, observation: Tensor, action: Tensor) -> Tensor:
    """Returns the mean of the critics' values `[n]`, on the CPU."""
    batch = TensorDict(observation=observation, action=action, batch_size=[len(observation)])
    name = critics_name(loss)
    network = getattr(loss, f"{name}_network")
    parameters = getattr(loss, f"{name}_network_params").data
    values = []
    for weights in parameters.unbind(0) if parameters.ndim else [parameters]:
        with weights.to_module(network):
            values.append(network(batch)["state_action_value"].squeeze(-1))
    return torch.stack(values).mean(0).cpu()
