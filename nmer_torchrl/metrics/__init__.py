"""Metrics: how far apart two rows are.

A metric is given to a sampler of neighbors as `metric=`. It is a description that never changes;
what it needs to know of the rows stored now is in the *space* that it opens for a sampler.
"""

from nmer_torchrl.metrics.base import Metric, Space, View
from nmer_torchrl.metrics.euclidean import Euclidean, ProductNorm
from nmer_torchrl.metrics.feature import FeatureSpace
from nmer_torchrl.metrics.mahalanobis import Mahalanobis

__all__ = [
    "Euclidean",
    "FeatureSpace",
    "Mahalanobis",
    "Metric",
    "ProductNorm",
    "Space",
    "View",
]
