"""Mixes an anchor and all its neighbors by convex combination."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from tensordict import NestedKey, TensorDictBase

from nmer_torchrl.checks import POSITIVE
from nmer_torchrl.functional import combine, sample_dirichlet
from nmer_torchrl.keys import POINT_KEYS, TERMINATED_KEY, VALUE_KEYS
from nmer_torchrl.transforms.fold import Fold
from nmer_torchrl.transforms.gates import Gate
from nmer_torchrl.transforms.rows import device_of


@final
class NeighborhoodMixup(Fold):
    """Folds neighborhoods `[*B, 1 + m]` to `[*B]` by weights over the anchor and m neighbors.

    The weights `w ~ Dirichlet(alpha, ..., alpha)` sum to one, and each mixed entry is
    `sum_i w_i * row_i`. With m = 1 this is `PairMixup`. The weights are written to
    `"mixup_weight"`, `[*B, 1 + m]`, the anchor's first. If the anchor or a neighbor is terminal or
    has a non-finite entry, the anchor is used unchanged and its weight is 1. Entries that are not
    mixed are the anchor's. A batch without a neighbor dimension passes through unchanged.

    Use it with `NeighborhoodSampler`.

    Args:
        alpha: Parameter of the Dirichlet distribution: small values give nearly all weight to one
            row, one gives uniformly distributed weights, large values give nearly the mean.

    Keyword Args:
        generator: Generator of the weights; `None` uses torch's global one.
        mix_keys: Entries to mix.
        terminated_key: Entry that marks a terminal row; such neighborhoods are not mixed.
        gates: Further rules that decide which neighborhoods are mixed.
        anchor_keys: Entries that are not mixed on purpose, so that no warning names them.

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

    width = None

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
        super().__init__(
            generator=generator,
            mix_keys=mix_keys,
            terminated_key=terminated_key,
            gates=gates,
            anchor_keys=anchor_keys,
        )
        self.alpha = float(POSITIVE("alpha", alpha))

    def fold(self, rows: TensorDictBase) -> TensorDictBase:
        """Folds `[*B, 1 + m]` to `[*B]`."""
        shape, device = rows.shape, device_of(rows)
        weight = sample_dirichlet(self.alpha, shape, generator=self.generator, device=device)
        entries = self.schema.entries(rows)
        mixed = {key: combine(entry, weight) for key, entry in entries.items()}
        usable = torch.ones(shape[:-1], dtype=torch.bool, device=device)
        return self.mix_groups(rows, mixed, weight, usable)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(alpha={self.alpha})"
