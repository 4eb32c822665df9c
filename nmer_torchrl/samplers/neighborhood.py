"""Uniform anchors with all of their nearest neighbours."""

from __future__ import annotations

from nmer_torchrl.pairs import Neighborhoods
from nmer_torchrl.samplers.base import NearSampler


class NeighborhoodSampler(NearSampler):
    """Draws uniform anchors, each with its k nearest neighbours: positions `[B, 1 + k]`.

    The anchor comes first, then its neighbours, nearest first. In place of neighbours that are not
    there, since fewer rows are stored or since the anchor has a non-finite entry, stands the anchor
    itself. Arguments, neighbours and promises are those of `NeighborPairSampler`; the fold is
    `NeighborhoodMixup` or `GaussianProcessMixup`.

    Examples:
        >>> from nmer_torchrl.samplers import NeighborhoodSampler
        >>> NeighborhoodSampler(k=5)
        NeighborhoodSampler(k=5, keys=('observation', 'action'))
    """

    pairing = Neighborhoods
