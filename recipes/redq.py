"""Trains randomized ensembled double Q-learning (REDQ) or DroQ, with any replay method.

python recipes/redq.py env=Hopper                 # REDQ: ten critics, NMER
python recipes/redq.py env=Hopper replay=uniform  # the baseline
python recipes/redq.py env=Hopper num_critics=2 dropout=0.01 layer_norm=true  # DroQ
python recipes/redq.py env=Hopper --cfg job       # every setting of that run

Chen et al., *Randomized Ensembled Double Q-Learning: Learning Fast Without a Model* (ICLR 2021);
Hiraoka et al., *Dropout Q-Functions for Doubly Efficient Reinforcement Learning* (ICLR 2022). This
file defines the networks, the losses and the gradient step. nmer_recipes/training.py holds the
training loop, which all agents share.
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
from nmer_recipes.errors import UsageError
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
from torchrl.objectives import REDQLoss, SoftUpdate


def make_agent(
    cfg: DictConfig, observations: int, actions: int, device: torch.device
) -> tuple[ProbabilisticActor, TensorDictModule, REDQLoss]:
    """Returns a policy, a module that samples from it, and the critics with their targets.

    `REDQLoss` only holds the weights. Its own losses differ from those below: its subset leaves out
    at least one critic, so DroQ's two critics would be trained on one; it keeps the entropy
    coefficient within [0.1, 10]; and it ignores importance weights.
    """
    if cfg.num_target_critics > cfg.num_critics:
        raise UsageError(
            f"num_target_critics={cfg.num_target_critics} of num_critics={cfg.num_critics} cannot "
            "be drawn; lower the first or raise the second."
        )
    network = make_gaussian_network(cfg, observations, actions, device)
    actor, explorer = make_gaussian_actor(network, actions, device)
    loss = REDQLoss(
        actor,
        make_critic(cfg, observations, actions, device),
        num_qvalue_nets=cfg.num_critics,
        sub_sample_len=cfg.num_target_critics,
        loss_function=STOCK_DISTANCES[cfg.critic_loss],
        alpha_init=cfg.alpha_init,
        target_entropy=-float(actions) if cfg.target_entropy is None else cfg.target_entropy,
        action_spec=bounds(actions, device),
    ).to(device)
    loss.make_value_estimator(gamma=cfg.gamma)
    loss.set_keys(done="terminated", terminated="terminated")  # keep bootstrapping at time limits
    return actor, explorer, loss


def make_losses(
    cfg: DictConfig, agent: REDQLoss
) -> tuple[Callable[..., tuple[Tensor, Tensor]], Callable[..., dict[str, Tensor]]]:
    """Returns the critic loss and the actor losses, as functions of weights and batches.

    Dropout is active in all of them, including the targets.
    """
    # Read plain numbers here: `torch.compile` cannot trace the config.
    gamma, target_entropy = cfg.gamma, float(agent.target_entropy)
    distance, subset = DISTANCES[cfg.critic_loss], cfg.num_target_critics
    actor = Functional(agent.actor_network[0].module, cfg.precision)
    critic = Functional(agent.qvalue_network.module, cfg.precision)

    def critic_loss(
        weights: Weights, batch: Batch, noise: Tensor, ranks: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Returns the loss, summed over critics, and each row's mean absolute error over critics.

        The noise `[B, actions]` is standard normal. The target critics with the highest random
        ranks `[critics]` compute the value.
        """
        (log_alpha,) = weights.log_alpha
        with torch.no_grad():
            policy = SquashedNormal(*actor(weights.actor, batch.following))
            action, log_prob = policy.draw(noise)
            drawn = ranks.topk(subset).indices
            targets = [weight[drawn] for weight in weights.target_critics]
            value = critic.each(targets, batch.following, action, moved=[]).amin(0)
            value = value - log_alpha.exp() * log_prob
            goal = batch.reward + gamma * ~batch.terminated * value
        values = critic.each(weights.critics, batch.observation, batch.action, moved=[])
        distances = distance(values, goal.expand_as(values), reduction="none")
        return batch.mean(distances.sum(0)), (values - goal).detach().abs().mean(0)

    def actor_losses(weights: Weights, batch: Batch, noise: Tensor) -> dict[str, Tensor]:
        """Returns the losses of actor and entropy coefficient, the entropy and the coefficient.

        The actor maximizes the mean value over all critics.
        """
        (log_alpha,) = weights.log_alpha
        alpha = log_alpha.detach().exp()
        policy = SquashedNormal(*actor(weights.actor, batch.observation))
        action, log_prob = policy.draw(noise)
        fixed = [weight.detach() for weight in weights.critics]
        value = critic.each(fixed, batch.observation, action, moved=[]).mean(0)
        excess = log_prob.detach() + target_entropy
        return {
            "loss_actor": batch.mean(alpha * log_prob - value),
            "loss_alpha": batch.mean(-log_alpha * excess),
            "entropy": -log_prob.detach().mean(),
            "alpha": alpha,
        }

    return critic_loss, actor_losses


class State(NamedTuple):
    """The tensors that a gradient step updates in place."""

    weights: Weights
    actor_moments: Moments
    critic_moments: Moments


def make_update(
    cfg: DictConfig, agent: REDQLoss
) -> tuple[Callable[[Batch, int], Results], dict[str, Adam]]:
    """Returns a function that takes gradient steps on a block of batches, and the optimizers."""
    delay, critics = cfg.policy_delay, cfg.num_critics
    limit, l2, tau = cfg.grad_clip, cfg.actor_l2, cfg.tau
    SoftUpdate(agent, tau=tau)  # creates the target networks; `move_targets` updates them
    critic_loss, actor_losses = make_losses(cfg, agent)
    weights = find_weights(agent)
    actor_optimizer = Adam([*weights.actor, *weights.log_alpha], lr=cfg.lr)
    critic_optimizer = Adam(weights.critics, lr=cfg.lr)

    def step(state: State, batch: Batch, noise: Tensor, moves_actor: bool) -> Results:
        """Updates critics and targets, and if `moves_actor` also actor and entropy coefficient."""
        weights, actor_moments, critic_moments = state
        ranks, noise = noise[:critics], noise[critics:].view(2, *batch.action.shape)

        def of_critics(critics: list[Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
            own = weights._replace(critics=critics)
            loss, errors = critic_loss(own, batch, noise[0], ranks)
            return loss, (loss.detach(), errors)

        def of_actor(learned: list[Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
            *actor, log_alpha = learned
            own = weights._replace(actor=actor, log_alpha=[log_alpha])
            losses = actor_losses(own, batch, noise[1])
            total = losses["loss_actor"] + losses["loss_alpha"]
            total = total + l2 * decay(actor) if l2 else total
            return total, {name: value.detach() for name, value in losses.items()}

        gradients, (loss_qvalue, errors) = differentiate(of_critics, weights.critics)
        critic_optimizer.move(weights.critics, clip_each(gradients, limit), critic_moments)
        losses = {"loss_qvalue": loss_qvalue}
        if moves_actor:
            learned = [*weights.actor, *weights.log_alpha]
            gradients, of_policy = differentiate(of_actor, learned)
            clipped = [*clip(gradients[:-1], limit), *clip(gradients[-1:], limit)]
            actor_optimizer.move(learned, clipped, actor_moments)
            losses |= of_policy
        move_targets(weights, tau)
        return losses, errors

    steps = over_blocks(
        cfg, step, lambda: State(weights, actor_optimizer.moments, critic_optimizer.moments)
    )

    def update(block: Batch, done: int) -> Results:
        """Takes a gradient step on each batch of a block `[K, B]`, after `done` earlier steps."""
        count, size, width = block.action.shape
        turns = tuple(n % delay == 0 for n in range(done + 1, done + 1 + count))
        noise = torch.randn(count, critics + 2 * size * width, device=block.action.device)
        return steps(block, noise, turns)

    return update, {"actor_optimizer": actor_optimizer, "critic_optimizer": critic_optimizer}


train = partial(training.train, make_agent=make_agent, make_update=make_update)

if __name__ == "__main__":
    run_recipe(train, "redq")
