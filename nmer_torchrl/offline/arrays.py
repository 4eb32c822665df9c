"""Converts recorded arrays, one row for each step, to transitions."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from tensordict import TensorDict

from nmer_torchrl.checks import COUNT
from nmer_torchrl.offline.transitions import Transitions

Numbers = NDArray[np.float32]
Flags = NDArray[np.bool_]

REQUIRED = ("observations", "actions", "rewards", "terminals")
NAMES = (*REQUIRED, "timeouts", "next_observations")
_ALLOWED = (
    "observations [N, o], actions [N, a], rewards [N] and terminals [N] are needed; timeouts [N] "
    "and next_observations [N, o] are optional"
)


class _Log(NamedTuple):
    """The arrays after their checks; all have N rows."""

    observations: Numbers  # [N, o]
    actions: Numbers  # [N, a]
    rewards: Numbers  # [N, 1]
    terminals: Flags  # [N]
    timeouts: Flags | None  # [N]
    next_observations: Numbers | None  # [N, o]


class _Ends(NamedTuple):
    """Flags of the rows at which episodes end, `[N]` each; no row has both."""

    terminated: Flags
    truncated: Flags


def make_transitions(arrays: Mapping[str, ArrayLike], max_steps: int | None = None) -> Transitions:
    """Builds transitions from recorded arrays in D4RL's layout, one row for each step.

    Row t means: in `observations[t]`, `actions[t]` led to `rewards[t]` and, if `terminals[t]`, to a
    terminal state. Rows are in temporal order, one episode after the other.

    Without `next_observations`, the next observation of a row is the observation of the row that
    follows. A terminal row gets its own observation instead, since the value of its next
    observation is never used. The next observation of a time limit, and of the last row, is not
    recorded, so these rows are left out. Rows with NaN or infinite numbers are left out, too.

    A row that is both terminal and a time limit counts as a time limit.

    Args:
        arrays: `observations` `[N, o]`, `actions` `[N, a]`, `rewards` `[N]` or `[N, 1]`,
            `terminals` `[N]`, and optionally `timeouts` `[N]` and `next_observations` `[N, o]`.
            Flags are booleans or the numbers 0 and 1. Other arrays are ignored, with a note. The
            arrays are copied, as float32.
        max_steps: Time limit of the task, for data without `timeouts`: an episode that has this
            many steps without a terminal row ends by the time limit.

    Examples:
        >>> import numpy as np
        >>> from nmer_torchrl import make_replay_buffer
        >>> from nmer_torchrl.offline import make_transitions
        >>> transitions = make_transitions(
        ...     {
        ...         "observations": np.random.randn(100, 3),
        ...         "actions": np.random.uniform(-1, 1, (100, 2)),
        ...         "rewards": np.random.randn(100),
        ...         "terminals": np.arange(100) % 25 == 24,
        ...         "timeouts": np.arange(100) == 59,
        ...     }
        ... )
        >>> dict(transitions.left_out)
        {'time limit without a next observation': 1}
        >>> buffer = make_replay_buffer("nmer", capacity=len(transitions), batch_size=32)
        >>> _ = buffer.extend(transitions.rows)
    """
    return assemble(dict(arrays), max_steps, copy=True)


def assemble(
    arrays: dict[str, Any],
    max_steps: int | None = None,
    *,
    copy: bool = False,
    notes: Sequence[str] = (),
) -> Transitions:
    """Does the work of `make_transitions`, and empties `arrays`.

    Args:
        arrays: The arrays of `make_transitions`.
        max_steps: The time limit of `make_transitions`.
        copy: Whether to copy the arrays. If False, rows may share memory with them.
        notes: Notes that precede the others.
    """
    if max_steps is not None:
        COUNT("max_steps", max_steps)
    said = list(notes)
    log = _check(arrays, copy, said)
    ends = _find_ends(log, max_steps, said)
    left_out, kept = _choose(log, ends)
    if not kept.any():
        reasons = ", ".join(f"{reason} ({count:,})" for reason, count in left_out.items())
        raise ValueError(
            f"None of the {len(kept):,} rows can be used: {reasons}. Correct these rows first."
        )
    truncated = _cut(ends, kept, said)
    if lost := int((ends.terminated & ~kept).sum()):
        said.append(f"Terminal rows among those left out: {lost:,}.")
    return Transitions(_rows(log, ends.terminated, truncated, kept), left_out, tuple(said))


# -- checks ----------------------------------------------------------------------------------------


def _check(arrays: dict[str, Any], copy: bool, notes: list[str]) -> _Log:
    """Validates the arrays, converts their shapes and dtypes, and empties `arrays`."""
    if missing := [name for name in REQUIRED if name not in arrays]:
        given = ", ".join(map(repr, arrays)) or "none"
        raise ValueError(
            f"The arrays lack {', '.join(map(repr, missing))}; the given arrays are {given}. "
            f"{_ALLOWED}."
        )
    others = [str(name) for name in arrays if name not in NAMES]
    for name in others:
        near = difflib.get_close_matches(name, NAMES, n=1, cutoff=0.85)
        if near and near[0] not in arrays:
            raise ValueError(f"Unknown array {name!r}; did you mean {near[0]!r}? {_ALLOWED}.")
    if others:
        notes.append(f"Ignored: {', '.join(map(repr, others))}.")
    observations = _numbers("observations", arrays.pop("observations"), copy)
    count, width = observations.shape
    actions = _numbers("actions", arrays.pop("actions"), copy)
    rewards = _numbers("rewards", arrays.pop("rewards"), copy)
    if rewards.shape[1] != 1:
        raise ValueError(f"'rewards' has shape {rewards.shape}; give one number per row, [N].")
    terminals = _flags("terminals", arrays.pop("terminals"))
    timeouts = _flags("timeouts", arrays.pop("timeouts")) if "timeouts" in arrays else None
    following = None
    if "next_observations" in arrays:
        following = _numbers("next_observations", arrays.pop("next_observations"), copy)
        if following.shape[1] != width:
            raise ValueError(
                f"'next_observations' has {following.shape[1]} numbers per row, but 'observations' "
                f"has {width}; give the same entries in both."
            )
    log = _Log(observations, actions, rewards, terminals, timeouts, following)
    for name, array in zip(NAMES, log, strict=True):
        if array is not None and len(array) != count:
            raise ValueError(
                f"{name!r} has {len(array)} rows, but 'observations' has {count}; give arrays of "
                "the same length, one row for each step."
            )
    if not count:
        raise ValueError("The arrays have no rows; give at least one.")
    return log


def _array(name: str, values: Any) -> NDArray[Any]:
    if isinstance(values, np.ma.MaskedArray) and np.ma.is_masked(values):
        raise ValueError(
            f"{name!r} has masked entries, which are not supported. Remove these rows, or, for "
            "numbers but not flags, use array.astype('float32').filled(numpy.nan)."
        )
    try:
        return np.asarray(values)
    except ValueError as error:
        raise ValueError(f"{name!r} is not an array: {error}. {_ALLOWED}.") from None


def _numbers(name: str, values: Any, copy: bool) -> Numbers:
    """Returns the values as `[N, width]` in float32; values out of its range become infinite."""
    array = _array(name, values)
    if name == "actions" and array.dtype.kind in "iub":
        raise ValueError(
            f"'actions' is {array.dtype}, which means discrete actions, but only continuous ones "
            "are supported; if they are continuous, convert them: actions.astype('float32')."
        )
    if array.dtype.kind not in "fiub":
        raise ValueError(f"{name!r} is {array.dtype}; give numbers, such as float32.")
    if array.ndim > 2 or array.dtype == np.uint8:
        raise ValueError(
            f"{name!r} is {array.dtype} of shape {array.shape}, which looks like images, but each "
            "row must be a vector; give features of the images, or convert other quantities to "
            f"float32 of shape [N, width]."
        )
    if array.ndim == 0 or (array.ndim == 2 and array.shape[1] == 0):
        raise ValueError(f"{name!r} has shape {array.shape}; give shape [N, width].")
    array = array[:, None] if array.ndim == 1 else array
    with np.errstate(over="ignore"):  # overflows become infinite, which is checked later
        return np.array(array, np.float32, copy=copy or None, order="C")


def _flags(name: str, values: Any) -> Flags:
    """Returns the values as `[N]` booleans; raises an error if one is neither 0 nor 1."""
    array = _array(name, values)
    if array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    if array.ndim != 1 or array.dtype.kind not in "fiub":
        raise ValueError(
            f"{name!r} is {array.dtype} of shape {array.shape}; give one flag per row, [N], as "
            "booleans or as the numbers 0 and 1."
        )
    wrong = np.flatnonzero((array != 0) & (array != 1))
    if len(wrong):
        raise ValueError(
            f"{name!r} is {array[wrong[0]]} in row {wrong[0]}, and {len(wrong)} rows are neither 0 "
            "nor 1; give a flag for each row."
        )
    return array.astype(np.bool_)


# -- ends of episodes ------------------------------------------------------------------------------


def _find_ends(log: _Log, max_steps: int | None, notes: list[str]) -> _Ends:
    terminated, count = log.terminals, len(log.terminals)
    if stays := int((terminated[1:] & terminated[:-1]).sum()):
        notes.append(
            f"Terminal rows right after another terminal row: {stays:,}. If the flag stays set "
            "after an episode has ended, remove the rows up to the beginning of the next episode."
        )
    apart = np.zeros(count, np.bool_)  # rows whose episode does not continue in the next row
    if log.next_observations is not None:
        apart[:-1] = _differ(log.next_observations[:-1], log.observations[1:])
    if log.timeouts is not None:
        truncated = log.timeouts
        if both := int((terminated & truncated).sum()):
            notes.append(
                f"Rows that are both terminal and a time limit: {both:,}. They count as time "
                "limits."
            )
        terminated = terminated & ~truncated
        if max_steps is not None:
            notes.append(f"max_steps={max_steps} is not used: the data has time limits.")
    elif max_steps is not None:
        truncated = _steps(terminated | apart) % max_steps == 0
        truncated &= ~terminated
        notes.append(f"Time limits inferred from max_steps={max_steps}: {truncated.sum():,}.")
    else:
        truncated = np.zeros(count, np.bool_)
        if log.next_observations is None:
            notes.append(
                "The data has no time limits. If an episode ended by a time limit, its last row is "
                "joined to the first row of the next episode; give `timeouts`, or `max_steps` if "
                "the limit is always the same."
            )
    apart &= ~(terminated | truncated)
    if found := int(apart.sum()):
        notes.append(
            "Rows without a flag whose next observation is not the observation of the row after "
            f"them: {found:,}. They count as the last rows of episodes that were cut off."
        )
    if 2 * found > count:
        notes.append(
            "These are most of the rows: check that the rows are in temporal order and that "
            "next_observations is not shifted or rounded."
        )
    return _Ends(terminated, truncated | apart)


def _differ(left: Numbers, right: Numbers) -> Flags:
    """Returns which rows `[n]` differ; NaN does not count, since such rows are left out."""
    differ = left != right
    differ &= ~np.isnan(left)
    differ &= ~np.isnan(right)
    return differ.any(1)


def _steps(ended: Flags) -> NDArray[np.int64]:
    """Returns the number of steps `[N]` of each row's episode up to and including the row."""
    position = np.arange(len(ended))
    begins = np.concatenate([[True], ended[:-1]])
    return position - np.maximum.accumulate(np.where(begins, position, 0)) + 1


def _cut(ends: _Ends, kept: Flags, notes: list[str]) -> Flags:
    """Returns `truncated` `[N]`, which is also set if the next row was left out."""
    ended = ends.terminated | ends.truncated
    index = np.flatnonzero(kept)
    before, after = index[:-1], index[1:]
    cut = (after != before + 1) & ~ended[before]
    total = ended.cumsum()
    if split := int((cut & (total[after - 1] == total[before])).sum()):
        notes.append(
            f"Places where rows left out interrupt an episode: {split:,}. The rows after each "
            "place count as another episode."
        )
    truncated = ends.truncated.copy()
    truncated[before[cut]] = True
    truncated[index[-1]] |= not ended[index[-1]]
    return truncated


# -- rows ------------------------------------------------------------------------------------------


def _choose(log: _Log, ends: _Ends) -> tuple[dict[str, int], Flags]:
    """Returns the number of rows that are left out, by reason, and a mask `[N]` of kept rows."""
    finite = {name: np.isfinite(getattr(log, name)).all(1) for name in REQUIRED[:3]}
    out = {f"NaN or infinite number in {name}": ~good for name, good in finite.items()}
    if log.next_observations is not None:
        bad = ~np.isfinite(log.next_observations).all(1)
        out["NaN or infinite number in next_observations"] = bad
    else:
        out["time limit without a next observation"] = ends.truncated
        last = np.zeros(len(ends.truncated), np.bool_)
        last[-1] = not ends.terminated[-1]
        out["last row without a next observation"] = last
        following = finite["observations"][_following(ends.terminated)]
        out["NaN or infinite number in the observations of the next row"] = ~following
    kept = np.ones(len(ends.terminated), np.bool_)
    left_out = {}
    for reason, mask in out.items():
        if count := int((mask & kept).sum()):
            left_out[reason] = count
            kept &= ~mask
    return left_out, kept


def _following(terminated: Flags) -> NDArray[np.int64]:
    """Returns the row `[N]` of each next observation: the row's own if it is terminal or last."""
    position = np.arange(len(terminated))
    return np.where(terminated, position, np.minimum(position + 1, len(position) - 1))


def _rows(log: _Log, terminated: Flags, truncated: Flags, kept: Flags) -> TensorDict:
    index = None if kept.all() else np.flatnonzero(kept)  # without it nothing is copied

    def pick(array: NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(array if index is None else array[index])

    if log.next_observations is None:
        following = torch.from_numpy(log.observations[_following(terminated)[kept]])
    else:
        following = pick(log.next_observations)
    count = len(following)
    return TensorDict(
        observation=pick(log.observations),
        action=pick(log.actions),
        next=TensorDict(
            observation=following,
            reward=pick(log.rewards),
            terminated=pick(terminated).unsqueeze(1),
            truncated=pick(truncated).unsqueeze(1),
            done=pick(terminated | truncated).unsqueeze(1),
            batch_size=[count],
        ),
        batch_size=[count],
    )
