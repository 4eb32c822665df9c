"""Twin delayed DDPG on a continuous task, with the replay method of your choice.

python recipes/td3.py env=HalfCheetah                 # NMER, the paper's settings
python recipes/td3.py env=HalfCheetah replay=uniform  # the baseline
python recipes/td3.py env=HalfCheetah --cfg job       # every setting of that run

Fujimoto, van Hoof and Meger, *Addressing Function Approximation Error in Actor-Critic Methods*
(ICML 2018). This file has the networks and the losses. The gradient step, which TD3+BC shares, is
in nmer_recipes/delayed.py, and the loop around it, which all agents share, in
nmer_recipes/training.py.
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
    """Returns a deterministic policy, the same with noise, and the losses with their critics."""
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
    loss.set_keys(done="terminated", terminated="terminated")  # a time limit ends no value
    return actor, explorer, loss


def make_losses(
    cfg: DictConfig, agent: TD3Loss
) -> tuple[Callable[..., tuple[Tensor, Tensor]], Callable[..., Tensor]]:
    """Returns the losses of the critics and of the actor, as functions of weights and batches."""
    # Plain numbers: `torch.compile` cannot follow the config.
    gamma, sigma, limit = cfg.gamma, cfg.target_noise, cfg.target_noise_clip
    distance = DISTANCES[cfg.critic_loss]
    actor = Functional(agent.actor_network.module)
    critic = Functional(agent.qvalue_network.module)

    def critic_loss(weights: Weights, batch: Batch, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the loss, summed over critics, and the rows' absolute errors, averaged over them.

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
        """Returns the negative value of what the actor does, by the first critic."""
        action = actor(weights.actor, batch.observation)
        first = [weight.detach()[:1] for weight in weights.critics]
        return batch.mean(-critic.each(first, batch.observation, action)[0])

    return critic_loss, actor_loss


def make_stock_losses(
    agent: TD3Loss,
) -> tuple[Callable[..., tuple[Tensor, Tensor]], Callable[..., Tensor]]:
    """Returns the same by TorchRL's loss, which has the weights itself and draws its own noise."""

    def critic_loss(_: Weights, batch: Batch, __: Tensor) -> tuple[Tensor, Tensor]:
        loss, details = agent.value_loss(batch.as_rows())
        return loss, details["td_error"].detach().sqrt().mean(0)

    return critic_loss, lambda _, batch: agent.actor_loss(batch.as_rows())[0]


def make_update(
    cfg: DictConfig, agent: TD3Loss
) -> tuple[Callable[[Batch, int], Results], dict[str, Adam]]:
    """Returns the gradient steps on a block of batches as one call, and the optimizers."""
    SoftUpdate(agent, tau=cfg.tau)  # makes the targets; `move_targets` moves them
    stock = cfg.losses == "torchrl"
    losses = make_stock_losses(agent) if stock else make_losses(cfg, agent)
    return make_delayed_update(cfg, find_weights(agent), *losses)


train = partial(training.train, make_agent=make_agent, make_update=make_update)

if __name__ == "__main__":
    run_recipe(train, "td3")
