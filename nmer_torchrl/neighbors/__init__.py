"""Searches for nearest neighbors among stored points, with one interface."""

from __future__ import annotations

import torch

from nmer_torchrl.neighbors.base import (
    NeighborSearch,
    PointTable,
    Search,
    SearchName,
    SearchOption,
    as_search,
)
from nmer_torchrl.neighbors.device import DeviceSearch
from nmer_torchrl.neighbors.faiss import FaissSearch
from nmer_torchrl.neighbors.graph import NeighborGraph
from nmer_torchrl.neighbors.keops import KeOpsSearch
from nmer_torchrl.neighbors.torch import TorchSearch

__all__ = [
    "DeviceSearch",
    "FaissSearch",
    "KeOpsSearch",
    "NeighborGraph",
    "NeighborSearch",
    "PointTable",
    "Search",
    "SearchName",
    "SearchOption",
    "TorchSearch",
    "check_search",
    "make_search",
]

SEARCHES: dict[SearchName, type[Search]] = {
    "graph": NeighborGraph,
    "keops": KeOpsSearch,
    "torch": TorchSearch,
    "faiss": FaissSearch,
}


def check_search(search: SearchOption) -> None:
    """Raises an error unless `search` is the name of a search or a search object.

    Examples:
        >>> check_search("graph")
        >>> check_search("kdtree")
        Traceback (most recent call last):
        ...
        ValueError: Unknown search 'kdtree'; the known ones are auto, graph, keops, torch, faiss.
    """
    if isinstance(search, str):
        known = ["auto", *SEARCHES]
        if search not in known:
            raise ValueError(f"Unknown search {search!r}; the known ones are {', '.join(known)}.")
    elif isinstance(search, type) or not isinstance(search, NeighborSearch):
        raise TypeError(
            f"`search` is {search!r}, which does not have the methods write, query and clear; give "
            "one of "
            f"{', '.join(['auto', *SEARCHES])}, or an object that satisfies NeighborSearch."
        )


def make_search(search: SearchOption, k: int, device: torch.device) -> Search:
    """Builds the named search for k neighbors among points on the given device.

    `"auto"` is KeOps on CUDA and the graph elsewhere. An object is passed through `as_search`.

    Examples:
        >>> import torch
        >>> type(make_search("auto", 10, torch.device("cpu"))).__name__
        'NeighborGraph'
    """
    check_search(search)
    if not isinstance(search, str):
        return as_search(search)
    if search == "auto":
        search = "keops" if device.type == "cuda" else "graph"
    return NeighborGraph(k) if search == "graph" else SEARCHES[search]()
