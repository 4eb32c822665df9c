"""How much the tests do: what CI has time for, or NMER_SOAK times as much."""

import os

SOAK = float(os.environ.get("NMER_SOAK") or 1)


def soak(count: int) -> int:
    """Returns the number of examples: as given in CI, and a multiple in the long version."""
    return max(1, round(count * SOAK))
