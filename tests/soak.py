"""How much the tests do: what CI has time for, or NMER_SOAK times as much."""

import os

SOAK = float(os.environ.get("NMER_SOAK") or 1)


def soak(count: int) -> int:
    """So many examples in CI, and in the long version as many times more as it says."""
    return max(1, round(count * SOAK))
