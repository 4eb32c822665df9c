"""Trains deep deterministic policy gradient (DDPG) with the replay method of your choice.

python recipes/ddpg.py env=HalfCheetah                 # NMER
python recipes/ddpg.py env=HalfCheetah replay=uniform  # the baseline
python recipes/ddpg.py env=HalfCheetah --cfg job       # every setting of that run

Lillicrap et al., *Continuous Control with Deep Reinforcement Learning* (ICLR 2016), with the
settings that Fujimoto et al. use to compare it with TD3 (ICML 2018). This file defines the
networks, the losses and the gradient step. nmer_recipes/training.py holds the training loop, which
all agents share.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from nmer_recipes import training
from nmer_recipes.actors import make_deterministic_actor
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
from nmer_recipes.optim import Adam, Moments, clip, decay, differentiate, move_targets
from omegaconf import DictConfig
from tensordict.nn import TensorDictModule
from torch import Tensor
from torchrl.objectives import DDPGLoss, SoftUpdate


def make_agent(
    cfg: DictConfig, observations: int, actions: int, device: torch.device
) -> tuple[TensorDictModule, TensorDictModule, DDPGLoss]:
    """Returns a deterministic policy, the policy with noise, and the losses with their critic."""
    actor, explorer = make_deterministic_actor(cfg, observations, actions, device)
    loss = DDPGLoss(
        actor,
        make_critic(cfg, observations, actions, device),
        loss_function=STOCK_DISTANCES[cfg.critic_loss],
        delay_actor=True,
        delay_value=True,
    ).to(device)
    loss.make_value_estimator(gamma=cfg.gamma)
    loss.set_keys(done="terminated", terminated="terminated")  # keep bootstrapping at time limits
    return actor, explorer, loss


def make_losses(
    cfg: DictConfig, agent: DDPGLoss
) -> tuple[Callable[..., tuple[Tensor, Tensor]], Callable[..., Tensor]]:
    """Returns the critic loss and the actor loss, as functions of weights and batches."""
    gamma, distance = cfg.gamma, DISTANCES[cfg.critic_loss]
    actor = Functional(agent.actor_network.module, cfg.precision)
    network = Functional(agent.value_network.module, cfg.precision)

    def critic(weights: list[Tensor], observation: Tensor, action: Tensor) -> Tensor:
        return network(weights, torch.cat([observation, action], -1))[..., 0]

    def critic_loss(weights: Weights, batch: Batch) -> tuple[Tensor, Tensor]:
        """Returns the loss and each row's absolute error."""
        with torch.no_grad():
            action = actor(weights.target_actor, batch.following)
            value = critic(weights.target_critics, batch.following, action)
            goal = batch.reward + gamma * ~batch.terminated * value
        values = critic(weights.critics, batch.observation, batch.action)
        errors = (values - goal).detach().abs()
        return batch.mean(distance(values, goal, reduction="none")), errors

    def actor_loss(weights: Weights, batch: Batch) -> Tensor:
        """Returns the negated value of the actor's actions."""
        fixed = [weight.detach() for weight in weights.critics]
        action = actor(weights.actor, batch.observation)
        return batch.mean(-critic(fixed, batch.observation, action))

    return critic_loss, actor_loss


def make_stock_losses(
    agent: DDPGLoss,
) -> tuple[Callable[..., tuple[Tensor, Tensor]], Callable[..., Tensor]]:
    """Returns the same losses computed by TorchRL's loss module, which holds the weights itself."""

    def critic_loss(_: Weights, batch: Batch) -> tuple[Tensor, Tensor]:
        loss, details = agent.loss_value(batch.as_rows())
        return loss, details["td_error"].detach().sqrt()

    return critic_loss, lambda _, batch: agent.loss_actor(batch.as_rows())[0]


class State(NamedTuple):
    """The tensors that a gradient step updates in place."""

    weights: Weights
    actor_moments: Moments
    critic_moments: Moments


def make_update(
    cfg: DictConfig, agent: DDPGLoss
) -> tuple[Callable[[Batch, int], Results], dict[str, Adam]]:
    """Returns a function that takes gradient steps on a block of batches, and the optimizers."""
    limit, l2, tau = cfg.grad_clip, cfg.actor_l2, cfg.tau
    SoftUpdate(agent, tau=tau)  # creates the target networks; `move_targets` updates them
    stock = cfg.losses == "torchrl"
    critic_loss, actor_loss = make_stock_losses(agent) if stock else make_losses(cfg, agent)
    weights = find_weights(agent)
    actor_optimizer = Adam(weights.actor, lr=cfg.lr)
    critic_optimizer = Adam(weights.critics, lr=cfg.lr)

    def step(state: State, batch: Batch, _: Tensor) -> Results:
        """Takes one step on the critic, the actor and the targets."""
        weights, actor_moments, critic_moments = state

        def of_critic(critics: list[Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
            loss, errors = critic_loss(weights._replace(critics=critics), batch)
            return loss, (loss.detach(), errors)

        def of_actor(actor: list[Tensor]) -> tuple[Tensor, Tensor]:
            loss = actor_loss(weights._replace(actor=actor), batch)
            return loss + l2 * decay(actor) if l2 else loss, loss.detach()

        gradients, (loss_qvalue, errors) = differentiate(of_critic, weights.critics)
        critic_optimizer.move(weights.critics, clip(gradients, limit), critic_moments)
        gradients, loss_actor = differentiate(of_actor, weights.actor)
        actor_optimizer.move(weights.actor, clip(gradients, limit), actor_moments)
        move_targets(weights, tau)
        return {"loss_qvalue": loss_qvalue, "loss_actor": loss_actor}, errors

    steps = over_blocks(
        cfg, step, lambda: State(weights, actor_optimizer.moments, critic_optimizer.moments)
    )

    def update(block: Batch, done: int) -> Results:
        """Takes a gradient step on each batch of a block `[K, B]`; ignores `done`."""
        return steps(block, block.reward.new_empty(len(block.reward), 0))  # no noise

    return update, {"actor_optimizer": actor_optimizer, "critic_optimizer": critic_optimizer}


train = partial(training.train, make_agent=make_agent, make_update=make_update)

if __name__ == "__main__":
    run_recipe(train, "ddpg")
