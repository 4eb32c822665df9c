"""Trains twin delayed DDPG (TD3) on a continuous task, with the replay method of your choice.

python recipes/td3.py env=HalfCheetah                 # NMER, the paper's settings
python recipes/td3.py env=HalfCheetah replay=uniform  # the baseline
python recipes/td3.py env=HalfCheetah --cfg job       # every setting of that run

Fujimoto, van Hoof and Meger, *Addressing Function Approximation Error in Actor-Critic Methods*
(ICML 2018). This file defines the networks and the losses. nmer_recipes/delayed.py holds the
gradient step, which TD3+BC shares. nmer_recipes/training.py holds the training loop, which all
agents share.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from nmer_recipes import training
from nmer_recipes.actors import bounds, make_deterministic_actor
from nmer_recipes.blocks import Batch
from nmer_recipes.compiling import Results
from nmer_recipes.config import run_recipe
from nmer_recipes.delayed import make_delayed_update
from nmer_recipes.networks import (
    DISTANCES,
    STOCK_DISTANCES,
    Functional,
    Weights,
    find_weights,
    make_critic,
)
from nmer_recipes.optim import Adam
from omegaconf import DictConfig
from tensordict.nn import TensorDictModule
from torch import Tensor
from torchrl.objectives import SoftUpdate, TD3Loss


def make_agent(
    cfg: DictConfig, observations: int, actions: int, device: torch.device
) -> tuple[TensorDictModule, TensorDictModule, TD3Loss]:
    """Returns a deterministic policy, the policy with noise, and the losses with their critics."""
    actor, explorer = make_deterministic_actor(cfg, observations, actions, device)
    loss = TD3Loss(
        actor,
        make_critic(cfg, observations, actions, device),
        num_qvalue_nets=2,
        loss_function=STOCK_DISTANCES[cfg.critic_loss],
        policy_noise=cfg.target_noise,
        noise_clip=cfg.target_noise_clip,
        delay_actor=True,
        delay_qvalue=True,
        action_spec=bounds(actions, device),
    ).to(device)
    loss.make_value_estimator(gamma=cfg.gamma)
    loss.set_keys(done="terminated", terminated="terminated")  # keep bootstrapping at time limits
    return actor, explorer, loss


def make_losses(
    cfg: DictConfig, agent: TD3Loss
) -> tuple[Callable[..., tuple[Tensor, Tensor]], Callable[..., Tensor]]:
    """Returns the critic loss and the actor loss, as functions of weights and batches."""
    # Read plain numbers here: `torch.compile` cannot trace the config.
    gamma, sigma, limit = cfg.gamma, cfg.target_noise, cfg.target_noise_clip
    distance = DISTANCES[cfg.critic_loss]
    actor = Functional(agent.actor_network.module, cfg.precision)
    critic = Functional(agent.qvalue_network.module, cfg.precision)

    def critic_loss(weights: Weights, batch: Batch, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the loss, summed over critics, and each row's mean absolute error over critics.

        The noise `[B, actions]` is standard normal.
        """
        with torch.no_grad():
            action = actor(weights.target_actor, batch.following)
            action = (action + (sigma * noise).clamp(-limit, limit)).clamp(-1, 1)
            value = critic.each(weights.target_critics, batch.following, action).amin(0)
            goal = batch.reward + gamma * ~batch.terminated * value
        values = critic.each(weights.critics, batch.observation, batch.action)
        distances = distance(values, goal.expand_as(values), reduction="none")
        return batch.mean(distances.sum(0)), (values - goal).detach().abs().mean(0)

    def actor_loss(weights: Weights, batch: Batch) -> Tensor:
        """Returns the negated value of the actor's actions, estimated by the first critic."""
        action = actor(weights.actor, batch.observation)
        first = [weight.detach()[:1] for weight in weights.critics]
        return batch.mean(-critic.each(first, batch.observation, action)[0])

    return critic_loss, actor_loss


def make_stock_losses(
    agent: TD3Loss,
) -> tuple[Callable[..., tuple[Tensor, Tensor]], Callable[..., Tensor]]:
    """Returns the same losses computed by TorchRL's loss module.

    The module holds the weights itself and draws its own noise.
    """

    def critic_loss(_: Weights, batch: Batch, __: Tensor) -> tuple[Tensor, Tensor]:
        loss, details = agent.value_loss(batch.as_rows())
        return loss, details["td_error"].detach().sqrt().mean(0)

    return critic_loss, lambda _, batch: agent.actor_loss(batch.as_rows())[0]


def make_update(
    cfg: DictConfig, agent: TD3Loss
) -> tuple[Callable[[Batch, int], Results], dict[str, Adam]]:
    """Returns a function that takes gradient steps on a block of batches, and the optimizers."""
    SoftUpdate(agent, tau=cfg.tau)  # creates the target networks; `move_targets` updates them
    stock = cfg.losses == "torchrl"
    losses = make_stock_losses(agent) if stock else make_losses(cfg, agent)
    return make_delayed_update(cfg, find_weights(agent), *losses)


train = partial(training.train, make_agent=make_agent, make_update=make_update)

if __name__ == "__main__":
    run_recipe(train, "td3")
