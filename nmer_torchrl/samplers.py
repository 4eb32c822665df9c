"""Pair samplers: who is mixed with whom.

A pair sampler returns an index `[B, 2]` of storage positions, anchor and partner. The storage then
yields a `[B, 2]` batch, which a fold such as `PairMixup` turns into `[B]`. An anchor without a
partner is paired with itself.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tensordict import NestedKey
from torch import Tensor
from torchrl.data.replay_buffers import Sampler, Storage

from nmer_torchrl import _compat
from nmer_torchrl.functional import choose_neighbor, choose_other
from nmer_torchrl.keys import POINT_KEYS, VALUE_KEYS
from nmer_torchrl.neighborhood import Neighborhood, check_k
from nmer_torchrl.neighbors import NeighborSearch
from nmer_torchrl.rows import StoredRows, check_layout

_STATE_FILE = "pair_sampler.pt"


class _PairSampler(Sampler):
    """Uniform anchors, and what all pair samplers share with the buffer.

    A subclass says how partners are chosen. It derives what it knows from the storage, so a copy in
    another process starts afresh.
    """

    def __init__(self, rows: StoredRows) -> None:
        self._rows = rows
        self._lock = threading.RLock()  # `ReplayBuffer.empty` does not wait for prefetching threads

    @abstractmethod
    def _synchronize(self, storage: Storage) -> None:
        """Takes up whatever has changed in the storage."""

    @abstractmethod
    def _partners(self, anchor: Tensor) -> Tensor:
        """Anchors `[B]` to partners `[B]`."""

    def sample(self, storage: Storage, batch_size: int) -> tuple[Tensor, dict[str, Any]]:
        """Positions `[B, 2]`: uniform anchors and their partners."""
        with self._lock:
            self._synchronize(storage)
            anchor = torch.randint(
                self._rows.length,
                (batch_size,),
                generator=_compat.generator(self),
                device=self._rows.device,
            )
            partner = self._partners(anchor)
        return torch.stack([anchor, partner], -1), {}

    def mark_update(self, index: int | Tensor, *, storage: Storage | None = None) -> None:
        """The buffer has written these positions."""
        if storage is not None:
            check_layout(storage)
        with self._lock:
            self._rows.announce(index, storage)

    def add(self, index: int) -> None:
        """The buffer is done with the write of one row that it announced."""
        with self._lock:
            self._rows.confirm()

    def extend(self, index: Tensor) -> None:
        """The buffer is done with the write of rows that it announced."""
        with self._lock:
            self._rows.confirm()

    def _empty(self) -> None:
        with self._lock:
            self._rows.forget()

    def state_dict(self) -> dict[str, Any]:
        """Empty unless a subclass keeps more than what follows from the storage."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Has the next sample read the storage anew."""
        self._empty()

    def dumps(self, path: str | Path) -> None:
        """Saves `state_dict()` into the directory `path`."""
        Path(path).mkdir(exist_ok=True)
        torch.save(self.state_dict(), Path(path) / _STATE_FILE)

    def loads(self, path: str | Path) -> None:
        """Loads what `dumps` saved."""
        self.load_state_dict(torch.load(Path(path) / _STATE_FILE, weights_only=True))

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        del state["_lock"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.RLock()


class NeighborPairSampler(_PairSampler):
    """Pairs a uniform anchor with one of its k nearest neighbours among all that is stored now.

    Nearest by the Euclidean distance over Z-scored, concatenated entries (by default observation
    and action). The Z-scores are those of the rows stored now: they follow every write and every
    overwrite. With fewer than k others stored the partner is one of those there are; with none,
    the anchor itself. Rows with a non-finite entry are never partners and have none.

    Args:
        k: Number of neighbours to choose from.

    Keyword Args:
        search: `"auto"` (KeOps where the storage is on CUDA, the graph elsewhere), `"graph"`,
            `"keops"`, `"torch"`, `"faiss"`, or an object that satisfies `NeighborSearch`.
        keys: Entries in which distances are measured; they may be nested and of any shape.
        value_keys: Entries that must be finite, too, for a row to be a partner: what the transform
            mixes beyond `keys`.

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
    ) -> None:
        self._neighborhood = Neighborhood(k, search, keys, value_keys)
        super().__init__(self._neighborhood.rows)

    @property
    def k(self) -> int:
        """Number of neighbours to choose from."""
        return self._neighborhood.k

    def neighbors(self, storage: Storage, index: Tensor, k: int | None = None) -> Tensor:
        """Positions `[q]` to the positions `[q, k]` of their nearest others, nearest first.

        By the statistics of what is stored now, never the position itself, padded with -1 where
        fewer than k others are stored.
        """
        index = torch.as_tensor(index)
        if index.ndim != 1 or index.dtype not in (torch.int64, torch.int32):
            raise ValueError(
                f"Positions are a vector of integers, but `index` is {index.dtype} of shape "
                f"{tuple(index.shape)}; give an int64 tensor of one dimension."
            )
        index = index.long()
        if k is not None:
            check_k(k)
        outside = (index < 0) | (index >= len(storage))
        if outside.any():
            raise IndexError(
                f"Position {int(index[outside][0])} was asked for, "
                f"but the storage holds positions 0 to {len(storage) - 1}."
            )
        with self._lock:
            self._neighborhood.synchronize(storage)
            return self._neighborhood.neighbors(index, k)

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


class RandomPairSampler(_PairSampler):
    """Pairs a uniform anchor with any other stored row, uniformly: Mixup without a neighbourhood.

    Rows with a non-finite entry are never partners.

    Keyword Args:
        keys: Entries that a transform mixes, and that must be finite in a partner.
        value_keys: More of them; the split is that of `NeighborPairSampler`.

    Examples:
        >>> from nmer_torchrl import RandomPairSampler
        >>> RandomPairSampler()
        RandomPairSampler(keys=('observation', 'action'))
    """

    def __init__(
        self,
        *,
        keys: Sequence[NestedKey] = POINT_KEYS,
        value_keys: Sequence[NestedKey] = VALUE_KEYS,
    ) -> None:
        super().__init__(StoredRows(keys, value_keys))
        self._unusable: set[int] = set()

    def _partners(self, anchor: Tensor) -> Tensor:
        generator = _compat.generator(self)
        if not self._unusable:
            partner = choose_other(anchor, self._rows.length, generator=generator)
        else:
            unusable = torch.tensor(sorted(self._unusable), device=anchor.device)
            positions = torch.ones(self._rows.length, dtype=torch.bool, device=anchor.device)
            positions[unusable] = False
            # Among the usable rows by rank, so that the choice stays uniform.
            rank = torch.where(positions[anchor], positions.cumsum(0)[anchor] - 1, -1)
            chosen = choose_other(rank, int(positions.sum()), generator=generator)
            usable = torch.cat([positions.nonzero().squeeze(1), anchor.new_tensor([-1])])
            partner = usable[chosen]
        return torch.where(partner >= 0, partner, anchor)

    def _synchronize(self, storage: Storage) -> None:
        if not self._rows.follows(storage):
            self._empty()
        for index, points in self._rows.changes(storage):
            usable = points.isfinite().all(-1)
            self._unusable.difference_update(index.tolist())
            self._unusable.update(index[~usable & (index < len(storage))].tolist())

    def _empty(self) -> None:
        with self._lock:
            super()._empty()
            self._unusable = set()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(keys={self._rows.keys})"
