"""The interface of a metric, and of the space that it opens for a pairing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeAlias

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from nmer_torchrl.neighbors import PointTable, Search, SearchOption

Widths: TypeAlias = Mapping[NestedKey, int]  # widths of entries, in their order in a point


class View(Protocol):
    """Measures distances under the statistics of one moment; immutable, so safe to share.

    Examples:
        >>> from nmer_torchrl.metrics import Euclidean
        >>> space = Euclidean().open("torch", 1, {"observation": 1}, torch.device("cpu"))
        >>> points = torch.tensor([[0.0], [2.0]])  # standard deviation 1
        >>> space.replace(torch.tensor([0, 1]), points, points[:0])
        >>> view = space.view()
        >>> view.distances(points[0], points[1])
        tensor(2., dtype=torch.float64)
    """

    def embed(self, points: Tensor) -> Tensor:
        """Maps points `[..., d]` to float64 points whose Euclidean distance is the metric's."""
        ...

    def distances(self, first: Tensor, second: Tensor) -> Tensor:
        """Returns the distances `[...]` between points `[..., d]`, in float64."""
        ...


class Space(ABC):
    """Holds the points stored now, the statistics of a metric over them, and a search.

    Examples:
        >>> from nmer_torchrl.metrics import Euclidean
        >>> space = Euclidean().open("torch", 1, {"observation": 1}, torch.device("cpu"))
        >>> points = torch.tensor([[0.0], [1.0], [5.0]])
        >>> space.replace(torch.arange(3), points, points[:0])
        >>> space.query(torch.tensor([0, 2]), k=2)
        tensor([[1, 2],
                [1, 0]])
    """

    search: Search
    table: PointTable  # the points as read from the storage, unscaled

    @abstractmethod
    def replace(self, index: Tensor, points: Tensor, removed: Tensor) -> None:
        """Writes the points `[n, d]` to the positions `[n]`, and drops the `[m, d]` removed ones.

        As in `NeighborSearch.write`, a point with a non-finite entry empties its position. Among
        the removed points, it means that the position was empty.
        """

    @abstractmethod
    def query(self, index: Tensor, k: int) -> Tensor:
        """Returns the neighbors `[q, k]` of positions `[q]`, as `NeighborSearch.query` does."""

    @abstractmethod
    def view(self) -> View:
        """Returns the distances under the current statistics."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the state that cannot be rebuilt from the points; by default the search's."""
        return self.search.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores a saved state after the points were written; ignores one that does not fit."""
        self.search.load_state_dict(state)


class Metric(ABC):
    """Defines the distance between two rows by their entries under a sampler's `keys`.

    Examples:
        >>> from nmer_torchrl.metrics import Euclidean
        >>> class ByAction(Euclidean):  # NMER's metric with double weight on actions
        ...     def __init__(self):
        ...         super().__init__(weights={"action": 2.0})
        >>> from nmer_torchrl import NeighborPairSampler
        >>> NeighborPairSampler(metric=ByAction()).metric
        ByAction(weights={'action': 2.0})
    """

    feature: Callable[[TensorDictBase], Tensor] | None = None  # maps rows to points; None: by keys
    # True if the metric depends on keys. Such a metric cannot be used in `FeatureSpace`.
    by_key: bool = False
    # True if `View.embed` maps points to a space in which the metric is the Euclidean distance.
    embeds: bool = True

    @abstractmethod
    def check(self, search: SearchOption, keys: tuple[NestedKey, ...]) -> None:
        """Raises an error if this metric does not support the search or the keys."""

    @abstractmethod
    def open(self, search: SearchOption, k: int, widths: Widths, device: torch.device) -> Space:
        """Builds a space for k neighbors among points that concatenate entries of these widths."""
