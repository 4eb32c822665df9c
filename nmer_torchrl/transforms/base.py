"""What all transforms share."""

from __future__ import annotations

import math
import threading
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from torch import Tensor
from torchrl.data.replay_buffers import ReplayBufferEnsemble, TensorStorage
from torchrl.envs.transforms import Transform

from nmer_torchrl import _compat
from nmer_torchrl.composition import check_drawn, check_measures, check_paired
from nmer_torchrl.functional import all_finite, any_feature, mix
from nmer_torchrl.generators import restore_generator
from nmer_torchrl.keys import as_keys, get_continuous, get_entry
from nmer_torchrl.transforms.entries import check_discrete, warn_unmixed
from nmer_torchrl.transforms.gates import Gate, Same, measure_of
from nmer_torchrl.transforms.n_step import (
    NONTERMINAL_KEY,
    STEPS_KEY,
    TimeOrder,
    check_n_step,
    check_time_order,
)

PAIRS = "pairs [B, 2]"  # what most folds take
_WRITTEN = ("index", "td_error")  # by a buffer or a loss into rows that were stored before
_LAYOUT = ("_shapes", "_dtypes", "_needed", "_dims")  # of rows; never changed in place


class RowCheck(Transform):
    """Refuses rows that do not fit the stored ones, before anything of them is stored.

    TorchRL moves its cursor and its length before it writes, so that a write which fails on the
    way, since an entry has another shape or dtype, leaves rows behind that no one wrote; an entry
    that is missing keeps what stood at its position, and one of width 1 is repeated. What a row
    looks like is read from the storage, or from the first rows where it is empty; later rows may
    have more entries. Batches pass unchanged.

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

    folds = False  # whether it makes one row of several

    def __init__(self) -> None:
        super().__init__(in_keys=[], out_keys=[])
        self._looked = False  # whether the first rows have been looked at
        self._paired = False  # whether the first batch was found to hold rows that belong together
        self._forget()

    def _forget(self) -> None:
        self._shapes: dict[NestedKey, torch.Size] = {}  # of entries of the rows seen so far
        self._dtypes: dict[NestedKey, torch.dtype] = {}
        self._needed: list[NestedKey] = []  # entries of the first rows
        self._dims = 0  # of the batch that they came in, 0 if there was none
        # Shapes and dtypes of rows let through before.
        self._last: tuple[dict[NestedKey, torch.Size], dict[NestedKey, torch.dtype]] | None = None
        self._revision: int | None = None  # of the storage, before the first rows were written
        self._order = TimeOrder()

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Returns the batch as it is."""
        return tensordict

    def _inv_call(self, tensordict: TensorDictBase | None) -> TensorDictBase | None:
        """Checks what is about to be stored; `None` where an n-step transform waits for more."""
        if tensordict is None:
            return None
        check_time_order(self, self._order, tensordict)
        entries = {k: v for k, v in tensordict.items(True, True) if isinstance(v, Tensor)}
        shapes = {key: entry.shape[tensordict.ndim :] for key, entry in entries.items()}
        dtypes = {key: entry.dtype for key, entry in entries.items()}
        dims = max(tensordict.ndim, 1)
        if (shapes, dtypes) == self._last and dims <= self._dims:
            return tensordict
        self._consult_storage()
        if 0 < self._dims < dims:
            raise ValueError(
                f"The rows come in a batch of shape {tuple(tensordict.shape)}, but those before in "
                f"one of {self._dims} dimension(s); extend the buffer with `data.reshape(-1)`."
            )
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
        _check_writer()
        if not self._looked:
            self._looked = self._look(tensordict)
        self._needed = self._needed or [key for key in entries if key not in _WRITTEN]
        self._shapes, self._dtypes = self._shapes | shapes, self._dtypes | dtypes
        self._dims = self._dims or dims
        self._last = shapes, dtypes
        return tensordict

    def _look(self, rows: TensorDictBase) -> bool:
        """Checks the first rows; a subclass says for what. Returns whether they are enough."""
        return True

    def _consult_storage(self) -> None:
        """Takes what a row looks like from the storage of the buffer that writes.

        What was learned from rows that were refused later on, and so never stored, is forgotten.
        """
        buffer = _compat.buffer_at_work("extend", "add", "__setitem__")
        if buffer is None or isinstance(buffer, ReplayBufferEnsemble):
            return
        storage = buffer.storage
        revision = _compat.revision(storage)
        if self._revision == revision:
            self._forget()
        self._revision = None if self._shapes else revision
        data = _compat.entries(storage) if isinstance(storage, TensorStorage) else None
        if not self._shapes and data is not None and len(storage) and _compat.writes_last(self):
            stored = {k: v for k, v in data.items(True, True) if isinstance(v, Tensor)}
            self._shapes = {key: entry.shape[data.ndim :] for key, entry in stored.items()}
            self._dtypes = {key: entry.dtype for key, entry in stored.items()}
            self._needed = [key for key in stored if key not in _WRITTEN]
            self._dims = data.ndim

    def get_extra_state(self) -> dict[str, Any]:
        """What rows look like, so that a restored buffer refuses the same."""
        return {name: getattr(self, name) for name in _LAYOUT}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Goes on from there."""
        self._forget()
        for name in _LAYOUT:
            setattr(self, name, state.get(name, getattr(self, name)))


def _check_writer() -> None:
    """Raises if the buffer that writes would count rows that were never written.

    A new writer starts at position 0 even if its storage already holds rows, and TorchRL then adds
    the new rows to the storage's length.
    """
    buffer = _compat.buffer_at_work("extend", "add")
    if buffer is not None and not _compat.writes_in_place(buffer):
        raise ValueError(
            f"The storage holds {len(buffer.storage)} rows, some of which this buffer has not "
            "written: its next row would go to another position than the one after them, and "
            "TorchRL would count rows that were never written. Write through one buffer only; to "
            "go on after stored rows, make it by make_replay_buffer(..., storage=storage) once "
            "they are there."
        )


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

    def _look_at_drawn(self, rows: TensorDictBase, takes: str) -> None:
        """Checks the first batch that is folded, and rows stored without passing this transform."""
        if not self._paired:
            self._paired = check_paired(self, rows, takes)
        if not self._looked:
            self._look(rows)
            self._looked = True

    def _entries(self, batch: TensorDictBase) -> dict[NestedKey, Tensor]:
        """The entries that are changed, out of a batch."""
        return {key: get_continuous(batch, key, self._argument) for key in self._changed_keys}

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
            restore_generator(self.generator, state["generator"])


class Fold(Augmentation):
    """Folds an anchor and its partners, `[*B, 1 + m]`, to one row, `[*B]`.

    Terminal ones, and those that a gate holds back, leave the anchor as it is.
    """

    folds = True

    def __init__(
        self,
        mix_keys: Sequence[NestedKey],
        terminated_key: NestedKey,
        generator: torch.Generator | None = None,
        argument: str = "mix_keys",
        gates: Sequence[Gate] = (),
        anchor_keys: Sequence[NestedKey] = (),
    ) -> None:
        super().__init__(mix_keys, argument, generator)
        self.anchor_keys = as_anchor_keys(anchor_keys, self._changed_keys)
        self.terminated_key = as_keys([terminated_key], "terminated_key")[0]
        if callable(gates):
            raise TypeError(
                f"gates={gates!r} is a single gate; give a list, as in gates=[{gates!r}]."
            )
        self.gates = tuple(gates)
        for gate in self.gates:
            if not callable(gate):
                raise TypeError(
                    f"`gates` holds {gate!r}, which is not callable; give gates such as "
                    "Fraction(0.5)."
                )
        self._lock = threading.RLock()  # gates count and learn, and prefetching threads share them

    def _kept(self, tensordict: TensorDictBase, dims: int) -> Tensor:
        """`[*B, 1 + m]` to boolean `[*B]`: whether the rules keep the anchor as it is."""
        return kept_anchors(tensordict, self.terminated_key, dims)

    def _held_back(self, tensordict: TensorDictBase, kept: Tensor) -> Tensor:
        """Also keeps the anchors that a gate holds back."""
        if not self.gates:
            return kept
        check_measures(self, {type(g).__name__: m for g in self.gates if (m := measure_of(g))})
        with self._lock:
            for gate in self.gates:
                kept = kept | ~gate(tensordict, self.generator)
        return kept

    def _inv_call(self, tensordict: TensorDictBase | None) -> TensorDictBase | None:
        check_n_step(self, self.terminated_key, tensordict)
        if tensordict is not None:
            check_single_rows(tensordict)
            get_entry(tensordict, self.terminated_key)
        return super()._inv_call(tensordict)

    def _look(self, rows: TensorDictBase) -> bool:
        if self._argument != "mix_keys":
            return True  # changes something else than transitions
        agreed = {key for gate in self.gates if isinstance(gate, Same) for key in gate.keys}
        kept = agreed | set(self.anchor_keys)
        told = check_discrete(rows, kept)
        warn_unmixed(self, rows, self._changed_keys, kept, outcomes=True)
        return told

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

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._lock = threading.RLock()


class PairFold(Fold):
    """Folds pairs `[*B, 2]` to `[*B]` by `w * anchor + (1 - w) * partner`; see `PairMixup`.

    A subclass says what the weights are.
    """

    @abstractmethod
    def _weights(self, shape: torch.Size, device: torch.device) -> Tensor:
        """Weights of the given shape, float32."""

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Folds `[*B, 2]` to `[*B]`; rows that were not drawn are returned as they are."""
        if not holds_pairs(tensordict):
            return pass_undrawn(self, tensordict, PAIRS)
        self._look_at_drawn(tensordict, PAIRS)
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


def as_anchor_keys(
    anchor_keys: Sequence[NestedKey], mixed: Sequence[NestedKey]
) -> tuple[NestedKey, ...]:
    """Returns the entries that stay the anchor's; raises if one of them is mixed."""
    keys = as_keys(anchor_keys, "anchor_keys")
    both = [key for key in keys if key in mixed]
    if both:
        names = ", ".join(map(repr, both))
        raise ValueError(
            f"`anchor_keys` names {names}, which is mixed; remove it from one of the two."
        )
    return keys


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


def pass_undrawn(fold: Transform, batch: TensorDictBase, takes: str) -> TensorDictBase:
    """Returns rows that were read by `buffer[:]` and the like; raises for a batch that was drawn.

    A fold that let a drawn batch pass would train on rows that nothing has mixed.
    """
    check_drawn(fold, batch, takes)
    return batch


def is_terminal(batch: TensorDictBase, terminated_key: NestedKey, dims: int) -> Tensor:
    """Boolean `[*B]` of that many dimensions: whether any beyond them is a terminal transition."""
    ended = any_feature(get_entry(batch, terminated_key).bool(), dims)
    nonterminal = batch.get(NONTERMINAL_KEY, None)
    return ended if nonterminal is None else ended | any_feature(~nonterminal.bool(), dims)


def kept_anchors(rows: TensorDictBase, terminated_key: NestedKey, dims: int) -> Tensor:
    """`[*B, 1 + m]` rows to boolean `[*B]`: whether the anchor is kept as it is."""
    kept = is_terminal(rows, terminated_key, dims)
    steps = rows.get(STEPS_KEY, None)
    if steps is not None:
        kept = kept | any_feature(steps != steps.narrow(dims, 0, 1), dims)
    return kept


def restore_rows(
    changed: dict[NestedKey, Tensor], original: dict[NestedKey, Tensor], dims: int
) -> Tensor | None:
    """Puts back all entries of the rows `[*B]` of which one has come out non-finite.

    Returns which rows stay changed, or None if all do. On the CPU a look at the sum tells in most
    cases; on a device, where to look is to wait, rows are always chosen.
    """
    entries = list(changed.values())
    if entries[0].device.type == "cpu":
        numbers = torch.cat([entry.reshape(-1) for entry in entries])
        # The sum may overflow by itself, so that "no" asks for a closer look.
        if math.isfinite(numbers.sum().item()):
            return None
    rows = torch.cat([entry.reshape(*entry.shape[:dims], -1) for entry in entries], -1)
    finite = all_finite(rows, dims)
    choose_rows(finite, changed, original)
    return finite


def choose_rows(
    flags: Tensor, changed: dict[NestedKey, Tensor], original: dict[NestedKey, Tensor]
) -> None:
    """Puts back the rows that are not flagged; flags are `[*B]`, entries `[*B, ...]`."""
    for key, entry in original.items():
        keep = flags[(...,) + (None,) * (entry.ndim - flags.ndim)]
        changed[key] = torch.where(keep, changed[key], entry)


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
