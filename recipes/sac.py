"""Trains soft actor-critic (SAC) on a continuous task, with the replay method of your choice.

python recipes/sac.py env=Walker2d                    # NMER, the paper's settings
python recipes/sac.py env=Walker2d replay=uniform     # the baseline
python recipes/sac.py env=Walker2d --cfg job          # every setting of that run

Haarnoja et al., *Soft Actor-Critic Algorithms and Applications* (2018). This file defines the
networks, the losses and the gradient step. nmer_recipes/training.py holds the training loop, which
all agents share.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from nmer_recipes import training
from nmer_recipes.actors import (
    SquashedNormal,
    bounds,
    make_gaussian_actor,
    make_gaussian_network,
)
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
from tensordict.nn import TensorDictModule
from torch import Tensor
from torchrl.modules import ProbabilisticActor
from torchrl.objectives import SACLoss, SoftUpdate


def make_agent(
    cfg: DictConfig, observations: int, actions: int, device: torch.device
) -> tuple[ProbabilisticActor, TensorDictModule, SACLoss]:
    """Returns a policy, a module that samples from it, and the losses with their critics."""
    network = make_gaussian_network(cfg, observations, actions, device)
    actor, explorer = make_gaussian_actor(network, actions, device)
    loss = SACLoss(
        actor,
        make_critic(cfg, observations, actions, device),
        num_qvalue_nets=2,
        loss_function=STOCK_DISTANCES[cfg.critic_loss],
        alpha_init=cfg.alpha_init,
        target_entropy=-float(actions) if cfg.target_entropy is None else cfg.target_entropy,
        action_spec=bounds(actions, device),
    ).to(device)
    loss.make_value_estimator(gamma=cfg.gamma)
    loss.set_keys(done="terminated", terminated="terminated")  # keep bootstrapping at time limits
    return actor, explorer, loss


def make_losses(cfg: DictConfig, agent: SACLoss) -> Callable[[Weights, Batch, Tensor], Results]:
    """Returns the losses, as a function of weights and batches."""
    # Read plain numbers here: `torch.compile` cannot trace the config.
    gamma, target_entropy = cfg.gamma, float(agent.target_entropy)
    distance = DISTANCES[cfg.critic_loss]
    actor = Functional(agent.actor_network[0].module, cfg.precision)
    critic = Functional(agent.qvalue_network.module, cfg.precision)

    def losses(weights: Weights, batch: Batch, noise: Tensor) -> Results:
        """Returns losses, entropy and its coefficient, and each row's absolute TD error.

        The noise `[2, B, actions]` samples the actions at the next and at the current observation.
        The TD error is averaged over the critics.
        """
        (log_alpha,) = weights.log_alpha
        alpha = log_alpha.detach().exp()
        with torch.no_grad():
            policy = SquashedNormal(*actor(weights.actor, batch.following))
            action, log_prob = policy.draw(noise[0])
            value = critic.each(weights.target_critics, batch.following, action).amin(0)
            goal = batch.reward + gamma * ~batch.terminated * (value - alpha * log_prob)
        values = critic.each(weights.critics, batch.observation, batch.action)
        distances = distance(values, goal.expand_as(values), reduction="none")

        policy = SquashedNormal(*actor(weights.actor, batch.observation))
        action, log_prob = policy.draw(noise[1])
        # The actor's gradient flows through the critics but does not change their weights.
        fixed = [weight.detach() for weight in weights.critics]
        value = critic.each(fixed, batch.observation, action).amin(0)
        excess = log_prob.detach() + target_entropy
        found = {
            "loss_qvalue": batch.mean(distances.sum(0)),
            "loss_actor": batch.mean(alpha * log_prob - value),
            "loss_alpha": batch.mean(-log_alpha * excess),
            "entropy": -log_prob.detach().mean(),
            "alpha": alpha,
        }
        return found, (values - goal).detach().abs().mean(0)

    return losses


def make_stock_losses(agent: SACLoss) -> Callable[[Weights, Batch, Tensor], Results]:
    """Returns the same losses computed by TorchRL's loss module.

    The module holds the weights itself and draws its own noise. Each TD error is the larger of the
    two critics' errors.
    """

    def losses(_: Weights, batch: Batch, __: Tensor) -> Results:
        rows = batch.as_rows()
        return agent(rows).to_dict(), rows["td_error"]

    return losses


class State(NamedTuple):
    """The tensors that a gradient step updates in place."""

    weights: Weights
    moments: Moments


def make_update(
    cfg: DictConfig, agent: SACLoss
) -> tuple[Callable[[Batch, int], Results], dict[str, Adam]]:
    """Returns a function that takes gradient steps on a block of batches, and the optimizer."""
    limit, l2, tau = cfg.grad_clip, cfg.actor_l2, cfg.tau
    SoftUpdate(agent, tau=tau)  # creates the target networks; `move_targets` updates them
    stock = cfg.losses == "torchrl"
    get_losses = make_stock_losses(agent) if stock else make_losses(cfg, agent)
    weights = find_weights(agent)
    optimizer = Adam([*weights.actor, *weights.critics, *weights.log_alpha], lr=cfg.lr)

    def step(state: State, batch: Batch, noise: Tensor) -> Results:
        """Takes one gradient step on actor, critics and entropy coefficient."""
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
        count, size, width = block.action.shape
        return steps(block, torch.randn(count, 2, size, width, device=block.action.device))

    return update, {"optimizer": optimizer}


train = partial(training.train, make_agent=make_agent, make_update=make_update)

if __name__ == "__main__":
    run_recipe(train, "sac")
