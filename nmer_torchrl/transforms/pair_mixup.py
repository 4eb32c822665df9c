"""Mixes pairs by convex combination: the transform of NMER."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from tensordict import NestedKey, TensorDictBase

from nmer_torchrl.checks import POSITIVE
from nmer_torchrl.functional import sample_beta
from nmer_torchrl.keys import POINT_KEYS, TERMINATED_KEY, VALUE_KEYS
from nmer_torchrl.transforms.fold import Fold
from nmer_torchrl.transforms.gates import Gate
from nmer_torchrl.transforms.rows import device_of


@final
class PairMixup(Fold):
    """Folds a `[B, 2]` batch of pairs to `[B]` by `w * anchor + (1 - w) * partner`.

    One `w ~ Beta(alpha, alpha)` is drawn for each pair. If either row is terminal or has a
    non-finite entry, the anchor is used unchanged and `w` is 1. Entries that are not mixed are the
    anchor's. The weights are written to `"mixup_weight"`, `[B, 1]`. A batch without a pair
    dimension, such as `buffer[:]`, passes through unchanged.

    Use it in a replay buffer whose sampler draws pairs. On `extend`, before anything is stored, it
    checks that the entries it mixes are present, continuous, and as wide as in earlier rows.

    Args:
        alpha: Parameter of the Beta distribution: small values give weights near 0 and 1, one
            gives uniform weights, large values give weights near one half.

    Keyword Args:
        generator: Generator of the weights; `None` uses torch's global one. It can be set later as
            an attribute.
        mix_keys: Entries to mix.
        terminated_key: Entry that marks a terminal row; such pairs are not mixed. A time limit is
            not a terminal state, so this is not `done`.
        gates: Further rules that decide which pairs are mixed, such as `Fraction(0.5)`.
        anchor_keys: Entries that are not mixed on purpose, so that no warning names them.

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
        """Folds `[*B, 2]` to `[*B]`."""
        shape, generator = rows.shape[:-1], self.generator
        weight = sample_beta(self.alpha, shape, generator=generator, device=device_of(rows))
        return self.mix_pairs(rows, weight)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(alpha={self.alpha})"
