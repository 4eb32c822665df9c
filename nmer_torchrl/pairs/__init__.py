"""Pairings choose the partners that each anchor is mixed with.

A pairing is a TorchRL `SampleUnit`: it expands the positions `[B]` that a sampler has drawn to
`[B, 2]`, anchor and partner. The storage then yields a `[B, 2]` batch, which a fold such as
`PairMixup` turns into `[B]`. `Neighborhoods` expands to `[B, 1 + k]`. An anchor without a partner
is paired with itself.
"""

from nmer_torchrl.pairs.base import Pairing
from nmer_torchrl.pairs.cap import QuantileCap
from nmer_torchrl.pairs.neighbor import NearPairing, Neighborhoods, NeighborPairs
from nmer_torchrl.pairs.random import RandomPairs
from nmer_torchrl.pairs.successor import SuccessorPairs

__all__ = [
    "NearPairing",
    "NeighborPairs",
    "Neighborhoods",
    "Pairing",
    "QuantileCap",
    "RandomPairs",
    "SuccessorPairs",
]
