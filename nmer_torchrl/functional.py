"""The math of pair mixing, as pure functions of tensors."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

_CHUNK = 4_096
_LARGEST = 1e37  # differences and Z-scores of numbers up to this stay within float32
_ODD = -7046029254386353131  # 2**64 / golden ratio, maps close numbers far apart


def sample_beta(
    alpha: float | Tensor,
    shape: tuple[int, ...],
    *,
    generator: torch.Generator | None = None,
    device: torch.device | None = None,
) -> Tensor:
    """Draws weights `w ~ Beta(alpha, alpha)` of the given shape, in float32.

    If `t` follows Student's t distribution with `2 * alpha` degrees of freedom,
    `1 / 2 + t / (2 * sqrt(2 * alpha + t**2))` follows the Beta distribution. For uniform `u` and
    `v`, `sqrt(2 * alpha * (u**(-1 / alpha) - 1)) * cos(2 * pi * v)` is such a `t` (Bailey, 1994).
    This draws no number in vain, unlike a rejection method, and is exact for every `alpha`.

    `alpha` may be a scalar tensor on the device of the weights, which is then not read by the host.

    Examples:
        >>> weight = sample_beta(0.75, (1_000, 1), generator=torch.Generator().manual_seed(0))
        >>> weight.shape, bool(((weight >= 0) & (weight <= 1)).all())
        (torch.Size([1000, 1]), True)
    """
    exponential = torch.empty(shape, device=device).exponential_(generator=generator)  # -log(u)
    odds = exponential.div_(alpha).expm1_().reciprocal_()  # 1 / (u**(-1 / alpha) - 1)
    cosine = torch.rand(shape, generator=generator, device=device).mul_(2 * math.pi).cos_()
    ratio = odds.addcmul_(cosine, cosine).rsqrt_().mul_(cosine)  # t / sqrt(2 * alpha + t**2)
    weight = ratio.add_(1.0).mul_(0.5)
    # CUDA's `rsqrt` rounds less exactly, so that a weight may be just outside of the bounds.
    return weight if weight.device.type == "cpu" else weight.clamp_(0.0, 1.0)


def sample_dirichlet(
    alpha: float,
    shape: tuple[int, ...],
    *,
    generator: torch.Generator | None = None,
    device: torch.device | None = None,
) -> Tensor:
    """Draws float32 weights `[..., n]` from a symmetric Dirichlet distribution; each n sum to 1.

    Examples:
        >>> weight = sample_dirichlet(0.75, (100, 11))
        >>> torch.allclose(weight.sum(-1), torch.ones(100))
        True
    """
    # By `Gamma(a) = Gamma(a + 1) * U ** (1 / a)` in logarithms: gamma draws of a small alpha
    # leave the range of float32.
    concentration = torch.full(shape, alpha + 1.0, dtype=torch.float64, device=device)
    gamma = torch._standard_gamma(concentration, generator=generator)
    uniform = torch.rand(shape, generator=generator, dtype=torch.float64, device=device)
    return (gamma.log() + torch.log1p(-uniform) / alpha).softmax(-1).float()


def mix(anchor: Tensor, partner: Tensor, weight: Tensor) -> Tensor:
    """Returns the convex combination `weight * anchor + (1 - weight) * partner`.

    `anchor` and `partner` are `[*B, ...]`, `weight` is `[*B, 1]`. A weight of 1 gives exactly the
    anchor.

    Examples:
        >>> anchor, partner = torch.tensor([[4.0, 0.0]]), torch.tensor([[0.0, 8.0]])
        >>> mix(anchor, partner, torch.tensor([[0.25]]))
        tensor([[1., 6.]])
    """
    if anchor.ndim != weight.ndim:
        weight = weight.reshape(weight.shape[:-1] + (1,) * (anchor.ndim - weight.ndim + 1))
    return torch.lerp(partner, anchor, weight.to(anchor.dtype))


def combine(rows: Tensor, weight: Tensor) -> Tensor:
    """Returns convex combinations `[*B, ...]` of rows `[*B, n, ...]` with weights `[*B, n]`.

    It is computed as a step from the first row, so that a weight of 1 gives exactly that row.

    Examples:
        >>> rows = torch.tensor([[[0.0, 0.0], [4.0, 0.0], [0.0, 8.0]]])
        >>> combine(rows, torch.tensor([[0.5, 0.25, 0.25]]))
        tensor([[1., 2.]])
    """
    dim = weight.ndim - 1
    first = rows.narrow(dim, 0, 1)
    shape = weight.shape + (1,) * (rows.ndim - weight.ndim)
    return first.squeeze(dim) + ((rows - first) * weight.to(rows.dtype).reshape(shape)).sum(dim)


def any_feature(flags: Tensor, batch_dims: int) -> Tensor:
    """Returns booleans `[*B]`: whether any entry of `[*B, ...]` is true.

    Examples:
        >>> any_feature(torch.tensor([[True, False], [False, False]]), 1)
        tensor([ True, False])
    """
    return flags.flatten(batch_dims).any(-1) if flags.ndim > batch_dims else flags


def all_finite(tensor: Tensor, batch_dims: int) -> Tensor:
    """Returns booleans `[*B]`: whether all entries of `[*B, ...]` are finite and at most 1e37.

    In float16, 1e37 would be infinite, so the largest finite number is the limit there.

    Examples:
        >>> all_finite(torch.tensor([[1.0, 2.0], [1.0, torch.nan]]), 1)
        tensor([ True, False])
    """
    sizes = tensor.abs()
    if not sizes.numel():  # `amax` does not accept empty tensors
        return torch.ones(tensor.shape[:batch_dims], dtype=torch.bool, device=tensor.device)
    if tensor.ndim > batch_dims:
        sizes = sizes.flatten(batch_dims).amax(-1)  # NaN if any entry is NaN
    half = sizes.dtype == torch.float16
    return sizes <= (torch.finfo(torch.float16).max if half else _LARGEST)


def finite_rows(points: Tensor) -> Tensor:
    """Returns booleans `[n]`: whether all numbers of a row of `[n, d]` are finite.

    Examples:
        >>> finite_rows(torch.tensor([[1.0, 2.0], [1.0, torch.inf]]))
        tensor([ True, False])
    """
    return (points - points).sum(-1) == 0  # infinity minus itself is NaN


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copies a tensor to a device, in the background if that is safe.

    A copy to the CPU in the background could be read before it has arrived.

    Examples:
        >>> to_device(torch.tensor([1, 2]), torch.device("cpu"))
        tensor([1, 2])
    """
    return tensor.to(device, non_blocking=device.type != "cpu")


def as_rows(index: Tensor, device: torch.device) -> Tensor | slice:
    """Converts positions `[n]` on the CPU to an index for rows on a device.

    Consecutive positions become a slice, which is faster and needs no copy to the device. Others
    are copied there.

    Examples:
        >>> as_rows(torch.tensor([4, 5, 6]), torch.device("cpu"))
        slice(4, 7, None)
    """
    n = len(index)
    if n == 1 or (n > 1 and bool((index[1:] - index[:-1] == 1).all())):
        first = int(index[0])
        return slice(first, first + n)
    return to_device(index, device)


def choose_neighbor(
    anchor: Tensor,
    neighbors: Tensor,
    *,
    generator: torch.Generator | None = None,
    padded: bool = True,
    alone: bool = True,
) -> Tensor:
    """Draws one neighbor of each anchor uniformly.

    `anchor` is `[B]` positions, `neighbors` is `[B, k]` positions padded with -1 on the right.
    An anchor without neighbors is its own partner. Two flags save operations: `padded=False` means
    that each row has k neighbors or none, and `alone=False` means that each row has neighbors.

    Examples:
        >>> neighbors = torch.tensor([[4, -1, -1], [-1, -1, -1]])
        >>> choose_neighbor(torch.tensor([7, 8]), neighbors)
        tensor([4, 8])
    """
    (rows, k), device = neighbors.shape, anchor.device
    if padded:
        count = (neighbors >= 0).sum(-1, keepdim=True)
        uniform = torch.rand((rows, 1), generator=generator, device=device, dtype=torch.float64)
        column = (uniform * count).long()
    else:
        column = torch.randint(k, (rows, 1), generator=generator, device=device)
    partner = neighbors.gather(-1, column).squeeze(-1)
    return torch.where(partner < 0, anchor, partner) if padded or alone else partner


def choose_other(
    anchor: Tensor, count: int | Tensor, *, generator: torch.Generator | None = None
) -> Tensor:
    """Draws one of `0 .. count - 1` other than the anchor, uniformly; `anchor` is `[B]`.

    Anchors outside that range exclude nothing. The result is -1 if there is no other.

    Examples:
        >>> choose_other(torch.tensor([0, 1]), 2), choose_other(torch.tensor([0]), 1)
        (tensor([1, 0]), tensor([-1]))
    """
    inside = (anchor >= 0) & (anchor < count)
    choices: Tensor = count - inside.long()
    uniform = torch.rand(
        anchor.shape, generator=generator, device=anchor.device, dtype=torch.float64
    )
    other = (uniform * choices).long()
    other = other + (inside & (other >= anchor))
    return torch.where(choices > 0, other, -1)


def pair_priorities(new: Tensor, old: Tensor, weight: Tensor) -> Tensor:
    """Returns priorities `[B, 2]` of anchors and partners after their mix had the error `new`.

    They are `w * new + (1 - w) * old` for the anchor and `(1 - w) * new + w * old` for the partner,
    where `new` and `weight` (w) are `[B]` and `old` is `[B, 2]`. The row with the larger weight
    changes more.

    Examples:
        >>> pair_priorities(torch.tensor([8.0]), torch.tensor([[0.0, 0.0]]), torch.tensor([0.75]))
        tensor([[6., 2.]])
    """
    share = torch.stack([weight, 1 - weight], -1)
    return torch.lerp(old, new.unsqueeze(-1).expand_as(old), share)


def mean_by_position(index: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the sorted distinct positions of `index` `[n]`, and the mean of the values at each.

    Examples:
        >>> mean_by_position(torch.tensor([5, 2, 5]), torch.tensor([1.0, 4.0, 3.0]))
        (tensor([2, 5]), tensor([4., 2.]))
    """
    position, inverse, count = index.unique(return_inverse=True, return_counts=True)
    total = value.new_zeros(len(position)).index_add_(0, inverse, value)
    return position, total / count


def fingerprint(numbers: Tensor) -> Tensor:
    """Maps rows `[n, d]` to int64 `[n]`; equal rows of one dtype give equal numbers.

    Zero and minus zero are equal. Different rows collide with a chance of about 1 in 2**64.

    Examples:
        >>> first, second, third = fingerprint(torch.tensor([[0.0, 1.0], [-0.0, 1.0], [0.0, 2.0]]))
        >>> bool(first == second), bool(first == third)
        (True, False)
    """
    return torch.cat([_fingerprint(part) for part in numbers.split(_CHUNK)])


def _fingerprint(numbers: Tensor) -> Tensor:
    if numbers.is_floating_point():
        numbers = numbers + 0.0  # minus zero becomes zero
    words = numbers.contiguous().view(torch.int32).long()
    random = _random_factors(words.shape[-1])
    offsets, factors = to_device(random, words.device)
    # A sum of products alone would map round numbers, whose low bits are zero, too close together.
    mixed = (words + offsets) * _ODD
    mixed ^= mixed >> 32
    return (mixed * factors).sum(-1)


@functools.cache
def _random_factors(d: int) -> Tensor:
    """Returns odd numbers `[2, d]`, the same in every process."""
    generator = torch.Generator().manual_seed(d)
    return torch.randint(-(2**63), 2**63 - 1, (2, d), generator=generator) | 1
