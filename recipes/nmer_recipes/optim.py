"""Computes gradients, Adam steps and target updates inside a compiled or captured update."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.adam import adam

from nmer_recipes.networks import Weights


@contextmanager
def no_denormals() -> Iterator[None]:
    """Treats numbers below 1e-38 as zero; use it around training on a CPU.

    Where gradients stay zero, as for ReLU units that are never active, Adam's moments decay to
    such numbers. Most processors take many times as long to compute with them.
    """
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


def differentiate(
    function: Callable[[list[Tensor]], tuple[Tensor, Any]], weights: list[Tensor]
) -> tuple[list[Tensor], Any]:
    """Returns the gradients of a function's first result, and its second result."""
    if torch.compiler.is_compiling():  # which does not support `torch.autograd.grad`
        gradients, (_, rest) = torch.func.grad_and_value(function, has_aux=True)(weights)
        return list(gradients), rest
    with torch.enable_grad():
        total, rest = function(weights)
    # Fused Adam needs gradients with the memory layout of their weights; vmap's may differ.
    return [gradient.contiguous() for gradient in torch.autograd.grad(total, weights)], rest


def decay(weights: list[Tensor]) -> Tensor:
    """Returns half the sum of squares of the weight matrices of one or several networks."""
    matrices = [weight for weight in weights[::2] if weight.ndim > 1]  # without norms' weights
    return torch.stack([weight.square().sum() for weight in matrices]).sum() / 2


def clip(gradients: list[Tensor], limit: float | None) -> list[Tensor]:
    """Scales a network's gradients so that their norm is at most the limit."""
    if limit is None:
        return gradients
    norm = torch.nn.utils.get_total_norm(gradients)
    return list(torch._foreach_mul(gradients, (limit / (norm + 1e-6)).clamp(max=1.0)))


def clip_each(gradients: list[Tensor], limit: float | None) -> list[Tensor]:
    """Clips the gradients `[n, ...]` of n stacked networks, each network separately."""
    if limit is None:
        return gradients
    flat = [gradient.reshape(len(gradient), -1) for gradient in gradients]
    norms = torch.stack([gradient.square().sum(1) for gradient in flat]).sum(0)
    scales = (limit / (norms.sqrt() + 1e-6)).clamp(max=1.0)
    return [gradient * scales.view(-1, *[1] * (gradient.ndim - 1)) for gradient in gradients]


class Moments(NamedTuple):
    """The state that Adam keeps for each parameter."""

    first: list[Tensor]
    second: list[Tensor]
    steps: list[Tensor]


class Adam(torch.optim.Adam):
    """Adam with a step that a compiled or captured update can contain.

    `step` does not support `torch.compile`, and creates its state at the first call. `move` is a
    plain function of weights, gradients and moments, which exist from the start. Both compute the
    same.
    """

    def __init__(
        self, parameters: list[Tensor], *, lr: float, betas: tuple[float, float] = (0.9, 0.999)
    ) -> None:
        super().__init__(parameters, lr=lr, betas=betas, fused=True)
        for weight in parameters:
            moments = {name: torch.zeros_like(weight) for name in ("exp_avg", "exp_avg_sq")}
            self.state[weight] = {"step": torch.zeros((), device=weight.device), **moments}
        self._collect()

    def _collect(self) -> None:
        (group,) = self.param_groups
        states = [self.state[weight] for weight in group["params"]]
        names = ("exp_avg", "exp_avg_sq", "step")
        self.moments = Moments(*([state[name] for state in states] for name in names))
        self._options = {name: group[name] for name in ("lr", "eps", "weight_decay", "maximize")}
        self._options["beta1"], self._options["beta2"] = group["betas"]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a saved state."""
        super().load_state_dict(state_dict)
        self._collect()

    @torch.no_grad()
    def move(self, weights: list[Tensor], gradients: list[Tensor], moments: Moments) -> None:
        """Updates weights by their gradients, and the moments, in place."""
        if torch.compiler.is_compiling():
            self._move_all(weights, gradients, moments)
        else:
            adam(
                weights,
                gradients,
                moments.first,
                moments.second,
                [],
                moments.steps,
                foreach=False,
                capturable=False,
                fused=True,
                amsgrad=False,
                **self._options,
            )

    def _move_all(self, weights: list[Tensor], gradients: list[Tensor], moments: Moments) -> None:
        """Computes the same with list operations, which `torch.compile` fuses into one kernel."""
        lr, eps, beta1, beta2 = (self._options[name] for name in ("lr", "eps", "beta1", "beta2"))
        torch._foreach_add_(moments.steps, 1)
        step = moments.steps[0]  # all are equal
        # As `exp`, which Inductor computes once. It would compute `**` again for each few numbers.
        first, second = (1 - torch.exp(step * math.log(beta)) for beta in (beta1, beta2))
        torch._foreach_lerp_(moments.first, gradients, 1 - beta1)
        torch._foreach_mul_(moments.second, beta2)
        torch._foreach_addcmul_(moments.second, gradients, gradients, 1 - beta2)
        roots = torch._foreach_mul(torch._foreach_sqrt(moments.second), second.rsqrt())
        moves = torch._foreach_div(moments.first, torch._foreach_add(roots, eps))
        torch._foreach_sub_(weights, torch._foreach_mul(moves, lr / first))


@torch.no_grad()
def move_targets(weights: Weights, tau: float) -> None:
    """Moves each target toward its network by the fraction `tau`, in place."""
    followed = [*(weights.actor if weights.target_actor else []), *weights.critics]
    targets = [*weights.target_actor, *weights.target_critics]
    torch._foreach_lerp_(targets, followed, tau)
