"""Mixes the inputs of pairs, and draws the supervision from one of the two rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from tensordict import NestedKey, TensorDictBase

from nmer_torchrl.checks import POSITIVE
from nmer_torchrl.functional import sample_beta
from nmer_torchrl.keys import POINT_KEYS
from nmer_torchrl.transforms.entries import check_discrete, warn_unmixed
from nmer_torchrl.transforms.fold import Fold
from nmer_torchrl.transforms.rows import device_of


@final
class MixReg(Fold):
    """Folds pairs `[*B, 2]` to `[*B]`: mixed inputs, and the supervision of one of the two.

    Observation and action are `w * anchor + (1 - w) * partner` with `w ~ Beta(alpha, alpha)`.
    Reward, next observation, flags and all other entries are the anchor's with probability `w`,
    and the partner's otherwise. `w` is written to `"mixup_weight"`, and the column of the row that
    gave the supervision, 0 or 1, to `"mixup_member"`, both `[*B, 1]`.

    Mixreg (Wang et al., 2020) trains on the mixed target `w * y + (1 - w) * y'`. A target such as
    `y = r + gamma * V(s')` is not linear in `s'`, so mixing next observations would not mix
    targets; only a loss that evaluates both next observations can. But the gradient of a squared
    error is linear in the target, so a target that is `y` with probability `w` and `y'` otherwise
    has the gradient of the mixed target on average. So losses with a squared error, such as
    TorchRL's TD3Loss and SACLoss with `loss_function="l2"`, train on mixreg without changes, with
    more noise. Flags are never mixed, so terminal transitions need no rule. The source draws pairs
    within a batch of images and uses the discrete action of the row with the greater weight. Here
    the sampler chooses the partner, and actions are mixed as well.

    If a mix is not finite, the anchor is used unchanged and `w` is 1. A batch without a pair
    dimension, such as `buffer[:]`, passes through unchanged.

    Args:
        alpha: Parameter of the Beta distribution; the source uses 0.2.

    Keyword Args:
        generator: Generator of weights and members; `None` uses torch's global one.
        mix_keys: Entries of the input.
        anchor_keys: Entries that are not mixed on purpose, so that no warning names them.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> x = torch.tensor([[[0.0], [1.0]], [[5.0], [7.0]]])
        >>> batch = MixReg(mix_keys=["x"])(TensorDict(x=x, y=10 * x, batch_size=[2, 2]))
        >>> torch.allclose(batch["x"], x[:, 1].lerp(x[:, 0], batch["mixup_weight"]))
        True
        >>> torch.equal(batch["y"], 10 * x[torch.arange(2), batch["mixup_member"].squeeze(1)])
        True
    """

    def __init__(
        self,
        alpha: float = 0.2,
        *,
        generator: torch.Generator | None = None,
        mix_keys: Sequence[NestedKey] = POINT_KEYS,
        anchor_keys: Sequence[NestedKey] = (),
    ) -> None:
        super().__init__(
            generator=generator, mix_keys=mix_keys, terminated_key=None, anchor_keys=anchor_keys
        )
        self.alpha = float(POSITIVE("alpha", alpha))

    def fold(self, rows: TensorDictBase) -> TensorDictBase:
        """Folds `[*B, 2]` to `[*B]`."""
        shape, device = rows.shape[:-1], device_of(rows)
        weight = sample_beta(self.alpha, shape, generator=self.generator, device=device)
        member = torch.rand(shape, generator=self.generator, device=device) >= weight
        mixed, finite = self.mix_entries(rows, weight.unsqueeze(-1))
        if finite is not None:
            weight, member = torch.where(finite, weight, 1.0), member & finite
        flat = rows.reshape(-1, 2)
        chosen = flat[torch.arange(len(flat), device=device), member.reshape(-1).long()]
        return chosen.reshape(shape).update(
            {
                **mixed,
                "mixup_weight": weight.unsqueeze(-1),
                "mixup_member": member.long().unsqueeze(-1),
            }
        )

    def look(self, rows: TensorDictBase) -> bool:
        """Checks the inputs of the first rows; returns whether the check was conclusive."""
        warn_unmixed(self, rows, self.mix_keys, self.anchor_keys, outcomes=False)
        return check_discrete(rows, self.anchor_keys)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(alpha={self.alpha})"
