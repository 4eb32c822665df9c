"""Trains Stable-Baselines3's TD3 with our settings, to check our uniform replay as a baseline.

    pip install stable-baselines3
    python recipes/benchmarks/baseline.py env=Hopper replay_ratio=1 total_frames=50000
    python recipes/td3.py env=Hopper replay=uniform replay_ratio=1 total_frames=50000 \
        target_interval=2

It takes the same options as `recipes/td3.py`, acts in the same task with equal networks and
settings, is evaluated from the same starts, and writes the same files, so that `recipes/report.py`
compares the two. Its replay method is called "stable-baselines3". It cannot be resumed.

Differences: a seed gives different networks and resets than in our recipe; random actions before
learning have exploration noise added; an evaluation comes before the updates of its frame, not
after them; and a step that both terminates and reaches the time limit counts as terminal.
"""

from __future__ import annotations

import sys
from pathlib import Path

import stable_baselines3
import torch
from omegaconf import DictConfig
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.noise import NormalActionNoise
from tensordict.nn import TensorDictModule
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))

from nmer_recipes.config import check_run, run_recipe, with_overrides
from nmer_recipes.envs import make_env
from nmer_recipes.errors import UsageError
from nmer_recipes.evaluate import Evaluator
from nmer_recipes.runs import Run


class Watch(BaseCallback):
    """Evaluates as the recipes do."""

    def __init__(self, cfg: DictConfig, run: Run) -> None:
        super().__init__()
        self.cfg, self.run = cfg, run
        self.evaluator = Evaluator(cfg.env, cfg.eval_episodes, gamma=cfg.gamma, device="cpu")
        self.returns: list[float] = []  # of training episodes since the last row

    def _on_step(self) -> bool:
        frame, run = self.num_timesteps, self.run
        self.returns += [float(i["episode"]["r"]) for i in self.locals["infos"] if "episode" in i]
        run.updates = self.model._n_updates
        run.count(frame)
        if frame % self.cfg.eval_every == 0:
            actor = TensorDictModule(self.model.actor, ["observation"], ["action"])
            with run.clock("evaluation"), torch.no_grad():
                episodes = self.evaluator.play(actor)
            returns = torch.tensor([sum(reward for *_, reward in steps) for steps, _ in episodes])
            lengths = torch.tensor([float(len(steps)) for steps, _ in episodes])
            scores = {"eval/return": returns.mean(), "eval/return_std": returns.std(correction=0)}
            scores["eval/length"] = lengths.mean()
            run.log(frame, self.returns, {name: float(score) for name, score in scores.items()})
        return run.interrupted is None


def train(cfg: DictConfig) -> None:
    """Trains one run."""
    if cfg.target_interval != cfg.policy_delay:
        raise UsageError(
            f"target_interval={cfg.target_interval}, but Stable-Baselines3 updates the targets "
            f"together with the actor; give target_interval={cfg.policy_delay}, as policy_delay."
        )
    if cfg.actor_l2 or cfg.grad_clip is not None or cfg.replay_ratio != int(cfg.replay_ratio):
        raise UsageError(
            f"actor_l2={cfg.actor_l2}, grad_clip={cfg.grad_clip}, replay_ratio={cfg.replay_ratio}: "
            "Stable-Baselines3 does not support the first two, and supports only integer ratios; "
            "give actor_l2=0 grad_clip=null and an integer replay_ratio."
        )
    torch.set_num_threads(cfg.threads)
    run, env = Run(cfg), make_env(cfg.env)
    actions = env.action_space.shape
    model = stable_baselines3.TD3(
        "MlpPolicy",
        env,
        learning_rate=cfg.lr,
        buffer_size=min(cfg.buffer_size, cfg.total_frames),
        learning_starts=cfg.random_frames,
        batch_size=cfg.batch_size,
        tau=cfg.tau,
        gamma=cfg.gamma,
        train_freq=1,
        gradient_steps=int(cfg.replay_ratio),
        action_noise=NormalActionNoise(
            torch.zeros(actions), cfg.exploration_noise * torch.ones(actions)
        ),
        policy_delay=cfg.policy_delay,
        target_policy_noise=cfg.target_noise,
        target_noise_clip=cfg.target_noise_clip,
        policy_kwargs={"net_arch": list(cfg.hidden), "activation_fn": nn.ReLU},
        seed=cfg.seed,
        device="cpu",
    )
    with run:
        model.learn(cfg.total_frames, callback=Watch(cfg, run))
        if run.interrupted:
            raise SystemExit(128 + run.interrupted)
        run.finish()


if __name__ == "__main__":
    ours = ["replay=uniform", "replay.kind=stable-baselines3", "target_interval=2"]
    sys.argv[1:] = with_overrides(sys.argv[1:], ours)
    run_recipe(train, "td3", check_run)
