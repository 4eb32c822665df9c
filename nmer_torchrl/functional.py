"""The maths of pair mixing as pure functions of tensors."""

from __future__ import annotations

import torch
from torch import Tensor


def sample_beta(
    alpha: float,
    shape: tuple[int, ...],
    *,
    generator: torch.Generator | None = None,
    device: torch.device | None = None,
) -> Tensor:
    """Weights `w ~ Beta(alpha, alpha)` of the given shape, float32.

    `Gamma(alpha) = Gamma(alpha + 1) * U ** (1 / alpha)` keeps the logarithm finite where a gamma
    draw itself would underflow, so that small `alpha` gives weights near 0 and 1, never 0/0.
    """
    concentration = torch.full((2, *shape), alpha + 1.0, dtype=torch.float64, device=device)
    # torch.distributions.Beta takes no generator; the draw beneath it does.
    gamma = torch._standard_gamma(concentration, generator=generator)
    uniform = torch.rand((2, *shape), generator=generator, dtype=torch.float64, device=device)
    first, second = gamma.log() + torch.log1p(-uniform) / alpha
    return torch.sigmoid(first - second).float()


def mix(anchor: Tensor, partner: Tensor, weight: Tensor) -> Tensor:
    """Convex combination `weight * anchor + (1 - weight) * partner`.

    `anchor` and `partner` are `[*B, ...]`, `weight` is `[*B]`. Weight 1 gives exactly the anchor.
    """
    weight = weight.to(anchor.dtype).reshape(weight.shape + (1,) * (anchor.ndim - weight.ndim))
    return torch.lerp(partner, anchor, weight)


def any_feature(flags: Tensor, batch_dims: int) -> Tensor:
    """Boolean `[*B, ...]` to `[*B]`: whether any entry beyond the batch dimensions is true."""
    return flags.flatten(batch_dims).any(-1) if flags.ndim > batch_dims else flags


def all_finite(tensor: Tensor, batch_dims: int) -> Tensor:
    """`[*B, ...]` to boolean `[*B]`: whether every entry is finite, also in float32."""
    return ~any_feature(~tensor.float().isfinite(), batch_dims)


def choose_neighbor(
    anchor: Tensor, neighbors: Tensor, *, generator: torch.Generator | None = None
) -> Tensor:
    """One neighbour of each anchor, uniformly among those it has.

    `anchor` is `[B]` positions, `neighbors` is `[B, k]` positions padded with -1 on the right.
    An anchor without neighbours is its own partner.
    """
    count = (neighbors >= 0).sum(-1)
    uniform = torch.rand(
        anchor.shape, generator=generator, device=anchor.device, dtype=torch.float64
    )
    column = (uniform * count).long()
    partner = neighbors.gather(-1, column.unsqueeze(-1)).squeeze(-1)
    return torch.where(count > 0, partner, anchor)


def choose_other(anchor: Tensor, count: int, *, generator: torch.Generator | None = None) -> Tensor:
    """One of `0 .. count - 1` other than the anchor, uniformly; `anchor` is `[B]`.

    Anchors outside of that range exclude nothing. With no other to choose, -1.
    """
    inside = (anchor >= 0) & (anchor < count)
    choices = count - inside.long()
    uniform = torch.rand(
        anchor.shape, generator=generator, device=anchor.device, dtype=torch.float64
    )
    other = (uniform * choices).long()
    other = other + (inside & (other >= anchor))
    return torch.where(choices > 0, other, -1)
