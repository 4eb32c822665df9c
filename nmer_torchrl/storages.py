"""A storage that reads pairs faster."""

from __future__ import annotations

from typing import Any

from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl.data import LazyTensorStorage

from nmer_torchrl import _compat


class PairStorage(LazyTensorStorage):
    """A `LazyTensorStorage` that reads the `[B, 2]` positions of a pair sampler faster.

    What it returns is the same. Each entry is gathered by `index_select`, all anchors first and
    then all partners, which leaves both contiguous for the fold. Rows are read and written under a
    lock that processes share, so that none is read while `buffer[i] = row`, which takes no such
    lock, writes it in another process. `make_replay_buffer` uses this storage unless it is given
    one.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> storage = PairStorage(10)
        >>> rows = TensorDict(x=torch.tensor([5.0, 6.0, 7.0]), batch_size=[3])
        >>> storage.set(torch.arange(3), rows)
        >>> storage.get(torch.tensor([[0, 1], [2, 0]]))["x"]
        tensor([[5., 6.],
                [7., 5.]])
    """

    def get(self, index: Any) -> Any:
        """Reads the rows at these positions."""
        with _compat.revision_lock(self):
            if isinstance(index, Tensor) and index.ndim == 2 and len(self):
                data = _compat.entries(self)
                if type(data) is TensorDict:
                    return _read_pairs(data, index.T)
            return super().get(index)

    def set(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> None:
        """Writes rows to these positions."""
        with _compat.revision_lock(self):
            super().set(cursor, data, set_cursor=set_cursor)


def _read_pairs(data: TensorDict, index: Tensor) -> TensorDictBase:
    """Rows `[n, ...]` at positions `[2, B]`, as `[B, 2, ...]`."""
    flat = index.reshape(-1)
    entries: dict[str, Any] = {}
    for name, value in data.items():
        if isinstance(value, Tensor):
            rows = value.index_select(0, flat)
            entries[name] = rows.view(*index.shape, *rows.shape[1:]).transpose(0, 1)
        elif type(value) is TensorDict:
            entries[name] = _read_pairs(value, index)
        else:
            entries[name] = value[index.T]
    return _compat.make_tensordict(entries, index.T.shape + data.batch_size[1:], data.device)
