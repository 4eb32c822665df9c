"""The fold to the middle of a pair."""

from __future__ import annotations

from typing import final

import torch
from tensordict import TensorDictBase

from nmer_torchrl.transforms.fold import Fold
from nmer_torchrl.transforms.rows import device_of


@final
class MeanMixup(Fold):
    """Folds pairs `[*B, 2]` to their means, `(anchor + partner) / 2`.

    In all else it is `PairMixup`, with `w = 1 / 2` for every pair.

    Keyword Args:
        generator: Source of the randomness of gates; `None` uses torch's global one.
        mix_keys: Entries to mix.
        terminated_key: The flag that keeps a pair unmixed; `None` for no such rule.
        gates: What else keeps pairs unmixed.
        anchor_keys: Entries that stay the anchor's without a warning.

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

    def fold(self, rows: TensorDictBase) -> TensorDictBase:
        """Folds `[*B, 2]` to `[*B]`."""
        return self.mix_pairs(rows, torch.full(rows.shape[:-1], 0.5, device=device_of(rows)))

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"
