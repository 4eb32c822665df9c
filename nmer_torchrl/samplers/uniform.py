"""Samplers that draw anchors uniformly and pair them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tensordict import NestedKey
from torch import Tensor
from torchrl.data.replay_buffers import Sampler, Storage

from nmer_torchrl import _compat
from nmer_torchrl.composition import Guard, check_folded
from nmer_torchrl.keys import END_KEYS, POINT_KEYS, TRAJECTORY_KEY, VALUE_KEYS
from nmer_torchrl.metrics import Metric
from nmer_torchrl.neighbors import SearchOption
from nmer_torchrl.pairs import (
    NearPairing,
    Neighborhoods,
    NeighborPairs,
    Pairing,
    QuantileCap,
    RandomPairs,
    SuccessorPairs,
)
from nmer_torchrl.samplers.base import NeighborQueries, Paired, StateFile, draw_uniform


class PairSampler(Paired, StateFile, Sampler):
    """Draws anchors uniformly and joins them with their partners.

    It turns a pairing into a `Sampler`, and draws what TorchRL's `RandomSampler` draws together
    with `sample_unit=unit`. Partners are drawn with the buffer's generator unless the unit has its
    own. The unit's state is part of the buffer's state.

    The buffer needs a transform that folds the pairs, such as `PairMixup` or your own. Without one,
    the first `sample()` raises an error.

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

    def sample(self, storage: Storage, batch_size: int) -> tuple[Tensor, dict[str, Any]]:
        """Returns positions `[B, 1 + m]`: uniform anchors and their partners."""
        self._guard.check(self, storage, check_folded)
        generator, own = _compat.generator(self), self.unit.generator
        with self.unit.lock:
            self.unit.synchronize(storage)
            anchor = draw_uniform(self.unit.rows, batch_size, generator)
            return self.unit.join(anchor, generator if own is None else own), {}

    def mark_update(self, index: int | Tensor, *, storage: Storage | None = None) -> None:
        """Records that the buffer has written these positions."""
        self.unit.mark_update(index, storage=storage)

    def _empty(self) -> None:
        self.unit.clear()

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the pairing that cannot be rebuilt from the storage."""
        return self.unit.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the pairing's state; the next draw reads the whole storage again."""
        self.unit.load_state_dict(state_dict)

    def __repr__(self) -> str:
        return repr(self.unit).replace(type(self.unit).__name__, type(self).__name__, 1)


class NearSampler(NeighborQueries, PairSampler):
    """Base class of samplers that draw uniform anchors with a pairing of near rows.

    A subclass sets the class of that pairing.
    """

    pairing: type[NearPairing]

    def __init__(
        self,
        k: int = 10,
        *,
        search: SearchOption = "auto",
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


class NeighborPairSampler(NearSampler):
    """Pairs each uniformly drawn anchor with one of its k nearest neighbors in the storage.

    Distances are Euclidean over Z-scored, concatenated entries (by default observation and action),
    unless another metric is given. Neighbors and Z-scores follow every write and every overwrite.
    If fewer than k other rows are stored, the partner is one of them; if there is none, it is the
    anchor itself. Rows with a non-finite entry are never partners and have none.

    The brute-force searches and `NeighborGraph(k, exact=True)` find the exact neighbors under the
    Z-scores of the rows stored now (KeOps up to float32). The default graph search is approximate:
    its scale may lag behind the current statistics by less than a percent, and its recall was at
    least 0.995 on the measured streams (see `docs/metrics.md` and `docs/benchmarks.md`).

    Args:
        k: Number of neighbors to choose from.

    Keyword Args:
        search: `"auto"` (KeOps where the storage is on CUDA, the graph elsewhere), `"graph"`,
            `"keops"`, `"torch"`, `"faiss"`, or an object that satisfies `NeighborSearch`.
        keys: Entries over which distances are measured. They may be nested and of any shape.
        value_keys: Further entries that the transform mixes. They must be finite, too, for a row to
            be a partner.
        metric: The distance between rows, a `Metric` such as `Mahalanobis()`. `None` uses
            `Euclidean()`.
        max_distance: Greatest distance of a partner under the metric, or a `QuantileCap`. An anchor
            whose partner is farther away is paired with itself. `None` sets no limit.

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

    pairing = NeighborPairs


class NeighborhoodSampler(NearSampler):
    """Draws uniform anchors, each with its k nearest neighbors: positions `[B, 1 + k]`.

    The anchor comes first, then its neighbors, nearest first. The anchor itself fills the places of
    missing neighbors, if fewer rows are stored or if the anchor has a non-finite entry. Arguments,
    neighbors and accuracy are those of `NeighborPairSampler`. Use it with `NeighborhoodMixup` or
    `GaussianProcessMixup`.

    Examples:
        >>> from nmer_torchrl.samplers import NeighborhoodSampler
        >>> NeighborhoodSampler(k=5)
        NeighborhoodSampler(k=5, keys=('observation', 'action'))
    """

    pairing = Neighborhoods


class RandomPairSampler(PairSampler):
    """Pairs each uniformly drawn anchor with another stored row, drawn uniformly.

    With `PairMixup` this is Mixup without a neighborhood. Rows with a non-finite entry are never
    partners and have none.

    Keyword Args:
        keys: Entries that the transform mixes. They must be finite in a partner.
        value_keys: Further entries that the transform mixes, as in `NeighborPairSampler`.

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
        super().__init__(RandomPairs(keys=keys, value_keys=value_keys))


class TemporalPairSampler(PairSampler):
    """Pairs each uniformly drawn anchor with the transition that followed it in its episode.

    With `PairMixup` this is Continuous Transition. `SuccessorPairs` documents how successors are
    found, which rows have none, and the arguments.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
        >>> buffer = TensorDictReplayBuffer(
        ...     storage=LazyTensorStorage(1_000), sampler=TemporalPairSampler(), batch_size=32
        ... )
        >>> states = torch.randn(5, 3)
        >>> following = TensorDict(
        ...     observation=states[1:], reward=torch.randn(4, 1), batch_size=[4]
        ... )
        >>> _ = buffer.extend(
        ...     TensorDict(
        ...         observation=states[:4], action=torch.randn(4, 1), next=following, batch_size=[4]
        ...     )
        ... )
        >>> buffer.sampler.successors(buffer.storage, torch.arange(4))
        tensor([ 1,  2,  3, -1])
    """

    unit: SuccessorPairs

    def __init__(
        self,
        *,
        keys: Sequence[NestedKey] = POINT_KEYS,
        value_keys: Sequence[NestedKey] = VALUE_KEYS,
        end_keys: Sequence[NestedKey] = END_KEYS,
        trajectory_key: NestedKey = TRAJECTORY_KEY,
    ) -> None:
        unit = SuccessorPairs(
            keys=keys, value_keys=value_keys, end_keys=end_keys, trajectory_key=trajectory_key
        )
        super().__init__(unit)

    def successors(self, storage: Storage, index: Tensor) -> Tensor:
        """Returns the successors `[q]` of the rows at positions `[q]`; -1 where there is none."""
        return self.unit.successors(storage, index)
