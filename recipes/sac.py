"""Soft actor-critic on a continuous task, with the replay method of your choice.

python recipes/sac.py env=Walker2d                    # NMER, the paper's settings
python recipes/sac.py env=Walker2d replay=uniform     # the baseline
python recipes/sac.py env=Walker2d --cfg job          # every setting of that run
"""

from __future__ import annotations

import math

import torch
from common.checkpoint import Checkpoint
from common.collect import make_collector
from common.compiling import maybe_compile
from common.config import run_recipe
from common.envs import make_env
from common.evaluate import Evaluator
from common.losses import SACLoss, SoftUpdate
from common.replay import describe, draw, make_buffer, report, store
from common.runs import Run
from common.streams import seeds
from common.video import check_video, write_video
from omegaconf import DictConfig
from tensordict import TensorDictBase
from tensordict.nn import NormalParamExtractor, TensorDictModule
from torch import Tensor, nn
from torchrl.data import Bounded
from torchrl.modules import MLP, ProbabilisticActor, TanhNormal, ValueOperator


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
    actor, explorer, loss = make_agent(cfg, observations, actions, device)
    target = SoftUpdate(loss, tau=cfg.tau)
    groups: list[list[Tensor]] = [
        list(loss.actor_network_params.flatten_keys().values()),
        list(loss.qvalue_network_params.flatten_keys().values()),
        [loss.log_alpha],
    ]
    weights = [parameter for parameter in groups[0] if parameter.ndim == 2]
    optimizer = torch.optim.Adam([p for group in groups for p in group], lr=cfg.lr, fused=True)
    (compute_losses,) = maybe_compile(cfg, loss)

    def update(batch: TensorDictBase) -> TensorDictBase:
        """One gradient step on everything."""
        losses = compute_losses(batch)
        total = losses["loss_qvalue"] + losses["loss_actor"] + losses["loss_alpha"]
        if cfg.actor_l2:
            total = total + cfg.actor_l2 * sum(w.square().sum() for w in weights) / 2
        total.backward()
        if cfg.grad_clip is not None:
            for group in groups:
                nn.utils.clip_grad_norm_(group, cfg.grad_clip)
        optimizer.step()
        optimizer.zero_grad()
        target.step()
        return losses.detach()

    # Buffer
    buffer = make_buffer(cfg, seed["replay"])
    collector = make_collector(
        cfg,
        env,
        explorer,
        lambda: make_agent(cfg, observations, actions, torch.device("cpu"))[1],
        seed,
    )

    # Loop
    run = Run(cfg)
    checkpoint = Checkpoint(
        run.directory, agent=loss, optimizer=optimizer, buffer=buffer, collector=collector, run=run
    )
    if run.resumed:
        checkpoint.load()
    clock, batch = run.clock, None
    with collector, run:
        for frame in range(collector.frames + 1, cfg.total_frames + 1):
            with clock("environment"):
                row = collector.step()
            with clock("upkeep"):
                store(buffer, row, collector.ended)
            losses = None
            due = math.floor((frame - cfg.random_frames) * cfg.replay_ratio) - run.updates
            for batch in draw(buffer, max(due, 0), clock):
                with clock("update"):
                    losses = update(batch)
                with clock("upkeep"):
                    report(buffer, batch)
                run.updates += 1
            run.count(frame, losses)

            # Evaluation
            if frame % cfg.eval_every == 0:
                with clock("evaluation"):
                    scores = evaluate(actor, loss)
                run.log(frame, collector.returns, scores, describe(buffer, batch))
            stopping, done = run.interrupted is not None, frame == cfg.total_frames
            if stopping or done or frame % cfg.checkpoint_every == 0:
                checkpoint.save(last=stopping or done)
            if stopping:
                run.stop()
        write_video(cfg, run.directory, evaluate, actor)
        run.finish()


if __name__ == "__main__":
    run_recipe(train, "sac")
