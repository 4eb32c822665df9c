"""Compiled losses: when they are worth it, and whether this machine can make them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from omegaconf import DictConfig

from common.errors import UsageError

_WORTH = 20_000  # updates from which on compiling, about a minute, pays


def maybe_compile(cfg: DictConfig, *functions: Callable[..., Any]) -> list[Callable[..., Any]]:
    """The functions, compiled where `cfg.compile` says so.

    With `auto` they are compiled for runs of many updates on CUDA where a compiler works. On a CPU
    the products take nearly all of the time, and compiled losses were no faster.
    """
    updates = (cfg.total_frames - cfg.random_frames) * cfg.replay_ratio
    pays = cfg.compile is True or (torch.device(cfg.device).type == "cuda" and updates >= _WORTH)
    if cfg.compile is False or not pays:
        return list(functions)
    problem = why_not(cfg.device)
    if problem is not None and cfg.compile is True:
        raise UsageError(
            f"compile=true, but torch.compile does not work here ({problem}); install a C++ "
            "compiler and Python's headers, or leave it out."
        )
    return [torch.compile(f) if problem is None else f for f in functions]


@cache
def why_not(device: str) -> str | None:
    """Why torch.compile does not work on this machine, or None if it does."""
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # it misses CUDA
    try:
        torch.compile(lambda x: x.sin() + 1.0)(torch.ones(8, device=device))
    except Exception as error:  # whatever the compiler says
        return str(error).strip().splitlines()[0]
    return None
