"""Tensordict entries as `[n, d]` points, and the checks that go with them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tensordict import NestedKey, TensorDictBase, unravel_key
from torch import Tensor

from nmer_torchrl.functional import all_finite

POINT_KEYS: tuple[NestedKey, ...] = ("observation", "action")
VALUE_KEYS: tuple[NestedKey, ...] = (("next", "observation"), ("next", "reward"))
TERMINATED_KEY: NestedKey = ("next", "terminated")


def as_keys(keys: Sequence[NestedKey] | str, name: str) -> tuple[NestedKey, ...]:
    """A sequence of keys as a tuple; a lone string counts as a sequence of one."""
    keys = (keys,) if isinstance(keys, str) else tuple(keys)
    for key in keys:
        parts = (key,) if isinstance(key, str) else key
        if not isinstance(parts, tuple) or not all(isinstance(part, str) for part in parts):
            raise TypeError(
                f"`{name}` holds {key!r}, which is not a key; "
                'keys are strings or tuples of strings such as ("next", "reward").'
            )
    return tuple(unravel_key(key) for key in keys)


def get_entry(data: TensorDictBase, key: NestedKey) -> Tensor:
    """The entry under `key`, or an error that names those that exist."""
    entry = data.get(key, None)
    if entry is None:
        known = ", ".join(sorted(repr(k) for k in data.keys(True, True)))
        raise KeyError(f"There is no entry {key!r}; the entries are {known}.")
    if not isinstance(entry, Tensor):
        raise ValueError(
            f"{key!r} is not a tensor but a {type(entry).__name__}; name what is in it by a tuple "
            f"within the sequence of keys, such as [({key!r}, ...)] for a nested entry."
        )
    return entry


def get_continuous(data: TensorDictBase, key: NestedKey, argument: str) -> Tensor:
    """The floating-point entry under `key`; `argument` names where the user gave it."""
    entry = get_entry(data, key)
    if not entry.is_floating_point():
        raise ValueError(
            f"Only continuous entries can be mixed or measured, but {key!r} is {entry.dtype}; "
            f"leave it out of `{argument}` or convert it to a floating-point dtype first."
        )
    return entry


def read_points(
    data: TensorDictBase,
    index: Tensor,
    keys: Sequence[NestedKey],
    value_keys: Sequence[NestedKey],
) -> Tensor:
    """Rows `[n]` of the data as points `[n, d]`: their entries under `keys`, flattened and joined.

    A row with a non-finite entry under `keys` or `value_keys` becomes a row of NaN. Points are
    float32, or float64 where a key is.
    """
    n = len(index)
    parts = [get_continuous(data, key, "keys")[index].reshape(n, -1) for key in keys]
    finite = torch.stack([all_finite(part, 1) for part in parts]).all(0)
    for key in value_keys:
        finite &= all_finite(get_continuous(data, key, "value_keys")[index], 1)
    wide = any(part.dtype == torch.float64 for part in parts)
    points = torch.cat([part.to(torch.float64 if wide else torch.float32) for part in parts], 1)
    return points.masked_fill_(~finite.unsqueeze(1), torch.nan)
