"""Trains implicit Q-learning (IQL) on fixed data, with the replay method of your choice.

python recipes/iql.py env=Hopper data=log.npz                 # NMER
python recipes/iql.py env=Hopper data=log.npz replay=uniform  # the baseline
python recipes/iql.py env=Hopper data=log.npz --cfg job       # every setting of that run

Kostrikov, Nair and Levine, *Offline Reinforcement Learning with Implicit Q-Learning* (ICLR 2022).
The task is used only for evaluation. This file defines the networks, the losses and the gradient
step. nmer_recipes/training.py holds the training loop, which all agents share.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from nmer_recipes import training
from nmer_recipes.actors import bounds, make_network
from nmer_recipes.blocks import Batch
from nmer_recipes.compiling import Results, over_blocks
from nmer_recipes.config import run_recipe
from nmer_recipes.networks import (
    DISTANCES,
    STOCK_DISTANCES,
    Functional,
    Weights,
    find_weights,
    make_critic,
)
from nmer_recipes.optim import Adam, Moments, clip, clip_each, decay, differentiate, move_targets
from omegaconf import DictConfig
from tensordict.nn import NormalParamExtractor, TensorDictModule
from torch import Tensor, nn
from torchrl.modules import MLP, IndependentNormal, ProbabilisticActor, ValueOperator
from torchrl.objectives import IQLLoss, SoftUpdate


class BoundedMean(nn.Module):
    """Converts outputs into the mean, within [-1, 1], and the scale of a Gaussian."""

    def __init__(self) -> None:
        super().__init__()
        self.split = NormalParamExtractor()

    def forward(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the mean and the scale."""
        loc, scale = self.split(outputs)
        return loc.tanh(), scale


def make_agent(
    cfg: DictConfig, observations: int, actions: int, device: torch.device
) -> tuple[ProbabilisticActor, ProbabilisticActor, IQLLoss]:
    """Returns a Gaussian policy (twice) and the losses with their critics.

    The policy also takes the explorer's place, since it need not explore.
    """
    network = make_network(cfg, observations, 2 * actions, BoundedMean(), device)
    actor = ProbabilisticActor(
        TensorDictModule(network, in_keys=["observation"], out_keys=["loc", "scale"]),
        in_keys=["loc", "scale"],
        spec=bounds(actions, device),
        distribution_class=IndependentNormal,
    )
    layers = {"num_cells": list(cfg.hidden), "activation_class": nn.ReLU, "device": device}
    value = MLP(in_features=observations, out_features=1, **layers)
    loss = IQLLoss(
        actor,
        make_critic(cfg, observations, actions, device),
        ValueOperator(value, in_keys=["observation"]),
        num_qvalue_nets=2,
        loss_function=STOCK_DISTANCES[cfg.critic_loss],
        temperature=cfg.temperature,
        expectile=cfg.expectile,
    ).to(device)
    loss.make_value_estimator(gamma=cfg.gamma)
    loss.set_keys(done="terminated", terminated="terminated")  # keep bootstrapping at time limits
    return actor, actor, loss


def make_losses(cfg: DictConfig, agent: IQLLoss) -> Callable[[Weights, Batch], Results]:
    """Returns the losses, as a function of weights and batches."""
    # Read plain numbers here: `torch.compile` cannot trace the config.
    gamma, expectile, temperature = cfg.gamma, cfg.expectile, cfg.temperature
    distance = DISTANCES[cfg.critic_loss]
    actor = Functional(agent.actor_network[0].module, cfg.precision)
    critic = Functional(agent.qvalue_network.module, cfg.precision)
    judge = Functional(agent.value_network.module, cfg.precision)

    def losses(weights: Weights, batch: Batch) -> Results:
        """Returns losses and entropy, and each row's mean absolute TD error over critics."""
        with torch.no_grad():
            target = critic.each(weights.target_critics, batch.observation, batch.action).amin(0)
            following = judge(weights.value, batch.following)[..., 0]
            goal = batch.reward + gamma * ~batch.terminated * following
        advantage = target - judge(weights.value, batch.observation)[..., 0]
        side = torch.where(advantage > 0, expectile, 1 - expectile)

        values = critic.each(weights.critics, batch.observation, batch.action)
        distances = distance(values, goal.expand_as(values), reduction="none")

        policy = torch.distributions.Normal(
            *actor(weights.actor, batch.observation), validate_args=False
        )
        log_prob = policy.log_prob(batch.action).sum(-1)
        trust = (temperature * advantage.detach()).exp().clamp(max=100)
        found = {
            "loss_qvalue": batch.mean(distances.sum(0)),
            "loss_value": batch.mean(side * advantage.square()),
            "loss_actor": batch.mean(-trust * log_prob),
            "entropy": policy.entropy().detach().sum(-1).mean(),
        }
        return found, (values - goal).detach().abs().mean(0)

    return losses


class State(NamedTuple):
    """The tensors that a gradient step updates in place."""

    weights: Weights
    moments: Moments


def make_update(
    cfg: DictConfig, agent: IQLLoss
) -> tuple[Callable[[Batch, int], Results], dict[str, Adam]]:
    """Returns a function that takes gradient steps on a block of batches, and the optimizer."""
    limit, l2, tau = cfg.grad_clip, cfg.actor_l2, cfg.tau
    SoftUpdate(agent, tau=tau)  # creates the target networks; `move_targets` updates them
    get_losses = make_losses(cfg, agent)
    weights = find_weights(agent)
    optimizer = Adam([*weights.actor, *weights.critics, *weights.value], lr=cfg.lr)

    def step(state: State, batch: Batch, _: Tensor) -> Results:
        """Takes one gradient step on actor, critics and value network."""
        weights, moments = state
        learned = [*weights.actor, *weights.critics, *weights.value]
        first, second = len(weights.actor), len(weights.actor) + len(weights.critics)

        def total_loss(learned: list[Tensor]) -> tuple[Tensor, Results]:
            actor, critics, value = learned[:first], learned[first:second], learned[second:]
            own = weights._replace(actor=actor, critics=critics, value=value)
            losses, errors = get_losses(own, batch)
            total = losses["loss_qvalue"] + losses["loss_value"] + losses["loss_actor"]
            total = total + l2 * decay(actor) if l2 else total
            return total, ({name: value.detach() for name, value in losses.items()}, errors)

        gradients, results = differentiate(total_loss, learned)
        clipped = [
            *clip(gradients[:first], limit),
            *clip_each(gradients[first:second], limit),
            *clip(gradients[second:], limit),
        ]
        optimizer.move(learned, clipped, moments)
        move_targets(weights, tau)
        return results

    steps = over_blocks(cfg, step, lambda: State(weights, optimizer.moments))

    def update(block: Batch, done: int) -> Results:
        """Takes a gradient step on each batch of a block `[K, B]`; ignores `done`."""
        return steps(block, block.reward.new_empty(len(block.reward), 0))  # no noise

    return update, {"optimizer": optimizer}


train = partial(training.train, make_agent=make_agent, make_update=make_update)

if __name__ == "__main__":
    run_recipe(train, "iql")
