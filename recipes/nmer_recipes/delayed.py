"""The gradient step of TD3 and TD3+BC, which update the actor less often than the critics."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from omegaconf import DictConfig
from torch import Tensor

from nmer_recipes.blocks import Batch
from nmer_recipes.compiling import Results, over_blocks
from nmer_recipes.networks import Weights
from nmer_recipes.optim import Adam, Moments, clip, clip_each, decay, differentiate, move_targets


class Turn(NamedTuple):
    """Says what a step updates besides the critics; depends only on the step's number."""

    actor: bool
    targets: bool


class State(NamedTuple):
    """The tensors that a gradient step updates in place."""

    weights: Weights
    actor_moments: Moments
    critic_moments: Moments


def make_delayed_update(
    cfg: DictConfig,
    weights: Weights,
    critic_loss: Callable[[Weights, Batch, Tensor], tuple[Tensor, Tensor]],
    actor_loss: Callable[[Weights, Batch], Tensor],
) -> tuple[Callable[[Batch, int], Results], dict[str, Adam]]:
    """Returns a function that takes gradient steps on a block of batches, and the optimizers.

    Args:
        cfg: The run's config.
        weights: The agent's weights; steps update them in place.
        critic_loss: Returns the critics' loss and the rows' absolute TD errors.
        actor_loss: Returns the actor's loss.
    """
    delay, interval = cfg.policy_delay, cfg.target_interval
    limit, l2, tau = cfg.grad_clip, cfg.actor_l2, cfg.tau
    actor_optimizer = Adam(weights.actor, lr=cfg.lr)
    critic_optimizer = Adam(weights.critics, lr=cfg.lr)

    def step(state: State, batch: Batch, noise: Tensor, turn: Turn) -> Results:
        """Updates the critics, and in their `turn` the actor and the targets."""
        weights, actor_moments, critic_moments = state

        def of_critics(critics: list[Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
            loss, errors = critic_loss(weights._replace(critics=critics), batch, noise)
            return loss, (loss.detach(), errors)

        def of_actor(actor: list[Tensor]) -> tuple[Tensor, Tensor]:
            loss = actor_loss(weights._replace(actor=actor), batch)
            return loss + l2 * decay(actor) if l2 else loss, loss.detach()

        gradients, (loss_qvalue, errors) = differentiate(of_critics, weights.critics)
        critic_optimizer.move(weights.critics, clip_each(gradients, limit), critic_moments)
        losses = {"loss_qvalue": loss_qvalue}
        if turn.actor:
            gradients, losses["loss_actor"] = differentiate(of_actor, weights.actor)
            actor_optimizer.move(weights.actor, clip(gradients, limit), actor_moments)
        if turn.targets:
            move_targets(weights, tau)
        return losses, errors

    steps = over_blocks(
        cfg, step, lambda: State(weights, actor_optimizer.moments, critic_optimizer.moments)
    )

    def update(block: Batch, done: int) -> Results:
        """Takes a gradient step on each batch of a block `[K, B]`, after `done` earlier steps."""
        turns = tuple(
            Turn(n % delay == 0, n % interval == 0)
            for n in range(done + 1, done + 1 + len(block.reward))
        )
        return steps(block, torch.randn_like(block.action), turns)

    return update, {"actor_optimizer": actor_optimizer, "critic_optimizer": critic_optimizer}
