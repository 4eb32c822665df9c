"""An anchor and all of its nearest neighbours."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchrl.data.replay_buffers import Storage

from nmer_torchrl.samplers.neighbor import NeighborPairSampler


class NeighborhoodSampler(NeighborPairSampler):
    """Draws uniform anchors, each with its k nearest neighbours: positions `[B, 1 + k]`.

    The anchor comes first, then its neighbours, nearest first. In place of neighbours that are not
    there, since fewer rows are stored or since the anchor has a non-finite entry, stands the anchor
    itself. Arguments, neighbours and promises are those of `NeighborPairSampler`; the fold is
    `NeighborhoodMixup` or `GaussianProcessMixup`.

    Examples:
        >>> from nmer_torchrl import NeighborhoodSampler
        >>> NeighborhoodSampler(k=5)
        NeighborhoodSampler(k=5, keys=('observation', 'action'))
    """

    def sample(self, storage: Storage, batch_size: int) -> tuple[Tensor, dict[str, Any]]:
        """Positions `[B, 1 + k]`: uniform anchors and their neighbours."""
        with self._lock:
            self._synchronize(storage)
            anchor = self._uniform(batch_size).unsqueeze(1)
            neighbors = self._neighborhood.neighbors(anchor.squeeze(1))
        return torch.cat([anchor, torch.where(neighbors < 0, anchor, neighbors)], 1), {}
