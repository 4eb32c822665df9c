"""Saves, restores and seeds random generators across devices."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor


def draw_seed(generator: torch.Generator | None) -> int:
    """Draws a seed from a generator on any device; `None` uses torch's global one."""
    device = "cpu" if generator is None else generator.device
    return int(torch.randint(2**62, (), generator=generator, device=device))


def restore_generator(generator: torch.Generator, state: Tensor) -> None:
    """Restores a generator from a saved state.

    A state of another kind of device cannot be restored. It then seeds the generator, so that the
    same state always leads to the same numbers.

    Examples:
        >>> saved = torch.Generator().manual_seed(3).get_state()
        >>> generator = torch.Generator()
        >>> restore_generator(generator, saved)
        >>> generator.initial_seed()
        3
    """
    try:
        generator.set_state(state)
    except RuntimeError:  # torch recognizes a state by its size
        generator.manual_seed(seed_from(state))


def seed_from(state: Tensor) -> int:
    """Returns a seed, at least 0 and below 2**63, that depends on every byte of a state.

    Examples:
        >>> seed_from(torch.zeros(16, dtype=torch.uint8))
        7696292205685908379
    """
    digest = hashlib.sha256(state.numpy().tobytes()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def generator_state(generator: torch.Generator | None) -> dict[str, Tensor]:
    """Returns the state of a generator under `"generator"`; empty if there is no generator."""
    return {} if generator is None else {"generator": generator.get_state()}


def load_generator_state(generator: torch.Generator | None, state: dict[str, Any]) -> None:
    """Restores a generator from what `generator_state` returned, if both exist."""
    if generator is not None and "generator" in state:
        restore_generator(generator, state["generator"])
