"""Base classes and functions that samplers share."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
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
    """Saves a sampler's state to a file that `torch.load(..., weights_only=True)` can read."""

    def dumps(self: Any, path: str | Path) -> None:
        """Saves `state_dict()` in the directory `path`."""
        Path(path).mkdir(exist_ok=True)
        torch.save(self.state_dict(), Path(path) / _STATE_FILE)

    def loads(self: Any, path: str | Path) -> None:
        """Loads a state that `dumps` saved."""
        self.load_state_dict(
            torch.load(Path(path) / _STATE_FILE, weights_only=True, map_location="cpu")
        )


class LockedSampler(StateFile, Sampler):
    """Adds a lock to a sampler."""

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
    """Adds a pairing, which follows the storage, to a sampler."""

    unit: Pairing

    @property
    def draws(self) -> str:
        """Returns a description of what is drawn for each anchor."""
        return self.unit.draws

    def synchronize(self, storage: Storage) -> None:
        """Reads all changed rows of the storage now instead of at the next draw."""
        with self.unit.lock:
            self.unit.synchronize(storage)


class NeighborQueries(Paired):
    """Adds neighbor queries to a sampler whose pairing searches neighbors."""

    unit: NearPairing

    @property
    def k(self) -> int:
        """Returns the number of neighbors to choose from."""
        return self.unit.k

    @property
    def metric(self) -> Metric:
        """Returns the metric, which defines the distance between rows."""
        return self.unit.metric

    def neighbors(self, storage: Storage, index: Tensor, k: int | None = None) -> Tensor:
        """Returns the neighbors `[q, k]` of the rows at positions `[q]`, nearest first.

        A row is never its own neighbor. Missing neighbors are -1 if fewer than k other rows are
        stored. Exact searches rank by the statistics of the rows stored now. The default graph
        knows every write, but ranks by a scale that may lag behind the statistics by less than a
        percent, so it can miss some neighbors (see `NeighborPairSampler`).
        """
        return self.unit.neighbors(storage, index, k)

    def build(
        self, storage: Storage, *, progress: Callable[[Sequence[Tensor]], Iterable[Tensor]] = iter
    ) -> None:
        """Builds the neighbor lists of all rows now instead of when rows are first drawn.

        Call it once after a buffer was filled at once, as with offline data. `progress=tqdm` shows
        a progress bar. Searches without lists have nothing to build.
        """
        self.unit.build(storage, progress=progress)

    def embed(self, batch: TensorDictBase) -> Tensor:
        """Maps rows `[*B]` to float64 points `[*B, f]` whose Euclidean distance is the metric's.

        It uses the statistics of the last draw. Rows need not be stored. Raises an error for
        metrics whose `embeds` is false.
        """
        return self.unit.embed(batch)

    def distances(self, batch: TensorDictBase) -> Tensor:
        """Returns the distances `[*B, m]` from the first of rows `[*B, 1 + m]` to the others.

        They are float64 and use the statistics of the last draw. For a batch of pairs, m is 1.
        """
        return self.unit.distances(batch)

    def refresh(self) -> None:
        """Reads all rows again at the next draw; call it when a `FeatureSpace` function changed."""
        self.unit.clear()


def draw_uniform(rows: StoredRows, batch_size: int, generator: torch.Generator | None) -> Tensor:
    """Draws positions `[B]` of stored rows uniformly."""
    return torch.randint(rows.length, (batch_size,), generator=generator, device=rows.device)
