"""Implements the recipes' agents in plain PyTorch, for the benchmarks to compare with.

Batches hold `"observation"`, `"action"`, `("next", "observation")`, `("next", "reward")` and
`("next", "terminated")`, the last two `[B, 1]`, and for SUNRISE also `"mask"` `[B, members]`.
Actions are in [-1, 1]. All agents learn with Adam at a learning rate of 0.001.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import softplus


def mlp(
    inputs: int,
    outputs: int,
    hidden: tuple[int, ...],
    *,
    dropout: float = 0.0,
    layer_norm: bool = False,
) -> nn.Sequential:
    """Builds linear layers with ReLU, and optionally DroQ's dropout and layer normalization."""
    layers: list[nn.Module] = []
    for width, following in pairwise([inputs, *hidden]):
        layers.append(nn.Linear(width, following))
        if dropout:
            layers.append(nn.Dropout(dropout))
        if layer_norm:
            layers.append(nn.LayerNorm(following))
        layers.append(nn.ReLU())
    return nn.Sequential(*layers, nn.Linear(hidden[-1], outputs))


def normalized_mlp(inputs: int, outputs: int, hidden: tuple[int, ...]) -> nn.Sequential:
    """Builds linear layers with batch normalization of the inputs and after each ReLU."""
    norm = partial(nn.BatchNorm1d, momentum=0.01, eps=1e-3)
    layers: list[nn.Module] = [norm(inputs)]
    for width, following in pairwise([inputs, *hidden]):
        layers += [nn.Linear(width, following), nn.ReLU(), norm(following)]
    return nn.Sequential(*layers, nn.Linear(hidden[-1], outputs))


def adam(parameters: Any, *, beta: float = 0.9, fused: bool = True) -> torch.optim.Adam:
    """Builds an optimizer.

    Fused Adam is faster by a sixth, but is not PyTorch's default on the CPU.
    """
    return torch.optim.Adam(parameters, lr=1e-3, betas=(beta, 0.999), fused=fused)


def descend(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    """Takes a gradient step; networks of other optimizers get no gradient."""
    optimizer.zero_grad()
    loss.backward(inputs=optimizer.param_groups[0]["params"])
    optimizer.step()


@torch.no_grad()
def follow(targets: nn.Module, networks: Iterable[nn.Module]) -> None:
    """Moves target networks toward the trained ones."""
    online = [parameter for network in networks for parameter in network.parameters()]
    torch._foreach_lerp_(list(targets.parameters()), online, 0.005)


def values(critics: Iterable[nn.Module], state: Tensor, action: Tensor) -> Tensor:
    """Returns the values `[n, B, 1]` of actions, estimated by n critics."""
    inputs = torch.cat([state, action], -1)
    return torch.stack([critic(inputs) for critic in critics])


def bootstrap(batch: Any, value: Tensor) -> Tensor:
    """Returns the critics' targets `[B, 1]`, from the value of the next state."""
    return batch["next", "reward"] + 0.99 * ~batch["next", "terminated"] * value


class TD3:
    """Twin delayed DDPG; the targets move at every actor step."""

    def __init__(
        self,
        observations: int,
        actions: int,
        hidden: tuple[int, ...] = (400, 300),
        *,
        num_critics: int = 2,
        policy_delay: int = 2,
        target_noise: float = 0.2,
        fused: bool = True,
    ) -> None:
        self.actor = nn.Sequential(mlp(observations, actions, hidden), nn.Tanh())
        self.critics = nn.ModuleList(
            mlp(observations + actions, 1, hidden) for _ in range(num_critics)
        )
        self.targets = copy.deepcopy(nn.ModuleList([self.actor, self.critics]))
        self.actor_optimizer = adam(self.actor.parameters(), fused=fused)
        self.critic_optimizer = adam(self.critics.parameters(), fused=fused)
        self.policy_delay, self.target_noise, self.updates = policy_delay, target_noise, 0

    @torch.no_grad()
    def act(self, observation: np.ndarray, noise: float = 0.1) -> np.ndarray:
        """Returns an action with exploration noise."""
        action = self.actor(torch.as_tensor(observation, dtype=torch.float32))
        return (action + noise * torch.randn_like(action)).clamp(-1, 1).numpy()

    def update(self, batch: Any) -> None:
        """Takes a gradient step."""
        self.updates += 1
        target_actor, target_critics = self.targets
        state, after = batch["observation"], batch["next", "observation"]
        with torch.no_grad():
            action = target_actor(after)
            if self.target_noise:
                noise = (self.target_noise * torch.randn_like(action)).clamp(-0.5, 0.5)
                action = (action + noise).clamp(-1, 1)
            goal = bootstrap(batch, values(target_critics, after, action).amin(0))
        errors = values(self.critics, state, batch["action"]) - goal
        descend(self.critic_optimizer, errors.square().sum(0).mean())
        if self.updates % self.policy_delay == 0:
            value = values(self.critics[:1], state, self.actor(state))
            descend(self.actor_optimizer, -value.mean())
            follow(self.targets, [self.actor, self.critics])


# DDPG is TD3 without TD3's additions.
DDPG = partial(TD3, num_critics=1, policy_delay=1, target_noise=0.0)


class SoftActor:
    """A squashed Gaussian policy with a learned entropy coefficient."""

    def __init__(self, network: nn.Module, actions: int, *, beta: float = 0.9) -> None:
        self.network, self.target_entropy = network, -float(actions)
        self.log_alpha = torch.zeros((), requires_grad=True)
        self.optimizer = adam([*network.parameters(), self.log_alpha], beta=beta)

    @property
    def alpha(self) -> Tensor:
        """The entropy coefficient."""
        return self.log_alpha.detach().exp()

    def sample(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """Returns random actions `[B, a]` and their log-probabilities `[B, 1]`."""
        loc, raw_scale = self.network(state).chunk(2, -1)
        scale = softplus(raw_scale + math.log(math.expm1(0.99))) + 0.01  # 1 if raw_scale is 0
        noise = torch.randn_like(loc)
        raw = loc + scale * noise
        normal = -noise.square() / 2 - scale.log() - math.log(2 * math.pi) / 2
        squashed = 2 * (math.log(2) - raw - softplus(-2 * raw))  # log of the derivative of tanh
        return raw.tanh(), (normal - squashed).sum(-1, keepdim=True)

    @torch.no_grad()
    def act(self, observation: np.ndarray) -> np.ndarray:
        """Returns a random action."""
        return self.sample(torch.as_tensor(observation, dtype=torch.float32)[None])[0][0].numpy()

    def learn(
        self,
        state: Tensor,
        value: Callable[[Tensor, Tensor], Tensor],
        mean: Callable[[Tensor], Tensor] = torch.mean,
    ) -> None:
        """Takes a gradient step toward actions of high value and toward the target entropy."""
        action, log_prob = self.sample(state)
        loss = mean(self.alpha * log_prob - value(state, action))
        excess = mean(log_prob.detach() + self.target_entropy)
        descend(self.optimizer, loss - self.log_alpha * excess)


class SAC:
    """Soft actor-critic, with REDQ and DroQ as variants.

    Args:
        observations: Number of observation entries.
        actions: Number of action dimensions.
        hidden: Units of the layers of all networks.
        num_critics: Number of critics; two of them, drawn at each step, compute the targets.
        policy_delay: Critic steps per actor step.
        reduce: Reduces the critics' values to what the actor maximizes.
        dropout: Dropout probability of the critics.
        layer_norm: Whether critics have layer normalization.
    """

    def __init__(
        self,
        observations: int,
        actions: int,
        hidden: tuple[int, ...] = (256, 256),
        *,
        num_critics: int = 2,
        policy_delay: int = 1,
        reduce: Callable[..., Tensor] = torch.amin,
        dropout: float = 0.0,
        layer_norm: bool = False,
    ) -> None:
        self.actor = SoftActor(mlp(observations, 2 * actions, hidden), actions)
        self.critics = nn.ModuleList(
            mlp(observations + actions, 1, hidden, dropout=dropout, layer_norm=layer_norm)
            for _ in range(num_critics)
        )
        self.targets = copy.deepcopy(self.critics)
        self.critic_optimizer = adam(self.critics.parameters())
        self.policy_delay, self.reduce, self.updates = policy_delay, reduce, 0

    def act(self, observation: np.ndarray) -> np.ndarray:
        """Returns a random action of the policy."""
        return self.actor.act(observation)

    def update(self, batch: Any) -> None:
        """Takes a gradient step."""
        after = batch["next", "observation"]
        with torch.no_grad():
            action, log_prob = self.actor.sample(after)
            drawn = [self.targets[i] for i in torch.randperm(len(self.targets))[:2].tolist()]
            value = values(drawn, after, action).amin(0) - self.actor.alpha * log_prob
        self.learn(batch, bootstrap(batch, value))

    def learn(
        self,
        batch: Any,
        goal: Tensor,
        trust: Tensor | float = 1.0,
        mean: Callable[[Tensor], Tensor] = torch.mean,
    ) -> None:
        """Takes a gradient step toward goals `[B, 1]`, each weighted by `trust`."""
        self.updates += 1
        errors = values(self.critics, batch["observation"], batch["action"]) - goal
        descend(self.critic_optimizer, mean(trust * errors.square().sum(0)))
        if self.updates % self.policy_delay == 0:
            self.actor.learn(batch["observation"], self._value, mean)
        follow(self.targets, self.critics)

    def _value(self, state: Tensor, action: Tensor) -> Tensor:
        return self.reduce(values(self.critics, state, action), 0)


REDQ = partial(SAC, num_critics=10, policy_delay=20, reduce=torch.mean)
DroQ = partial(SAC, policy_delay=20, reduce=torch.mean, dropout=0.01, layer_norm=True)


class CrossQ:
    """SAC without targets, with batch normalization.

    CrossQ itself uses batch renormalization, which is the same for its first 100,000 batches.
    """

    def __init__(
        self, observations: int, actions: int, hidden: tuple[int, ...] = (256, 256)
    ) -> None:
        network = normalized_mlp(observations, 2 * actions, hidden).eval()
        self.actor = SoftActor(network, actions, beta=0.5)
        self.critics = nn.ModuleList(
            normalized_mlp(observations + actions, 1, hidden) for _ in range(2)
        )
        self.critic_optimizer = adam(self.critics.parameters(), beta=0.5)
        self.updates = 0

    def act(self, observation: np.ndarray) -> np.ndarray:
        """Returns a random action of the policy."""
        return self.actor.act(observation)

    def update(self, batch: Any) -> None:
        """Takes a gradient step; normalizes current and next rows as one batch."""
        self.updates += 1
        state, after = batch["observation"], batch["next", "observation"]
        with torch.no_grad():
            action, log_prob = self.actor.sample(after)
        self.critics.train()
        both = torch.cat([state, after]), torch.cat([batch["action"], action])
        found, following = values(self.critics, *both).chunk(2, 1)
        goal = bootstrap(batch, following.detach().amin(0) - self.actor.alpha * log_prob)
        descend(self.critic_optimizer, (found - goal).square().sum(0).mean())
        if self.updates % 3 == 0:
            self.actor.network.train()
            self.critics.eval()
            self.actor.learn(state, lambda *inputs: values(self.critics, *inputs).amin(0))
            self.actor.network.eval()


class SUNRISE:
    """An ensemble of SAC agents that weight targets by the agreement of their critics."""

    def __init__(
        self,
        observations: int,
        actions: int,
        hidden: tuple[int, ...] = (256, 256),
        *,
        members: int = 5,
    ) -> None:
        self.members = [SAC(observations, actions, hidden) for _ in range(members)]

    @torch.no_grad()
    def act(self, observation: np.ndarray) -> np.ndarray:
        """Returns the members' action with the highest upper confidence bound."""
        state = torch.as_tensor(observation, dtype=torch.float32)[None]
        actions = torch.cat([member.actor.sample(state)[0] for member in self.members])
        critics = [critic for member in self.members for critic in member.critics]
        found = values(critics, state.expand(len(actions), -1), actions)  # [2n, n, 1]
        bound = found.mean(0) + found.std(0, correction=0)
        return actions[bound.argmax()].numpy()

    def update(self, batch: Any) -> None:
        """Takes a gradient step of each member, on the rows of its mask."""
        after, goals = batch["next", "observation"], []
        targets = [critic for member in self.members for critic in member.targets]
        with torch.no_grad():
            for number, member in enumerate(self.members):
                action, log_prob = member.actor.sample(after)
                found = values(targets, after, action)
                own = found[2 * number : 2 * number + 2].amin(0)
                goal = bootstrap(batch, own - member.actor.alpha * log_prob)
                goals.append((goal, torch.sigmoid(-20 * found.std(0, correction=0)) + 0.5))
        masks = batch["mask"].float().split(1, -1)
        for member, (goal, trust), mask in zip(self.members, goals, masks, strict=True):
            member.learn(batch, goal, trust, partial(_masked_mean, mask))


def _masked_mean(mask: Tensor, rows: Tensor) -> Tensor:
    return (rows * mask).sum() / (mask.sum() + 1)  # the authors' code adds 1 too
