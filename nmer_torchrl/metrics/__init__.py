"""Metrics define the distance between two rows.

A metric is passed to a neighbor sampler as `metric=`. It is immutable. The statistics of the stored
rows are in the *space* that it opens for a sampler.
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
