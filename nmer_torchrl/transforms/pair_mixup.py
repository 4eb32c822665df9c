"""The fold of NMER: convex combinations of pairs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from torch import Tensor
from torchrl.envs.transforms import Transform

from nmer_torchrl import _compat
from nmer_torchrl.functional import all_finite, any_feature, mix, sample_beta
from nmer_torchrl.keys import (
    POINT_KEYS,
    TERMINATED_KEY,
    VALUE_KEYS,
    as_keys,
    get_continuous,
    get_entry,
)
from nmer_torchrl.transforms.n_step import check_n_step

# TorchRL's MultiStepTransform writes these: targets that look a different number of steps ahead, or
# end at a terminal state, are not mixed.
_STEPS_KEY = "steps_to_next_obs"
_NONTERMINAL_KEY = "nonterminal"


class PairMixup(Transform):
    """Folds a `[B, 2]` batch of pairs to `[B]` by `w * anchor + (1 - w) * partner`.

    One `w ~ Beta(alpha, alpha)` is drawn for each pair. Where either of the two is terminal, or has
    a non-finite entry, the anchor is used as it is and `w` is 1. Entries that are not mixed are the
    anchor's. The `w` used is written to `"mixup_weight"`, `[B, 1]`. A batch without a dimension of
    pairs, such as that of `buffer[:]`, passes through unchanged.

    Put it into a replay buffer whose sampler draws pairs. On `extend` it checks, before anything is
    stored, that the entries it mixes are there, continuous, and as wide as those before.

    Args:
        alpha: Parameter of the Beta distribution: small values give weights near 0 and 1, one
            gives uniform weights, large values give weights near one half.

    Keyword Args:
        generator: Source of the weights; `None` uses torch's global one. May be set later through
            the attribute of that name.
        mix_keys: Entries to mix.
        terminated_key: The flag that keeps a pair unmixed. A time limit is not a terminal state, so
            this is not `done`.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> fold = PairMixup(0.75, mix_keys=["x"], terminated_key="end")
        >>> x = torch.tensor([[[0.0], [1.0]], [[5.0], [7.0]]])
        >>> end = torch.tensor([[[False], [False]], [[False], [True]]])
        >>> batch = fold(TensorDict(x=x, end=end, batch_size=[2, 2]))
        >>> batch.batch_size, bool(0 <= batch["x"][0] <= 1)
        (torch.Size([2]), True)
        >>> batch["x"][1].item(), batch["mixup_weight"][1].item()
        (5.0, 1.0)
    """

    def __init__(
        self,
        alpha: float = 0.75,
        *,
        generator: torch.Generator | None = None,
        mix_keys: Sequence[NestedKey] = (*POINT_KEYS, *VALUE_KEYS),
        terminated_key: NestedKey = TERMINATED_KEY,
    ) -> None:
        if not (math.isfinite(alpha) and alpha > 0):
            raise ValueError(
                f"alpha={alpha!r} is no parameter of a Beta distribution; it must be finite and "
                "above 0 (the default is 0.75)."
            )
        super().__init__(in_keys=[], out_keys=[])
        self.alpha = float(alpha)
        self.generator = generator
        self.mix_keys = as_keys(mix_keys, "mix_keys")
        if not self.mix_keys:
            raise ValueError("`mix_keys` is empty; name at least one entry to mix.")
        self.terminated_key = as_keys([terminated_key], "terminated_key")[0]
        self._widths: dict[NestedKey, torch.Size] = {}  # of the rows seen so far

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """`[*B, 2]` to `[*B]`; anything else is returned as it is."""
        if tensordict.ndim < 2 or tensordict.shape[-1] != 2:
            return tensordict
        batch = tensordict.shape[:-1]
        kept = self._kept(tensordict, len(batch))
        weight = sample_beta(self.alpha, batch, generator=self.generator, device=kept.device)
        weight = weight.masked_fill_(kept, 1.0).unsqueeze(-1)
        entries = {key: get_continuous(tensordict, key, "mix_keys") for key in self.mix_keys}
        if not self._widths:  # the storage was filled before
            self._widths = {key: entry.shape[tensordict.ndim :] for key, entry in entries.items()}
        pairs = {key: entry.unbind(len(batch)) for key, entry in entries.items()}
        mixed = {key: mix(anchor, partner, weight) for key, (anchor, partner) in pairs.items()}
        if not _sums_finite(list(mixed.values())):
            finite = torch.stack([all_finite(entry, len(batch)) for entry in mixed.values()]).all(0)
            weight = torch.where(finite.unsqueeze(-1), weight, 1.0)
            for key, (anchor, _) in pairs.items():
                keep = finite[(...,) + (None,) * (anchor.ndim - finite.ndim)]
                mixed[key] = torch.where(keep, mixed[key], anchor)
        return _first_of_pairs(tensordict, len(batch), mixed).set("mixup_weight", weight)

    def _kept(self, pairs: TensorDictBase, dims: int) -> Tensor:
        """`[*B, 2]` pairs to boolean `[*B]`: whether the anchor is kept as it is."""
        kept = any_feature(get_entry(pairs, self.terminated_key).bool(), dims)
        names = pairs.keys()
        if _NONTERMINAL_KEY in names:
            kept = kept | any_feature(~pairs.get(_NONTERMINAL_KEY).bool(), dims)
        if _STEPS_KEY in names:
            first, second = pairs.get(_STEPS_KEY).unbind(dims)
            kept = kept | any_feature(first != second, dims)
        return kept

    def _inv_call(self, tensordict: TensorDictBase | None) -> TensorDictBase | None:
        """Checks what is about to be stored."""
        check_n_step(self, self.terminated_key)
        if tensordict is None:  # an n-step transform waits for more rows
            return None
        if tensordict.ndim > 1:
            raise ValueError(
                f"The rows come in a batch of shape {tuple(tensordict.shape)}, but pairs are drawn "
                "from single rows; extend the buffer with `data.reshape(-1)`."
            )
        get_entry(tensordict, self.terminated_key)
        widths = {
            key: get_continuous(tensordict, key, "mix_keys").shape[tensordict.ndim :]
            for key in self.mix_keys
        }
        for key, stored in self._widths.items():
            if widths[key] != stored:
                raise ValueError(
                    f"The entry {key!r} has shape {tuple(widths[key])} in each row, but the rows "
                    f"stored before have {tuple(stored)}; use another buffer for these rows."
                )
        self._widths = widths
        return tensordict

    def get_extra_state(self) -> dict[str, Tensor]:
        """The state of the generator, so that a restored buffer draws the same weights."""
        return {} if self.generator is None else {"generator": self.generator.get_state()}

    def set_extra_state(self, state: dict[str, Tensor]) -> None:
        """Restores the generator, if there is one."""
        if self.generator is not None and "generator" in state:
            self.generator.set_state(state["generator"])

    def __repr__(self) -> str:
        return f"{type(self).__name__}(alpha={self.alpha})"


def _sums_finite(entries: list[Tensor]) -> bool:
    """A quick look by sums; they may overflow by themselves, so "no" asks for a closer look."""
    return math.isfinite(torch.stack([entry.sum() for entry in entries]).sum().item())


def _first_of_pairs(
    pairs: TensorDictBase, dim: int, replaced: dict[NestedKey, Tensor], prefix: tuple[str, ...] = ()
) -> TensorDictBase:
    """The first of two along `dim`, with some entries replaced, in one go."""
    entries: dict[str, Any] = {}
    for name, value in pairs.items():
        entry = replaced.get((*prefix, name) if prefix else name)
        if entry is not None:
            entries[name] = entry
        elif isinstance(value, Tensor):
            entries[name] = value.select(dim, 0)
        elif type(value) is TensorDict:
            entries[name] = _first_of_pairs(value, dim, replaced, (*prefix, name))
        else:
            entries[name] = first = value[(slice(None),) * dim + (0,)]
            path = (*prefix, name)
            for key, entry in replaced.items():
                if isinstance(key, tuple) and key[: len(path)] == path:
                    first.set(key[len(path) :], entry)
    shape = pairs.batch_size
    return _compat.make_tensordict(entries, shape[:dim] + shape[dim + 1 :], pairs.device)
