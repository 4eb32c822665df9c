"""What all samplers share."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor
from torchrl.data.replay_buffers import Sampler, Storage

from nmer_torchrl import _compat
from nmer_torchrl.composition import Guard, check_folded
from nmer_torchrl.keys import POINT_KEYS, VALUE_KEYS
from nmer_torchrl.metrics import Metric
from nmer_torchrl.neighbors import NeighborSearch, SearchName
from nmer_torchrl.pairs import NearPairing, Pairing, QuantileCap
from nmer_torchrl.tracking.rows import StoredRows

_STATE_FILE = "sampler.pt"


class LockedSampler(Sampler):
    """A sampler with a lock, and with a state that `torch.load(..., weights_only=True)` reads."""

    def __init__(self) -> None:
        # `ReplayBuffer.empty`, among others, does not wait for prefetching threads.
        self._lock = threading.RLock()

    def dumps(self, path: str | Path) -> None:
        """Saves `state_dict()` into the directory `path`."""
        save_state(self, path)

    def loads(self, path: str | Path) -> None:
        """Loads what `dumps` saved."""
        load_state(self, path)

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        del state["_lock"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.RLock()


class PairSampler(Sampler):
    """Draws uniform anchors and joins them with their partners: a pairing as a `Sampler`.

    It draws what TorchRL's `RandomSampler` draws beside `sample_unit=unit`. Partners come from the
    buffer's generator, unless the unit has one of its own, and the unit's state is part of the
    buffer's.

    The buffer needs a transform that folds the pairs, such as `PairMixup`, or one of your own;
    without any the first `sample()` raises.

    Args:
        unit: The pairing.

    Examples:
        >>> from nmer_torchrl import RandomPairs
        >>> PairSampler(RandomPairs())
        PairSampler(keys=('observation', 'action'))
    """

    def __init__(self, unit: Pairing) -> None:
        if not isinstance(unit, Pairing):
            raise TypeError(
                f"unit={unit!r} is not a Pairing; give one, such as NeighborPairs(k=10)."
            )
        self.unit = unit
        self._guard = Guard()

    @property
    def draws(self) -> str:
        """What is drawn for each anchor."""
        return self.unit.draws

    def sample(self, storage: Storage, batch_size: int) -> tuple[Tensor, dict[str, Any]]:
        """Returns positions `[B, 1 + m]`: uniform anchors and their partners."""
        self._guard.check(self, storage, check_folded)
        generator, own = _compat.generator(self), self.unit.generator
        with self.unit.lock:
            self.unit.synchronize(storage)
            anchor = draw_uniform(self.unit.rows, batch_size, generator)
            return self.unit.join(anchor, generator if own is None else own), {}

    def synchronize(self, storage: Storage) -> None:
        """Takes up whatever has changed in the storage, rather than at the next draw."""
        with self.unit.lock:
            self.unit.synchronize(storage)

    def mark_update(self, index: int | Tensor, *, storage: Storage | None = None) -> None:
        """Notes that the buffer has written these positions."""
        self.unit.mark_update(index, storage=storage)

    def _empty(self) -> None:
        self.unit.clear()

    def state_dict(self) -> dict[str, Any]:
        """Returns what the pairing keeps beyond what follows from the storage."""
        return self.unit.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Reads the storage anew at the next draw, and gives the pairing what it kept."""
        self.unit.load_state_dict(state_dict)

    def dumps(self, path: str | Path) -> None:
        """Saves `state_dict()` into the directory `path`."""
        save_state(self, path)

    def loads(self, path: str | Path) -> None:
        """Loads what `dumps` saved."""
        load_state(self, path)

    def __repr__(self) -> str:
        return repr(self.unit).replace(type(self.unit).__name__, type(self).__name__, 1)


class NeighborQueries:
    """Answers questions about neighbours for a sampler whose pairing is by nearness."""

    unit: NearPairing

    @property
    def k(self) -> int:
        """Number of neighbours to choose from."""
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


class NearSampler(NeighborQueries, PairSampler):
    """Draws uniform anchors beside a pairing by nearness; a subclass says by which."""

    pairing: type[NearPairing]

    def __init__(
        self,
        k: int = 10,
        *,
        search: SearchName | NeighborSearch = "auto",
        keys: Sequence[NestedKey] = POINT_KEYS,
        value_keys: Sequence[NestedKey] = VALUE_KEYS,
        metric: Metric | None = None,
        max_distance: float | QuantileCap | None = None,
    ) -> None:
        unit = self.pairing(
            k,
            search=search,
            keys=keys,
            value_keys=value_keys,
            metric=metric,
            max_distance=max_distance,
        )
        super().__init__(unit)


def draw_uniform(rows: StoredRows, batch_size: int, generator: torch.Generator | None) -> Tensor:
    """Returns uniform positions `[B]` of the rows that are stored."""
    return torch.randint(rows.length, (batch_size,), generator=generator, device=rows.device)


def save_state(sampler: Sampler, path: str | Path) -> None:
    """Saves the state of a sampler into the directory `path`."""
    Path(path).mkdir(exist_ok=True)
    torch.save(sampler.state_dict(), Path(path) / _STATE_FILE)


def load_state(sampler: Sampler, path: str | Path) -> None:
    """Loads what `save_state` saved."""
    sampler.load_state_dict(torch.load(Path(path) / _STATE_FILE, weights_only=True))
