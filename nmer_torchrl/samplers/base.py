"""What samplers share."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.data.replay_buffers import Sampler, Storage

from nmer_torchrl.metrics import Metric
from nmer_torchrl.pairs import NearPairing, Pairing
from nmer_torchrl.tracking.rows import StoredRows

_STATE_FILE = "sampler.pt"


class StateFile:
    """Saves the state of a sampler as a file that `torch.load(..., weights_only=True)` reads."""

    def dumps(self: Any, path: str | Path) -> None:
        """Saves `state_dict()` into the directory `path`."""
        Path(path).mkdir(exist_ok=True)
        torch.save(self.state_dict(), Path(path) / _STATE_FILE)

    def loads(self: Any, path: str | Path) -> None:
        """Loads what `dumps` saved."""
        self.load_state_dict(torch.load(Path(path) / _STATE_FILE, weights_only=True))


class LockedSampler(StateFile, Sampler):
    """A sampler with a lock."""

    def __init__(self) -> None:
        # `ReplayBuffer.empty`, among others, does not wait for prefetching threads.
        self._lock = threading.RLock()

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        del state["_lock"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.RLock()


class Paired:
    """A sampler with a pairing, which follows the storage."""

    unit: Pairing

    @property
    def draws(self) -> str:
        """What is drawn for each anchor."""
        return self.unit.draws

    def synchronize(self, storage: Storage) -> None:
        """Takes up whatever has changed in the storage, rather than at the next draw."""
        with self.unit.lock:
            self.unit.synchronize(storage)


class NeighborQueries(Paired):
    """Answers questions about neighbors for a sampler whose pairing is by nearness."""

    unit: NearPairing

    @property
    def k(self) -> int:
        """Number of neighbors to choose from."""
        return self.unit.k

    @property
    def metric(self) -> Metric:
        """How far apart rows are."""
        return self.unit.metric

    def neighbors(self, storage: Storage, index: Tensor, k: int | None = None) -> Tensor:
        """Returns the positions `[q, k]` of the nearest others of positions `[q]`, nearest first.

        By the statistics of what is stored now, never the position itself, padded with -1 where
        fewer than k others are stored.
        """
        return self.unit.neighbors(storage, index, k)

    def embed(self, batch: TensorDictBase) -> Tensor:
        """Returns points `[*B, f]` of rows `[*B]` whose Euclidean distance is the metric's.

        By the statistics of the last draw, float64. Rows need not be stored ones. Raises for
        metrics whose `embeds` is false.
        """
        return self.unit.embed(batch)

    def distances(self, batch: TensorDictBase) -> Tensor:
        """Returns the distances `[*B, m]` of the first of rows `[*B, 1 + m]` from the others.

        By the statistics of the last draw, float64; of a batch of pairs, m is 1.
        """
        return self.unit.distances(batch)

    def refresh(self) -> None:
        """Reads all rows anew at the next draw, such as when the function of a metric changed."""
        self.unit.clear()


def draw_uniform(rows: StoredRows, batch_size: int, generator: torch.Generator | None) -> Tensor:
    """Returns uniform positions `[B]` of the rows that are stored."""
    return torch.randint(rows.length, (batch_size,), generator=generator, device=rows.device)
