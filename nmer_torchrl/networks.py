"""Small networks for methods that learn."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn


def draw_seed(generator: torch.Generator | None) -> int:
    """A seed out of a generator, wherever that is; `None` for torch's global one."""
    device = "cpu" if generator is None else generator.device
    return int(torch.randint(2**62, (), generator=generator, device=device))


def make_mlp(widths: Sequence[int], seed: int) -> nn.Sequential:
    """Linear layers of these widths with ReLU in between, on the CPU.

    They are initialized as `nn.Linear` is, but from the seed alone: torch's global generators are
    left as they are.
    """
    generator = torch.Generator().manual_seed(seed)
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layer = nn.utils.skip_init(nn.Linear, before, after)
        for parameter in (layer.weight, layer.bias):
            nn.init.uniform_(parameter, -(before**-0.5), before**-0.5, generator=generator)
        layers += [layer, nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def descend(loss: Tensor, optimizer: torch.optim.Optimizer) -> None:
    """One step of the optimizer, or none where a gradient or its square is not finite.

    Such a step, from rewards of 1e30 say, would leave NaN in the parameters, or infinities in what
    the optimizer remembers, for good.
    """
    optimizer.zero_grad()
    loss.backward()
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"]]
    if all(g is None or bool(g.square().sum().isfinite()) for g in gradients):
        optimizer.step()
