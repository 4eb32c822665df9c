"""Writes videos of policies."""

from __future__ import annotations

import math
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

ENDINGS = (".mp4", ".gif")
_HEIGHT = 240  # of the pictures of a clip, in pixels
_GIF_RATE, _GIF_COLORS = 20, 64  # at most so many pictures a second, and colors in all of them


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


def write_frames(path: Path, frames: list, rate: float) -> None:
    """Writes images as a video of `rate` images per second."""
    import imageio.v2

    imageio.v2.mimwrite(path, frames, fps=rate, macro_block_size=1)


def add_caption(picture: np.ndarray, text: str) -> np.ndarray:
    """Returns a picture `[height, width, 3]` in the size of a clip, with text in its corner."""
    from PIL import Image, ImageDraw, ImageFont

    image = Image.fromarray(picture)
    width = 2 * round(image.width / image.height * _HEIGHT / 2)  # even, as mp4 needs it
    image = image.resize((width, _HEIGHT))
    ImageDraw.Draw(image).text(
        (8, 5), text, "white", ImageFont.load_default(17), stroke_width=2, stroke_fill="black"
    )
    return np.asarray(image)


def write_clip(path: Path, films: list[list[np.ndarray]], rate: float) -> None:
    """Writes films side by side as one mp4 or GIF; a film that ends early keeps its last picture.

    Args:
        path: The file. Its ending chooses the format.
        films: The pictures `[height, width, 3]` of each film, from left to right.
        rate: Number of pictures in a second. A GIF leaves some out if there are too many.
    """
    import imageio.v2
    from PIL import Image

    rows = [
        np.hstack([film[min(i, len(film) - 1)] for film in films])
        for i in range(max(map(len, films)))
    ]
    if path.suffix.lower() != ".gif":
        imageio.v2.mimwrite(path, rows, fps=rate, macro_block_size=1)
        return
    every = math.ceil(rate / _GIF_RATE)
    rows = rows[::every]
    # The same colors in all pictures, undithered: what does not move then takes no space. The
    # octree keeps colors that are rare, such as those of a thin robot.
    sample = Image.fromarray(np.vstack([row[::4, ::4] for row in rows]))
    colors = sample.quantize(_GIF_COLORS, Image.Quantize.FASTOCTREE)
    images = [
        Image.fromarray(row).quantize(palette=colors, dither=Image.Dither.NONE) for row in rows
    ]
    images[0].save(
        path, save_all=True, append_images=images[1:], duration=1000 * every / rate, loop=0
    )
