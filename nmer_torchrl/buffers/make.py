"""One word to a ready replay buffer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tensordict import NestedKey
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.data.replay_buffers import RandomSampler, Sampler, Storage
from torchrl.envs.transforms import Transform

from nmer_torchrl.buffers.prioritized import PairPrioritizedReplayBuffer
from nmer_torchrl.keys import POINT_KEYS, TERMINATED_KEY, VALUE_KEYS, as_keys
from nmer_torchrl.neighbors import NeighborSearch
from nmer_torchrl.rows import check_layout
from nmer_torchrl.samplers import (
    CheckedPrioritizedSampler,
    NeighborPairSampler,
    PrioritizedNeighborPairSampler,
    RandomPairSampler,
)
from nmer_torchrl.storages import PairStorage
from nmer_torchrl.transforms import PairMixup

_PRIORITY = frozenset({"priority_alpha", "priority_beta", "priority_eps"})
# What each kind of buffer has a use for, beyond what every buffer has.
KINDS: dict[str, frozenset[str]] = {
    "uniform": frozenset(),
    "mixup": frozenset({"alpha", "keys", "value_keys", "terminated_key"}),
    "1nn": frozenset({"alpha", "search", "keys", "value_keys", "terminated_key"}),
    "nmer": frozenset({"k", "alpha", "search", "keys", "value_keys", "terminated_key"}),
    "per": _PRIORITY,
    "per_nmer": _PRIORITY | {"k", "alpha", "search", "keys", "value_keys", "terminated_key"},
}


def make_replay_buffer(
    kind: str,
    *,
    capacity: int,
    batch_size: int,
    k: int | None = None,
    alpha: float | None = None,
    search: str | NeighborSearch | None = None,
    keys: Sequence[NestedKey] | None = None,
    value_keys: Sequence[NestedKey] | None = None,
    terminated_key: NestedKey | None = None,
    priority_alpha: float | None = None,
    priority_beta: float | None = None,
    priority_eps: float | None = None,
    device: torch.device | str | None = None,
    storage: Storage | None = None,
    prefetch: int | None = None,
    generator: torch.Generator | None = None,
) -> TensorDictReplayBuffer:
    """A replay buffer of the given kind.

    | kind | anchors | partners | batch |
    |---|---|---|---|
    | `"uniform"` | uniform | none | stored rows |
    | `"mixup"` | uniform | any other row | mixed |
    | `"1nn"` | uniform | the nearest neighbour | mixed |
    | `"nmer"` | uniform | one of the k nearest neighbours | mixed |
    | `"per"` | by priority | none | stored rows |
    | `"per_nmer"` | by priority | one of the k nearest neighbours | mixed |

    Kinds with priorities put importance weights `[B]` under `"priority_weight"`, and take new TD
    errors, written to the batch under `"td_error"`, by `update_tensordict_priority(batch)`.
    TorchRL's schedulers anneal `buffer.sampler.beta`.

    Args:
        kind: Which method.

    Keyword Args:
        capacity: Number of rows that the buffer holds before it overwrites the oldest.
        batch_size: Number of rows that `sample()` returns.
        k: Number of neighbours, for `"nmer"` and `"per_nmer"`; 10 unless given.
        alpha: Parameter of the Beta distribution of the weights; 0.75 unless given.
        search: The neighbour search (see `NeighborPairSampler`); `"auto"` unless given.
        keys: Entries in which neighbours are measured; `["observation", "action"]` unless given.
        value_keys: Entries that are mixed besides `keys`; next observation and reward unless given.
        terminated_key: The flag that keeps a pair unmixed; `("next", "terminated")` unless given.
        priority_alpha: Exponent of the priorities; 0.6 unless given.
        priority_beta: Exponent of the importance weights; 0.4 unless given.
        priority_eps: Added to each priority; 1e-6 unless given.
        device: Where the rows are stored; the CPU unless given.
        storage: A storage of that capacity to use instead of a `LazyTensorStorage` (for pairs, a
            `PairStorage`, which reads them faster).
        prefetch: Number of batches to draw ahead in threads.
        generator: Source of all randomness, `None` for torch's global one. The weights get a
            generator of their own, seeded from this one, so that a restored buffer goes on with
            the same batches.

    Examples:
        >>> from nmer_torchrl import make_replay_buffer
        >>> buffer = make_replay_buffer("nmer", capacity=1_000_000, batch_size=256, k=10)
        >>> buffer.sampler
        NeighborPairSampler(k=10, keys=('observation', 'action'))
    """
    if kind not in KINDS:
        raise ValueError(f"Unknown kind {kind!r}; the known ones are {', '.join(KINDS)}.")
    given = {
        "k": k,
        "alpha": alpha,
        "search": search,
        "keys": keys,
        "value_keys": value_keys,
        "terminated_key": terminated_key,
        "priority_alpha": priority_alpha,
        "priority_beta": priority_beta,
        "priority_eps": priority_eps,
    }
    for name, value in given.items():
        if value is not None and name not in KINDS[kind]:
            uses = ", ".join(sorted(KINDS[kind])) or "none of them"
            raise ValueError(
                f"A {kind!r} buffer has no use for {name}={value!r}; leave it out. "
                f"Of the arguments that depend on the kind it takes {uses}."
            )
    for name, count in (("capacity", capacity), ("batch_size", batch_size)):
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ValueError(
                f"{name}={count!r}, but it is a number of rows: an integer, at least 1."
            )
    paired = kind not in ("uniform", "per")
    make = PairStorage if paired else LazyTensorStorage
    storage = _make_storage(make, capacity, device, storage)

    sampler: Sampler = RandomSampler()
    transform: Transform | None = None
    priority = {
        name: value
        for name, value in (
            ("alpha", priority_alpha),
            ("beta", priority_beta),
            ("eps", priority_eps),
        )
        if value is not None
    }
    if kind == "per":
        sampler = CheckedPrioritizedSampler(capacity, **priority)
    if paired:
        check_layout(storage)
        keys = as_keys(POINT_KEYS if keys is None else keys, "keys")
        value_keys = as_keys(VALUE_KEYS if value_keys is None else value_keys, "value_keys")
        if kind == "mixup":
            sampler = RandomPairSampler(keys=keys, value_keys=value_keys)
        elif kind == "per_nmer":
            sampler = PrioritizedNeighborPairSampler(
                capacity,
                k=10 if k is None else k,
                search="auto" if search is None else search,
                keys=keys,
                value_keys=value_keys,
                **priority,
            )
        else:
            sampler = NeighborPairSampler(
                k=1 if kind == "1nn" else 10 if k is None else k,
                search="auto" if search is None else search,
                keys=keys,
                value_keys=value_keys,
            )
        transform = PairMixup(
            0.75 if alpha is None else alpha,
            generator=_spawn(generator),
            mix_keys=(*keys, *value_keys),
            terminated_key=TERMINATED_KEY if terminated_key is None else terminated_key,
        )
    buffer = PairPrioritizedReplayBuffer if kind == "per_nmer" else TensorDictReplayBuffer
    return buffer(
        storage=storage,
        sampler=sampler,
        transform=transform,
        batch_size=batch_size,
        prefetch=prefetch,
        generator=generator,
    )


def _make_storage(
    make: type[LazyTensorStorage],
    capacity: int,
    device: torch.device | str | None,
    storage: Storage | None,
) -> Storage:
    if storage is None:
        return make(capacity, device=device or "cpu")
    if storage.max_size != capacity:
        raise ValueError(
            f"capacity={capacity}, but the storage holds {storage.max_size} rows; make them agree."
        )
    if device is not None:
        raise ValueError(
            f"device={device!r} is for a storage that is made here; "
            "give it to the storage that you pass instead."
        )
    return storage


def _spawn(generator: torch.Generator | None) -> torch.Generator | None:
    """A new generator whose seed is drawn from the given one."""
    if generator is None:
        return None
    device = generator.device
    seed = torch.randint(2**62, (), generator=generator, device=device, dtype=torch.int64)
    return torch.Generator(device).manual_seed(int(seed))
