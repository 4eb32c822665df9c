"""Uniform anchors with one of their nearest neighbours."""

from __future__ import annotations

from nmer_torchrl.pairs import NeighborPairs
from nmer_torchrl.samplers.base import NearSampler


class NeighborPairSampler(NearSampler):
    """Pairs a uniform anchor with one of its k nearest neighbours among all that is stored now.

    Nearest by the Euclidean distance over Z-scored, concatenated entries (by default observation
    and action), or by another metric. The Z-scores are those of the rows stored now: they follow
    every write and every overwrite. With fewer than k others stored the partner is one of those
    there are; with none, the anchor itself. Rows with a non-finite entry are never partners and
    have none.

    Args:
        k: Number of neighbours to choose from.

    Keyword Args:
        search: `"auto"` (KeOps where the storage is on CUDA, the graph elsewhere), `"graph"`,
            `"keops"`, `"torch"`, `"faiss"`, or an object that satisfies `NeighborSearch`.
        keys: Entries in which distances are measured; they may be nested and of any shape.
        value_keys: Entries that must be finite, too, for a row to be a partner: what the transform
            mixes beyond `keys`.
        metric: How far apart rows are: any `Metric`, such as `Mahalanobis()`. `None` uses
            `Euclidean()`.
        max_distance: Greatest distance of a partner under the metric, or a `QuantileCap`. An anchor
            whose partner is farther away is paired with itself. `None` for no limit.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
        >>> from nmer_torchrl import NeighborPairSampler, PairMixup
        >>> buffer = TensorDictReplayBuffer(
        ...     storage=LazyTensorStorage(1_000),
        ...     sampler=NeighborPairSampler(k=10),
        ...     transform=PairMixup(alpha=0.75),
        ...     batch_size=32,
        ... )
        >>> transitions = TensorDict(
        ...     observation=torch.randn(100, 3),
        ...     action=torch.randn(100, 1),
        ...     next=TensorDict(
        ...         observation=torch.randn(100, 3),
        ...         reward=torch.randn(100, 1),
        ...         terminated=torch.zeros(100, 1, dtype=torch.bool),
        ...         batch_size=[100],
        ...     ),
        ...     batch_size=[100],
        ... )
        >>> _ = buffer.extend(transitions)
        >>> batch = buffer.sample()
        >>> batch["observation"].shape, batch["index"].shape, batch["mixup_weight"].shape
        (torch.Size([32, 3]), torch.Size([32, 2]), torch.Size([32, 1]))
    """

    pairing = NeighborPairs
