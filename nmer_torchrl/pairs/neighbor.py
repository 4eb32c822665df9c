"""Partners among the nearest neighbours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor
from torchrl.data.replay_buffers import Storage

from nmer_torchrl.functional import choose_neighbor
from nmer_torchrl.keys import POINT_KEYS, VALUE_KEYS
from nmer_torchrl.metrics import Metric
from nmer_torchrl.neighbors import NeighborSearch, SearchName
from nmer_torchrl.pairs.base import Pairing
from nmer_torchrl.pairs.cap import Cap, QuantileCap
from nmer_torchrl.pairs.neighborhood import StoredNeighbors, check_k
from nmer_torchrl.tracking.rows import check_positions


class NearPairing(Pairing):
    """A pairing by nearness; a subclass says which of the neighbours are partners."""

    def __init__(
        self,
        k: int = 10,
        *,
        search: SearchName | NeighborSearch = "auto",
        keys: Sequence[NestedKey] = POINT_KEYS,
        value_keys: Sequence[NestedKey] = VALUE_KEYS,
        metric: Metric | None = None,
        max_distance: float | QuantileCap | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        self.cap = None if max_distance is None else Cap(max_distance)
        self.neighborhood = StoredNeighbors(k, search, keys, value_keys, metric)
        super().__init__(self.neighborhood.rows, generator)

    @property
    def k(self) -> int:
        """Number of neighbours to choose from."""
        return self.neighborhood.k

    @property
    def metric(self) -> Metric:
        """How far apart rows are."""
        return self.neighborhood.metric

    def neighbors(self, storage: Storage, index: Tensor, k: int | None = None) -> Tensor:
        """Returns the positions `[q, k]` of the nearest others of positions `[q]`, nearest first.

        By the statistics of what is stored now, never the position itself, padded with -1 where
        fewer than k others are stored.
        """
        if k is not None:
            check_k(k)
        index = check_positions(index, storage)
        with self.lock:
            self.neighborhood.synchronize(storage)
            return self.neighborhood.neighbors(index, k)

    def embed(self, batch: TensorDictBase) -> Tensor:
        """Returns points `[*B, f]` of rows `[*B]` whose Euclidean distance is the metric's.

        By the statistics of the last draw, float64. Rows need not be stored ones. Raises for
        metrics whose `embeds` is false.
        """
        return self.neighborhood.embed(batch)

    def distances(self, batch: TensorDictBase) -> Tensor:
        """Returns the distances `[*B, m]` of the first of rows `[*B, 1 + m]` from the others.

        By the statistics of the last draw, float64; of a batch of pairs, m is 1.
        """
        return self.neighborhood.distances(batch)

    def _within(self, anchor: Tensor, partner: Tensor) -> Tensor:
        """Replaces the partners that are too far away by the anchor."""
        if self.cap is None:
            return partner
        near = self.cap.near(self.neighborhood.stored_distances(anchor, partner))
        return torch.where(near, partner, anchor)

    def clear(self) -> None:
        """Reads all rows anew at the next draw, such as when the function of a metric changed."""
        with self.lock:
            self.neighborhood.clear()

    def synchronize(self, storage: Storage) -> None:
        """Takes up whatever has changed in the storage."""
        self.neighborhood.synchronize(storage)

    def state_dict(self) -> dict[str, Any]:
        """Returns what the neighbour search keeps, and the distances that a cap remembers."""
        with self.lock:
            storage = self.rows.storage
            if storage is not None and len(storage):
                self.synchronize(storage)
            state = self.neighborhood.state_dict()
            return state if self.cap is None else {**state, "recent": self.cap.recent.clone()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Reads the storage anew at the next draw, and gives search and cap what they kept."""
        with self.lock:
            self.neighborhood.load_state_dict(state_dict)
            if self.cap is not None and "recent" in state_dict:
                self.cap.recent = state_dict["recent"].clone()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(k={self.k}, keys={self.rows.keys})"


class NeighborPairs(NearPairing):
    """Pairs each anchor with one of its k nearest neighbours among all that is stored now.

    Nearest by the Euclidean distance over Z-scored, concatenated entries (by default observation
    and action), or by another metric. The Z-scores are those of the rows stored now: they follow
    every write and every overwrite. With fewer than k others stored the partner is one of those
    there are; with none, the anchor itself. Rows with a non-finite entry are never partners and
    have none.

    Args:
        k: Number of neighbours to choose from.

    Keyword Args:
        search: `"auto"` (KeOps where the storage is on CUDA, the graph elsewhere), `"graph"`,
            `"keops"`, `"torch"`, `"faiss"`, or an object that satisfies `NeighborSearch`.
        keys: Entries in which distances are measured; they may be nested and of any shape.
        value_keys: Entries that must be finite, too, for a row to be a partner: what the transform
            mixes beyond `keys`.
        metric: How far apart rows are: any `Metric`, such as `Mahalanobis()`. `None` uses
            `Euclidean()`.
        max_distance: Greatest distance of a partner under the metric, or a `QuantileCap`. An anchor
            whose partner is farther away is paired with itself. `None` for no limit.
        generator: Source of all randomness; `None` uses torch's global one.

    Examples:
        >>> from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
        >>> from torchrl.data.replay_buffers import PrioritizedSampler
        >>> from nmer_torchrl import NeighborPairs, PairMixup
        >>> buffer = TensorDictReplayBuffer(
        ...     storage=LazyTensorStorage(1_000),
        ...     sampler=PrioritizedSampler(1_000, alpha=0.6, beta=0.4),  # or any other
        ...     sample_unit=NeighborPairs(k=10),
        ...     transform=PairMixup(alpha=0.75),
        ...     batch_size=32,
        ... )
    """

    def partners(self, anchor: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Returns the partners `[B]` of anchors `[B]`, after `synchronize`."""
        near = self.neighborhood
        partner = choose_neighbor(
            anchor, near.neighbors(anchor), generator=generator, **near.padding()
        )
        return self._within(anchor, partner)


class Neighborhoods(NearPairing):
    """Groups each anchor with all its k nearest neighbours, `[B, 1 + k]`.

    The neighbours are those of `NeighborPairs`, nearest first; where fewer than k others are
    stored, the anchor takes the place of those that are missing, as of those that are farther away
    than `max_distance`. It goes with `NeighborhoodMixup` or `GaussianProcessMixup`, and takes the
    arguments of `NeighborPairs`.

    Examples:
        >>> from nmer_torchrl import Neighborhoods
        >>> Neighborhoods(k=5)
        Neighborhoods(k=5, keys=('observation', 'action'))
    """

    draws = "neighborhoods [B, 1 + k]"

    def partners(self, anchor: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Returns the neighbours `[B, k]` of anchors `[B]`, after `synchronize`."""
        own, neighbors = anchor.unsqueeze(1), self.neighborhood.neighbors(anchor)
        return self._within(own, torch.where(neighbors < 0, own, neighbors))
