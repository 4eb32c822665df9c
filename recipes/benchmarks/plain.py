"""TD3 and SAC in plain PyTorch: what the benchmarks compare with.

Batches are anything that holds `"observation"`, `"action"`, `("next", "observation")`,
`("next", "reward")` and `("next", "terminated")`, the last two `[B, 1]`. Actions are in [-1, 1].
"""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss, softplus


def mlp(inputs: int, outputs: int, hidden: tuple[int, int]) -> nn.Sequential:
    """Two hidden layers."""
    first, second = nn.Linear(inputs, hidden[0]), nn.Linear(*hidden)
    return nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), nn.Linear(hidden[1], outputs))


def _adam(parameters: Any, *, fused: bool = True) -> torch.optim.Adam:
    return torch.optim.Adam(parameters, lr=1e-3, fused=fused)


class TD3:
    """Twin delayed DDPG with the usual settings; targets follow at every step of the actor.

    `fused` is how Adam is made: faster by a sixth, but not PyTorch's default on the CPU.
    """

    def __init__(
        self,
        observations: int,
        actions: int,
        hidden: tuple[int, int] = (400, 300),
        *,
        fused: bool = True,
    ) -> None:
        self.actor = nn.Sequential(mlp(observations, actions, hidden), nn.Tanh())
        self.critics = nn.ModuleList(mlp(observations + actions, 1, hidden) for _ in range(2))
        self.targets = copy.deepcopy(nn.ModuleList([self.actor, self.critics]))
        self.actor_optimizer = _adam(self.actor.parameters(), fused=fused)
        self.critic_optimizer = _adam(self.critics.parameters(), fused=fused)
        self.updates = 0

    @torch.no_grad()
    def act(self, observation: np.ndarray, noise: float = 0.1) -> np.ndarray:
        """An action with exploration noise."""
        action = self.actor(torch.as_tensor(observation, dtype=torch.float32))
        return (action + noise * torch.randn_like(action)).clamp(-1, 1).numpy()

    def update(self, batch: Any) -> None:
        """One gradient step."""
        self.updates += 1
        target_actor, target_critics = self.targets
        state, action, after = batch["observation"], batch["action"], batch["next", "observation"]
        with torch.no_grad():
            noise = (0.2 * torch.randn_like(action)).clamp(-0.5, 0.5)
            inputs = torch.cat([after, (target_actor(after) + noise).clamp(-1, 1)], -1)
            value = torch.minimum(*(critic(inputs) for critic in target_critics))
            goal = batch["next", "reward"] + 0.99 * ~batch["next", "terminated"] * value
        inputs = torch.cat([state, action], -1)
        loss: Tensor = sum(mse_loss(critic(inputs), goal) for critic in self.critics)
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


class SAC:
    """Soft actor-critic with the usual settings and a learned entropy coefficient."""

    def __init__(
        self, observations: int, actions: int, hidden: tuple[int, int] = (256, 256)
    ) -> None:
        self.actor = mlp(observations, 2 * actions, hidden)
        self.critics = nn.ModuleList(mlp(observations + actions, 1, hidden) for _ in range(2))
        self.targets = copy.deepcopy(self.critics)
        self.log_alpha = torch.zeros((), requires_grad=True)
        self.target_entropy = -float(actions)
        self.actor_optimizer = _adam(self.actor.parameters())
        self.critic_optimizer = _adam(self.critics.parameters())
        self.alpha_optimizer = _adam([self.log_alpha])

    def _sample(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """Actions `[B, a]` and their log-probabilities `[B, 1]`."""
        loc, log_scale = self.actor(state).chunk(2, -1)
        normal = torch.distributions.Normal(loc, log_scale.clamp(-20, 2).exp())
        raw = normal.rsample()
        squashed = 2 * (math.log(2) - raw - softplus(-2 * raw))  # log of the slope of tanh
        return raw.tanh(), (normal.log_prob(raw) - squashed).sum(-1, keepdim=True)

    @torch.no_grad()
    def act(self, observation: np.ndarray) -> np.ndarray:
        """A random action of the policy."""
        return self._sample(torch.as_tensor(observation, dtype=torch.float32))[0].numpy()

    def update(self, batch: Any) -> None:
        """One gradient step on everything."""
        state, after = batch["observation"], batch["next", "observation"]
        alpha = self.log_alpha.detach().exp()
        with torch.no_grad():
            action, log_prob = self._sample(after)
            inputs = torch.cat([after, action], -1)
            value = torch.minimum(*(critic(inputs) for critic in self.targets)) - alpha * log_prob
            goal = batch["next", "reward"] + 0.99 * ~batch["next", "terminated"] * value
        inputs = torch.cat([state, batch["action"]], -1)
        loss: Tensor = sum(mse_loss(critic(inputs), goal) for critic in self.critics)
        self.critic_optimizer.zero_grad()
        loss.backward()
        self.critic_optimizer.step()
        action, log_prob = self._sample(state)
        inputs = torch.cat([state, action], -1)
        self.critics.requires_grad_(False)
        value = torch.minimum(*(critic(inputs) for critic in self.critics))
        self.actor_optimizer.zero_grad()
        (alpha * log_prob - value).mean().backward()
        self.actor_optimizer.step()
        self.critics.requires_grad_(True)
        excess = log_prob.detach().mean() + self.target_entropy
        self.alpha_optimizer.zero_grad()
        (-self.log_alpha * excess).backward()
        self.alpha_optimizer.step()
        with torch.no_grad():
            torch._foreach_lerp_(
                list(self.targets.parameters()), list(self.critics.parameters()), 0.005
            )
