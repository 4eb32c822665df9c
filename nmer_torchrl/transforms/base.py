"""What all transforms share."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from torch import Tensor
from torchrl.envs.transforms import Transform

from nmer_torchrl import _compat
from nmer_torchrl.functional import all_finite, any_feature, mix
from nmer_torchrl.keys import as_keys, get_continuous, get_entry
from nmer_torchrl.transforms.gates import Gate
from nmer_torchrl.transforms.n_step import check_n_step

# TorchRL's MultiStepTransform writes these: targets that look a different number of steps ahead, or
# end at a terminal state, are not mixed.
_STEPS_KEY = "steps_to_next_obs"
_NONTERMINAL_KEY = "nonterminal"
_LAYOUT = ("_shapes", "_dtypes", "_needed", "_dims")  # of rows; never changed in place


class RowCheck(Transform):
    """Refuses rows that do not fit those stored before, before anything of them is stored.

    TorchRL moves its cursor and its length before it writes, so that a write which fails on the
    way, since an entry has another shape or dtype, leaves rows behind that no one wrote; an entry
    that is missing keeps what stood at its position, and one of width 1 is repeated. The first rows
    tell which entries there are; later ones may have more. Batches pass unchanged.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
        >>> buffer = TensorDictReplayBuffer(
        ...     storage=LazyTensorStorage(10), transform=RowCheck(), batch_size=4
        ... )
        >>> _ = buffer.extend(TensorDict(x=torch.zeros(3, 2), batch_size=[3]))
        >>> buffer.extend(TensorDict(x=torch.zeros(3, 1), batch_size=[3]))  # doctest: +ELLIPSIS
        Traceback (most recent call last):
            ...
        ValueError: The entry 'x' has shape (1,) in each row, but the rows stored before have ...
    """

    def __init__(self) -> None:
        super().__init__(in_keys=[], out_keys=[])
        self._shapes: dict[NestedKey, torch.Size] = {}  # of entries of the rows seen so far
        self._dtypes: dict[NestedKey, torch.dtype] = {}
        self._needed: list[NestedKey] = []  # entries of the first rows
        self._dims = 0  # of the batch that they came in, 0 if there was none
        self._last: tuple[dict, dict] | None = None  # shapes and dtypes of rows let through before

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Returns the batch as it is."""
        return tensordict

    def _inv_call(self, tensordict: TensorDictBase | None) -> TensorDictBase | None:
        """Checks what is about to be stored; `None` where an n-step transform waits for more."""
        if tensordict is None:
            return None
        dims = max(tensordict.ndim, 1)
        if 0 < self._dims < dims:
            raise ValueError(
                f"The rows come in a batch of shape {tuple(tensordict.shape)}, but those before in "
                f"one of {self._dims} dimension(s); extend the buffer with `data.reshape(-1)`."
            )
        entries = {k: v for k, v in tensordict.items(True, True) if isinstance(v, Tensor)}
        shapes = {key: entry.shape[tensordict.ndim :] for key, entry in entries.items()}
        dtypes = {key: entry.dtype for key, entry in entries.items()}
        if (shapes, dtypes) == self._last:
            return tensordict
        for key in shapes:
            if shapes[key] != self._shapes.get(key, shapes[key]):
                raise ValueError(
                    f"The entry {key!r} has shape {tuple(shapes[key])} in each row, but the rows "
                    f"stored before have {tuple(self._shapes[key])}; use another buffer for these "
                    "rows."
                )
        for key in dtypes:
            if dtypes[key] != self._dtypes.get(key, dtypes[key]):
                raise ValueError(
                    f"The entry {key!r} is {dtypes[key]}, but in the rows stored before it is "
                    f"{self._dtypes[key]}; convert it first."
                )
        for key in self._needed:
            get_entry(tensordict, key)
        # An index is what a buffer wrote into rows that were stored or drawn before.
        self._needed = self._needed or [key for key in entries if key != "index"]
        self._shapes, self._dtypes = self._shapes | shapes, self._dtypes | dtypes
        self._dims = self._dims or dims
        self._last = shapes, dtypes
        return tensordict

    def get_extra_state(self) -> dict[str, Any]:
        """What rows look like, so that a restored buffer refuses the same."""
        return {name: getattr(self, name) for name in _LAYOUT}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Goes on from there."""
        for name in _LAYOUT:
            setattr(self, name, state.get(name, type(getattr(self, name))()))
        self._last = None


class Augmentation(RowCheck):
    """A transform that changes some continuous entries of the rows drawn, at random.

    Everything random comes from its generator, whose state is part of its own. On `extend` it
    checks, before anything is stored, that the entries it changes are there and continuous, and
    that all entries are like those before.

    Args:
        keys: The entries.
        argument: What the user knows them as.
        generator: Source of all randomness; `None` uses torch's global one.
    """

    def __init__(
        self, keys: Sequence[NestedKey], argument: str, generator: torch.Generator | None
    ) -> None:
        super().__init__()
        self._changed_keys = as_keys(keys, argument)
        if not self._changed_keys:
            raise ValueError(f"`{argument}` is empty; name at least one entry.")
        self._argument = argument
        self.generator = generator

    def _entries(self, batch: TensorDictBase) -> dict[NestedKey, Tensor]:
        """The entries that are changed, out of a batch."""
        entries = {key: get_continuous(batch, key, self._argument) for key in self._changed_keys}
        if not self._shapes:  # the storage was filled before
            self._shapes = {key: entry.shape[batch.ndim :] for key, entry in entries.items()}
        return entries

    def _inv_call(self, tensordict: TensorDictBase | None) -> TensorDictBase | None:
        if tensordict is not None:
            for key in self._changed_keys:
                get_continuous(tensordict, key, self._argument)
        return super()._inv_call(tensordict)

    def get_extra_state(self) -> dict[str, Any]:
        """The state of the generator, so that a restored buffer draws the same, and the rest."""
        state = super().get_extra_state()
        if self.generator is not None:
            state["generator"] = self.generator.get_state()
        return state

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Restores the generator, if there is one, and the rest."""
        super().set_extra_state(state)
        if self.generator is not None and "generator" in state:
            self.generator.set_state(state["generator"])


class Fold(Augmentation):
    """Folds an anchor and its partners, `[*B, 1 + m]`, to one row, `[*B]`.

    Terminal ones, and those that a gate holds back, leave the anchor as it is.
    """

    def __init__(
        self,
        mix_keys: Sequence[NestedKey],
        terminated_key: NestedKey,
        generator: torch.Generator | None = None,
        argument: str = "mix_keys",
        gates: Sequence[Gate] = (),
    ) -> None:
        super().__init__(mix_keys, argument, generator)
        self.terminated_key = as_keys([terminated_key], "terminated_key")[0]
        self.gates = tuple(gates)
        for gate in self.gates:
            if not callable(gate):
                raise TypeError(
                    f"`gates` holds {gate!r}, which is not callable; give gates such as "
                    "Fraction(0.5)."
                )

    def _kept(self, tensordict: TensorDictBase, dims: int) -> Tensor:
        """`[*B, 1 + m]` to boolean `[*B]`: whether the rules keep the anchor as it is."""
        return kept_anchors(tensordict, self.terminated_key, dims)

    def _held_back(self, tensordict: TensorDictBase, kept: Tensor) -> Tensor:
        """The same, and where a gate does."""
        for gate in self.gates:
            kept = kept | ~gate(tensordict, self.generator)
        return kept

    def _inv_call(self, tensordict: TensorDictBase | None) -> TensorDictBase | None:
        check_n_step(self, self.terminated_key)
        if tensordict is not None:
            check_single_rows(tensordict)
            get_entry(tensordict, self.terminated_key)
        return super()._inv_call(tensordict)

    def get_extra_state(self) -> dict[str, Any]:
        """The state of the generator, and of gates that have one."""
        gates = {
            str(number): gate.state_dict()
            for number, gate in enumerate(self.gates)
            if hasattr(gate, "state_dict")
        }
        return {**super().get_extra_state(), **({"gates": gates} if gates else {})}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Goes on from there."""
        super().set_extra_state(state)
        for number, saved in state.get("gates", {}).items():
            gate = self.gates[int(number)] if int(number) < len(self.gates) else None
            load = getattr(gate, "load_state_dict", None)
            if load is not None:
                load(saved)


class PairFold(Fold):
    """Folds pairs `[*B, 2]` to `[*B]` by `w * anchor + (1 - w) * partner`; see `PairMixup`.

    A subclass says what the weights are.
    """

    @abstractmethod
    def _weights(self, shape: torch.Size, device: torch.device) -> Tensor:
        """Weights of the given shape, float32."""

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """`[*B, 2]` to `[*B]`; anything else is returned as it is."""
        if not holds_pairs(tensordict):
            return tensordict
        dims = tensordict.ndim - 1
        kept = self._kept(tensordict, dims)
        weight = self._weights(tensordict.shape[:-1], kept.device)
        kept = self._held_back(tensordict, kept)
        weight = weight.masked_fill_(kept, 1.0).unsqueeze(-1)
        pairs = {key: entry.unbind(dims) for key, entry in self._entries(tensordict).items()}
        mixed = self._mix(pairs, weight)
        finite = restore_rows(mixed, {key: anchor for key, (anchor, _) in pairs.items()}, dims)
        if finite is not None:
            weight = torch.where(finite.unsqueeze(-1), weight, 1.0)
        return anchors(tensordict, dims, mixed).set("mixup_weight", weight)

    def _mix(
        self, pairs: dict[NestedKey, tuple[Tensor, ...]], weight: Tensor
    ) -> dict[NestedKey, Tensor]:
        """Anchors and partners `[*B, ...]` to their mix by weights `[*B, 1]`."""
        return {key: mix(anchor, partner, weight) for key, (anchor, partner) in pairs.items()}


def check_alpha(alpha: float) -> float:
    """Raises if this is no parameter of a symmetric Beta distribution."""
    if not (math.isfinite(alpha) and alpha > 0):
        raise ValueError(
            f"alpha={alpha!r} is no parameter of a Beta distribution; it must be finite and above "
            "0 (the default is 0.75)."
        )
    return float(alpha)


def check_single_rows(rows: TensorDictBase) -> None:
    """Raises if what is about to be stored is not a row or a vector of rows."""
    if rows.ndim > 1:
        raise ValueError(
            f"The rows come in a batch of shape {tuple(rows.shape)}, but pairs are drawn "
            "from single rows; extend the buffer with `data.reshape(-1)`."
        )


def holds_pairs(batch: TensorDictBase) -> bool:
    """Whether a batch is `[*B, 2]`, rather than what `buffer[:]` reads."""
    return batch.ndim >= 2 and batch.shape[-1] == 2


def is_terminal(batch: TensorDictBase, terminated_key: NestedKey, dims: int) -> Tensor:
    """Boolean `[*B]` of that many dimensions: whether any beyond them is a terminal transition."""
    ended = any_feature(get_entry(batch, terminated_key).bool(), dims)
    nonterminal = batch.get(_NONTERMINAL_KEY, None)
    return ended if nonterminal is None else ended | any_feature(~nonterminal.bool(), dims)


def kept_anchors(rows: TensorDictBase, terminated_key: NestedKey, dims: int) -> Tensor:
    """`[*B, 1 + m]` rows to boolean `[*B]`: whether the anchor is kept as it is."""
    kept = is_terminal(rows, terminated_key, dims)
    steps = rows.get(_STEPS_KEY, None)
    if steps is not None:
        kept = kept | any_feature(steps != steps.narrow(dims, 0, 1), dims)
    return kept


def restore_rows(
    changed: dict[NestedKey, Tensor], original: dict[NestedKey, Tensor], dims: int
) -> Tensor | None:
    """Puts back all entries of the rows `[*B]` of which one has come out non-finite.

    Returns which rows stay changed, or None if all do.
    """
    if _sums_finite(list(changed.values())):
        return None
    finite = torch.stack([all_finite(entry, dims) for entry in changed.values()]).all(0)
    choose_rows(finite, changed, original)
    return finite


def choose_rows(
    flags: Tensor, changed: dict[NestedKey, Tensor], original: dict[NestedKey, Tensor]
) -> None:
    """Puts back the rows that are not flagged; flags are `[*B]`, entries `[*B, ...]`."""
    for key, entry in original.items():
        keep = flags[(...,) + (None,) * (entry.ndim - flags.ndim)]
        changed[key] = torch.where(keep, changed[key], entry)


def _sums_finite(entries: list[Tensor]) -> bool:
    """A quick look by sums; they may overflow by themselves, so "no" asks for a closer look."""
    return math.isfinite(torch.stack([entry.sum() for entry in entries]).sum().item())


def anchors(
    rows: TensorDictBase, dim: int, replaced: dict[NestedKey, Tensor], prefix: tuple[str, ...] = ()
) -> TensorDictBase:
    """The first along `dim`, with some entries replaced, in one go."""
    entries: dict[str, Any] = {}
    for name, value in rows.items():
        entry = replaced.get((*prefix, name) if prefix else name)
        if entry is not None:
            entries[name] = entry
        elif isinstance(value, Tensor):
            entries[name] = value.select(dim, 0)
        elif type(value) is TensorDict:
            entries[name] = anchors(value, dim, replaced, (*prefix, name))
        else:
            entries[name] = first = value[(slice(None),) * dim + (0,)]
            path = (*prefix, name)
            for key, entry in replaced.items():
                if isinstance(key, tuple) and key[: len(path)] == path:
                    first.set(key[len(path) :], entry)
    shape = rows.batch_size
    return _compat.make_tensordict(entries, shape[:dim] + shape[dim + 1 :], rows.device)
