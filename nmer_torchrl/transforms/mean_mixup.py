"""Mixes pairs to their mean."""

from __future__ import annotations

from typing import final

import torch
from tensordict import TensorDictBase

from nmer_torchrl.transforms.fold import Fold
from nmer_torchrl.transforms.rows import device_of


@final
class MeanMixup(Fold):
    """Folds pairs `[*B, 2]` to their means, `(anchor + partner) / 2`.

    It is `PairMixup` with `w = 1 / 2` for every pair.

    Keyword Args:
        generator: Generator that gates use; `None` uses torch's global one.
        mix_keys: Entries to mix.
        terminated_key: Entry that marks a terminal row; such pairs are not mixed. `None` turns this
            rule off.
        gates: Further rules that decide which pairs are mixed.
        anchor_keys: Entries that are not mixed on purpose, so that no warning names them.

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
