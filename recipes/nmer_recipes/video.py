"""Writes an mp4 of a policy."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import gymnasium
import numpy as np
from omegaconf import DictConfig
from tensordict.nn import TensorDictModuleBase

from nmer_recipes.envs import make_env
from nmer_recipes.errors import UsageError
from nmer_recipes.evaluate import Evaluator


def check_video(cfg: DictConfig) -> None:
    """Raises if a run could not write its video, before it starts."""
    if cfg.video:
        make_filmed(cfg.env).close()


def make_filmed(cfg: DictConfig) -> gymnasium.Env:
    """Builds the task without rescaling so that it can be filmed; raises if it cannot.

    MuJoCo renders with EGL where there is no display.
    """
    try:
        import imageio_ffmpeg  # noqa: F401
    except ImportError:
        raise UsageError(
            "A video needs the package imageio-ffmpeg, which is not installed; "
            "run `pip install imageio imageio-ffmpeg`, or leave the video out."
        ) from None
    if sys.platform == "linux" and not os.environ.get("DISPLAY"):
        os.environ.setdefault("MUJOCO_GL", "egl")
    try:
        env = make_env(cfg, render_mode="rgb_array", rescale=False)
        env.reset()
        picture = env.render()
    except (gymnasium.error.Error, NotImplementedError, TypeError) as error:
        reason = str(error).splitlines()[0] if str(error) else "it does not render"
        raise UsageError(f"{cfg.id} cannot be filmed: {reason}; leave the video out.") from None
    if not isinstance(picture, np.ndarray):
        raise UsageError(f"{cfg.id} has no render mode 'rgb_array'; leave the video out.")
    return env


def write_video(
    cfg: DictConfig, directory: Path, evaluate: Evaluator, actor: TensorDictModuleBase
) -> None:
    """Writes `video.mp4` of one episode if configured."""
    if cfg.video:
        write_frames(directory / "video.mp4", *evaluate.record(actor, cfg.env))


def write_frames(path: Path, frames: list, env: gymnasium.Env) -> None:
    """Writes an environment's images as a video, at the environment's own frame rate."""
    import imageio.v2

    speed = env.metadata.get("render_fps", 30)
    imageio.v2.mimwrite(path, frames, fps=speed, macro_block_size=1)
