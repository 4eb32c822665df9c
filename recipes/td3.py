"""Twin delayed DDPG on a continuous task, with the replay method of your choice.

python recipes/td3.py env=HalfCheetah                 # NMER, the paper's settings
python recipes/td3.py env=HalfCheetah replay=uniform  # the baseline
python recipes/td3.py env=HalfCheetah --cfg job       # every setting of that run
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from nmer_recipes.blocks import Batch, as_block
from nmer_recipes.checkpoint import Checkpoint
from nmer_recipes.collect import make_collector
from nmer_recipes.compiling import Results, over_blocks
from nmer_recipes.config import run_recipe
from nmer_recipes.envs import check_task, make_env
from nmer_recipes.evaluate import Evaluator
from nmer_recipes.memory import check_memory
from nmer_recipes.networks import (
    DISTANCES,
    STOCK_DISTANCES,
    Functional,
    Weights,
    find_weights,
)
from nmer_recipes.optim import Adam, Moments, clip, clip_each, decay, differentiate, move_targets
from nmer_recipes.policy import save_policy
from nmer_recipes.replay import describe, draw, make_buffer, store
from nmer_recipes.runs import Run
from nmer_recipes.seeding import seeds
from nmer_recipes.video import check_video, write_video
from omegaconf import DictConfig
from tensordict.nn import TensorDictModule
from torch import Tensor, nn
from torchrl.data import Bounded
from torchrl.modules import MLP, ValueOperator
from torchrl.objectives import SoftUpdate, TD3Loss

from nmer_torchrl.loop import report_errors


class ExplorationNoise(nn.Module):
    """Adds noise to actions, and keeps them in [-1, 1]."""

    def __init__(self, sigma: float) -> None:
        super().__init__()
        self.sigma = sigma

    def forward(self, action: Tensor) -> Tensor:
        """The noisy action."""
        return (action + self.sigma * torch.randn_like(action)).clamp(-1, 1)


def make_agent(
    cfg: DictConfig, observations: int, actions: int, device: torch.device
) -> tuple[TensorDictModule, TensorDictModule, TD3Loss]:
    """A deterministic policy, the same with noise, and the losses with two critics and targets."""
    spec = Bounded(-torch.ones(actions), torch.ones(actions), device=device)
    layers = {"num_cells": list(cfg.hidden), "activation_class": nn.ReLU, "device": device}
    network = nn.Sequential(
        MLP(in_features=observations, out_features=actions, **layers), nn.Tanh()
    )
    keys = {"in_keys": ["observation"], "out_keys": ["action"]}
    actor = TensorDictModule(network, **keys)
    noise = ExplorationNoise(cfg.exploration_noise)
    explorer = TensorDictModule(nn.Sequential(network, noise), **keys)
    critic = ValueOperator(
        MLP(in_features=observations + actions, out_features=1, **layers),
        in_keys=["observation", "action"],
    )
    loss = TD3Loss(
        actor,
        critic,
        num_qvalue_nets=2,
        loss_function=STOCK_DISTANCES[cfg.critic_loss],
        policy_noise=cfg.target_noise,
        noise_clip=cfg.target_noise_clip,
        delay_actor=True,
        delay_qvalue=True,
        action_spec=spec,
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


class Turn(NamedTuple):
    """What else a step of the critics moves; it depends on the step's number alone."""

    actor: bool
    targets: bool


class State(NamedTuple):
    """What a step moves in place."""

    weights: Weights
    actor_moments: Moments
    critic_moments: Moments


def make_update(
    cfg: DictConfig, agent: TD3Loss
) -> tuple[Callable[[Batch, int], Results], dict[str, Adam]]:
    """Returns the gradient steps on a block of batches as one call, and the optimizers."""
    delay, interval = cfg.policy_delay, cfg.target_interval
    limit, l2, tau = cfg.grad_clip, cfg.actor_l2, cfg.tau
    SoftUpdate(agent, tau=tau)  # makes the targets; `move_targets` moves them
    stock = cfg.losses == "torchrl"
    critic_loss, actor_loss = make_stock_losses(agent) if stock else make_losses(cfg, agent)
    weights = find_weights(agent)
    actor_optimizer = Adam(weights.actor, lr=cfg.lr)
    critic_optimizer = Adam(weights.critics, lr=cfg.lr)

    def step(state: State, batch: Batch, noise: Tensor, turn: Turn) -> Results:
        """One step of the critics, and in their turn of the actor and of the targets."""
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
        """A step on each batch of a block `[K, B]`, after so many steps."""
        turns = tuple(
            Turn(n % delay == 0, n % interval == 0)
            for n in range(done + 1, done + 1 + len(block.reward))
        )
        return steps(block, torch.randn_like(block.action), turns)

    return update, {"actor_optimizer": actor_optimizer, "critic_optimizer": critic_optimizer}


def train(cfg: DictConfig) -> float:
    """Seed, environment, agent, buffer, loop, evaluation; returns the score."""
    check_task(cfg.env)
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
        run.directory,
        agent=agent,
        buffer=buffer,
        collector=collector,
        run=run,
        **optimizers,
    )
    if run.resumed:
        checkpoint.load()
    clock, rows = run.clock, None

    def evaluate_and_save(frame: int) -> None:
        """What is due after a frame; a resumed run makes an evaluation that a signal has ended."""
        if run.due is not None:
            with clock("evaluation"):
                scores = evaluate(actor, agent, run.stops)
            if scores is not None:
                run.log(frame, collector.returns, scores, run.due)
                save_policy(run, actor, env)
        stopping, done = run.stops(), frame == cfg.total_frames
        if stopping or done or frame % cfg.checkpoint_every == 0:
            checkpoint.save(last=stopping or done)
        if stopping:
            run.stop()

    with collector, run:
        if run.due is not None:
            evaluate_and_save(collector.frames)
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
                run.due = describe(buffer, rows)
            evaluate_and_save(frame)
        write_video(cfg, run.directory, evaluate, actor)
        return run.finish()


if __name__ == "__main__":
    run_recipe(train, "td3")
