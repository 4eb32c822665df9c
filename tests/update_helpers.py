"""Small agents and blocks of batches for tests of updates."""

from __future__ import annotations

import importlib

import torch
from recipe_helpers import make_batch, make_config

from nmer_recipes.blocks import as_block  # isort: skip

CPU = torch.device("cpu")
ROWS, OBSERVATIONS, ACTIONS = 16, 4, 2


def make_agent(algorithm, *overrides, device=CPU):
    """Builds an agent, its config and its module; the same each time."""
    recipe = importlib.import_module(algorithm)
    small = ["hidden=[8,8]", "critic_hidden=${hidden}", f"batch_size={ROWS}", "compile=false"]
    cfg = make_config(algorithm, *small, *overrides)
    torch.manual_seed(0)
    if "target_entropy" in cfg:
        cfg.target_entropy = -ACTIONS
    return recipe.make_agent(cfg, OBSERVATIONS, ACTIONS, device)[-1], cfg, recipe


def make_blocks(*sizes, seed=0, device=CPU):
    torch.manual_seed(seed)
    rows = [make_batch(n * ROWS, OBSERVATIONS, ACTIONS) for n in sizes]
    for batch in rows:
        batch["mask"] = torch.rand(len(batch), 5) < 0.5  # of SUNRISE's members
    return [as_block(batch, ROWS, device) for batch in rows]
