"""Tracking: what a storage holds now, kept up with every write.

`StoredRows` follows a storage and tells which rows have changed. Statistics, covariances, spreads
and the order of time are built on it.
"""

from nmer_torchrl.tracking.rows import StoredRows
from nmer_torchrl.tracking.standardize import RunningStandardizer

__all__ = ["RunningStandardizer", "StoredRows"]
