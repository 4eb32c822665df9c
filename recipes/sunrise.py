"""Trains SUNRISE on a continuous task, with the replay method of your choice.

python recipes/sunrise.py env=Walker2d                 # NMER
python recipes/sunrise.py env=Walker2d replay=uniform  # the baseline
python recipes/sunrise.py env=Walker2d --cfg job       # every setting of that run

Lee et al., *SUNRISE: A Simple Unified Framework for Ensemble Learning in Deep Reinforcement
Learning* (ICML 2021): an ensemble of SAC agents that learn from random subsets of the data, weight
targets by the ensemble's agreement, and act by an upper confidence bound. This file defines the
networks, the losses and the gradient step. nmer_recipes/training.py holds the training loop, which
all agents share.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from nmer_recipes import training
from nmer_recipes.actors import SquashedNormal, make_gaussian_network
from nmer_recipes.blocks import Batch
from nmer_recipes.compiling import Results, over_blocks
from nmer_recipes.config import run_recipe
from nmer_recipes.networks import (
    DISTANCES,
    Functional,
    Weights,
    find_weights,
    make_critic,
    unstack,
)
from nmer_recipes.optim import Adam, Moments, clip_each, decay, differentiate, move_targets
from omegaconf import DictConfig
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictParams
from torch import Tensor, nn
from torchrl.objectives import LossModule, SoftUpdate


class Ensemble(LossModule):
    """Holds the weights of the SAC agents: actors, critics with targets, entropy coefficients.

    There are `n` actors and `2 * n` critics. A member's two critics are adjacent.
    """

    actor_network: TensorDictModule
    actor_network_params: TensorDictParams
    target_actor_network_params: TensorDictParams
    qvalue_network: TensorDictModule
    qvalue_network_params: TensorDictParams
    target_qvalue_network_params: TensorDictParams
    in_keys = ("observation", "action")

    def __init__(
        self, actor: TensorDictModule, critic: TensorDictModule, *, members: int, alpha_init: float
    ) -> None:
        super().__init__()
        self.convert_to_functional(actor, "actor_network", expand_dim=members)
        self.convert_to_functional(
            critic, "qvalue_network", expand_dim=2 * members, create_target_params=True
        )
        self.log_alpha = nn.Parameter(torch.full((members,), math.log(alpha_init)))


class MeanActor(nn.Module):
    """Acts by the mean of the members' deterministic actions."""

    def __init__(self, network: Functional, weights: list[Tensor]) -> None:
        super().__init__()
        self.network, self.weights = network, nn.ParameterList(weights)

    def forward(self, observation: Tensor) -> Tensor:
        """Returns the action."""
        members = [self.network(member, observation) for member in unstack(list(self.weights))]
        return torch.stack([SquashedNormal(*each).deterministic_sample for each in members]).mean(0)


class UpperBoundActor(nn.Module):
    """Samples an action from each member and takes the one with the highest upper bound.

    The upper confidence bound is the mean of all critics' values plus `bonus` times their standard
    deviation.
    """

    def __init__(
        self, actor: Functional, critic: Functional, weights: Weights, bonus: float
    ) -> None:
        super().__init__()
        self.actor, self.critic, self.bonus = actor, critic, bonus
        self.actors = nn.ParameterList(weights.actor)
        self.critics = nn.ParameterList(weights.critics)

    def forward(self, observation: Tensor) -> Tensor:
        """Returns the action."""
        members = [self.actor(member, observation) for member in unstack(list(self.actors))]
        drawn = [SquashedNormal(*each).rsample_and_log_prob()[0] for each in members]
        actions = torch.stack(drawn)  # [n, ..., actions]
        seen = observation.expand(len(actions), *observation.shape)
        values = self.critic.each(list(self.critics), seen, actions)  # [2 * n, n, ...]
        bound = values.mean(0) + self.bonus * values.std(0, correction=0)
        best = bound.argmax(0, keepdim=True).unsqueeze(-1)
        return actions.take_along_dim(best, 0)[0]


def make_agent(
    cfg: DictConfig, observations: int, actions: int, device: torch.device
) -> tuple[TensorDictModule, TensorDictModule, Ensemble]:
    """Returns the mean policy, the exploring policy, and the weights of all members."""
    actor = TensorDictModule(
        make_gaussian_network(cfg, observations, actions, device),
        in_keys=["observation"],
        out_keys=["loc", "scale"],
    )
    critic = make_critic(cfg, observations, actions, device)
    ensemble = Ensemble(actor, critic, members=cfg.members, alpha_init=cfg.alpha_init).to(device)
    SoftUpdate(ensemble, tau=cfg.tau)  # creates the target networks; `move_targets` updates them
    weights = find_weights(ensemble)
    networks = Functional(actor.module), Functional(critic.module)
    keys = {"in_keys": ["observation"], "out_keys": ["action"]}
    return (
        TensorDictModule(MeanActor(networks[0], weights.actor), **keys),
        TensorDictModule(UpperBoundActor(*networks, weights, cfg.ucb_bonus), **keys),
        ensemble,
    )


def add_mask(cfg: DictConfig, row: TensorDictBase) -> None:
    """Adds a mask of the members that learn from a row; at least one member does."""
    device = row["observation"].device
    drawn = torch.rand(cfg.members, device=device)
    row["mask"] = (drawn < cfg.mask_share) | (drawn == drawn.amin())


def make_losses(cfg: DictConfig, agent: Ensemble) -> Callable[[Weights, Batch, Tensor], Results]:
    """Returns the losses, as a function of weights and batches."""
    # Read plain numbers here: `torch.compile` cannot trace the config.
    gamma, members, temperature = cfg.gamma, cfg.members, cfg.backup_temperature
    target_entropy, distance = cfg.target_entropy, DISTANCES[cfg.critic_loss]
    actor = Functional(agent.actor_network.module, cfg.precision)
    critic = Functional(agent.qvalue_network.module, cfg.precision)

    def act(weights: list[Tensor], observation: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the members' actions `[n, B, actions]` and their log-probabilities `[n, B]`."""
        parts = [
            SquashedNormal(*actor(member, observation)).draw(own)
            for member, own in zip(unstack(weights), noise, strict=True)
        ]
        drawn, log_prob = zip(*parts, strict=True)
        return torch.stack(drawn), torch.stack(log_prob)

    def lowest(values: Tensor) -> Tensor:
        """Returns the lower value of each member's critics `[n, B]`, from all `[2 * n, n, B]`."""
        own = values.unflatten(0, (members, 2)).diagonal(dim1=0, dim2=2)  # [2, B, n]
        return own.amin(0).T

    def losses(weights: Weights, batch: Batch, noise: Tensor) -> Results:
        """Returns losses, entropy and its coefficient, and each row's absolute TD error.

        Each loss is a sum over the members of the mean over the rows that the member learns from.
        The noise `[2, n, B, actions]` samples the actions at the next and at the current
        observation.
        """
        (log_alpha,) = weights.log_alpha  # [n]
        alpha = log_alpha.detach().exp().unsqueeze(1)
        share = batch.mask.T.float()  # [n, B]
        if batch.weight is not None:
            share = share * batch.weight

        def mean(rows: Tensor) -> Tensor:  # the authors' code adds 1 too
            return ((rows * share).sum(1) / (share.sum(1) + 1)).sum()

        with torch.no_grad():
            action, log_prob = act(weights.actor, batch.following, noise[0])
            following = batch.following.expand(members, *batch.following.shape)
            values = critic.each(weights.target_critics, following, action)  # [2 * n, n, B]
            goal = lowest(values) - alpha * log_prob
            goal = batch.reward + gamma * ~batch.terminated * goal
            trust = torch.sigmoid(-temperature * values.std(0, correction=0)) + 0.5
        values = critic.each(weights.critics, batch.observation, batch.action)
        values = values.unflatten(0, (members, 2))  # [n, 2, B]
        goal = goal.unsqueeze(1).expand_as(values)
        distances = distance(values, goal, reduction="none").sum(1)

        action, log_prob = act(weights.actor, batch.observation, noise[1])
        # The actors' gradients flow through the critics but do not change their weights.
        fixed = [weight.detach().unflatten(0, (members, 2)) for weight in weights.critics]
        value = torch.stack(
            [
                critic.each(pair, batch.observation, own).amin(0)
                for pair, own in zip(unstack(fixed), action, strict=True)
            ]
        )
        excess = log_prob.detach() + target_entropy
        found = {
            "loss_qvalue": mean(trust * distances),
            "loss_actor": mean(alpha * log_prob - value),
            "loss_alpha": mean(-log_alpha.unsqueeze(1) * excess),
            "entropy": -log_prob.detach().mean(),
            "alpha": alpha.mean(),
        }
        return found, (values - goal).detach().abs().mean((0, 1))

    return losses


class State(NamedTuple):
    """The tensors that a gradient step updates in place."""

    weights: Weights
    moments: Moments


def make_update(
    cfg: DictConfig, agent: Ensemble
) -> tuple[Callable[[Batch, int], Results], dict[str, Adam]]:
    """Returns a function that takes gradient steps on a block of batches, and the optimizer."""
    limit, l2, tau, members = cfg.grad_clip, cfg.actor_l2, cfg.tau, cfg.members
    get_losses = make_losses(cfg, agent)
    weights = find_weights(agent)
    optimizer = Adam([*weights.actor, *weights.critics, *weights.log_alpha], lr=cfg.lr)

    def step(state: State, batch: Batch, noise: Tensor) -> Results:
        """Takes one gradient step on actors, critics and entropy coefficients."""
        weights, moments = state
        learned = [*weights.actor, *weights.critics, *weights.log_alpha]
        first, second = len(weights.actor), len(weights.actor) + len(weights.critics)

        def total_loss(learned: list[Tensor]) -> tuple[Tensor, Results]:
            actor, critics, log_alpha = learned[:first], learned[first:second], learned[second:]
            own = weights._replace(actor=actor, critics=critics, log_alpha=log_alpha)
            losses, errors = get_losses(own, batch, noise)
            total = losses["loss_qvalue"] + losses["loss_actor"] + losses["loss_alpha"]
            total = total + l2 * decay(actor) if l2 else total
            return total, ({name: value.detach() for name, value in losses.items()}, errors)

        gradients, results = differentiate(total_loss, learned)
        parts = gradients[:first], gradients[first:second], gradients[second:]
        clipped = [gradient for part in parts for gradient in clip_each(part, limit)]
        optimizer.move(learned, clipped, moments)
        move_targets(weights, tau)
        return results

    steps = over_blocks(cfg, step, lambda: State(weights, optimizer.moments))

    def update(block: Batch, done: int) -> Results:
        """Takes a gradient step on each batch of a block `[K, B]`; ignores `done`."""
        count, size, width = block.action.shape
        shape = (count, 2, members, size, width)
        return steps(block, torch.randn(shape, device=block.action.device))

    return update, {"optimizer": optimizer}


train = partial(
    training.train, make_agent=make_agent, make_update=make_update, add_entries=add_mask
)

if __name__ == "__main__":
    run_recipe(train, "sunrise")
