"""Mixes pairs with a learned alpha, as in Continuous Transition."""

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

_LEAST = 1e-3  # smallest alpha; weights are then almost always 0 or 1


@final
class TunedMixup(Fold):
    """Mixes pairs as `PairMixup` does, and tunes alpha to keep mixes near observed transitions.

    It follows Lin et al., Continuous Transition (2020). A discriminator learns to predict next
    observation and reward from observation and action, on both rows of each pair. If its prediction
    for a mixed input differs from the mix of its predictions by more than `tolerance` (a mean
    squared difference), the transitions are not linear between the two rows. Alpha then decreases,
    which moves weights toward 0 and 1. Alpha stays within (0, 1].

    Every sampled batch of pairs is one training step of the discriminator and of alpha. Both are
    part of the buffer's state. As in the source, entries are not Z-scored. Unlike the source,
    terminal pairs are not mixed, and rows with a non-finite entry are not used for training.

    Args:
        alpha: Initial parameter of the Beta distribution.

    Keyword Args:
        tolerance: Mean squared difference above which alpha decreases.
        lr: Learning rate of the discriminator and of alpha.
        hidden: Widths of the discriminator's hidden layers.
        keys: Entries that the discriminator predicts from.
        value_keys: Entries that it predicts.
        terminated_key: Entry that marks a terminal row; such pairs are not mixed.
        generator: Generator of the weights and of the discriminator's seed.
        anchor_keys: Entries that are not mixed on purpose, so that no warning names them.

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
        hidden: Sequence[int] = (256, 256, 256),
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
        self._learner: _Learner | None = None  # built from the first batch, which sets the widths
        self._saved: dict[str, Any] | None = None

    @property
    def alpha(self) -> float:
        """Returns the current parameter of the Beta distribution; waits for the device."""
        return self._first if self._learner is None else self._learner.alpha.item()

    def fold(self, rows: TensorDictBase) -> TensorDictBase:
        """Folds `[*B, 2]` to `[*B]`, and takes one training step."""
        with self._lock, torch.enable_grad():  # prefetching threads take turns
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
            # A saved state replaces all parameters, so no seed is drawn then.
            seed = draw_seed(self.generator) if self._saved is None else 0
            widths = [inputs.shape[-1], *self.hidden, outputs.shape[-1]]
            if self._saved is not None:  # its hidden layers may differ from this version's default
                layers = self._saved["layers"]
                widths[1:] = [len(bias) for name, bias in layers.items() if name.endswith("bias")]
            layers = make_mlp(widths, seed).to(inputs.device)
            self._learner = _Learner(layers, self._first, self.tolerance, self.lr)
            if self._saved is not None:
                self._learner.load_state_dict(self._saved)
                self._saved = None
        return self._learner

    def get_extra_state(self) -> dict[str, Any]:
        """Returns the state of the generator, alpha, the discriminator and their optimizers."""
        state: dict[str, Any] = {**super().get_extra_state(), "alpha": self.alpha}
        learned = self._saved if self._learner is None else self._learner.state_dict()
        return state if learned is None else {**state, "learner": learned}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Restores a state that `get_extra_state` returned."""
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
    """Holds the discriminator, alpha, and their optimizers."""

    def __init__(self, layers: nn.Sequential, alpha: float, tolerance: float, lr: float) -> None:
        self.layers, self.tolerance = layers, tolerance
        device = next(layers.parameters()).device
        self.alpha = nn.Parameter(torch.tensor(alpha, device=device))
        self.layers_optimizer = CarefulAdam(layers.parameters(), lr)
        self.alpha_optimizer = CarefulAdam([self.alpha], lr)

    def step(self, inputs: Tensor, outputs: Tensor, mixed: Tensor, weight: Tensor) -> None:
        """Takes one training step on pairs `[n, 2, d]` and their outcomes `[n, 2, e]`.

        It also uses the mixes `[n, d]` and weights `[n, 1]`. Pairs with a non-finite entry are
        replaced by zeros and do not count; removing them would wait for the device.
        """
        finite = all_finite(inputs, 1) & all_finite(outputs, 1)
        pair = finite[:, None, None]
        inputs, outputs = inputs.where(pair, 0.0), outputs.where(pair, 0.0)
        mixed, count = mixed.where(pair[:, 0], 0.0), finite.sum().clamp_min(1) * outputs.shape[-1]
        error = (self.layers(inputs) - outputs).square().where(pair, 0.0)
        self.layers_optimizer.step(error.sum() / count, finite.any())  # sums over both rows
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
    """Concatenates entries of rows `[*B]` to `[*B, d]` in float32."""
    parts = [get_continuous(data, key, argument).detach().float() for key in keys]
    return torch.cat([part.reshape(*data.shape, -1) for part in parts], -1)
