"""A search on a different device than the storage."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nmer_torchrl.functional import to_device
from nmer_torchrl.neighbors.base import NeighborSearch, Search, as_search


class DeviceSearch(Search):
    """Runs a search on a given device, independent of the device of the stored rows.

    Rows can stay in host memory or in memory-mapped files, where there is more room, while the
    points (`[n, d]`, observation and action) are on the GPU. Points are copied to the device when
    they are written. A query waits for one copy of its answer.

    Args:
        search: An empty search.
        device: Device on which it searches.

    Examples:
        >>> import torch
        >>> from nmer_torchrl import make_replay_buffer
        >>> from nmer_torchrl.neighbors import DeviceSearch, TorchSearch
        >>> search = DeviceSearch(TorchSearch(), "cpu")  # "cuda:0"
        >>> buffer = make_replay_buffer("nmer", capacity=1_000, batch_size=32, search=search)
    """

    def __init__(self, search: NeighborSearch, device: torch.device | str) -> None:
        self.search, self.device = as_search(search), torch.device(device)
        self.products, self.exact = self.search.products, self.search.exact
        self.fills, self.lists = self.search.fills, self.search.lists

    def write(self, index: Tensor, points: Tensor) -> None:
        """See `NeighborSearch.write`."""
        self.search.write(index, to_device(points, self.device))

    def query(self, index: Tensor, k: int, scale: Tensor) -> Tensor:
        """See `NeighborSearch.query`."""
        there = to_device(index, self.device)
        return self.search.query(there, k, scale).to(index.device)

    def clear(self) -> None:
        """See `NeighborSearch.clear`."""
        self.search.clear()

    def state_dict(self) -> dict[str, Any]:
        """See `Search.state_dict`."""
        return self.search.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Search.load_state_dict`."""
        self.search.load_state_dict(state)
