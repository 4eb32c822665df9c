"""Convex combinations of whole neighbourhoods."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from nmer_torchrl.functional import all_finite, combine, sample_dirichlet
from nmer_torchrl.keys import POINT_KEYS, TERMINATED_KEY, VALUE_KEYS
from nmer_torchrl.transforms.base import Fold, anchors, check_alpha, choose_rows, pass_undrawn
from nmer_torchrl.transforms.gates import Gate

_NEIGHBORHOODS = "neighborhoods [B, 1 + m]"


class NeighborhoodMixup(Fold):
    """Folds neighbourhoods `[*B, 1 + m]` to `[*B]` by weights over the anchor and m neighbours.

    The weights `w ~ Dirichlet(alpha, ..., alpha)` sum to one, and each mixed entry is
    `sum_i w_i * row_i`; with m = 1 that is `PairMixup`. They are written to `"mixup_weight"`,
    `[*B, 1 + m]`, the anchor's first. Where the anchor or a neighbour is terminal or has a
    non-finite entry, the anchor is used as it is, and its weight is 1. Entries that are not mixed
    are the anchor's. A batch without a dimension of neighbours passes through unchanged.

    It goes with `NeighborhoodSampler`.

    Args:
        alpha: Parameter of the Dirichlet distribution: small values give nearly all weight to one
            row, one gives any weights alike, large values give nearly the mean.

    Keyword Args:
        generator: Source of the weights; `None` uses torch's global one.
        mix_keys: Entries to mix.
        terminated_key: The flag that keeps a neighbourhood unmixed.
        gates: What else keeps neighbourhoods unmixed.
        anchor_keys: Observations that stay the anchor's without a warning.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> x, end = torch.randn(8, 4, 3), torch.zeros(8, 4, 1, dtype=torch.bool)
        >>> fold = NeighborhoodMixup(mix_keys=["x"], terminated_key="end")
        >>> batch = fold(TensorDict(x=x, end=end, batch_size=[8, 4]))
        >>> expected = (batch["mixup_weight"].unsqueeze(-1) * x).sum(1)
        >>> torch.allclose(batch["x"], expected, atol=1e-5)
        True
    """

    def __init__(
        self,
        alpha: float = 0.75,
        *,
        generator: torch.Generator | None = None,
        mix_keys: Sequence[NestedKey] = (*POINT_KEYS, *VALUE_KEYS),
        terminated_key: NestedKey = TERMINATED_KEY,
        gates: Sequence[Gate] = (),
        anchor_keys: Sequence[NestedKey] = (),
    ) -> None:
        super().__init__(mix_keys, terminated_key, generator, gates=gates, anchor_keys=anchor_keys)
        self.alpha = check_alpha(alpha)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Folds `[*B, 1 + m]` to `[*B]`; rows that were not drawn are returned as they are."""
        if tensordict.ndim < 2:
            return pass_undrawn(self, tensordict, _NEIGHBORHOODS)
        self._look_at_drawn(tensordict, _NEIGHBORHOODS)
        dims = tensordict.ndim - 1
        kept = self._kept(tensordict, dims)
        weight = sample_dirichlet(
            self.alpha, tensordict.shape, generator=self.generator, device=kept.device
        )
        kept = self._held_back(tensordict, kept)
        entries = self._entries(tensordict)
        mixed, usable = self._mix(tensordict, entries, weight)
        for entry in mixed.values():
            usable = usable & all_finite(entry, dims)
        usable = usable & ~kept
        choose_rows(usable, mixed, {key: entry.select(dims, 0) for key, entry in entries.items()})
        alone = torch.zeros_like(weight)
        alone[..., 0] = 1.0
        weight = torch.where(usable.unsqueeze(-1), weight, alone)
        return anchors(tensordict, dims, mixed).set("mixup_weight", weight)

    def _mix(
        self, rows: TensorDictBase, entries: dict[NestedKey, Tensor], weight: Tensor
    ) -> tuple[dict[NestedKey, Tensor], Tensor]:
        """Entries `[*B, 1 + m, ...]` to their mix, and which rows `[*B]` of it may be used."""
        mixed = {key: combine(entry, weight) for key, entry in entries.items()}
        return mixed, torch.ones(rows.shape[:-1], dtype=torch.bool, device=weight.device)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(alpha={self.alpha})"
