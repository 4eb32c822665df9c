"""Reads tensordict entries as `[n, d]` points, and checks keys."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from tensordict import NestedKey, TensorDictBase, unravel_key
from torch import Tensor

from nmer_torchrl.functional import all_finite

POINT_KEYS: tuple[NestedKey, ...] = ("observation", "action")
VALUE_KEYS: tuple[NestedKey, ...] = (("next", "observation"), ("next", "reward"))
TERMINATED_KEY: NestedKey = ("next", "terminated")
END_KEYS: tuple[NestedKey, ...] = (("next", "done"), TERMINATED_KEY, ("next", "truncated"))
TRAJECTORY_KEY: NestedKey = ("collector", "traj_ids")


def as_keys(keys: Sequence[NestedKey] | str, name: str) -> tuple[NestedKey, ...]:
    """Returns a sequence of keys as a tuple; a single string counts as one key.

    A list inside the sequence is a nested key, as config files write it.
    """
    try:
        keys = (keys,) if isinstance(keys, str) else tuple(keys)
    except TypeError:
        raise TypeError(
            f"`{name}` is {keys!r}, which is not a sequence of keys; "
            'give a list such as ["observation", ("next", "reward")].'
        ) from None
    keys = tuple(tuple(key) if isinstance(key, list) else key for key in keys)
    for key in keys:
        parts = (key,) if isinstance(key, str) else key
        if not (isinstance(parts, tuple) and parts and all(isinstance(p, str) for p in parts)):
            raise TypeError(
                f"`{name}` holds {key!r}, which is not a key; "
                'keys are strings or tuples of strings such as ("next", "reward").'
            )
    return tuple(unravel_key(key) for key in keys)


class Roles(NamedTuple):
    """The keys of a transition by role; see `as_roles`."""

    observations: tuple[NestedKey, ...]
    next_observations: tuple[NestedKey, ...]  # in the same order as the observations
    actions: tuple[NestedKey, ...]
    rewards: tuple[NestedKey, ...]


def as_roles(keys: Sequence[NestedKey], value_keys: Sequence[NestedKey]) -> Roles:
    """Sorts keys into observations, actions and rewards by TorchRL's naming.

    An observation is an entry of `keys` whose `("next", key)` is among `value_keys`; the other
    `keys` are actions, and the other `value_keys` rewards.

    Examples:
        >>> as_roles(POINT_KEYS, VALUE_KEYS).observations
        ('observation',)
    """
    keys, value_keys = as_keys(keys, "keys"), as_keys(value_keys, "value_keys")
    observations = tuple(key for key in keys if next_key(key) in value_keys)
    if not observations:
        raise ValueError(
            f"None of the keys {keys} is an observation, because `value_keys` {value_keys} has no "
            "('next', key) for any of them; name both the observation and the next observation."
        )
    following = tuple(next_key(key) for key in observations)
    return Roles(
        observations,
        following,
        actions=tuple(key for key in keys if key not in observations),
        rewards=tuple(key for key in value_keys if key not in following),
    )


def next_key(key: NestedKey) -> NestedKey:
    """Returns the key under which TorchRL stores the same entry one step later."""
    return unravel_key(("next", key))


def get_entry(data: TensorDictBase, key: NestedKey) -> Tensor:
    """Returns the entry under `key`; raises an error that lists the existing keys."""
    entry = data.get(key, None)
    if entry is None:
        known = ", ".join(sorted(repr(k) for k in data.keys(True, True)))
        raise KeyError(f"There is no entry {key!r}; the entries are {known}.")
    if not isinstance(entry, Tensor):
        raise ValueError(
            f"{key!r} is a {type(entry).__name__}, not a tensor; to name a tensor inside a nested "
            f"entry, put a tuple into the list of keys, as in [({key!r}, ...)]."
        )
    return entry


def get_continuous(data: TensorDictBase, key: NestedKey, argument: str) -> Tensor:
    """Returns the floating-point entry under `key`; errors name the user's `argument`."""
    entry = get_entry(data, key)
    if not entry.is_floating_point():
        raise ValueError(
            f"Only continuous entries can be mixed or measured, but {key!r} is {entry.dtype}; "
            f"leave it out of `{argument}`, or convert it to a floating-point dtype if it is a "
            f"quantity. For a discrete action, mix only rows in which it is equal: "
            f"gates=[Same({key!r})]."
        )
    return entry


def read_points(
    data: TensorDictBase,
    index: Tensor | slice,
    keys: Sequence[NestedKey],
    value_keys: Sequence[NestedKey],
) -> Tensor:
    """Returns rows `[n]` as points `[n, d]`: their entries under `keys`, concatenated.

    A row with a non-finite entry under `keys` or `value_keys` becomes NaN. Points are float32, or
    float64 if an entry is. All entries must be continuous.
    """
    rows = [data.get(key)[index] for key in (*keys, *value_keys)]
    parts = [row.reshape(len(row), -1) for row in rows]
    points = torch.cat(parts[: len(keys)], 1)
    points = points if points.dtype == torch.float64 else points.float()
    finite = all_finite(points, 1)
    if value_keys:
        finite &= all_finite(torch.cat(parts[len(keys) :], 1), 1)
    return points.masked_fill_(~finite.unsqueeze(1), torch.nan)


def read_features(
    data: TensorDictBase,
    index: Tensor | slice,
    feature: Callable[[TensorDictBase], Tensor],
    points: Tensor,
) -> Tensor:
    """Returns rows `[n]` as points `[n, f]`, computed by a function.

    Rows that are NaN in `points`, the result of `read_points`, are NaN here as well.
    """
    features = _call_feature(feature, data[index])
    return features.masked_fill(points[:, :1].isnan(), torch.nan)


def join_entries(
    batch: TensorDictBase,
    keys: Sequence[NestedKey],
    feature: Callable[[TensorDictBase], Tensor] | None,
) -> Tensor:
    """Returns rows `[n]` as points: concatenated entries `[n, d]`, or features `[n, f]`."""
    if feature is not None:
        return _call_feature(feature, batch)
    parts = [get_continuous(batch, key, "keys").reshape(len(batch), -1) for key in keys]
    return torch.cat(parts, 1)


@torch.no_grad()
def _call_feature(feature: Callable[[TensorDictBase], Tensor], rows: TensorDictBase) -> Tensor:
    features = feature(rows)
    good = isinstance(features, Tensor) and features.ndim == 2 and len(features) == len(rows)
    if not good or not features.is_floating_point():
        kind = type(features).__name__
        found = f"{features.dtype} {tuple(features.shape)}" if kind == "Tensor" else kind
        raise ValueError(
            f"The feature function returned {found} for {len(rows)} rows, but it must return "
            f"floating-point points of shape ({len(rows)}, f)."
        )
    return features if features.dtype == torch.float64 else features.float()
