"""Twin delayed DDPG on a continuous task, with the replay method of your choice.

python recipes/td3.py env=HalfCheetah                 # NMER, the paper's settings
python recipes/td3.py env=HalfCheetah replay=uniform  # the baseline
python recipes/td3.py env=HalfCheetah --cfg job       # every setting of that run
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
from common.losses import SoftUpdate, TD3Loss
from common.replay import describe, draw, make_buffer, report, store
from common.runs import Run
from common.streams import seeds
from common.video import check_video, write_video
from omegaconf import DictConfig
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torch import Tensor, nn
from torchrl.data import Bounded
from torchrl.modules import MLP, ValueOperator


class GaussianNoise(nn.Module):
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
    noise = GaussianNoise(cfg.exploration_noise)
    explorer = TensorDictModule(nn.Sequential(network, noise), **keys)
    critic = ValueOperator(
        MLP(in_features=observations + actions, out_features=1, **layers),
        in_keys=["observation", "action"],
    )
    loss = TD3Loss(
        actor,
        critic,
        num_qvalue_nets=2,
        loss_function="l2",
        policy_noise=cfg.target_noise,
        noise_clip=cfg.target_noise_clip,
        delay_actor=True,
        delay_qvalue=True,
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
    actor_weights: list[Tensor] = list(loss.actor_network_params.flatten_keys().values())
    critic_weights: list[Tensor] = list(loss.qvalue_network_params.flatten_keys().values())
    matrices = [parameter for parameter in actor_weights if parameter.ndim == 2]
    actor_optimizer = torch.optim.Adam(actor_weights, lr=cfg.lr, fused=True)
    critic_optimizer = torch.optim.Adam(critic_weights, lr=cfg.lr, fused=True)
    value_loss, policy_loss = maybe_compile(cfg, loss.value_loss, loss.actor_loss)

    def descend(total: Tensor, optimizer: torch.optim.Adam, parameters: list[Tensor]) -> None:
        total.backward()
        if cfg.grad_clip is not None:
            nn.utils.clip_grad_norm_(parameters, cfg.grad_clip)
        optimizer.step()
        optimizer.zero_grad()

    def update(batch: TensorDictBase, number: int) -> dict[str, Tensor]:
        """One step of the critics; at every `policy_delay`-th, of the actor and the targets."""
        losses = {}
        loss_qvalue, details = value_loss(batch)
        batch.set("td_error", details["td_error"])
        descend(loss_qvalue, critic_optimizer, critic_weights)
        losses["loss_qvalue"] = loss_qvalue.detach()
        if number % cfg.policy_delay == 0:
            loss_actor, _ = policy_loss(batch)
            losses["loss_actor"] = loss_actor.detach()
            if cfg.actor_l2:
                loss_actor = loss_actor + cfg.actor_l2 * sum(w.square().sum() for w in matrices) / 2
            descend(loss_actor, actor_optimizer, actor_weights)
            target.step()
        return losses

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
        run.directory,
        agent=loss,
        actor_optimizer=actor_optimizer,
        critic_optimizer=critic_optimizer,
        buffer=buffer,
        collector=collector,
        run=run,
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
                run.updates += 1
                with clock("update"):
                    losses = update(batch, run.updates)
                with clock("upkeep"):
                    report(buffer, batch)
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
    run_recipe(train, "td3")
