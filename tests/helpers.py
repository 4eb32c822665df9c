"""Test data, and a slow float64 implementation of the neighbor search."""

from __future__ import annotations

import torch
from tensordict import TensorDict
from torch import Tensor

POINT_KEYS = ("observation", "action")
MIX_KEYS = ("observation", "action", ("next", "observation"), ("next", "reward"))


def make_transitions(
    n: int, *, observation: int = 3, action: int = 2, terminated: float = 0.0, seed: int = 0
) -> TensorDict:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    ended = torch.rand((n, 1), generator=generator) < terminated
    return TensorDict(
        observation=normal(n, observation) * 10 + 5,
        action=normal(n, action).clamp(-1, 1),
        identity=torch.arange(n) + 1_000 * seed,
        next=TensorDict(
            observation=normal(n, observation) * 10 + 5,
            reward=normal(n, 1),
            terminated=ended,
            done=torch.rand((n, 1), generator=generator) < 0.5,
            batch_size=[n],
        ),
        batch_size=[n],
    )


def stored_points(storage, keys=POINT_KEYS) -> Tensor:
    """Returns the points stored now, in float64."""
    data = storage[: len(storage)]
    return torch.cat([data[key].flatten(1).double() for key in keys], 1)


def oracle_scale(points: Tensor) -> Tensor:
    std, least = points.std(0, correction=0), 1e-8 * points.abs().amax(0)
    return 1 / torch.where(std > least.clamp_min(1e-30), std, least.clamp_min(1.0))


def oracle_distances(points: Tensor, index: Tensor, k: int, scale: Tensor | None = None) -> Tensor:
    """Returns sorted distances `[q, k]` to the nearest other points, padded with infinity."""
    scale = oracle_scale(points.double()) if scale is None else scale
    difference = (points.double()[index].unsqueeze(1) - points.double().unsqueeze(0)) * scale
    distances = difference.square().sum(-1).sqrt()
    distances[torch.arange(len(index)), index] = torch.inf
    distances = distances.masked_fill(distances.isnan(), torch.inf).sort(1).values[:, :k]
    return torch.nn.functional.pad(distances, (0, k - distances.shape[1]), value=torch.inf)


def distances_to(
    points: Tensor, index: Tensor, neighbors: Tensor, scale: Tensor | None = None
) -> Tensor:
    """Returns the distances `[q, k]` of the given neighbors; infinity for -1."""
    scale = oracle_scale(points.double()) if scale is None else scale
    difference = (points.double()[neighbors] - points.double()[index].unsqueeze(1)) * scale
    return difference.square().sum(-1).sqrt().masked_fill(neighbors < 0, torch.inf)


def assert_neighbors(
    points: Tensor, index: Tensor, neighbors: Tensor, scale=None, *, rtol: float = 1e-5
) -> None:
    """Checks that neighbors are the nearest, distinct, sorted, and never the position itself."""
    expected = oracle_distances(points, index, neighbors.shape[1], scale)
    actual = distances_to(points, index, neighbors, scale)
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=rtol * 1e-4)
    assert not (neighbors == index.unsqueeze(1)).any()
    for row in neighbors.tolist():
        found = [position for position in row if position >= 0]
        assert len(set(found)) == len(found)
