"""Random amplitude scaling."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import final

import torch
from tensordict import NestedKey, TensorDictBase

from nmer_torchrl.keys import as_keys, next_key
from nmer_torchrl.transforms.augmentation import Augmentation
from nmer_torchrl.transforms.rows import device_of, restore_rows


@final
class AmplitudeScaling(Augmentation):
    """Multiplies the observation and the next observation of each row `[*B]` by a random factor.

    One `z ~ U[min_factor, max_factor]` is drawn for each row, shared by both observations and all
    their dimensions, and written to `"amplitude"`, `[*B, 1]`. This is the random amplitude scaling
    of RAD (Laskin et al., 2020) for state observations. The source also offers one `z` for each
    dimension and a separate `z` for the next observation, and tries several ranges. This class has
    only the form that keeps the two observations of a transition consistent. There is no rule for
    terminal transitions, since reward and flags do not change. If an observation is not finite, the
    row is unchanged and `z` is 1.

    As with `StateMixup`, `buffer[:]` is changed too; `buffer.storage[:]` returns the stored rows.

    Args:
        min_factor: Smallest factor.
        max_factor: Largest factor.

    Keyword Args:
        generator: Generator of the factors; `None` uses torch's global one.
        observation_keys: Entries to scale, together with `("next", key)` of each.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> x = torch.ones(4, 3)
        >>> following = TensorDict(observation=2 * x, batch_size=[4])
        >>> rows = TensorDict(observation=x, next=following, batch_size=[4])
        >>> batch = AmplitudeScaling(0.6, 1.2)(rows)
        >>> torch.equal(batch["observation"], batch["amplitude"].expand(4, 3))
        True
        >>> torch.equal(batch["next", "observation"], 2 * batch["observation"])
        True
    """

    def __init__(
        self,
        min_factor: float = 0.6,
        max_factor: float = 1.2,
        *,
        generator: torch.Generator | None = None,
        observation_keys: Sequence[NestedKey] = ("observation",),
    ) -> None:
        if not 0 < min_factor <= max_factor < math.inf:
            raise ValueError(
                f"min_factor={min_factor!r} and max_factor={max_factor!r} are not a valid range; "
                "give finite numbers above 0, in order (the defaults are 0.6 and 1.2)."
            )
        first = as_keys(observation_keys, "observation_keys")
        both = (*first, *(next_key(key) for key in first))
        super().__init__(both, "observation_keys", generator)
        self.min_factor, self.max_factor = float(min_factor), float(max_factor)

    def augment(self, rows: TensorDictBase) -> TensorDictBase:
        """Returns rows `[*B]` with scaled observations."""
        entries, dims = self.schema.entries(rows), rows.ndim
        factor = torch.rand(rows.shape, generator=self.generator, device=device_of(rows))
        low, high = self.min_factor, self.max_factor
        factor = (low + (high - low) * factor).clamp_(low, high)
        scaled = {
            key: entry * factor[(...,) + (None,) * (entry.ndim - dims)].to(entry.dtype)
            for key, entry in entries.items()
        }
        finite = restore_rows(scaled, entries, dims)
        if finite is not None:
            factor = torch.where(finite, factor, 1.0)
        return rows.copy().update(scaled).set("amplitude", factor.unsqueeze(-1))

    def __repr__(self) -> str:
        return f"{type(self).__name__}(min_factor={self.min_factor}, max_factor={self.max_factor})"
