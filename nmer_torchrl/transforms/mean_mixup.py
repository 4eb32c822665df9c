"""The fold to the middle of a pair."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from tensordict import NestedKey, TensorDictBase

from nmer_torchrl.keys import POINT_KEYS, TERMINATED_KEY, VALUE_KEYS
from nmer_torchrl.transforms.fold import Fold
from nmer_torchrl.transforms.gates import Gate
from nmer_torchrl.transforms.rows import device_of


@final
class MeanMixup(Fold):
    """Folds pairs `[*B, 2]` to their means, `(anchor + partner) / 2`.

    In all else it is `PairMixup`, with `w = 1 / 2` for every pair.

    Keyword Args:
        generator: Source of the randomness of gates; `None` uses torch's global one.
        mix_keys: Entries to mix.
        terminated_key: The flag that keeps a pair unmixed.
        gates: What else keeps pairs unmixed.
        anchor_keys: Observations that stay the anchor's without a warning.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> pairs = TensorDict(
        ...     x=torch.tensor([[[0.0], [1.0]]]),
        ...     end=torch.tensor([[[False], [False]]]),
        ...     batch_size=[1, 2],
        ... )
        >>> MeanMixup(mix_keys=["x"], terminated_key="end")(pairs)["x"]
        tensor([[0.5000]])
    """

    def __init__(
        self,
        *,
        generator: torch.Generator | None = None,
        mix_keys: Sequence[NestedKey] = (*POINT_KEYS, *VALUE_KEYS),
        terminated_key: NestedKey = TERMINATED_KEY,
        gates: Sequence[Gate] = (),
        anchor_keys: Sequence[NestedKey] = (),
    ) -> None:
        super().__init__(
            mix_keys,
            generator=generator,
            terminated_key=terminated_key,
            gates=gates,
            anchor_keys=anchor_keys,
        )

    def fold(self, rows: TensorDictBase) -> TensorDictBase:
        """Folds `[*B, 2]` to `[*B]`."""
        return self.mix_pairs(rows, torch.full(rows.shape[:-1], 0.5, device=device_of(rows)))

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"
