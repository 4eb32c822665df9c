"""What a metric is to a sampler."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from nmer_torchrl.neighbors import NeighborSearch, PointTable, SearchName


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


class Space(Protocol):
    """The points stored now and the statistics of a metric over them, with a search.

    Examples:
        >>> from nmer_torchrl.metrics import Euclidean
        >>> space = Euclidean().open("torch", 1, {"observation": 1}, torch.device("cpu"))
        >>> points = torch.tensor([[0.0], [1.0], [5.0]])
        >>> space.replace(torch.arange(3), points, points[:0])
        >>> space.query(torch.tensor([0, 2]), k=2)
        tensor([[1, 2],
                [1, 0]])
    """

    search: NeighborSearch
    table: PointTable  # the points as they were read

    def replace(self, index: Tensor, points: Tensor, removed: Tensor) -> None:
        """The points `[n, d]` now stand at the positions `[n]`; the `[m, d]` removed are gone.

        As in `NeighborSearch.write`, a point with a non-finite entry empties its position. Among
        the removed, such a point stands for a position that was empty.
        """
        ...

    def query(self, index: Tensor, k: int) -> Tensor:
        """Positions `[q]` to those `[q, k]` of their nearest others, as `NeighborSearch.query`."""
        ...

    def view(self) -> View:
        """Distances as they are now."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """What does not follow from the points that are stored."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes up what was saved, the points being there."""
        ...


class Metric(ABC):
    """How far apart two rows are, by their entries under a sampler's `keys`.

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

    @abstractmethod
    def check(self, search: SearchName | NeighborSearch, keys: tuple[NestedKey, ...]) -> None:
        """Raises if this metric does not go with that search or with these keys."""

    @abstractmethod
    def open(
        self,
        search: SearchName | NeighborSearch,
        k: int,
        widths: Mapping[NestedKey, int],
        device: torch.device,
    ) -> Space:
        """A new space for k neighbours among points that join entries of these widths."""


def own_table(search: NeighborSearch) -> PointTable | None:
    """The table in which a search holds the points that it was given, if it is one of ours."""
    table = getattr(search, "table", None)
    return table if isinstance(table, PointTable) else None


def search_state(search: NeighborSearch) -> dict[str, Any]:
    """What a search wants to keep, if anything."""
    state = getattr(search, "state_dict", None)
    return {} if state is None else {"search": state()}


def load_search_state(search: NeighborSearch, state: dict[str, Any]) -> None:
    """Gives a search what it kept."""
    load = getattr(search, "load_state_dict", None)
    if load is not None and "search" in state:
        load(state["search"])
