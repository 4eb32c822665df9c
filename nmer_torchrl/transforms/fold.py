"""Base class of the transforms that fold an anchor and its partners to one row."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor
from torchrl.envs.transforms import Transform

from nmer_torchrl.composition import check_drawn, check_paired
from nmer_torchrl.functional import all_finite, mix
from nmer_torchrl.generators import generator_state, load_generator_state
from nmer_torchrl.keys import POINT_KEYS, TERMINATED_KEY, VALUE_KEYS, as_keys, get_entry
from nmer_torchrl.transforms.entries import (
    as_anchor_keys,
    check_discrete,
    check_single_rows,
    warn_unmixed,
)
from nmer_torchrl.transforms.gates import Gate, Same, as_gates
from nmer_torchrl.transforms.n_step import check_n_step, forget_steps
from nmer_torchrl.transforms.rows import anchors, choose_rows, kept_anchors, restore_rows
from nmer_torchrl.transforms.schema import RowSchema


class Fold(Transform, ABC):
    """Folds an anchor and its partners, `[*B, 1 + m]`, to one row, `[*B]`.

    A subclass implements `fold`. It calls `mix_pairs` with the weights of pairs, or `mix_groups`
    with the mixed entries of larger groups; set `width = None` to accept those. Both leave the
    anchor unchanged if a row is terminal or a gate rejects it. Entries that are not mixed are the
    anchor's. Rows are checked before they are stored.

    Keyword Args:
        generator: Source of all randomness; `None` uses torch's global one.
        mix_keys: Entries to mix.
        terminated_key: Entry that marks a terminal row; such rows are not mixed. `None` turns this
            rule off.
        gates: Further rules that decide which anchors are mixed.
        anchor_keys: Entries that are not mixed on purpose, so that no warning names them.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> class NearAnchor(Fold):
        ...     def fold(self, rows):
        ...         weight = 0.9 + 0.1 * torch.rand(rows.shape[:-1], generator=self.generator)
        ...         return self.mix_pairs(rows, weight)
        >>> x, end = torch.tensor([[[0.0], [1.0]]]), torch.zeros(1, 2, dtype=torch.bool)
        >>> fold = NearAnchor(mix_keys=["x"], terminated_key="end")
        >>> batch = fold(TensorDict(x=x, end=end, batch_size=[1, 2]))
        >>> batch.batch_size, bool(batch["x"] <= 0.1)
        (torch.Size([1]), True)
    """

    folds = True
    width: int | None = 2  # number of rows that are folded to one; None accepts any number
    argument = "mix_keys"  # name of the argument that lists the entries to mix, for errors

    def __init__(
        self,
        *,
        generator: torch.Generator | None = None,
        mix_keys: Sequence[NestedKey] = (*POINT_KEYS, *VALUE_KEYS),
        terminated_key: NestedKey | None = TERMINATED_KEY,
        gates: Sequence[Gate] = (),
        anchor_keys: Sequence[NestedKey] = (),
    ) -> None:
        super().__init__(in_keys=[], out_keys=[])
        self.schema = RowSchema(mix_keys, self.argument)
        self.generator = generator
        self.terminated_key = (
            None if terminated_key is None else as_keys([terminated_key], "terminated_key")[0]
        )
        self.gates = as_gates(gates)
        self.anchor_keys = as_anchor_keys(anchor_keys, self.mix_keys)
        self._lock = threading.RLock()  # gates have state, which prefetching threads share
        self._drawn = False  # whether the first batch was checked to hold anchors with partners
        self._warned = False  # whether the entries were checked for some that should be mixed, too

    @abstractmethod
    def fold(self, rows: TensorDictBase) -> TensorDictBase:
        """Folds anchors and their partners `[*B, 1 + m]` to one row each, `[*B]`."""

    @property
    def mix_keys(self) -> tuple[NestedKey, ...]:
        """Returns the entries to mix."""
        return self.schema.keys

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Folds `[*B, 1 + m]` to `[*B]`; returns rows that were not drawn as pairs unchanged."""
        takes = "neighborhoods [B, 1 + m]" if self.width is None else "pairs [B, 2]"
        if tensordict.ndim < 2 or self.width not in (None, tensordict.shape[-1]):
            check_drawn(self, tensordict, takes)
            return tensordict
        if not self._drawn:
            self._drawn = check_paired(self, tensordict, takes)
        if not self.schema.looked:  # the rows seen so far did not show what they hold
            self.schema.looked = self.look(tensordict)
        return self.fold(tensordict)

    def kept(self, rows: TensorDictBase) -> Tensor:
        """Returns booleans `[*B]`: which anchors of rows `[*B, 1 + m]` are not mixed.

        Gates may draw random numbers. Draw weights first, so that gates do not change them.
        """
        kept = kept_anchors(rows, self.terminated_key, rows.ndim - 1)
        if self.gates:
            with self._lock:
                for gate in self.gates:
                    mixed = gate(rows, self.generator)
                    if mixed.shape != kept.shape and mixed.shape not in ((), (1,)):
                        raise ValueError(
                            f"The gate {gate!r} returned booleans of shape {tuple(mixed.shape)} "
                            f"for {tuple(kept.shape)} anchors; return one for each anchor."
                        )
                    kept = kept | ~mixed
        return kept

    def mix_pairs(self, rows: TensorDictBase, weight: Tensor) -> TensorDictBase:
        """Folds pairs `[*B, 2]` by `w * anchor + (1 - w) * partner`.

        The weights `[*B]` are written to `"mixup_weight"`, `[*B, 1]`. The weight is 1 where the
        anchor is not mixed or the mix is not finite.
        """
        weight = weight.masked_fill_(self.kept(rows), 1.0).unsqueeze(-1)
        mixed, finite = self.mix_entries(rows, weight)
        if finite is not None:
            weight = torch.where(finite.unsqueeze(-1), weight, 1.0)
        return anchors(rows, rows.ndim - 1, mixed).set("mixup_weight", weight)

    def mix_entries(
        self, rows: TensorDictBase, weight: Tensor
    ) -> tuple[dict[NestedKey, Tensor], Tensor | None]:
        """Mixes the entries of pairs `[*B, 2]` with weights `[*B, 1]`.

        Returns the mixed entries and a mask `[*B]` of the mixed rows, or None for the mask if all
        are mixed. Rows whose mix is not finite get the anchor's entries.
        """
        dims, entries = rows.ndim - 1, self.schema.entries(rows)
        pairs = {key: entry.unbind(dims) for key, entry in entries.items()}
        mixed = {key: mix(anchor, partner, weight) for key, (anchor, partner) in pairs.items()}
        finite = restore_rows(mixed, {key: anchor for key, (anchor, _) in pairs.items()}, dims)
        return mixed, finite

    def mix_groups(
        self, rows: TensorDictBase, mixed: dict[NestedKey, Tensor], weight: Tensor, usable: Tensor
    ) -> TensorDictBase:
        """Folds groups `[*B, 1 + m]` to the given mix, or to the anchor.

        The mix is used where it is usable and finite and the anchor may be mixed. The weights
        `[*B, 1 + m]`, the anchor's first, are written to `"mixup_weight"`. Where the mix is not
        used, the anchor's weight is 1 and the others are 0.
        """
        dims = rows.ndim - 1
        usable = usable & ~self.kept(rows)
        for entry in mixed.values():
            usable = usable & all_finite(entry, dims)
        entries = self.schema.entries(rows)
        choose_rows(usable, mixed, {key: entry.select(dims, 0) for key, entry in entries.items()})
        alone = torch.zeros_like(weight)
        alone[..., 0] = 1.0
        weight = torch.where(usable.unsqueeze(-1), weight, alone)
        return anchors(rows, dims, mixed).set("mixup_weight", weight)

    def look(self, rows: TensorDictBase) -> bool:
        """Checks the entries of rows; returns whether the check was conclusive."""
        agreed = {key for gate in self.gates if isinstance(gate, Same) for key in gate.keys}
        kept = agreed | set(self.anchor_keys)
        told = check_discrete(rows, kept)
        if not self._warned:
            self._warned = True
            warn_unmixed(self, rows, self.mix_keys, kept, outcomes=True)
        return told

    def _inv_call(self, tensordict: TensorDictBase | None) -> TensorDictBase | None:
        """Checks rows before they are stored; `None` if an n-step transform waits for more."""
        if self.terminated_key is not None:
            check_n_step(self, self.terminated_key, tensordict)
        if tensordict is not None:
            check_single_rows(tensordict)
            if self.terminated_key is not None:
                get_entry(tensordict, self.terminated_key)
            self.schema.check(self, tensordict, self.look)
        return tensordict

    def get_extra_state(self) -> dict[str, Any]:
        """Returns the layout of rows and the state of the generator and the gates."""
        gates = {
            str(number): gate.state_dict()
            for number, gate in enumerate(self.gates)
            if hasattr(gate, "state_dict")
        }
        state = {**self.schema.state_dict(), **generator_state(self.generator)}
        return {**state, "gates": gates} if gates else state

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Restores a state that `get_extra_state` returned."""
        self.schema.load_state_dict(state)
        forget_steps(self)
        load_generator_state(self.generator, state)
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
