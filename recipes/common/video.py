"""An mp4 of a policy."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from omegaconf import DictConfig
from tensordict.nn import TensorDictModuleBase

from common.errors import UsageError
from common.evaluate import Evaluator


def check_video(cfg: DictConfig) -> None:
    """Raises before a run that could not write its video; picks EGL where there is no display."""
    if not cfg.video:
        return
    try:
        import imageio_ffmpeg  # noqa: F401
    except ImportError:
        raise UsageError(
            "video=true needs the package imageio-ffmpeg, which is not installed; "
            "`pip install imageio imageio-ffmpeg`, or leave video out."
        ) from None
    if sys.platform == "linux" and not os.environ.get("DISPLAY"):
        os.environ.setdefault("MUJOCO_GL", "egl")


def write_video(
    cfg: DictConfig, directory: Path, evaluate: Evaluator, actor: TensorDictModuleBase
) -> None:
    """Writes `video.mp4` of one episode, if asked for."""
    if not cfg.video:
        return
    import imageio.v2

    frames, speed = evaluate.record(actor, cfg.env)
    imageio.v2.mimwrite(directory / "video.mp4", frames, fps=speed, macro_block_size=1)
