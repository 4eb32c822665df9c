"""Measures how close a replay method's transitions are to the simulator's."""

from nmer_torchrl.diagnostics.manifold import ManifoldError, manifold_error

__all__ = ["ManifoldError", "manifold_error"]
