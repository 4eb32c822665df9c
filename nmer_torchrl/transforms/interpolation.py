"""Other ways between the two of a pair."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tensordict import NestedKey
from torch import Tensor

from nmer_torchrl.functional import mix
from nmer_torchrl.keys import POINT_KEYS, TERMINATED_KEY, VALUE_KEYS, as_keys, next_key
from nmer_torchrl.transforms.base import PairFold
from nmer_torchrl.transforms.gates import Gate
from nmer_torchrl.transforms.pair_mixup import PairMixup


class MeanMixup(PairFold):
    """Folds pairs `[*B, 2]` to their means, `(anchor + partner) / 2`.

    In all else it is `PairMixup`, with `w = 1 / 2` for every pair.

    Keyword Args:
        generator: Source of the randomness of gates; `None` uses torch's global one.
        mix_keys: Entries to mix.
        terminated_key: The flag that keeps a pair unmixed.
        gates: What else keeps pairs unmixed.

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
    ) -> None:
        super().__init__(mix_keys, terminated_key, generator, gates=gates)

    def _weights(self, shape: torch.Size, device: torch.device) -> Tensor:
        return torch.full(shape, 0.5, device=device)

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class DeltaMixup(PairMixup):
    """`PairMixup` that mixes the change of state, and adds it to the mixed state.

    With `s`, `s'` the observations of the anchor and `t`, `t'` those of the partner, the next
    observation is `(w s + (1 - w) t) + (w (s' - s) + (1 - w) (t' - t))`. Since one `w` serves both,
    that equals `w s' + (1 - w) t'` of `PairMixup` but for rounding: it is here because the released
    code of NMER offers it, and as what `GaussianProcessMixup` does with a change that it predicts.
    Rows that stay unmixed have the anchor's own next observation.

    Args:
        alpha: Parameter of the Beta distribution, as of `PairMixup`.

    Keyword Args:
        generator: Source of the weights; `None` uses torch's global one.
        mix_keys: Entries to mix; the observations and their next ones are among them.
        terminated_key: The flag that keeps a pair unmixed.
        gates: What else keeps pairs unmixed.
        observation_keys: The observations; each one's next is at `("next", key)`.

    Examples:
        >>> DeltaMixup(0.75)
        DeltaMixup(alpha=0.75)
    """

    def __init__(
        self,
        alpha: float = 0.75,
        *,
        generator: torch.Generator | None = None,
        mix_keys: Sequence[NestedKey] = (*POINT_KEYS, *VALUE_KEYS),
        terminated_key: NestedKey = TERMINATED_KEY,
        gates: Sequence[Gate] = (),
        observation_keys: Sequence[NestedKey] = ("observation",),
    ) -> None:
        super().__init__(
            alpha,
            generator=generator,
            mix_keys=mix_keys,
            terminated_key=terminated_key,
            gates=gates,
        )
        self.observation_keys = as_keys(observation_keys, "observation_keys")
        for key in self.observation_keys:
            for needed in (key, next_key(key)):
                if needed not in self.mix_keys:
                    raise ValueError(
                        f"The change of {key!r} cannot be mixed, since {needed!r} is not among "
                        f"`mix_keys`, {self.mix_keys}; add it, or leave {key!r} out of "
                        "`observation_keys`."
                    )

    def _mix(
        self, pairs: dict[NestedKey, tuple[Tensor, ...]], weight: Tensor
    ) -> dict[NestedKey, Tensor]:
        mixed = super()._mix(pairs, weight)
        for key in self.observation_keys:
            (first, second), (first_next, second_next) = pairs[key], pairs[next_key(key)]
            change = mix(first_next - first, second_next - second, weight)
            whole = weight.reshape(weight.shape[:-1] + (1,) * (first.ndim - weight.ndim + 1)) == 1
            mixed[next_key(key)] = torch.where(whole, first_next, mixed[key] + change)
        return mixed
