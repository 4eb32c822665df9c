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
from tensordict.nn import NormalParamExtractor, TensorDictModule
from torch import Tensor, nn
from torch.distributions import Distribution
from torch.nn.functional import softplus
from torchrl.data import Bounded
from torchrl.modules import MLP, ProbabilisticActor, ValueOperator
from torchrl.objectives import SACLoss, SoftUpdate

from nmer_torchrl.loop import report_errors


class SquashedNormal(Distribution):
    """The tanh of a Gaussian: actions in [-1, 1]."""

    def __init__(self, loc: Tensor, scale: Tensor) -> None:
        super().__init__(loc.shape[:-1], loc.shape[-1:], validate_args=False)
        self.loc, self.scale = loc, scale

    def draw(self, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Returns actions and their log-probabilities `[B]`; the noise is standard normal."""
        raw = self.loc + self.scale * noise
        normal = -noise.square() / 2 - self.scale.log() - math.log(2 * math.pi) / 2
        slope = 2 * (math.log(2) - raw - softplus(-2 * raw))  # log of that of tanh
        return raw.tanh(), (normal - slope).sum(-1)

    def rsample_and_log_prob(self, shape: tuple[int, ...] = ()) -> tuple[Tensor, Tensor]:
        """Returns the same with noise of its own, as TorchRL's losses ask for it."""
        return self.draw(torch.randn(*shape, *self.loc.shape, device=self.loc.device))

    @property
    def deterministic_sample(self) -> Tensor:
        """The action without noise; as TorchRL's, it stays off the bounds."""
        return self.loc.tanh().clamp(-1 + 1e-6, 1 - 1e-6)


class Explore(nn.Module):
    """Draws actions by the parameters of their distribution."""

    def forward(self, parameters: tuple[Tensor, Tensor]) -> Tensor:
        """Returns random actions."""
        return SquashedNormal(*parameters).rsample_and_log_prob()[0]


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
        distribution_class=SquashedNormal,
    )
    explorer = TensorDictModule(
        nn.Sequential(network, Explore()), in_keys=["observation"], out_keys=["action"]
    )
    critic = ValueOperator(
        MLP(in_features=observations + actions, out_features=1, **layers),
        in_keys=["observation", "action"],
    )
    loss = SACLoss(
        actor,
        critic,
        num_qvalue_nets=2,
        loss_function=STOCK_DISTANCES[cfg.critic_loss],
        alpha_init=cfg.alpha_init,
        target_entropy=-float(actions) if cfg.target_entropy is None else cfg.target_entropy,
        action_spec=spec,
    ).to(device)
    loss.make_value_estimator(gamma=cfg.gamma)
    loss.set_keys(done="terminated", terminated="terminated")  # a time limit ends no value
    return actor, explorer, loss


def make_losses(cfg: DictConfig, agent: SACLoss) -> Callable[[Weights, Batch, Tensor], Results]:
    """Returns the losses, as a function of weights and batches."""
    # Plain numbers: `torch.compile` cannot follow the config.
    gamma, target_entropy = cfg.gamma, float(agent.target_entropy)
    distance = DISTANCES[cfg.critic_loss]
    actor = Functional(agent.actor_network[0].module)
    critic = Functional(agent.qvalue_network.module)

    def losses(weights: Weights, batch: Batch, noise: Tensor) -> Results:
        """Returns losses, entropy and its coefficient, and the rows' absolute TD errors.

        The noise `[2, B, actions]` makes the actions random at the next observation and at this
        one. The TD error is averaged over the critics.
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
        # The actor's gradient passes through the critics without reaching them.
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
    """Returns the same by TorchRL's loss, which has the weights itself and draws its own noise.

    Its TD errors are those of the critic that is farther off.
    """

    def losses(_: Weights, batch: Batch, __: Tensor) -> Results:
        rows = batch.as_rows()
        return agent(rows).to_dict(), rows["td_error"]

    return losses


class State(NamedTuple):
    """What a step moves in place."""

    weights: Weights
    moments: Moments


def make_update(
    cfg: DictConfig, agent: SACLoss
) -> tuple[Callable[[Batch, int], Results], dict[str, Adam]]:
    """Returns the gradient steps on a block of batches as one call, and the optimizer."""
    limit, l2, tau = cfg.grad_clip, cfg.actor_l2, cfg.tau
    SoftUpdate(agent, tau=tau)  # makes the targets; `move_targets` moves them
    stock = cfg.losses == "torchrl"
    get_losses = make_stock_losses(agent) if stock else make_losses(cfg, agent)
    weights = find_weights(agent)
    optimizer = Adam([*weights.actor, *weights.critics, *weights.log_alpha], lr=cfg.lr)

    def step(state: State, batch: Batch, noise: Tensor) -> Results:
        """One gradient step on everything."""
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
        """A step on each batch of a block `[K, B]`; how many were made before does not matter."""
        count, size, width = block.action.shape
        return steps(block, torch.randn(count, 2, size, width, device=block.action.device))

    return update, {"optimizer": optimizer}


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
    cfg.target_entropy = float(agent.target_entropy)  # so that the run's config has it
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
    run_recipe(train, "sac")
