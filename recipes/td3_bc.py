"""Trains TD3 with behavior cloning (TD3+BC) on fixed data, with the replay method of your choice.

python recipes/td3_bc.py env=Hopper data=log.npz                 # NMER
python recipes/td3_bc.py env=Hopper data=log.npz replay=uniform  # the baseline
python recipes/td3_bc.py env=Hopper data=log.npz --cfg job       # every setting of that run

Fujimoto and Gu, *A Minimalist Approach to Offline Reinforcement Learning* (NeurIPS 2021). The task
is used only for evaluation. This file defines the networks and the losses. nmer_recipes/delayed.py
holds the gradient step, which TD3 shares. nmer_recipes/training.py holds the training loop, which
all agents share.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from nmer_recipes import training
from nmer_recipes.actors import bounds, make_network
from nmer_recipes.blocks import Batch
from nmer_recipes.compiling import Results
from nmer_recipes.config import run_recipe
from nmer_recipes.delayed import make_delayed_update
from nmer_recipes.networks import (
    DISTANCES,
    STOCK_DISTANCES,
    Functional,
    Standardize,
    Weights,
    find_weights,
    make_critic,
)
from nmer_recipes.optim import Adam
from omegaconf import DictConfig
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torch import Tensor, nn
from torchrl.modules import ValueOperator
from torchrl.objectives import SoftUpdate, TD3BCLoss


class Joined(nn.Sequential):
    """Layers that concatenate their inputs first."""

    def forward(self, *inputs: Tensor) -> Tensor:
        """Returns the outputs."""
        return super().forward(torch.cat(inputs, -1))


def make_agent(
    cfg: DictConfig, observations: int, actions: int, device: torch.device
) -> tuple[TensorDictModule, TensorDictModule, TD3BCLoss]:
    """Returns a deterministic policy (twice) and the losses with their critics.

    The policy also takes the explorer's place, since it need not explore.
    """
    network = nn.Sequential(
        Standardize(observations, device),
        make_network(cfg, observations, actions, nn.Tanh(), device),
    )
    actor = TensorDictModule(network, in_keys=["observation"], out_keys=["action"])
    critic = Joined(
        Standardize(observations + actions, device),
        make_critic(cfg, observations, actions, device).module,
    )
    loss = TD3BCLoss(
        actor,
        ValueOperator(critic, in_keys=["observation", "action"]).eval(),
        num_qvalue_nets=2,
        loss_function=STOCK_DISTANCES[cfg.critic_loss],
        policy_noise=cfg.target_noise,
        noise_clip=cfg.target_noise_clip,
        alpha=cfg.bc_alpha,
        action_spec=bounds(actions, device),
    ).to(device)
    loss.make_value_estimator(gamma=cfg.gamma)
    loss.set_keys(done="terminated", terminated="terminated")  # keep bootstrapping at time limits
    SoftUpdate(loss, tau=cfg.tau)  # creates the target networks; `move_targets` updates them
    return actor, actor, loss


@torch.no_grad()
def standardize(cfg: DictConfig, agent: TD3BCLoss, rows: TensorDictBase) -> None:
    """Standardizes observations by the data's mean and standard deviation if `cfg.normalize`."""
    if not cfg.normalize:
        return
    seen = rows["observation"]
    mean, scale = seen.mean(0), 1 / (seen.std(0, correction=0) + 1e-3)
    width = len(mean)
    for name, buffer in agent.named_buffers():  # of the actor, critics and targets
        if name.endswith("fixed_mean"):
            buffer[..., :width] = mean.to(buffer.device)
        elif name.endswith("fixed_scale"):
            buffer[..., :width] = scale.to(buffer.device)


def make_losses(
    cfg: DictConfig, agent: TD3BCLoss
) -> tuple[Callable[..., tuple[Tensor, Tensor]], Callable[..., Tensor]]:
    """Returns the critic loss and the actor loss, as functions of weights and batches."""
    # Read plain numbers here: `torch.compile` cannot trace the config.
    gamma, sigma, limit, alpha = cfg.gamma, cfg.target_noise, cfg.target_noise_clip, cfg.bc_alpha
    distance = DISTANCES[cfg.critic_loss]
    actor = Functional(agent.actor_network.module, cfg.precision)
    critic = Functional(agent.qvalue_network.module, cfg.precision)

    def critic_loss(weights: Weights, batch: Batch, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the loss, summed over critics, and each row's mean absolute error over critics.

        The noise `[B, actions]` is standard normal.
        """
        judge = partial(critic.each, statistics=weights.critic_statistics)
        with torch.no_grad():
            action = actor(weights.target_actor, batch.following, weights.actor_statistics)
            action = (action + (sigma * noise).clamp(-limit, limit)).clamp(-1, 1)
            value = judge(weights.target_critics, batch.following, action).amin(0)
            goal = batch.reward + gamma * ~batch.terminated * value
        values = judge(weights.critics, batch.observation, batch.action)
        distances = distance(values, goal.expand_as(values), reduction="none")
        return batch.mean(distances.sum(0)), (values - goal).detach().abs().mean(0)

    def actor_loss(weights: Weights, batch: Batch) -> Tensor:
        """Returns the squared distance to the data's actions minus the scaled value of the actor's.

        The first critic estimates the value, which is scaled to a mean magnitude of `bc_alpha`.
        """
        action = actor(weights.actor, batch.observation, weights.actor_statistics)
        first = [weight.detach()[:1] for weight in weights.critics]
        statistics = [statistic[:1] for statistic in weights.critic_statistics]
        value = critic.each(first, batch.observation, action, statistics=statistics)[0]
        distances = (action - batch.action).square().mean(-1)
        return batch.mean(distances - alpha / value.detach().abs().mean() * value)

    return critic_loss, actor_loss


def make_update(
    cfg: DictConfig, agent: TD3BCLoss
) -> tuple[Callable[[Batch, int], Results], dict[str, Adam]]:
    """Returns a function that takes gradient steps on a block of batches, and the optimizers."""
    return make_delayed_update(cfg, find_weights(agent), *make_losses(cfg, agent))


train = partial(training.train, make_agent=make_agent, make_update=make_update, prepare=standardize)

if __name__ == "__main__":
    run_recipe(train, "td3_bc")
