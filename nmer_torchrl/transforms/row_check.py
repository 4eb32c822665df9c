"""A transform that only checks new rows, for buffers without another transform of the package."""

from __future__ import annotations

from typing import final

from tensordict import TensorDictBase

from nmer_torchrl.transforms.augmentation import Augmentation


@final
class RowCheck(Augmentation):
    """Rejects rows that do not fit the stored ones, before they are stored.

    TorchRL advances its cursor and length before it writes. If a write then fails because an entry
    has another shape or dtype, rows that were never written remain. A missing entry keeps its old
    value, and an entry of width 1 is repeated. The expected layout is read from the storage, or
    from the first rows if it is empty. Later rows may have more entries, which the rows after them
    need as well. Batches pass through unchanged.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
        >>> buffer = TensorDictReplayBuffer(
        ...     storage=LazyTensorStorage(10), transform=RowCheck(), batch_size=4
        ... )
        >>> _ = buffer.extend(TensorDict(x=torch.zeros(3, 2), batch_size=[3]))
        >>> buffer.extend(TensorDict(x=torch.zeros(3, 1), batch_size=[3]))  # doctest: +ELLIPSIS
        Traceback (most recent call last):
            ...
        ValueError: The entry 'x' has shape (1,) in each row, but the rows stored before have ...
    """

    def __init__(self) -> None:
        super().__init__((), "", None)

    def augment(self, rows: TensorDictBase) -> TensorDictBase:
        """Returns the rows unchanged."""
        return rows
