"""n-step rows: a transform to store those of several environments, and checks."""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple, final

import torch
from tensordict import NestedKey, TensorDictBase, unravel_key
from torch import Tensor
from torchrl.data.replay_buffers import Storage
from torchrl.envs.transforms import MultiStepTransform, Transform

from nmer_torchrl import _compat
from nmer_torchrl.functional import any_feature

# MultiStepTransform writes these.
STEPS_KEY = "steps_to_next_obs"
NONTERMINAL_KEY = "nonterminal"
_ORDER = "transform=Compose(fold, FlattenRows(), MultiStepTransform(...))"


@final
class FlattenRows(Transform):
    """Flattens rows `[envs, steps]` to single rows before they are stored.

    A buffer of pairs stores single rows. `MultiStepTransform` needs the rows of each environment
    separately to compute n-step returns, so rows must be flattened after it. Writes pass through a
    buffer's transforms from the last to the first, so append this one first and
    `MultiStepTransform` after it. Without `MultiStepTransform` it replaces `data.reshape(-1)`, such
    as when a collector writes to the buffer itself. Batches pass through unchanged.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
        >>> buffer = TensorDictReplayBuffer(
        ...     storage=LazyTensorStorage(10), transform=FlattenRows(), batch_size=4
        ... )
        >>> _ = buffer.extend(TensorDict(x=torch.zeros(2, 3), batch_size=[2, 3]))
        >>> len(buffer)
        6
    """

    folds = False

    def __init__(self) -> None:
        super().__init__(in_keys=[], out_keys=[])
        self._order = TimeOrder()

    def forget(self) -> None:
        """Forgets the order of the rows that were written."""
        self._order.forget()

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Returns the batch unchanged."""
        return tensordict

    def _inv_call(self, tensordict: TensorDictBase | None) -> TensorDictBase | None:
        """Flattens rows before they are stored; `None` if an n-step transform waits for more."""
        if tensordict is None:
            return None
        for transform in _n_step_transforms(self):
            if tensordict.ndim > 1 and not _is_n_step(tensordict):
                raise ValueError(
                    "FlattenRows would join the rows of different environments before "
                    "MultiStepTransform gets them; append MultiStepTransform after FlattenRows, as "
                    f"in {_ORDER}."
                )
            self._order.check(tensordict, transform)
        return tensordict.reshape(-1) if tensordict.ndim > 1 else tensordict


class TimeOrder:
    """Checks that the rows that an n-step transform joins follow each other in time.

    A row follows another if it starts from the next observation of the other, or if the other ends
    an episode. Rows of several environments in one dimension do not, and neither do rows of
    different rollouts that were cut off without an end flag. The rows of one call are also compared
    with those of earlier calls.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Forgets all rows."""
        self._last: _Steps | None = None  # the last rows, to compare the next ones with
        self._n = 0  # the n of their n-step returns
        # The storage's revision when it was first seen empty; -1 if it has held rows since then.
        self._empty_at: int | None = None
        self._storage: weakref.ref[Storage] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_storage": None}

    def finds_emptied(self, storage: Storage) -> bool:
        """Returns whether the storage is empty but has held rows; call it before each write."""
        if self._storage is None or self._storage() is not storage:
            self.forget()
            self._storage = weakref.ref(storage)
        now = _compat.revision(storage)
        emptied = not len(storage) and self._empty_at not in (None, now)
        self._empty_at = -1 if len(storage) else now if self._empty_at is None else self._empty_at
        return emptied

    def check(self, rows: TensorDictBase, transform: MultiStepTransform) -> None:
        """Raises an error unless rows `[*B, T]` are in temporal order along the last dimension."""
        dim = rows.ndim - 1
        steps = _read_steps(rows, transform) if rows.ndim else None
        if steps is None:
            return
        n = 1
        if _is_n_step(rows):  # the transform has processed these rows already
            n = transform.n_steps
            if self._last is not None and self._n == n:
                pairs = zip(self._last, steps, strict=True)
                steps = _Steps(*(torch.cat(pair, dim) for pair in pairs))
            kept = min(n, steps.ended.shape[dim])
            self._last = _Steps(*(part.narrow(dim, -kept, kept).clone() for part in steps))
            self._n = n
        joined = steps.ended.shape[dim] - n  # rows whose successor is among these rows
        if joined <= 0:
            return
        keeps_first = n == 1 or transform.done_key in transform.done_keys
        ended = steps.ended.narrow(dim, n - 1 if keeps_first else 0, joined)
        target, start = steps.target.narrow(dim, 0, joined), steps.start.narrow(dim, n, joined)
        differs = (target != start) & ~(target.isnan() & start.isnan())
        far = steps.ahead.narrow(dim, 0, joined) == n
        if (differs.any(-1) & far & ~ended).any():
            raise ValueError(
                "MultiStepTransform joins rows that do not follow each other in time: some do not "
                "start from the next observation of the row before. Create a new buffer with "
                f"{_ORDER}, and extend it with rows of shape [envs, steps]. Where an episode is "
                'cut off, set ("next", "done") of its last row to True.'
            )


class _Steps(NamedTuple):
    """The data that decides whether rows `[*B, T]` follow each other."""

    start: Tensor  # `[*B, T, d]`, observations
    target: Tensor  # `[*B, T, d]`, next observations
    ended: Tensor  # `[*B, T]`, whether the episode ends
    ahead: Tensor  # `[*B, T]`, number of steps to the target


def _read_steps(rows: TensorDictBase, transform: MultiStepTransform) -> _Steps | None:
    """Reads the steps from rows; None if there is no end flag or nothing to compare."""
    dims, following = rows.ndim, rows.get("next", None)
    done = None if following is None else following.get(transform.done_key, None)
    if following is None or done is None:
        return None
    others = {"next", *transform.reward_keys}
    start, target = [], []
    for key in rows.keys(True, True):
        if key in others or (isinstance(key, tuple) and key[0] == "next"):
            continue
        led_to = following.get(key, None)
        if isinstance(led_to, Tensor) and led_to.is_floating_point():
            start.append(rows.get(key).reshape(*rows.shape, -1))
            target.append(led_to.reshape(*rows.shape, -1))
    if not start:
        return None
    ended = any_feature(done.bool(), dims)
    ahead = rows.get(STEPS_KEY, None)
    ahead = torch.ones_like(ended, dtype=torch.int64) if ahead is None else ahead
    return _Steps(torch.cat(start, -1), torch.cat(target, -1), ended, ahead)


def check_time_order(transform: Transform, order: TimeOrder, rows: TensorDictBase) -> None:
    """Raises an error if an n-step transform of the same buffer joins rows of several environments.

    Nothing is checked if the buffer has a `FlattenRows`, which checks rows before it flattens them.
    """
    beside = list(_n_step_transforms(transform))
    if not beside:
        return
    if _compat.buffer_at_work("__setitem__") is not None:
        raise ValueError(
            "`buffer[i] = rows` is not supported with MultiStepTransform, which would write "
            "earlier rows. Use `extend`."
        )
    buffer = _compat.buffer_at_work("extend")
    if buffer is not None and order.finds_emptied(buffer.storage):
        if _is_n_step(rows):
            raise ValueError(
                "The buffer was emptied, but MultiStepTransform still held rows from before "
                "`empty()` and would store them with these. Create a new buffer."
            )
        forget_steps(transform)  # in time, since MultiStepTransform gets these rows after this one
        order.forget()
    if not any(isinstance(t, FlattenRows) for t in _compat.transforms_beside(transform)):
        order.check(rows, beside[0])


def forget_steps(transform: Transform) -> None:
    """Makes the n-step transforms of the same buffer forget the rows that they hold back.

    These belong to what was written before another state was loaded.
    """
    for other in _n_step_transforms(transform):
        _compat.forget_rows(other)
    for other in _compat.transforms_beside(transform):
        if isinstance(other, FlattenRows):
            other.forget()


def check_n_step(
    fold: Transform, terminated_key: NestedKey, rows: TensorDictBase | None = None
) -> None:
    """Raises an error if an n-step transform hides terminal rows or gets rows in a wrong shape."""
    for transform in _n_step_transforms(fold):
        if transform.n_steps == 1:
            raise ValueError(
                "MultiStepTransform(n_steps=1) does not change any row, but marks each row as the "
                "end of an episode, so no row would be mixed; leave the transform out."
            )
        others = [k for k in transform.done_keys if unravel_key(("next", k)) != terminated_key]
        if len(others) < len(transform.done_keys):
            raise ValueError(
                f"MultiStepTransform(done_keys={transform.done_keys}) takes {terminated_key!r} "
                "from the first of its steps, so rows that lead to a terminal state would be "
                "mixed; to take it from the last step, use "
                f"MultiStepTransform(..., done_keys={others})."
            )
        if rows is not None and rows.ndim > 1:
            raise ValueError(
                f"The rows are a batch of shape {tuple(rows.shape)}, but pairs are drawn from "
                f"single rows. For n-step returns of each environment, use {_ORDER}. Do not "
                "flatten the rows yourself, since MultiStepTransform would then join rows of "
                "different environments."
            )


def _n_step_transforms(transform: Transform) -> list[MultiStepTransform]:
    beside = _compat.transforms_beside(transform)
    return [other for other in beside if isinstance(other, MultiStepTransform)]


def _is_n_step(rows: TensorDictBase) -> bool:
    """Returns whether an n-step transform has processed the rows."""
    return STEPS_KEY in rows
