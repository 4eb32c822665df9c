"""Tracks the rows of a storage, and statistics of them, through every write.

`StoredRows` follows a storage and reports which rows have changed. Statistics, covariances,
standard deviations and the temporal order of rows build on it.
"""

from nmer_torchrl.tracking.rows import StoredRows
from nmer_torchrl.tracking.standardize import RunningStandardizer

__all__ = ["RunningStandardizer", "StoredRows"]
