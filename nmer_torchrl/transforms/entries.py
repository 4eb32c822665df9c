"""Checks for entries that a fold would mix wrongly or forget to mix."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator, Sequence

from tensordict import NestedKey, TensorDictBase
from torch import Tensor
from torchrl.envs.transforms import Transform

from nmer_torchrl.keys import as_keys, get_entry, next_key

# Entries that TorchRL's transforms add to an episode besides observations.
_NOTES = {"reward", "original_reward", "time_reset", "time_step", "time_policy"}
_NOTES |= {"episode_reward", "reward_sum"}  # TorchRL's names of the return so far
_REWARD: NestedKey = ("next", "reward")


def as_anchor_keys(
    anchor_keys: Sequence[NestedKey], mixed: Collection[NestedKey]
) -> tuple[NestedKey, ...]:
    """Returns the entries that are not mixed; raises an error if one of them is mixed."""
    keys = as_keys(anchor_keys, "anchor_keys")
    both = [key for key in keys if key in mixed]
    if both:
        names = ", ".join(map(repr, both))
        raise ValueError(
            f"`anchor_keys` names {names}, which is mixed; remove it from `anchor_keys` or from "
            "the keys that are mixed."
        )
    return keys


def check_single_rows(rows: TensorDictBase) -> None:
    """Raises an error unless the data to be stored is a row or a vector of rows."""
    if rows.ndim > 1:
        raise ValueError(
            f"The rows are a batch of shape {tuple(rows.shape)}, but the buffer stores a vector of "
            "single rows; extend the buffer with `data.reshape(-1)`."
        )


def check_discrete(rows: TensorDictBase, agreed: Collection[NestedKey]) -> bool:
    """Raises an error if discrete actions would be mixed, or kept while observations are mixed.

    Args:
        rows: Rows of any batch size.
        agreed: Entries that must be equal for rows to be mixed, or that are kept on purpose.

    Returns:
        Whether the check was conclusive: a single row does not show whether an action is one-hot.
    """
    told = True
    for key in rows.keys(True, True):
        if _last(key) != "action" or _first(key) == "next" or key in agreed:
            continue
        entry = get_entry(rows, key)
        one_hot = _is_one_hot(entry, rows.ndim)
        told &= one_hot is not None
        if one_hot or not entry.is_floating_point():
            kind = "one-hot" if one_hot else str(entry.dtype)
            raise ValueError(
                f"The entry {key!r} is {kind}, that is, a discrete action, and a mix of two "
                "discrete actions is not an action. Leave it out of the keys that are measured and "
                f"mixed, and mix only rows in which it is equal: use gates=[Same({key!r})], or "
                f"same_keys=[{key!r}] in make_replay_buffer."
            )
    return told


def _is_one_hot(entry: Tensor, dims: int) -> bool | None:
    """Returns whether rows with `dims` batch dimensions are one-hot; None if it is undecidable.

    Concatenated one-hot parts count as well: all rows then have the same number of ones.
    """
    if entry.ndim <= dims or entry.shape[-1] < 2 or not entry.is_floating_point():
        return False
    ones = (entry == 1).reshape(-1, entry.shape[-1])
    count = ones.sum(-1)
    alike = (count == count[:1]) & (count > 0) & (count < ones.shape[-1])
    if not bool(((entry == 0) | (entry == 1)).all() & alike.all()):
        return False
    return True if bool((ones != ones[:1]).any()) else None


def warn_unmixed(
    fold: Transform,
    rows: TensorDictBase,
    mixed: Collection[NestedKey],
    kept: Collection[NestedKey],
    *,
    outcomes: bool,
) -> None:
    """Warns if some entries of a transition are mixed while others are the anchor's.

    Args:
        fold: The transform that mixes.
        rows: Rows of any batch size.
        mixed: Entries that are mixed.
        kept: Entries that are kept on purpose, or that must be equal.
        outcomes: Whether next observations and rewards should be mixed, too.
    """
    observations = list(_observations(rows))
    if not any(key in mixed for key in observations):
        return  # the fold mixes no observations
    wanted: list[NestedKey] = list(observations)
    if _floats(rows, "action"):
        wanted.append("action")
    if outcomes:
        wanted += [next_key(key) for key in observations]
        wanted += [_REWARD] if _floats(rows, _REWARD) else []
    left = [key for key in wanted if key not in mixed and key not in kept]
    if left:
        names = ", ".join(map(repr, left))
        warnings.warn(
            f"{type(fold).__name__} mixes {', '.join(map(repr, mixed))}, but the rows also hold "
            f"{names}, which are copied from the anchor, so the entries of a mixed row may be "
            "inconsistent. Add them to `mix_keys` (in make_replay_buffer to `keys` or "
            f"`value_keys`), or pass anchor_keys=[{names}] to copy them without this warning.",
            stacklevel=2,
        )


def _observations(rows: TensorDictBase) -> Iterator[NestedKey]:
    """Yields the floating-point entries that a row has both before and after the step."""
    for key in rows.keys(True, True):
        if _last(key) not in _NOTES and _floats(rows, key) and _floats(rows, next_key(key)):
            yield key


def _floats(rows: TensorDictBase, key: NestedKey) -> bool:
    entry = rows.get(key, None)
    return isinstance(entry, Tensor) and entry.is_floating_point()


def _first(key: NestedKey) -> str:
    return key if isinstance(key, str) else key[0]


def _last(key: NestedKey) -> str:
    return key if isinstance(key, str) else key[-1]
