"""The fold of Continuous Transition with its learned temperature."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any, final

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor, nn

from nmer_torchrl.checks import POSITIVE, Number
from nmer_torchrl.functional import all_finite, sample_beta
from nmer_torchrl.generators import draw_seed
from nmer_torchrl.keys import POINT_KEYS, TERMINATED_KEY, VALUE_KEYS, as_keys, get_continuous
from nmer_torchrl.networks import CarefulAdam, make_mlp
from nmer_torchrl.transforms.fold import Fold

_LEAST = 1e-3  # smallest alpha: weights are 0 or 1 all but always


@final
class TunedMixup(Fold):
    """`PairMixup` whose alpha is tuned so that mixed transitions stay near what was seen.

    After Lin et al., Continuous Transition (2020). A discriminator learns to predict next
    observation and reward from observation and action, on both members of each pair. Where its
    prediction for a mixed input is farther than `tolerance` (a mean squared difference) from the
    mix of its predictions, the transitions are not linear between the two, and alpha goes down:
    weights move toward 0 and 1. It stays within (0, 1].

    Every sampled batch of pairs is one step of the discriminator and of alpha. Both are part of the
    buffer's state. As the source does, entries are taken as they are, not Z-scored; unlike it,
    terminal pairs are not mixed (as everywhere here), and rows with a non-finite entry teach
    nothing.

    Args:
        alpha: Where the parameter of the Beta distribution starts.

    Keyword Args:
        tolerance: Mean squared difference above which alpha goes down.
        lr: Learning rate of the discriminator and of alpha.
        hidden: Widths of the discriminator's hidden layers.
        keys: Entries that predict.
        value_keys: Entries that are predicted.
        terminated_key: As in `PairMixup`.
        generator: Source of the weights, and of the seed of the discriminator.
        anchor_keys: Entries that stay the anchor's without a warning.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> fold = TunedMixup(keys=["x"], value_keys=["y"], terminated_key="end")
        >>> x = torch.randn(8, 2, 3)
        >>> end = torch.zeros(8, 2, 1, dtype=torch.bool)
        >>> batch = fold(TensorDict(x=x, y=x.sum(-1, keepdim=True), end=end, batch_size=[8, 2]))
        >>> batch.batch_size, 0 < fold.alpha <= 1
        (torch.Size([8]), True)
    """

    learns = True

    def __init__(
        self,
        alpha: float = 1.0,
        *,
        tolerance: float = 0.1,
        lr: float = 3e-4,
        hidden: Sequence[int] = (256, 256),
        keys: Sequence[NestedKey] = POINT_KEYS,
        value_keys: Sequence[NestedKey] = VALUE_KEYS,
        terminated_key: NestedKey = TERMINATED_KEY,
        generator: torch.Generator | None = None,
        anchor_keys: Sequence[NestedKey] = (),
    ) -> None:
        self._inputs, self._outputs = as_keys(keys, "keys"), as_keys(value_keys, "value_keys")
        for name, given in (("keys", self._inputs), ("value_keys", self._outputs)):
            if not given:
                raise ValueError(f"`{name}` is empty; name at least one entry.")
        super().__init__(
            generator=generator,
            mix_keys=(*self._inputs, *self._outputs),
            terminated_key=terminated_key,
            anchor_keys=anchor_keys,
        )
        self._first = float(Number(above=0, most=1)("alpha", alpha))
        self.tolerance, self.lr = POSITIVE("tolerance", tolerance), POSITIVE("lr", lr)
        self.hidden = tuple(hidden)
        self._learner: _Learner | None = None  # made by the first batch, which tells the widths
        self._saved: dict[str, Any] | None = None

    @property
    def alpha(self) -> float:
        """The parameter of the Beta distribution now. To read it waits for the device."""
        return self._first if self._learner is None else self._learner.alpha.item()

    def fold(self, rows: TensorDictBase) -> TensorDictBase:
        """Folds `[*B, 2]` to `[*B]`, and takes one step of learning."""
        with self._lock, torch.enable_grad():  # prefetching threads learn in turn
            inputs = _join(rows, self._inputs, "keys").flatten(0, -3)
            outputs = _join(rows, self._outputs, "value_keys").flatten(0, -3)
            learner = self._learner_for(inputs, outputs)
            alpha, shape, device = learner.alpha.detach(), rows.shape[:-1], inputs.device
            weight = sample_beta(alpha, shape, generator=self.generator, device=device)
            batch = self.mix_pairs(rows, weight)
            weight = batch["mixup_weight"].reshape(-1, 1)
            mixed = _join(batch, self._inputs, "keys").flatten(0, -2)
            learner.step(inputs, outputs, mixed, weight)
        return batch

    def _learner_for(self, inputs: Tensor, outputs: Tensor) -> _Learner:
        if self._learner is None:
            # What was saved replaces all of it; nothing is drawn then.
            seed = draw_seed(self.generator) if self._saved is None else 0
            widths = [inputs.shape[-1], *self.hidden, outputs.shape[-1]]
            layers = make_mlp(widths, seed).to(inputs.device)
            self._learner = _Learner(layers, self._first, self.tolerance, self.lr)
            if self._saved is not None:
                self._learner.load_state_dict(self._saved)
                self._saved = None
        return self._learner

    def get_extra_state(self) -> dict[str, Any]:
        """Returns the generator, alpha, the discriminator and the state of what optimizes them."""
        state: dict[str, Any] = {**super().get_extra_state(), "alpha": self.alpha}
        learned = self._saved if self._learner is None else self._learner.state_dict()
        return state if learned is None else {**state, "learner": learned}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Goes on from there."""
        super().set_extra_state(state)
        self._first = state.get("alpha", self._first)
        self._learner, self._saved = None, state.get("learner")

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        saved = self._saved if self._learner is None else self._learner.state_dict()
        return {**state, "_first": self.alpha, "_saved": saved, "_learner": None}

    def __repr__(self) -> str:
        return f"{type(self).__name__}(alpha={self.alpha})"


class _Learner:
    """The discriminator, alpha, and what optimizes them."""

    def __init__(self, layers: nn.Sequential, alpha: float, tolerance: float, lr: float) -> None:
        self.layers, self.tolerance = layers, tolerance
        device = next(layers.parameters()).device
        self.alpha = nn.Parameter(torch.tensor(alpha, device=device))
        self.layers_optimizer = CarefulAdam(layers.parameters(), lr)
        self.alpha_optimizer = CarefulAdam([self.alpha], lr)

    def step(self, inputs: Tensor, outputs: Tensor, mixed: Tensor, weight: Tensor) -> None:
        """Learns from pairs `[n, 2, d]` and what followed them `[n, 2, e]`.

        Takes their mixes `[n, d]` and weights `[n, 1]`. Pairs with a non-finite entry are replaced
        by zeros and do not count; to leave them out would wait for the device.
        """
        finite = all_finite(inputs, 1) & all_finite(outputs, 1)
        pair = finite[:, None, None]
        inputs, outputs = inputs.where(pair, 0.0), outputs.where(pair, 0.0)
        mixed, count = mixed.where(pair[:, 0], 0.0), finite.sum().clamp_min(1) * outputs.shape[-1]
        error = (self.layers(inputs) - outputs).square().where(pair, 0.0)
        self.layers_optimizer.step(error.sum() / count, finite.any())  # the sum over both members
        with torch.no_grad():
            first, second = self.layers(inputs).unbind(1)
            between = torch.lerp(second, first, weight)
            bend = (self.layers(mixed) - between).square().where(pair[:, 0], 0.0)
            excess = bend.sum() / count - self.tolerance
        self.alpha_optimizer.step(self.alpha.log() * excess, finite.any())
        with torch.no_grad():
            self.alpha.clamp_(_LEAST, 1.0)

    def state_dict(self) -> dict[str, Any]:
        return {
            "layers": deepcopy(self.layers.state_dict()),
            "alpha": self.alpha.detach().clone(),
            "layers_optimizer": self.layers_optimizer.state_dict(),
            "alpha_optimizer": self.alpha_optimizer.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.layers.load_state_dict(state["layers"])
        with torch.no_grad():
            self.alpha.copy_(state["alpha"])
        self.layers_optimizer.load_state_dict(state["layers_optimizer"])
        self.alpha_optimizer.load_state_dict(state["alpha_optimizer"])


def _join(data: TensorDictBase, keys: tuple[NestedKey, ...], argument: str) -> Tensor:
    """Entries of rows `[*B]` side by side, `[*B, d]`, float32."""
    parts = [get_continuous(data, key, argument).detach().float() for key in keys]
    return torch.cat([part.reshape(*data.shape, -1) for part in parts], -1)
