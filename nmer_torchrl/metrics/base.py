"""The whole contract of a metric: what it is, and the space that it opens for a pairing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeAlias

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from nmer_torchrl.neighbors import PointTable, Search, SearchOption

Widths: TypeAlias = Mapping[NestedKey, int]  # of entries, in the order in which points join them


class View(Protocol):
    """Distances under the statistics of one moment. It never changes, so any thread may use it.

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
        """Points `[..., d]` to where their Euclidean distance is the metric's, float64."""
        ...

    def distances(self, first: Tensor, second: Tensor) -> Tensor:
        """Distances `[...]` between points `[..., d]`, float64."""
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
    table: PointTable  # the points as they were read

    @abstractmethod
    def replace(self, index: Tensor, points: Tensor, removed: Tensor) -> None:
        """The points `[n, d]` now stand at the positions `[n]`; the `[m, d]` removed are gone.

        As in `NeighborSearch.write`, a point with a non-finite entry empties its position. Among
        the removed, such a point stands for a position that was empty.
        """

    @abstractmethod
    def query(self, index: Tensor, k: int) -> Tensor:
        """Positions `[q]` to those `[q, k]` of their nearest others, as `NeighborSearch.query`."""

    @abstractmethod
    def view(self) -> View:
        """Distances as they are now."""

    def state_dict(self) -> dict[str, Any]:
        """Returns what does not follow from the points: what the search keeps, by default."""
        return self.search.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes up a saved state, the points being there; ignores one that does not fit."""
        self.search.load_state_dict(state)


class Metric(ABC):
    """Says how far apart two rows are, by their entries under a sampler's `keys`.

    Examples:
        >>> from nmer_torchrl.metrics import Euclidean
        >>> class ByAction(Euclidean):  # NMER's own, in which the action counts twice
        ...     def __init__(self):
        ...         super().__init__(weights={"action": 2.0})
        >>> from nmer_torchrl import NeighborPairSampler
        >>> NeighborPairSampler(metric=ByAction()).metric
        ByAction(weights={'action': 2.0})
    """

    feature: Callable[[TensorDictBase], Tensor] | None = None  # rows to points, if not their keys
    # True if the metric depends on keys. Such a metric cannot be used in `FeatureSpace`.
    by_key: bool = False
    # True if `View.embed` maps points to a space in which the metric is the Euclidean distance.
    embeds: bool = True

    @abstractmethod
    def check(self, search: SearchOption, keys: tuple[NestedKey, ...]) -> None:
        """Raises if this metric does not go with that search or with these keys."""

    @abstractmethod
    def open(self, search: SearchOption, k: int, widths: Widths, device: torch.device) -> Space:
        """A new space for k neighbors among points that join entries of these widths."""
