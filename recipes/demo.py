"""A short demonstration: SAC with NMER on a small MuJoCo task, in a few minutes on one core.

python recipes/demo.py [--env InvertedPendulum-v5] [--replay nmer] [--frames 12000] [--seed 0]
"""

from __future__ import annotations

import argparse
import logging
import warnings

import torch
from tensordict.nn import NormalParamExtractor, TensorDictModule
from torchrl.collectors import Collector
from torchrl.envs import DoubleToFloat, ExplorationType, TransformedEnv, set_exploration_type
from torchrl.envs.libs.gym import GymEnv
from torchrl.modules import MLP, ProbabilisticActor, TanhNormal, ValueOperator
from torchrl.objectives import SACLoss, SoftUpdate
from tqdm import tqdm

from nmer_torchrl import make_replay_buffer


def parse_args() -> argparse.Namespace:
    """Options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--env", default="InvertedPendulum-v5", help="a Gymnasium MuJoCo task")
    parser.add_argument(
        "--replay", default="nmer", choices=["uniform", "mixup", "1nn", "nmer"], help="the method"
    )
    parser.add_argument("--frames", type=int, default=12_000, help="environment steps")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def make_env(name: str, seed: int) -> TransformedEnv:
    """The task with float32 observations."""
    env = TransformedEnv(GymEnv(name), DoubleToFloat())
    env.set_seed(seed)
    return env


def evaluate(env: TransformedEnv, actor: ProbabilisticActor, episodes: int = 3) -> float:
    """Mean return of the deterministic policy."""
    with torch.no_grad(), set_exploration_type(ExplorationType.DETERMINISTIC):
        returns = [env.rollout(1_000, actor)["next", "reward"].sum() for _ in range(episodes)]
    return float(torch.stack(returns).mean())


def main() -> None:
    """Seed, environment, agent, buffer, loop, evaluation."""
    args = parse_args()
    logging.getLogger("torchrl").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", module="torchrl|gymnasium")
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)

    env, eval_env = make_env(args.env, args.seed), make_env(args.env, args.seed + 1)
    spec = env.action_spec
    observations, actions = env.observation_spec["observation"].shape[-1], spec.shape[-1]

    network = torch.nn.Sequential(
        MLP(in_features=observations, out_features=2 * actions, num_cells=[256, 256]),
        NormalParamExtractor(),
    )
    actor = ProbabilisticActor(
        TensorDictModule(network, in_keys=["observation"], out_keys=["loc", "scale"]),
        in_keys=["loc", "scale"],
        spec=spec,
        distribution_class=TanhNormal,
        distribution_kwargs={"low": spec.space.low, "high": spec.space.high},
    )
    critic = ValueOperator(
        MLP(in_features=observations + actions, out_features=1, num_cells=[256, 256]),
        in_keys=["observation", "action"],
    )
    loss = SACLoss(actor, critic, action_spec=spec, num_qvalue_nets=2)
    loss.make_value_estimator(gamma=0.99)
    target = SoftUpdate(loss, tau=0.005)
    optimizer = torch.optim.Adam(loss.parameters(), lr=1e-3)

    buffer = make_replay_buffer(args.replay, capacity=100_000, batch_size=128)

    collector = Collector(
        env,
        actor,
        frames_per_batch=20,
        total_frames=args.frames,
        init_random_frames=500,
        auto_register_policy_transforms=True,
    )
    updates, score = 0, float("nan")
    bar = tqdm(
        total=args.frames, unit="frame", desc=f"SAC + {args.replay}, {args.env}", mininterval=1
    )
    for data in collector:
        buffer.extend(data.reshape(-1))
        for _ in range(data.numel() if len(buffer) >= 500 else 0):
            updates += 1
            losses = loss(buffer.sample())
            optimizer.zero_grad()
            (losses["loss_actor"] + losses["loss_qvalue"] + losses["loss_alpha"]).backward()
            optimizer.step()
            target.step()
        collector.update_policy_weights_()
        bar.update(data.numel())
        if bar.n % (args.frames // 10) < data.numel():
            score = evaluate(eval_env, actor)
            bar.set_postfix(eval_return=f"{score:.0f}", refresh=False)
    bar.close()
    collector.shutdown()
    score = evaluate(eval_env, actor, episodes=5)
    print(f"{args.env}, {args.frames} frames, {updates} updates: eval return {score:.0f}")


if __name__ == "__main__":
    main()
