"""Small networks, and their optimizer, for methods that learn."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import deepcopy
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

_BETAS, _EPS = (0.9, 0.999), 1e-8  # hyperparameters of Adam


def make_mlp(widths: Sequence[int], seed: int) -> nn.Sequential:
    """Builds linear layers of these widths with ReLU in between, on the CPU.

    They are initialized like `nn.Linear`, but from the seed alone: torch's global generators do not
    change.
    """
    generator = torch.Generator().manual_seed(seed)
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layer = nn.utils.skip_init(nn.Linear, before, after)
        for parameter in (layer.weight, layer.bias):
            nn.init.uniform_(parameter, -(before**-0.5), before**-0.5, generator=generator)
        layers += [layer, nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class CarefulAdam:
    """Takes steps of Adam, and skips those whose gradient, or its square, is not finite.

    Such a step, for example from rewards of 1e30, would permanently leave NaN in the parameters or
    infinities in the moments. The check is on the parameters' device, so that nothing waits for it.

    Args:
        parameters: Parameters to optimize.
        lr: Learning rate.
    """

    def __init__(self, parameters: Iterable[Tensor], lr: float) -> None:
        self.parameters, self.lr = list(parameters), lr
        self.means = [torch.zeros_like(each) for each in self.parameters]
        self.squares = [torch.zeros_like(each) for each in self.parameters]
        self.steps = self.parameters[0].new_zeros(())

    def step(self, loss: Tensor, when: Tensor | bool = True) -> None:
        """Takes one step to minimize the loss, or none if the scalar boolean `when` is false."""
        gradients = torch.autograd.grad(loss, self.parameters)
        with torch.no_grad():
            finite = torch.stack([g.square().sum() for g in gradients]).isfinite().all() & when
            taken = finite.to(self.steps.dtype)
            self.steps += taken
            count = self.steps.clamp_min(1.0)
            for parameter, gradient, mean, square in zip(
                self.parameters, gradients, self.means, self.squares, strict=True
            ):
                gradient = torch.where(finite, gradient, 0.0)
                mean.lerp_(gradient, (1.0 - _BETAS[0]) * taken)
                square.lerp_(gradient.square(), (1.0 - _BETAS[1]) * taken)
                spread = (square / (1.0 - _BETAS[1] ** count)).sqrt() + _EPS
                change = mean / (1.0 - _BETAS[0] ** count) / spread
                parameter.sub_(self.lr * taken * change)

    def state_dict(self) -> dict[str, Any]:
        """Returns the moments and the number of steps taken."""
        return deepcopy({name: getattr(self, name) for name in ("means", "squares", "steps")})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores a state that `state_dict` returned, on the device of the parameters."""
        with torch.no_grad():
            for own, saved in zip(self.means, state["means"], strict=True):
                own.copy_(saved)
            for own, saved in zip(self.squares, state["squares"], strict=True):
                own.copy_(saved)
            self.steps.copy_(state["steps"])
