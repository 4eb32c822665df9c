"""Plays a run's trained policy, prints its returns, and can record a video.

python recipes/play.py runs/NAME/DATE                        # five episodes of the best policy
python recipes/play.py runs/NAME/DATE --video walk.mp4       # also records the first episode
python recipes/play.py runs/NAME/DATE --export policy.pt2    # also exports the policy
"""

from __future__ import annotations

import argparse
from pathlib import Path

import gymnasium
import numpy as np
from nmer_recipes.envs import make_env
from nmer_recipes.errors import UsageError
from nmer_recipes.policy import WHICH, Policy, export_policy, load_policy
from nmer_recipes.video import make_filmed, write_frames
from tqdm import tqdm


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(
        prog="play.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = " (default: %(default)s)"
    add = parser.add_argument
    add("run", type=Path, help="directory of the run")
    add("--which", choices=WHICH, default="best", help=f"policy to play{default}")
    add("--episodes", type=int, default=5, help=f"number of episodes{default}")
    add("--seed", type=int, default=0, help=f"seed of the first episode{default}")
    add("--video", type=Path, metavar="FILE.mp4", help="record the first episode in this file")
    add("--export", type=Path, metavar="FILE.pt2", help="export the policy with torch.export")
    options = parser.parse_args(arguments)
    if options.episodes < 1:
        parser.error(f"--episodes {options.episodes} is out of range; give an integer, at least 1")
    return options


def play_episode(
    policy: Policy, env: gymnasium.Env, seed: int, frames: list | None = None
) -> list[float]:
    """Returns the rewards of an episode, and appends its rendered steps to `frames`."""
    observation, _ = env.reset(seed=seed)
    rewards, done = [], False
    while not done:
        observation, reward, terminated, truncated, _ = env.step(policy.act(observation))
        rewards.append(float(reward))
        done = terminated or truncated
        if frames is not None:
            frames.append(env.render())
    return rewards


def play(options: argparse.Namespace) -> None:
    """Loads the policy, plays the episodes and prints the returns."""
    policy = load_policy(options.run, options.which)
    frames: list | None = [] if options.video else None
    returns, lengths = [], []
    task = policy.cfg.env
    with make_filmed(task) if options.video else make_env(task, rescale=False) as env:
        for number in tqdm(range(options.episodes), unit="episode", disable=None):
            rewards = play_episode(policy, env, options.seed + number, frames)
            returns.append(sum(rewards))
            lengths.append(len(rewards))
            if frames:
                write_frames(options.video, frames, env)
                frames = None
    deviation = np.std(returns, ddof=min(1, len(returns) - 1))
    print(f"{policy.cfg.name}, {options.which} policy, after {policy.frames:,} frames:")
    print("| episode | return | steps |\n| --- | --- | --- |")
    for number, (total, steps) in enumerate(zip(returns, lengths, strict=True)):
        print(f"| {options.seed + number} | {total:.1f} | {steps} |")
    print(f"| mean ± std | {np.mean(returns):.1f} ± {deviation:.1f} | {np.mean(lengths):.0f} |")
    if options.export:
        export_policy(policy, options.export)
    for path in (options.video, options.export):
        if path is not None:
            print(f"Wrote {path}")


def main(arguments: list[str] | None = None) -> None:
    """Runs the command; prints usage errors without a traceback."""
    try:
        play(parse(arguments))
    except UsageError as error:
        raise SystemExit(f"play.py: {error}") from None


if __name__ == "__main__":
    main()
