"""The check of new rows by itself, for buffers without another transform of this package."""

from __future__ import annotations

from typing import final

from tensordict import TensorDictBase

from nmer_torchrl.transforms.augmentation import Augmentation


@final
class RowCheck(Augmentation):
    """Refuses rows that do not fit the stored ones, before anything of them is stored.

    TorchRL moves its cursor and its length before it writes, so that a write which fails on the
    way, since an entry has another shape or dtype, leaves rows behind that no one wrote; an entry
    that is missing keeps what stood at its position, and one of width 1 is repeated. What a row
    looks like is read from the storage, or from the first rows where it is empty; later rows may
    have more entries. Batches pass unchanged.

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
        """Returns the rows as they are."""
        return rows
