"""Mixes the observations within one transition."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from tensordict import NestedKey, TensorDictBase

from nmer_torchrl.checks import POSITIVE
from nmer_torchrl.functional import mix, sample_beta
from nmer_torchrl.keys import as_keys, next_key
from nmer_torchrl.transforms.augmentation import Augmentation
from nmer_torchrl.transforms.rows import device_of, restore_rows


@final
class StateMixup(Augmentation):
    """Moves the observation of each row `[*B]` toward its next one: `w * s + (1 - w) * s'`.

    One `w ~ Beta(alpha, alpha)` is drawn for each row and written to `"state_weight"`, `[*B, 1]`.
    All other entries are unchanged. This is the state mixup of S4RL (Sinha et al., 2021) as the
    NMER paper evaluates it; the source mixes in an offline setting, and averages the values of
    several mixed copies of a state. Neither has a rule for terminal transitions. None is needed,
    since the two mixed states belong to one transition, whose reward and flags do not change. If an
    observation is not finite, the row is unchanged and `w` is 1.

    TorchRL also applies a buffer's transforms to rows that are read by position, so `buffer[:]` is
    changed too. `buffer.storage[:]` returns the stored rows.

    Args:
        alpha: Parameter of the Beta distribution, as in `PairMixup`.

    Keyword Args:
        generator: Generator of the weights; `None` uses torch's global one.
        observation_keys: Entries to mix, each with its next observation at `("next", key)`.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> rows = TensorDict(
        ...     observation=torch.zeros(4, 3),
        ...     next=TensorDict(observation=torch.ones(4, 3), batch_size=[4]),
        ...     batch_size=[4],
        ... )
        >>> batch = StateMixup(0.75)(rows)
        >>> torch.allclose(batch["observation"], (1 - batch["state_weight"]).expand(4, 3))
        True
    """

    def __init__(
        self,
        alpha: float = 0.75,
        *,
        generator: torch.Generator | None = None,
        observation_keys: Sequence[NestedKey] = ("observation",),
    ) -> None:
        first = as_keys(observation_keys, "observation_keys")
        both = (*first, *(next_key(key) for key in first))
        super().__init__(both, "observation_keys", generator)
        self.observation_keys = first
        self.alpha = float(POSITIVE("alpha", alpha))

    def augment(self, rows: TensorDictBase) -> TensorDictBase:
        """Returns rows `[*B]` with mixed observations."""
        shape, generator = rows.shape, self.generator
        weight = sample_beta(self.alpha, shape, generator=generator, device=device_of(rows))
        weight, entries = weight.unsqueeze(-1), self.schema.entries(rows)
        before = {key: entries[key] for key in self.observation_keys}
        moved = {key: mix(entry, entries[next_key(key)], weight) for key, entry in before.items()}
        finite = restore_rows(moved, before, rows.ndim)
        if finite is not None:
            weight = torch.where(finite.unsqueeze(-1), weight, 1.0)
        return rows.copy().update(moved).set("state_weight", weight)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(alpha={self.alpha})"
