"""Plays the trained policies of runs, prints their returns, and can record a video.

python recipes/play.py runs/NAME/DATE                        # five episodes of the best policy
python recipes/play.py runs/NAME/DATE --video walk.mp4       # also records the first episode
python recipes/play.py runs/NAME/DATE --export policy.pt2    # also exports the policy
python recipes/play.py RUN_A RUN_B --video walkers.gif       # the same starts, side by side
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import gymnasium
import numpy as np
from nmer_recipes.envs import frame_rate, make_env
from nmer_recipes.errors import UsageError
from nmer_recipes.policy import WHICH, Policy, export_policy, load_policy
from nmer_recipes.video import (
    ENDINGS,
    add_caption,
    make_filmed,
    write_clip,
    write_frames,
)
from tqdm import tqdm

_GIF_SECONDS = 6.0  # keeps two walkers below 2 MB


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(
        prog="play.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = " (default: %(default)s)"
    add = parser.add_argument
    add("runs", type=Path, nargs="+", metavar="RUN", help="run directories, all of the same task")
    add("--which", choices=WHICH, default="best", help=f"policy to play{default}")
    add("--episodes", type=int, default=5, help=f"number of episodes{default}")
    add("--seed", type=int, default=0, help=f"seed of the first episode{default}")
    add(
        "--video",
        type=Path,
        metavar="FILE",
        help="record the first episode of each run side by side; FILE ends in .mp4 or .gif",
    )
    add(
        "--seconds",
        type=float,
        help="length of the video in the task's time (default: the whole episode; "
        f"{_GIF_SECONDS:g} for a GIF)",
    )
    add("--export", type=Path, metavar="FILE.pt2", help="export the policy with torch.export")
    options = parser.parse_args(arguments)
    video, runs = options.video, len(options.runs)
    if options.episodes < 1:
        parser.error(f"--episodes {options.episodes} is out of range; give an integer, at least 1")
    if video and video.suffix.lower() not in ENDINGS:
        parser.error(f"--video {video} does not end in {' or '.join(ENDINGS)}; rename it")
    if video and not video.parent.is_dir():
        parser.error(f"--video {video}: there is no directory {video.parent}; create it first")
    if options.seconds is not None and not video:
        parser.error("--seconds needs --video; add --video FILE, or leave it out")
    if options.seconds is not None and not options.seconds > 0:
        parser.error(f"--seconds {options.seconds:g} is out of range; give a number above 0")
    if options.export and runs > 1:
        parser.error(f"--export writes a single policy, but {runs} runs were given; give one run")
    gif = video is not None and video.suffix.lower() == ".gif"
    options.plain = runs == 1 and not gif  # without captions, and in the task's own size
    if options.seconds is None:
        options.seconds = _GIF_SECONDS if gif else math.inf
    return options


def check_same_task(runs: list[Path], policies: list[Policy]) -> None:
    """Raises if the runs' tasks differ."""
    names = ("id", "kind", "kwargs", "wrappers", "max_steps")  # all that `make_env` reads
    tasks = [
        " ".join(f"env.{name}={policy.cfg.env[name]}" for name in names if policy.cfg.env.get(name))
        for policy in policies
    ]
    for run, task in zip(runs, tasks, strict=True):
        if task != tasks[0]:
            raise UsageError(
                f"{runs[0]} has the task {tasks[0]}, but {run} has {task}; give runs of the same "
                "task, or play each one alone."
            )


def make_labels(policies: list[Policy]) -> list[str]:
    """Returns each run's replay method, with its seed if two runs have the same method."""
    kinds = [policy.cfg.replay.kind for policy in policies]
    if len(set(kinds)) == len(kinds):
        return kinds
    return [f"{kind}, seed {policy.cfg.seed}" for kind, policy in zip(kinds, policies, strict=True)]


def play_episode(
    policy: Policy,
    env: gymnasium.Env,
    seed: int,
    frames: list | None = None,
    limit: float = math.inf,
) -> list[float]:
    """Returns the rewards of an episode; appends its first `limit` rendered steps to `frames`."""
    observation, _ = env.reset(seed=seed)
    rewards, done = [], False
    while not done:
        observation, reward, terminated, truncated, _ = env.step(policy.act(observation))
        rewards.append(float(reward))
        done = terminated or truncated
        if frames is not None and len(frames) < limit:
            frames.append(env.render())
    return rewards


def play(options: argparse.Namespace) -> None:
    """Loads the policies, plays the episodes, prints the returns and writes the files."""
    policies = [load_policy(run, options.which) for run in options.runs]
    check_same_task(options.runs, policies)
    films = []
    for policy, label in zip(policies, make_labels(policies), strict=True):
        frames: list | None = [] if options.video else None
        task, episodes = policy.cfg.env, []
        with make_filmed(task) if options.video else make_env(task, rescale=False) as env:
            rate = frame_rate(env)
            for number in tqdm(range(options.episodes), unit="episode", disable=None):
                seed, limit = options.seed + number, options.seconds * rate
                episodes.append(play_episode(policy, env, seed, frames, limit))
                if frames:
                    if not options.plain:
                        frames = add_captions(frames, label, episodes[0])
                    films.append(frames)
                    frames = None
        if policy is not policies[0]:
            print()
        print_returns(policy, episodes, options)
    if options.video and options.plain:
        write_frames(options.video, films[0], rate)
    elif options.video:
        write_clip(options.video, films, rate)
    if options.export:
        export_policy(policies[0], options.export)
    for path in (options.video, options.export):
        if path is not None:
            print(f"Wrote {path}")


def add_captions(frames: list, label: str, rewards: list[float]) -> list:
    """Adds the label and the return so far to each picture."""
    totals = np.cumsum(rewards[: len(frames)])
    return [
        add_caption(frame, f"{label}\nreturn so far: {total:.0f}")
        for frame, total in zip(frames, totals, strict=True)
    ]


def print_returns(policy: Policy, episodes: list[list[float]], options: argparse.Namespace) -> None:
    """Prints a table of the episodes, which are given by their rewards."""
    returns, lengths = [sum(rewards) for rewards in episodes], [len(each) for each in episodes]
    deviation = np.std(returns, ddof=min(1, len(returns) - 1))
    unit = "updates" if "total_updates" in policy.cfg else "frames"
    print(f"{policy.cfg.name}, {options.which} policy, after {policy.frames:,} {unit}:")
    print("| episode | return | steps |\n| --- | --- | --- |")
    for number, (total, steps) in enumerate(zip(returns, lengths, strict=True)):
        print(f"| {options.seed + number} | {total:.1f} | {steps} |")
    print(f"| mean ± std | {np.mean(returns):.1f} ± {deviation:.1f} | {np.mean(lengths):.0f} |")


def main(arguments: list[str] | None = None) -> None:
    """Runs the command; prints usage errors without a traceback."""
    try:
        play(parse(arguments))
    except UsageError as error:
        raise SystemExit(f"play.py: {error}") from None


if __name__ == "__main__":
    main()
