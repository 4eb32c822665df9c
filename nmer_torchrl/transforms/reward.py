"""Averages the rewards of pairs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from tensordict import NestedKey, TensorDictBase

from nmer_torchrl.keys import TERMINATED_KEY
from nmer_torchrl.transforms.fold import Fold
from nmer_torchrl.transforms.rows import device_of


@final
class RewardMean(Fold):
    """Folds pairs `[*B, 2]` to their anchors, with the mean of the two rewards.

    With `NeighborPairSampler` this is replay with interpolated rewards for continuous states. The
    source (Pilar von Pilchau et al., 2020) has discrete states. It stores extra transitions whose
    reward is the average over all transitions from the same state and action, one for each state
    that followed. Continuous states do not repeat, so here only the anchor's reward changes. It is
    averaged with the reward of one near neighbor, drawn again each time. Over many draws that is
    half the anchor's own reward and half the mean of its k nearest neighbors.

    As with `PairMixup`, the anchor is unchanged if either row is terminal or has a non-finite
    reward; `"mixup_weight"`, `[*B, 1]`, is then 1, otherwise one half. A batch without a pair
    dimension passes through unchanged.

    Keyword Args:
        reward_keys: Entries to average.
        terminated_key: Entry that marks a terminal row; such pairs are not averaged.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> pairs = TensorDict(
        ...     r=torch.tensor([[[1.0], [3.0]], [[5.0], [7.0]]]),
        ...     end=torch.tensor([[[False], [False]], [[False], [True]]]),
        ...     batch_size=[2, 2],
        ... )
        >>> RewardMean(reward_keys=["r"], terminated_key="end")(pairs)["r"].squeeze(-1)
        tensor([2., 5.])
    """

    argument = "reward_keys"

    def __init__(
        self,
        *,
        reward_keys: Sequence[NestedKey] = (("next", "reward"),),
        terminated_key: NestedKey = TERMINATED_KEY,
    ) -> None:
        super().__init__(mix_keys=reward_keys, terminated_key=terminated_key)

    def fold(self, rows: TensorDictBase) -> TensorDictBase:
        """Folds `[*B, 2]` to `[*B]`."""
        return self.mix_pairs(rows, torch.full(rows.shape[:-1], 0.5, device=device_of(rows)))

    def look(self, rows: TensorDictBase) -> bool:
        """Accepts rows with any other entries, since these are not mixed."""
        return True

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"
