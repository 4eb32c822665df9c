"""Soft actor-critic on a continuous task, with the replay method of your choice.

python recipes/sac.py env=Walker2d                    # NMER, the paper's settings
python recipes/sac.py env=Walker2d replay=uniform     # the baseline
python recipes/sac.py env=Walker2d --cfg job          # every setting of that run
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from common.checkpoint import Checkpoint
from common.collect import make_collector
from common.compiling import Results, maybe_capture, maybe_compile
from common.config import run_recipe
from common.envs import make_env
from common.evaluate import Evaluator
from common.losses import (
    Adam,
    Batch,
    Moments,
    SACLosses,
    Weights,
    as_block,
    clip,
    decay,
    differentiate,
    find_weights,
    move_targets,
)
from common.memory import check_memory
from common.replay import describe, draw, make_buffer, store
from common.runs import Run
from common.streams import seeds
from common.video import check_video, write_video
from omegaconf import DictConfig
from tensordict.nn import NormalParamExtractor, TensorDictModule
from torch import Tensor, nn
from torchrl.data import Bounded
from torchrl.modules import MLP, ProbabilisticActor, TanhNormal, ValueOperator
from torchrl.objectives import SACLoss, SoftUpdate

from nmer_torchrl.loop import report_errors


class State(NamedTuple):
    """What a step moves in place."""

    weights: Weights
    moments: Moments


class SquashedNormal(nn.Module):
    """Draws actions in [-1, 1] by mean and scale of a Gaussian that tanh squashes."""

    def forward(self, parameters: tuple[Tensor, Tensor]) -> Tensor:
        """A random action."""
        loc, scale = parameters
        return (loc + scale * torch.randn_like(loc)).tanh()


def make_agent(
    cfg: DictConfig, observations: int, actions: int, device: torch.device
) -> tuple[ProbabilisticActor, TensorDictModule, SACLoss]:
    """A squashed Gaussian policy, what draws from it, and losses with two critics and targets."""
    spec = Bounded(-torch.ones(actions), torch.ones(actions), device=device)
    layers = {"num_cells": list(cfg.hidden), "activation_class": nn.ReLU, "device": device}
    network = nn.Sequential(
        MLP(in_features=observations, out_features=2 * actions, **layers), NormalParamExtractor()
    )
    actor = ProbabilisticActor(
        TensorDictModule(network, in_keys=["observation"], out_keys=["loc", "scale"]),
        in_keys=["loc", "scale"],
        spec=spec,
        distribution_class=TanhNormal,
        distribution_kwargs={"low": spec.space.low, "high": spec.space.high},
    )
    explorer = TensorDictModule(
        nn.Sequential(network, SquashedNormal()), in_keys=["observation"], out_keys=["action"]
    )
    critic = ValueOperator(
        MLP(in_features=observations + actions, out_features=1, **layers),
        in_keys=["observation", "action"],
    )
    loss = SACLoss(
        actor,
        critic,
        num_qvalue_nets=2,
        loss_function="l2",
        alpha_init=cfg.alpha_init,
        target_entropy=-float(actions) if cfg.target_entropy is None else cfg.target_entropy,
        action_spec=spec,
    ).to(device)
    loss.make_value_estimator(gamma=cfg.gamma)
    loss.set_keys(done="terminated", terminated="terminated")  # a time limit ends no value
    return actor, explorer, loss


def make_update(
    cfg: DictConfig, agent: SACLoss
) -> tuple[Callable[[Batch, int], Results], dict[str, Adam]]:
    """Returns the gradient steps on a block of batches as one call, and the optimizer."""
    # Plain numbers: `torch.compile` cannot follow the config.
    limit, l2 = cfg.grad_clip, cfg.actor_l2
    tau = cfg.tau
    SoftUpdate(agent, tau=tau)  # makes the targets; `move_targets` moves them
    weights, loss = find_weights(agent), SACLosses(agent)
    groups = (weights.actor, weights.critics, weights.log_alpha)
    optimizer = Adam([weight for group in groups for weight in group], lr=cfg.lr)

    def step(state: State, batch: Batch, noise: Tensor) -> Results:
        """One gradient step on everything."""
        weights, moments = state
        learned = [*weights.actor, *weights.critics, *weights.log_alpha]
        first, second = len(weights.actor), len(weights.actor) + len(weights.critics)

        def total_loss(learned: list[Tensor]) -> tuple[Tensor, Results]:
            actor, critics, log_alpha = learned[:first], learned[first:second], learned[second:]
            own = weights._replace(actor=actor, critics=critics, log_alpha=log_alpha)
            losses, errors = loss(own, batch, noise)
            total = losses["loss_qvalue"] + losses["loss_actor"] + losses["loss_alpha"]
            total = total + l2 * decay(actor) if l2 else total
            return total, ({name: value.detach() for name, value in losses.items()}, errors)

        gradients, results = differentiate(total_loss, learned)
        groups = (gradients[:first], gradients[first:second], gradients[second:])
        clipped = [gradient for group in groups for gradient in clip(group, limit)]
        optimizer.move(learned, clipped, moments)
        move_targets(weights, tau)
        return results

    steps = maybe_compile(cfg, step)

    def run(block: Batch, noise: Tensor) -> Results:
        return steps(State(weights, optimizer.moments), block, noise)

    captured = maybe_capture(cfg, run)

    def update(block: Batch, done: int) -> Results:
        """A step on each batch of a block `[K, B]`; how many were made before does not matter."""
        count, size, width = block.action.shape
        return captured(block, torch.randn(count, 2, size, width, device=block.action.device))

    return update, {"optimizer": optimizer}


def train(cfg: DictConfig) -> None:
    """Seed, environment, agent, buffer, loop, evaluation."""
    check_video(cfg)
    # Seed: a stream each, so that a replay method changes neither the networks nor the resets.
    torch.set_num_threads(cfg.threads)
    device, seed = torch.device(cfg.device), seeds(cfg.seed)
    torch.manual_seed(seed["networks"])

    # Environment
    env = make_env(cfg.env)
    evaluate = Evaluator(cfg.env, cfg.eval_episodes, gamma=cfg.gamma, device=device)
    observations, actions = env.observation_space.shape[0], env.action_space.shape[0]

    # Agent
    actor, explorer, agent = make_agent(cfg, observations, actions, device)
    update, optimizers = make_update(cfg, agent)

    # Buffer
    check_memory(cfg, observations, actions)
    run = Run(cfg)
    buffer = make_buffer(cfg, seed["replay"], run.directory)
    collector = make_collector(
        cfg,
        env,
        explorer,
        lambda: make_agent(cfg, observations, actions, torch.device("cpu"))[1],
        seed,
    )

    # Loop
    checkpoint = Checkpoint(
        run.directory, agent=agent, buffer=buffer, collector=collector, run=run, **optimizers
    )
    if run.resumed:
        checkpoint.load()
    clock, rows = run.clock, None
    with collector, run:
        for frame in range(collector.frames + 1, cfg.total_frames + 1):
            with clock("environment"):
                row = collector.step()
            with clock("upkeep"):
                store(buffer, row, collector.ended)
            due = math.floor((frame - cfg.random_frames) * cfg.replay_ratio) - run.updates
            for rows in draw(buffer, max(due, 0), clock):
                with clock("update"):
                    block = as_block(rows, cfg.batch_size, device)
                    losses, errors = update(block, run.updates)
                    run.note(losses, len(block.reward))
                with clock("upkeep"):
                    report_errors(buffer, rows, errors.flatten())
            run.count(frame)

            # Evaluation
            if frame % cfg.eval_every == 0:
                with clock("evaluation"):
                    scores = evaluate(actor, agent)
                run.log(frame, collector.returns, scores, describe(buffer, rows))
            stopping, done = run.interrupted is not None, frame == cfg.total_frames
            if stopping or done or frame % cfg.checkpoint_every == 0:
                checkpoint.save(last=stopping or done)
            if stopping:
                run.stop()
        write_video(cfg, run.directory, evaluate, actor)
        run.finish()


if __name__ == "__main__":
    run_recipe(train, "sac")
