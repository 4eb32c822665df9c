"""Passes the events of a training loop to a replay buffer.

Most methods need none of these functions. `synchronize` and `finish_episode` call the method of the
same name of the buffer's sampler and of its pairing, if they have one. `report_errors` calls the
sampler's `update_priority`. A loop that calls these functions works with every method. They also
work with your own sampler if it has these methods.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tensordict import TensorDictBase
from torch import Tensor
from torchrl.data import PrioritizedSampler, TensorDictReplayBuffer
from torchrl.data.replay_buffers import Sampler

from nmer_torchrl import _compat


def synchronize(buffer: TensorDictReplayBuffer) -> None:
    """Processes newly written rows now instead of at the next draw.

    A neighbor search then works while rows are collected, and draws take less time. Batches are the
    same either way.

    Examples:
        >>> from nmer_torchrl import make_replay_buffer
        >>> buffer = make_replay_buffer("nmer", capacity=1_000, batch_size=32)
        >>> synchronize(buffer)
    """
    for member in _compat.members_of(buffer):
        if len(member):
            for take_up in _methods(member, "follow", "synchronize"):
                take_up(member.storage)


def finish_episode(buffer: TensorDictReplayBuffer, episode_return: float) -> None:
    """Informs a buffer that a training episode has ended with this return.

    Examples:
        >>> from nmer_torchrl import make_replay_buffer
        >>> buffer = make_replay_buffer("ero", capacity=1_000, batch_size=32)
        >>> finish_episode(buffer, 12.5)
    """
    for member in _compat.members_of(buffer):
        for finish in _methods(member, "finish_episode"):
            _check_single(buffer, member, "finish_episode")
            finish(episode_return, member.storage)


def report_errors(buffer: TensorDictReplayBuffer, batch: TensorDictBase, errors: Tensor) -> None:
    """Passes the absolute TD errors `[B]` of a batch to the buffer that drew it.

    They update the priorities. Nothing happens for samplers without priorities.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from nmer_torchrl import make_replay_buffer
        >>> buffer = make_replay_buffer("per", capacity=4, batch_size=2)
        >>> _ = buffer.extend(TensorDict(x=torch.randn(4, 3), batch_size=[4]))
        >>> report_errors(buffer, buffer.sample(), torch.tensor([0.5, 2.0]))
    """
    for member in _compat.members_of(buffer):
        if _takes_errors(member):
            _check_single(buffer, member, "report_errors")
    sampler = buffer.sampler
    if isinstance(sampler, PrioritizedSampler):
        buffer.update_tensordict_priority(batch.set(buffer.priority_key, errors))
    elif _takes_errors(buffer):
        index = batch["index"]
        anchors = index if _compat.unit_of(buffer) is None else index[:, 0]
        buffer.update_priority(anchors, errors)


def learns(buffer: TensorDictReplayBuffer) -> bool:
    """Returns whether the rows that a buffer draws depend on the updates made so far.

    If not, a loop may draw all batches of a frame at once. A sampler, pairing or transform whose
    draws depend on updates has a true attribute `learns`. Prioritized samplers always count.

    Examples:
        >>> from nmer_torchrl import make_replay_buffer
        >>> kinds = ("nmer", "per_nmer")
        >>> [learns(make_replay_buffer(kind, capacity=9, batch_size=3)) for kind in kinds]
        [False, True]
    """
    members = _compat.members_of(buffer)
    if members != [buffer] and any(map(learns, members)):
        return True
    parts = [buffer.sampler, _compat.unit_of(buffer), *_compat.leaves(buffer.transform)]
    prioritized = isinstance(buffer.sampler, PrioritizedSampler)
    return prioritized or any(getattr(part, "learns", False) for part in parts)


def _takes_errors(buffer: TensorDictReplayBuffer) -> bool:
    """Returns whether the sampler of a single buffer has priorities."""
    return type(buffer.sampler).update_priority is not Sampler.update_priority


def _check_single(buffer: TensorDictReplayBuffer, member: Any, name: str) -> None:
    """Raises an error if a call for one member was made for a whole ensemble."""
    if member is not buffer:
        raise TypeError(
            f"{name} got an ensemble, but it concerns the sampler of one buffer. Call it for each "
            "member with that member's rows."
        )


def _methods(buffer: TensorDictReplayBuffer, *names: str) -> Iterator[Any]:
    """Yields the first of these methods of the sampler and of the sample unit, if they have any."""
    for part in (buffer.sampler, _compat.unit_of(buffer)):
        for name in names:
            if hasattr(part, name):
                yield getattr(part, name)
                break
