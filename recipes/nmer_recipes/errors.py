"""What goes wrong by the user's hand."""

from __future__ import annotations


class UsageError(Exception):
    """Something that the user can put right; shown without a traceback."""
