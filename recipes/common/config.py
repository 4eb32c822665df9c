"""Configuration: resolvers for the paper's settings, checks, and the entry point of a recipe."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hydra
import torch
from omegaconf import DictConfig, OmegaConf

from common import paper

CONF = Path(__file__).parents[1] / "conf"


class UsageError(Exception):
    """Something that the user can put right; shown without a traceback."""


def _paper(name: str, *, _root_: DictConfig) -> int | float | None:
    return paper.setting(name, _root_.algorithm, _root_.env.name, _root_.replay.kind)


def _share(total: int, parts: int) -> int:
    return max(1, int(total) // parts)


def _default_device() -> str:
    return "cuda:0" if torch.cuda.is_available() else "cpu"


def register_resolvers() -> None:
    """Makes `${paper:...}`, `${share:...}` and `${default_device:}` known to OmegaConf."""
    for name, resolver in {
        "paper": _paper,
        "share": _share,
        "default_device": _default_device,
    }.items():
        OmegaConf.register_new_resolver(name, resolver, replace=True)


def run_recipe(
    train: Callable[[DictConfig], None],
    name: str,
    validate: Callable[[DictConfig], None] | None = None,
) -> None:
    """Composes the config `name` from the command line, checks it and trains by it."""
    register_resolvers()
    shows = any(option.startswith("--cfg") or option == "-c" for option in sys.argv)
    if shows and "--resolve" not in sys.argv:
        sys.argv.append("--resolve")  # so that the paper's values show

    def job(cfg: DictConfig) -> None:
        logging.getLogger("torchrl").setLevel(logging.WARNING)
        warnings.filterwarnings("ignore", module="torchrl|tensordict|gymnasium|glfw")
        try:
            OmegaConf.resolve(cfg)
            (validate or check)(cfg)
            train(cfg)
        except UsageError as error:
            raise SystemExit(f"{name}.py: {error}") from None

    hydra.main(version_base="1.3", config_path=str(CONF), config_name=name)(job)()


# Smallest value of each number that has one.
_AT_LEAST: dict[str, float] = {
    "seed": 0,
    "total_frames": 1,
    "random_frames": 1,
    "replay_ratio": 0,
    "actor_l2": 0,
    "buffer_size": 1,
    "batch_size": 1,
    "threads": 1,
    "eval_every": 1,
    "eval_episodes": 1,
    "checkpoint_every": 1,
}
_INTEGERS = set(_AT_LEAST) - {"replay_ratio", "actor_l2"}


def check(cfg: DictConfig) -> None:
    """Raises a `UsageError` for a value that no run could use."""
    for name, least in _AT_LEAST.items():
        value = cfg[name]
        kinds: Any = int if name in _INTEGERS else (int, float)
        if isinstance(value, bool) or not isinstance(value, kinds) or not value >= least:
            kind = "an integer" if name in _INTEGERS else "a number"
            raise UsageError(f"{name}={value}, but it is {kind}, at least {least}.")
    if cfg.random_frames >= cfg.total_frames:
        raise UsageError(
            f"random_frames={cfg.random_frames} of total_frames={cfg.total_frames} leave no frame "
            "to learn from; lower random_frames or raise total_frames."
        )
    if cfg.eval_every > cfg.total_frames:
        raise UsageError(
            f"eval_every={cfg.eval_every}, but the run has total_frames={cfg.total_frames}; "
            "lower eval_every, or the run is never evaluated."
        )
    if cfg.compile not in (True, False, "auto"):
        raise UsageError(f"compile={cfg.compile}; it is true, false or auto.")
    if cfg.grad_clip is not None and not cfg.grad_clip > 0:
        raise UsageError(f"grad_clip={cfg.grad_clip}; it is above 0, or null for no clipping.")
    try:
        device = torch.device(cfg.device)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise UsageError(f"device={cfg.device} is not there ({reason}); try device=cpu.") from None
