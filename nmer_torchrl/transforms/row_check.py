"""The check of new rows by itself, for buffers without another transform of this package."""

from __future__ import annotations

from typing import Any, final

from tensordict import TensorDictBase
from torchrl.envs.transforms import Transform

from nmer_torchrl.transforms.schema import RowSchema


@final
class RowCheck(Transform):
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

    folds = False

    def __init__(self) -> None:
        super().__init__(in_keys=[], out_keys=[])
        self.schema = RowSchema()

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Returns the batch as it is."""
        return tensordict

    def _inv_call(self, tensordict: TensorDictBase | None) -> TensorDictBase | None:
        """Checks what is about to be stored; `None` where an n-step transform waits for more."""
        if tensordict is not None:
            self.schema.check(self, tensordict)
        return tensordict

    def get_extra_state(self) -> dict[str, Any]:
        """Returns what rows look like."""
        return self.schema.state_dict()

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Goes on from there."""
        self.schema.load_state_dict(state)
