"""Samplers that draw rows or anchors by priority."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from tensordict import NestedKey
from torch import Tensor
from torchrl.data.replay_buffers import PrioritizedSampler, ReplayBuffer, Storage

from nmer_torchrl import _compat
from nmer_torchrl.checks import is_integer
from nmer_torchrl.composition import Guard, check_folded
from nmer_torchrl.functional import mean_by_position, pair_priorities
from nmer_torchrl.keys import POINT_KEYS, VALUE_KEYS
from nmer_torchrl.metrics import Metric
from nmer_torchrl.neighbors import SearchOption
from nmer_torchrl.pairs import NeighborPairs, QuantileCap
from nmer_torchrl.samplers.base import NeighborQueries, StateFile

_FLOAT32 = torch.finfo(torch.float32)


class CheckedPrioritizedSampler(StateFile, PrioritizedSampler):
    """TorchRL's `PrioritizedSampler` with checks, and with a state that is safe to load.

    Position i is drawn with probability `(p_i + eps) ** alpha / sum_j (p_j + eps) ** alpha`. Its
    importance weight `(N * P(i)) ** -beta`, divided by the largest weight, is returned under
    `"priority_weight"`. A new row has the largest priority ever given, at first 1. All of this is
    TorchRL's behavior. The differences are:

    - Priorities that are not finite or below 0 are rejected (after one NaN, TorchRL draws the same
      row forever), and so are positions beyond the capacity.
    - Without a generator, torch's global generator is used, not NumPy's.
    - The state consists of tensors, for `torch.load(..., weights_only=True)`.
    - Rows that were written to the storage without notice are added as new rows.

    `beta` and `alpha` are attributes that TorchRL's schedulers may change.

    Args:
        max_capacity: Number of rows that the storage can hold.
        alpha: Exponent of the priorities: 0 draws uniformly, 1 in proportion to them.
        beta: Exponent of the importance weights: 0 means no correction, 1 full correction.
        eps: Constant that is added to each priority, so that every row can be drawn.

    Examples:
        >>> import torch
        >>> from torchrl.data import LazyTensorStorage, ReplayBuffer
        >>> from torchrl.data.replay_buffers.scheduler import LinearScheduler
        >>> sampler = CheckedPrioritizedSampler(max_capacity=4)
        >>> buffer = ReplayBuffer(storage=LazyTensorStorage(4), sampler=sampler, batch_size=8)
        >>> _ = buffer.extend(torch.arange(4))
        >>> buffer.update_priority(torch.tensor([0, 1]), torch.tensor([0.5, 8.0]))
        >>> sampler.priorities(torch.arange(4)).round(decimals=4)
        tensor([0.5000, 8.0000, 1.0000, 1.0000], dtype=torch.float64)
        >>> LinearScheduler(buffer, "beta", final_value=1.0, num_steps=2).step()
        >>> float(sampler.beta)
        0.7
    """

    def __init__(
        self, max_capacity: int, alpha: float = 0.6, beta: float = 0.4, eps: float = 1e-6
    ) -> None:
        if not is_integer(max_capacity) or max_capacity < 1:
            raise ValueError(
                f"max_capacity={max_capacity!r} is not a number of rows; "
                "give an integer, at least 1."
            )
        for name, value, usual in (("alpha", alpha, 0.6), ("beta", beta, 0.4)):
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(
                    f"{name}={value!r} is out of range; give a finite exponent, at least 0 (the "
                    f"default is {usual})."
                )
        if not (math.isfinite(eps) and eps > 0 and eps**alpha > _FLOAT32.tiny):
            raise ValueError(
                f"With eps={eps!r} and alpha={alpha!r}, a row of priority 0 would never be drawn; "
                "give a finite eps above 0 for which eps ** alpha does not underflow (the default "
                "is 1e-6)."
            )
        super().__init__(max_capacity, alpha, beta, eps)
        self._ranked = 0  # all rows before this position have a priority

    def sample(self, storage: Storage, batch_size: int) -> tuple[Tensor, dict[str, Any]]:
        """Draws positions `[B]` by priority, with importance weights `[B]`."""
        self._rank(storage)
        return _compat.draw_by_priority(self, storage, batch_size)

    def priorities(self, index: Tensor) -> Tensor:
        """Returns the priorities of positions as they were given, in the same shape and float64.

        TorchRL stores `(p + eps) ** alpha`; this inverts it. It is 0 where there is no row. With
        `alpha = 0` the priorities are lost, and the result is NaN.
        """
        if self.alpha == 0:
            return torch.full(index.shape, torch.nan, dtype=torch.float64, device=index.device)
        powers = _compat.priority_powers(self, index).double()
        return (powers ** (1 / self.alpha) - _compat.priority_eps(self)).clamp_min(0)

    @torch.no_grad()
    def update_priority(
        self,
        index: int | Tensor,
        priority: float | Tensor,
        *,
        storage: Storage | None = None,
    ) -> None:
        """Sets the priorities of these positions; the last value counts for repeated positions."""
        self._check_capacity(storage)
        _compat.follow_device(self, storage)
        index, priority = self._fetch(torch.as_tensor(index), torch.as_tensor(priority))
        if index.ndim < 2 and index.numel() and int(index.max()) >= self.max_size:
            raise IndexError(
                f"Position {int(index.max())} was given a priority, "
                f"but the sampler has positions 0 to {self.max_size - 1}."
            )
        super().update_priority(index, self._as_priority(priority), storage=storage)

    def _fetch(self, *tensors: Tensor) -> list[Tensor]:
        """Moves positions and one number for each to the device of the trees, in one copy.

        Each copy to the host waits for the rows' device. float64 holds all of them exactly.
        """
        first = tensors[0]
        alike = all(x.shape == first.shape and x.device == first.device for x in tensors)
        if first.device == self.device or not alike or any(x.is_complex() for x in tensors):
            return [x.to(self.device) for x in tensors]
        copied = torch.stack([x.detach().double() for x in tensors]).to(self.device)
        return [x.to(like.dtype) for x, like in zip(copied, tensors, strict=True)]

    def _as_priority(self, priority: float | Tensor) -> Tensor:
        """Returns priorities as float32; raises an error if they are not valid."""
        priority = torch.as_tensor(priority).detach().to(self.device)
        if priority.is_complex():
            raise TypeError(
                f"A priority is a real number, but {priority.dtype} was given; give floats."
            )
        priority = priority.to(self.dtype)
        # The sum of their powers over all rows must be finite, too.
        limit = (_FLOAT32.max / self.max_size) ** (1 / max(self.alpha, 1.0))
        good = (priority >= 0) & (priority <= limit)
        if not good.all():
            raise ValueError(
                f"A priority is a number from 0 to {limit:.3g}, but {float(priority[~good][0])} "
                "was given; use the absolute TD error, and make sure that it is finite."
            )
        return priority

    def _check_capacity(self, storage: Storage | None) -> None:
        if storage is not None and storage.max_size > self.max_size:
            raise ValueError(
                f"The storage has room for {storage.max_size} rows, but the sampler has "
                f"max_capacity={self.max_size}; make it at least {storage.max_size}."
            )

    def _maybe_init_from_storage(self, storage: Storage | None) -> None:
        _compat.follow_device(self, storage)

    def _rank(self, storage: Storage) -> None:
        """Gives rows that were written without notice the priority of new rows."""
        self._check_capacity(storage)
        _compat.follow_device(self, storage)
        length = len(storage)
        if length > self._ranked:
            position = torch.arange(self._ranked, length)
            without = position[_compat.priority_powers(self, position) == 0]
            if len(without):
                self.update_priority(without, self.default_priority, storage=storage)
        self._ranked = length

    def _empty(self) -> None:
        super()._empty()
        self._ranked = 0

    def state_dict(self) -> dict[str, Any]:
        """Returns priorities `[capacity]` as stored, `(p + eps) ** alpha`, and the parameters."""
        return {
            "powers": _compat.priority_powers(self, torch.arange(self.max_size)),
            "largest": torch.as_tensor(self.default_priority).cpu().clone(),
            "alpha": float(self.alpha),
            "beta": float(self.beta),
            "eps": _compat.priority_eps(self),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores a state that `state_dict` returned, also of a sampler with fewer rows.

        An empty state changes nothing.
        """
        if not state_dict:
            return
        powers = state_dict["powers"]
        if len(powers) > self.max_size:
            raise ValueError(
                f"The state holds priorities for {len(powers)} rows, but the sampler has "
                f"max_capacity={self.max_size}; make it at least {len(powers)}."
            )
        self._empty()
        self.alpha, self.beta = state_dict["alpha"], state_dict["beta"]
        _compat.set_priority_eps(self, state_dict["eps"])
        _compat.set_priority_powers(self, powers, state_dict["largest"])


class PrioritizedNeighborPairSampler(NeighborQueries, CheckedPrioritizedSampler):
    """Pairs each anchor, drawn by priority, with one of its k nearest neighbors.

    Anchors are drawn as in `CheckedPrioritizedSampler`, partners as in `NeighborPairSampler`. Both
    rows of a pair have an importance weight: `"priority_weight"` is `[B, 2]`. Use it in a
    `PairPrioritizedReplayBuffer`, which mixes these weights like the pair, and updates the
    priorities of both rows. The other arguments are those of `NeighborPairSampler`.

    Args:
        max_capacity: Number of rows that the storage can hold.
        k: Number of neighbors to choose from.

    Keyword Args:
        alpha: Exponent of the priorities: 0 draws anchors uniformly, 1 in proportion to them.
        beta: Exponent of the importance weights: 0 means no correction, 1 full correction.
        eps: Constant that is added to each priority, so that every row can be drawn.

    Examples:
        >>> from nmer_torchrl import PrioritizedNeighborPairSampler
        >>> PrioritizedNeighborPairSampler(1_000, k=10)
        PrioritizedNeighborPairSampler(k=10, alpha=0.6, beta=0.4, keys=('observation', 'action'))
    """

    def __init__(
        self,
        max_capacity: int,
        k: int = 10,
        *,
        alpha: float = 0.6,
        beta: float = 0.4,
        eps: float = 1e-6,
        search: SearchOption = "auto",
        keys: Sequence[NestedKey] = POINT_KEYS,
        value_keys: Sequence[NestedKey] = VALUE_KEYS,
        metric: Metric | None = None,
        max_distance: float | QuantileCap | None = None,
    ) -> None:
        super().__init__(max_capacity, alpha, beta, eps)
        self.unit = NeighborPairs(
            k,
            search=search,
            keys=keys,
            value_keys=value_keys,
            metric=metric,
            max_distance=max_distance,
        )
        self._guard = Guard()

    def sample(self, storage: Storage, batch_size: int) -> tuple[Tensor, dict[str, Any]]:
        """Draws positions `[B, 2]` of anchors and partners, with importance weights `[B, 2]`."""
        self._guard.check(self, storage, check_folded, _check_updates)
        with self.unit.lock:
            self.unit.synchronize(storage)
            anchor, info = super().sample(storage, batch_size)
            device = self.unit.rows.device
            anchor, weight = (x.to(device) for x in (anchor, info["priority_weight"]))
            index = self.unit.join(anchor, _compat.generator(self))
            powers = _compat.priority_powers(self, index)
            # Weights are proportional to `powers ** -beta`; both use the anchor's normalization.
            other = weight * (powers[:, 0] / powers[:, 1]) ** self.beta
        return index, {"priority_weight": torch.stack([weight, other], -1)}

    def update_pairs(
        self, index: Tensor, weight: Tensor, priority: Tensor, *, storage: Storage
    ) -> None:
        """Updates the priorities of both rows of each pair from the error of their mix.

        `PairPrioritizedReplayBuffer.update_tensordict_priority` documents the update. With
        `alpha = 0` old priorities are not stored, and the new error replaces them. Positions whose
        row no longer exists are skipped.

        Args:
            index: Positions of anchors and partners, `[B, 2]`.
            weight: The weights `w` of the anchors, `[B]`.
            priority: Errors of the mixed rows, `[B]`.

        Keyword Args:
            storage: The storage of the rows.
        """
        anchor, partner, weight, priority = self._fetch(*index.unbind(-1), weight, priority)
        index = torch.stack([anchor, partner], -1)
        if not ((weight >= 0) & (weight <= 1)).all():
            raise ValueError(
                "'mixup_weight' has values outside of 0 to 1; pass the weights that `sample()` "
                "returned."
            )
        if index.numel() and not 0 <= int(index.min()) <= int(index.max()) < self.max_size:
            raise IndexError(
                f"Positions {int(index.min())} to {int(index.max())} were given priorities, "
                f"but the sampler has positions 0 to {self.max_size - 1}."
            )
        new = self._as_priority(priority).double()
        with self.unit.lock:
            self._rank(storage)
            alone = (weight == 1) | (index[:, 0] == index[:, 1])
            weight = torch.where(alone, 1.0, weight.double())
            old = self.priorities(index)
            old = torch.where(old.isnan(), new.unsqueeze(-1), old)
            proposed = pair_priorities(new, old, weight)
            there = index < len(storage)
            there[:, 1] &= ~alone
            position, mean = mean_by_position(index[there], proposed[there])
            if len(position):
                self.update_priority(position, mean, storage=storage)

    def update_priority(
        self, index: int | Tensor, priority: float | Tensor, *, storage: Storage | None = None
    ) -> None:
        """Sets the priorities of single positions; use `update_pairs` for pairs."""
        index = torch.as_tensor(index)
        if index.ndim > 1:
            raise ValueError(
                f"Priorities are set for single positions, but `index` has shape "
                f"{tuple(index.shape)}; give a vector of positions, or pass a batch of pairs to "
                "`update_tensordict_priority` of a PairPrioritizedReplayBuffer."
            )
        with self.unit.lock:
            super().update_priority(index, priority, storage=storage)

    def mark_update(self, index: int | Tensor, *, storage: Storage | None = None) -> None:
        """Records that the buffer has written these positions, and gives them the top priority."""
        with self.unit.lock:
            self.unit.mark_update(index, storage=storage)
            super().mark_update(index, storage=storage)

    def _empty(self) -> None:
        with self.unit.lock:
            self.unit.clear()
            super()._empty()

    def state_dict(self) -> dict[str, Any]:
        """Returns the priorities and the state of the neighbor search."""
        with self.unit.lock:
            return {**self.unit.state_dict(), "priorities": super().state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the priorities and the search; the rest is read from the storage."""
        with self.unit.lock:
            super().load_state_dict(state_dict.get("priorities", {}))
            self.unit.load_state_dict(state_dict)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(k={self.k}, alpha={self.alpha}, beta={self.beta}, "
            f"keys={self.unit.rows.keys})"
        )


def _check_updates(sampler: PrioritizedNeighborPairSampler, buffer: ReplayBuffer) -> None:
    """Raises an error if the buffer would not update the priorities of both rows of a pair."""
    owner = _compat.member_buffer(buffer, sampler)
    if not getattr(owner, "updates_pairs", False):
        raise TypeError(
            f"{type(sampler).__name__} keeps priorities for both rows of a pair, but a "
            f"{type(owner).__name__} does not update them; use a PairPrioritizedReplayBuffer of "
            'nmer_torchrl.buffers, or make_replay_buffer("per_nmer", ...).'
        )
