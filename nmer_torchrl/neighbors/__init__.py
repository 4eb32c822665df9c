"""Exact nearest neighbours among what is stored, behind one protocol."""

from __future__ import annotations

import torch

from nmer_torchrl.neighbors.base import NeighborSearch, PointTable
from nmer_torchrl.neighbors.faiss import FaissSearch
from nmer_torchrl.neighbors.keops import KeOpsSearch
from nmer_torchrl.neighbors.torch import TorchSearch

__all__ = [
    "FaissSearch",
    "KeOpsSearch",
    "NeighborSearch",
    "PointTable",
    "TorchSearch",
    "check_search",
    "make_search",
]

SEARCHES: dict[str, type[NeighborSearch]] = {
    "keops": KeOpsSearch,
    "torch": TorchSearch,
    "faiss": FaissSearch,
}


def check_search(search: str | NeighborSearch) -> None:
    """Raises if `search` neither names a search nor is one."""
    if isinstance(search, str):
        known = ["auto", *SEARCHES]
        if search not in known:
            raise ValueError(f"Unknown search {search!r}; the known ones are {', '.join(known)}.")
    elif isinstance(search, type) or not isinstance(search, NeighborSearch):
        raise TypeError(
            f"`search` is {search!r}, which has no write, query and clear; give one of "
            f"{', '.join(['auto', *SEARCHES])}, or an object that satisfies NeighborSearch."
        )


def make_search(search: str | NeighborSearch, device: torch.device) -> NeighborSearch:
    """The search of that name for points on that device; an object is returned as it is.

    `"auto"` is KeOps on CUDA and torch elsewhere.
    """
    check_search(search)
    if not isinstance(search, str):
        return search
    if search == "auto":
        search = "keops" if device.type == "cuda" else "torch"
    return SEARCHES[search]()
