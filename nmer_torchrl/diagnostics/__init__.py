"""How true a replay method's transitions are."""

from nmer_torchrl.diagnostics.manifold import ManifoldError, manifold_error

__all__ = ["ManifoldError", "manifold_error"]
