"""Partners among the nearest neighbours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tensordict import NestedKey, TensorDictBase
from torch import Tensor
from torchrl.data.replay_buffers import Storage

from nmer_torchrl import _compat
from nmer_torchrl.functional import choose_neighbor
from nmer_torchrl.keys import POINT_KEYS, VALUE_KEYS
from nmer_torchrl.metrics import Metric
from nmer_torchrl.neighborhood import Neighborhood, check_k
from nmer_torchrl.neighbors import NeighborSearch
from nmer_torchrl.samplers.base import PairSampler, check_positions


class NeighborPairSampler(PairSampler):
    """Pairs a uniform anchor with one of its k nearest neighbours among all that is stored now.

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
        metric: How far apart rows are: `Euclidean()`, the default, `Mahalanobis()`,
            `ProductNorm()`, or either of the first two in a `FeatureSpace`.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
        >>> from nmer_torchrl import NeighborPairSampler, PairMixup
        >>> buffer = TensorDictReplayBuffer(
        ...     storage=LazyTensorStorage(1_000),
        ...     sampler=NeighborPairSampler(k=10),
        ...     transform=PairMixup(alpha=0.75),
        ...     batch_size=32,
        ... )
        >>> transitions = TensorDict(
        ...     observation=torch.randn(100, 3),
        ...     action=torch.randn(100, 1),
        ...     next=TensorDict(
        ...         observation=torch.randn(100, 3),
        ...         reward=torch.randn(100, 1),
        ...         terminated=torch.zeros(100, 1, dtype=torch.bool),
        ...         batch_size=[100],
        ...     ),
        ...     batch_size=[100],
        ... )
        >>> _ = buffer.extend(transitions)
        >>> batch = buffer.sample()
        >>> batch["observation"].shape, batch["index"].shape, batch["mixup_weight"].shape
        (torch.Size([32, 3]), torch.Size([32, 2]), torch.Size([32, 1]))
    """

    def __init__(
        self,
        k: int = 10,
        *,
        search: str | NeighborSearch = "auto",
        keys: Sequence[NestedKey] = POINT_KEYS,
        value_keys: Sequence[NestedKey] = VALUE_KEYS,
        metric: Metric | None = None,
    ) -> None:
        self._neighborhood = Neighborhood(k, search, keys, value_keys, metric)
        super().__init__(self._neighborhood.rows)

    @property
    def k(self) -> int:
        """Number of neighbours to choose from."""
        return self._neighborhood.k

    @property
    def metric(self) -> Metric:
        """How far apart rows are."""
        return self._neighborhood.metric

    def neighbors(self, storage: Storage, index: Tensor, k: int | None = None) -> Tensor:
        """Positions `[q]` to the positions `[q, k]` of their nearest others, nearest first.

        By the statistics of what is stored now, never the position itself, padded with -1 where
        fewer than k others are stored.
        """
        if k is not None:
            check_k(k)
        index = check_positions(index, storage)
        with self._lock:
            self._neighborhood.synchronize(storage)
            return self._neighborhood.neighbors(index, k)

    def embed(self, batch: TensorDictBase) -> Tensor:
        """Rows `[*B]` to points `[*B, f]` whose Euclidean distance is the metric's, float64.

        By the statistics of the last draw. Rows need not be stored ones; there are no such points
        for `ProductNorm`.
        """
        return self._neighborhood.embed(batch)

    def distances(self, batch: TensorDictBase) -> Tensor:
        """Rows `[*B, 1 + m]` to the distances `[*B, m]` of the first from the others, float64.

        By the statistics of the last draw; of a batch of pairs, m is 1.
        """
        return self._neighborhood.distances(batch)

    def refresh(self) -> None:
        """Has the next draw read all rows anew, such as when the function of a metric changed."""
        with self._lock:
            self._neighborhood.clear()

    def _synchronize(self, storage: Storage) -> None:
        self._neighborhood.synchronize(storage)

    def _partners(self, anchor: Tensor) -> Tensor:
        neighbors = self._neighborhood.neighbors(anchor)
        return choose_neighbor(anchor, neighbors, generator=_compat.generator(self))

    def _empty(self) -> None:
        with self._lock:
            self._neighborhood.clear()

    def state_dict(self) -> dict[str, Any]:
        """What the neighbour search keeps, such as the lists of a graph."""
        with self._lock:
            storage = self._rows.storage
            if storage is not None and len(storage):
                self._synchronize(storage)
            return self._neighborhood.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Has the next sample read the storage anew, and the search take up what it kept."""
        with self._lock:
            self._neighborhood.load_state_dict(state_dict)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(k={self.k}, keys={self._rows.keys})"
