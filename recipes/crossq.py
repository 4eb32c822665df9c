"""Trains CrossQ on a continuous task, with the replay method of your choice.

python recipes/crossq.py env=Walker2d                          # NMER
python recipes/crossq.py env=Walker2d replay=uniform           # the baseline
python recipes/crossq.py env=Walker2d critic_hidden=[256,256]  # for a machine without a GPU
python recipes/crossq.py env=Walker2d --cfg job                # every setting of that run

Bhatt et al., *CrossQ: Batch Normalization in Deep Reinforcement Learning for Greater Sample
Efficiency and Simplicity* (ICLR 2024): SAC without target networks, with batch renormalization in
actor and critics and with wide critics. This file defines the networks, the losses and the gradient
step. nmer_recipes/training.py holds the training loop, which all agents share.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from nmer_recipes import training
from nmer_recipes.actors import SquashedNormal, bounds, make_gaussian_actor
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
)
from nmer_recipes.optim import Adam, Moments, clip, clip_each, decay, differentiate
from omegaconf import DictConfig
from tensordict.nn import NormalParamExtractor, TensorDictModule
from torch import Tensor, nn
from torchrl.modules import BatchRenorm1d, ProbabilisticActor, ValueOperator
from torchrl.objectives import CrossQLoss


class Network(nn.Sequential):
    """Linear layers, with batch renormalization of the inputs and after each activation.

    Inputs are concatenated. They are a batch `[B, n]` or a single row `[n]`, which `BatchRenorm1d`
    itself does not accept.
    """

    def __init__(self, cfg: DictConfig, inputs: int, cells: Sequence[int], outputs: int) -> None:
        options = {"momentum": cfg.norm_momentum, "eps": 1e-3, "warmup_steps": cfg.norm_warm_up}
        layers: list[nn.Module] = [BatchRenorm1d(inputs, **options)]
        for width, following in pairwise([inputs, *cells]):
            layers += [nn.Linear(width, following), nn.ReLU(), BatchRenorm1d(following, **options)]
        super().__init__(*layers, nn.Linear([inputs, *cells][-1], outputs))

    def forward(self, *inputs: Tensor) -> Tensor:
        """Returns the outputs."""
        joined = torch.cat(inputs, -1)
        return super().forward(joined) if joined.ndim > 1 else super().forward(joined[None])[0]


def make_agent(
    cfg: DictConfig, observations: int, actions: int, device: torch.device
) -> tuple[ProbabilisticActor, TensorDictModule, CrossQLoss]:
    """Returns a policy, a module that samples from it, and two critics without targets.

    The networks are in evaluation mode, so they normalize by running statistics when they act.
    Gradient steps call them through `Functional`, which takes the mode as an argument.
    """
    if cfg.batch_size < 2:
        raise UsageError(
            "batch_size=1 is too small for batch normalization; crossq.py needs at least 2."
        )
    layers = Network(cfg, observations, cfg.hidden, 2 * actions)
    network = nn.Sequential(layers, NormalParamExtractor()).to(device)
    actor, explorer = make_gaussian_actor(network, actions, device)
    critic = Network(cfg, observations + actions, cfg.critic_hidden, 1).to(device)
    loss = CrossQLoss(
        actor,
        ValueOperator(critic, in_keys=["observation", "action"]).eval(),
        num_qvalue_nets=2,
        loss_function=STOCK_DISTANCES[cfg.critic_loss],
        alpha_init=cfg.alpha_init,
        target_entropy=-float(actions) if cfg.target_entropy is None else cfg.target_entropy,
        action_spec=bounds(actions, device),
    ).to(device)
    loss.make_value_estimator(gamma=cfg.gamma)
    loss.set_keys(done="terminated", terminated="terminated")  # keep bootstrapping at time limits
    return actor, explorer, loss


def make_losses(
    cfg: DictConfig, agent: CrossQLoss
) -> tuple[Callable[..., tuple[Tensor, Tensor]], Callable[..., dict[str, Tensor]]]:
    """Returns the critic loss and the actor losses, as functions of weights and batches.

    Each appends to `moved` the running statistics after its batch.
    """
    # Read plain numbers here: `torch.compile` cannot trace the config.
    gamma, target_entropy = cfg.gamma, float(agent.target_entropy)
    distance = DISTANCES[cfg.critic_loss]
    actor = Functional(agent.actor_network[0].module, cfg.precision)
    critic = Functional(agent.qvalue_network.module, cfg.precision)

    def critic_loss(
        weights: Weights, batch: Batch, noise: Tensor, moved: list[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Returns the loss, summed over critics, and each row's mean absolute error over critics.

        Current and next rows go through the critics as one batch `[2 * B]`, which is normalized as
        a whole. The noise `[B, actions]` is standard normal.
        """
        (log_alpha,) = weights.log_alpha
        with torch.no_grad():
            parameters = actor(weights.actor, batch.following, weights.actor_statistics)
            action, log_prob = SquashedNormal(*parameters).draw(noise)
        rows = len(batch.reward)
        joint = critic.each(
            weights.critics,
            torch.cat([batch.observation, batch.following]),
            torch.cat([batch.action, action]),
            statistics=weights.critic_statistics,
            moved=moved,
        )
        values = joint[:, :rows]
        with torch.no_grad():
            value = joint[:, rows:].amin(0) - log_alpha.exp() * log_prob
            goal = batch.reward + gamma * ~batch.terminated * value
        distances = distance(values, goal.expand_as(values), reduction="none")
        return batch.mean(distances.sum(0)), (values - goal).detach().abs().mean(0)

    def actor_losses(
        weights: Weights, batch: Batch, noise: Tensor, moved: list[Tensor]
    ) -> dict[str, Tensor]:
        """Returns the losses of actor and entropy coefficient, the entropy and the coefficient."""
        (log_alpha,) = weights.log_alpha
        alpha = log_alpha.detach().exp()
        parameters = actor(weights.actor, batch.observation, weights.actor_statistics, moved)
        action, log_prob = SquashedNormal(*parameters).draw(noise)
        fixed, statistics = [w.detach() for w in weights.critics], weights.critic_statistics
        value = critic.each(fixed, batch.observation, action, statistics=statistics).amin(0)
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
    cfg: DictConfig, agent: CrossQLoss
) -> tuple[Callable[[Batch, int], Results], dict[str, Adam]]:
    """Returns a function that takes gradient steps on a block of batches, and the optimizers."""
    delay, limit, l2 = cfg.policy_delay, cfg.grad_clip, cfg.actor_l2
    critic_loss, actor_losses = make_losses(cfg, agent)
    weights, betas = find_weights(agent), (cfg.adam_beta, 0.999)
    actor_optimizer = Adam([*weights.actor, *weights.log_alpha], lr=cfg.lr, betas=betas)
    critic_optimizer = Adam(weights.critics, lr=cfg.lr, betas=betas)

    def step(state: State, batch: Batch, noise: Tensor, moves_actor: bool) -> Results:
        """Updates the critics, and if `moves_actor` also the actor and the entropy coefficient."""
        weights, actor_moments, critic_moments = state

        def of_critics(critics: list[Tensor]) -> tuple[Tensor, Any]:
            moved: list[Tensor] = []
            own = weights._replace(critics=critics)
            loss, errors = critic_loss(own, batch, noise[0], moved)
            return loss, (loss.detach(), errors, moved)

        def of_actor(
            learned: list[Tensor],
        ) -> tuple[Tensor, tuple[dict[str, Tensor], list[Tensor]]]:
            moved: list[Tensor] = []
            *actor, log_alpha = learned
            own = weights._replace(actor=actor, log_alpha=[log_alpha])
            losses = actor_losses(own, batch, noise[1], moved)
            total = losses["loss_actor"] + losses["loss_alpha"]
            total = total + l2 * decay(actor) if l2 else total
            return total, ({name: value.detach() for name, value in losses.items()}, moved)

        gradients, (loss_qvalue, errors, moved) = differentiate(of_critics, weights.critics)
        critic_optimizer.move(weights.critics, clip_each(gradients, limit), critic_moments)
        torch._foreach_copy_(weights.critic_statistics, moved)
        losses = {"loss_qvalue": loss_qvalue}
        if moves_actor:
            learned = [*weights.actor, *weights.log_alpha]
            gradients, (of_policy, moved) = differentiate(of_actor, learned)
            clipped = [*clip(gradients[:-1], limit), *clip(gradients[-1:], limit)]
            actor_optimizer.move(learned, clipped, actor_moments)
            torch._foreach_copy_(weights.actor_statistics, moved)
            losses |= of_policy
        return losses, errors

    steps = over_blocks(
        cfg, step, lambda: State(weights, actor_optimizer.moments, critic_optimizer.moments)
    )

    def update(block: Batch, done: int) -> Results:
        """Takes a gradient step on each batch of a block `[K, B]`, after `done` earlier steps."""
        count, size, width = block.action.shape
        turns = tuple(n % delay == 0 for n in range(done + 1, done + 1 + count))
        return steps(block, torch.randn(count, 2, size, width, device=block.action.device), turns)

    return update, {"actor_optimizer": actor_optimizer, "critic_optimizer": critic_optimizer}


train = partial(training.train, make_agent=make_agent, make_update=make_update)

if __name__ == "__main__":
    run_recipe(train, "crossq")
