"""Slow reference implementations of predictions and priorities."""

from __future__ import annotations

from collections import defaultdict
from fractions import Fraction

import torch


def slow_prediction(process, points, outputs, query):
    """Computes the equations for one neighborhood in float64."""
    n = len(points)
    apart = [[(x - y).norm() for y in points] for x in points]
    length = process.lengthscale * sum(sum(row) for row in apart) / (n * (n - 1))
    length = length if length > 0 else torch.tensor(1.0)

    def kernel(x, y):
        return torch.exp(-(x - y).square().sum() / (2 * length**2))

    gram = torch.stack([torch.stack([kernel(x, y) for y in points]) for x in points])
    gram = gram + process.noise_variance * torch.eye(n, dtype=torch.float64)
    near = torch.stack([kernel(x, query) for x in points])
    mean = outputs.mean(0)
    solved = torch.linalg.solve(gram, near)
    return mean + solved @ (outputs - mean), 1 - solved @ near


def probabilities(values, alpha=0.6, eps=1e-6) -> list[float]:
    """Computes the probabilities of positions in plain Python."""
    powers = [(float(p) + eps) ** alpha for p in values]
    return [power / sum(powers) for power in powers]


def importance(values, alpha=0.6, beta=0.4, eps=1e-6) -> torch.Tensor:
    """Computes `(N * P(i)) ** -beta`, divided by the largest of them, in plain Python."""
    raw = [(len(values) * p) ** -beta for p in probabilities(values, alpha, eps)]
    return torch.tensor([weight / max(raw) for weight in raw])


def reference_update(old, pairs, weights, errors) -> list[float]:
    """Returns the priorities after a batch, computed pair by pair in exact fractions."""
    proposals = defaultdict(list)
    for (anchor, partner), weight, error in zip(pairs, weights, errors, strict=True):
        w, new = Fraction(weight), Fraction(error)
        if w == 1 or anchor == partner:
            proposals[anchor].append(new)
        else:
            proposals[anchor].append(w * new + (1 - w) * Fraction(old[anchor]))
            proposals[partner].append((1 - w) * new + w * Fraction(old[partner]))
    return [
        float(sum(proposals[i]) / len(proposals[i])) if i in proposals else old[i]
        for i in range(len(old))
    ]
