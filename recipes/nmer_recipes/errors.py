"""Errors that the user can fix."""

from __future__ import annotations


class UsageError(Exception):
    """An error that the user can fix; shown without a traceback."""
