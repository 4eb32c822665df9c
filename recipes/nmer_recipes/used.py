"""Writes down settings that a run decides itself."""

from __future__ import annotations

from omegaconf import DictConfig, OmegaConf

from nmer_recipes.compiling import is_worth_it
from nmer_recipes.errors import UsageError
from nmer_recipes.memory import search_of
from nmer_recipes.methods import make_method


def settle(cfg: DictConfig) -> None:
    """Replaces `auto` by the value that this run uses."""
    if cfg.compile == "auto":
        cfg.compile = is_worth_it(cfg)
    if cfg.replay.get("search") == "auto":
        cfg.replay.search = _find_search(cfg)


def _find_search(cfg: DictConfig) -> str:
    """Returns the neighbor search that the method uses with its metric."""
    name = search_of(cfg) or "auto"  # a user's own method may use the name differently
    try:
        make_method(OmegaConf.merge(cfg.replay, {"search": name}))
    except UsageError:  # the graph does not support every metric
        return "torch"
    return name
