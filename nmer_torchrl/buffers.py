"""One word to a ready replay buffer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tensordict import NestedKey
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.data.replay_buffers import RandomSampler, Sampler, Storage
from torchrl.envs.transforms import Transform

from nmer_torchrl.keys import POINT_KEYS, TERMINATED_KEY, VALUE_KEYS, as_keys, as_roles
from nmer_torchrl.neighbors import NeighborSearch
from nmer_torchrl.rows import check_layout
from nmer_torchrl.samplers import (
    NeighborPairSampler,
    PairSampler,
    RandomPairSampler,
    SpreadSampler,
    TemporalPairSampler,
)
from nmer_torchrl.storages import PairStorage
from nmer_torchrl.transforms import (
    AmplitudeScaling,
    GaussianNoise,
    MixReg,
    PairMixup,
    RewardMean,
    StateMixup,
)

# What each kind of buffer has a use for, beyond what every buffer has.
KINDS: dict[str, frozenset[str]] = {
    "uniform": frozenset(),
    "mixup": frozenset({"alpha", "keys", "value_keys", "terminated_key"}),
    "1nn": frozenset({"alpha", "search", "keys", "value_keys", "terminated_key"}),
    "nmer": frozenset({"k", "alpha", "search", "keys", "value_keys", "terminated_key"}),
    "ct": frozenset({"alpha", "keys", "value_keys", "terminated_key"}),
    "s4rl": frozenset({"alpha", "keys", "value_keys"}),
    "noisy": frozenset({"sigma", "action_bounds", "keys", "value_keys", "terminated_key"}),
    "ras": frozenset({"low", "high", "keys", "value_keys"}),
    "mixreg": frozenset({"alpha", "keys", "value_keys"}),
    "interpolated_rewards": frozenset({"k", "search", "keys", "value_keys", "terminated_key"}),
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
    sigma: float | None = None,
    action_bounds: tuple[float, float] | None = None,
    low: float | None = None,
    high: float | None = None,
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
    | `"ct"` | uniform | what followed in the episode | mixed |
    | `"s4rl"` | uniform | none | observation mixed with the next one |
    | `"noisy"` | uniform | none | with Gaussian noise |
    | `"ras"` | uniform | none | observation and next one times a random factor |
    | `"mixreg"` | uniform | any other row | inputs mixed, targets of either |
    | `"interpolated_rewards"` | uniform | one of the k nearest neighbours | rewards averaged |

    Args:
        kind: Which method.

    Keyword Args:
        capacity: Number of rows that the buffer holds before it overwrites the oldest.
        batch_size: Number of rows that `sample()` returns.
        k: Number of neighbours; 10 unless given.
        alpha: Parameter of the Beta distribution of the weights; 0.75 unless given, for `"mixreg"`
            0.2.
        search: The neighbour search (see `NeighborPairSampler`); `"auto"` unless given.
        keys: Entries in which neighbours are measured; `["observation", "action"]` unless given.
        value_keys: Entries that are mixed besides `keys`; next observation and reward unless given.
        terminated_key: The flag that keeps a pair unmixed; `("next", "terminated")` unless given.
        sigma: Standard deviation of noise, as a share of each dimension's spread; 0.1 unless given.
        action_bounds: Where noise keeps actions; (-1, 1) unless given. Infinities for no bounds.
        low: Least random factor of observations; 0.6 unless given.
        high: Greatest random factor of observations; 1.2 unless given.
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
        "sigma": sigma,
        "action_bounds": action_bounds,
        "low": low,
        "high": high,
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
    keys = as_keys(POINT_KEYS if keys is None else keys, "keys")
    value_keys = as_keys(VALUE_KEYS if value_keys is None else value_keys, "value_keys")
    search = "auto" if search is None else search
    sampler = _make_sampler(kind, 10 if k is None else k, search, keys, value_keys)
    make = PairStorage if isinstance(sampler, PairSampler) else LazyTensorStorage
    storage = _make_storage(make, capacity, device, storage)
    if not isinstance(sampler, RandomSampler):
        check_layout(storage)
    transform = _make_transform(
        kind,
        sampler,
        generator,
        keys,
        value_keys,
        terminated_key=TERMINATED_KEY if terminated_key is None else terminated_key,
        alpha=alpha if alpha is not None else 0.2 if kind == "mixreg" else 0.75,
        sigma=0.1 if sigma is None else sigma,
        action_bounds=(-1.0, 1.0) if action_bounds is None else action_bounds,
        low=0.6 if low is None else low,
        high=1.2 if high is None else high,
    )
    return TensorDictReplayBuffer(
        storage=storage,
        sampler=sampler,
        transform=transform,
        batch_size=batch_size,
        prefetch=prefetch,
        generator=generator,
    )


def _make_sampler(
    kind: str,
    k: int,
    search: str | NeighborSearch,
    keys: Sequence[NestedKey],
    value_keys: Sequence[NestedKey],
) -> Sampler:
    match kind:
        case "mixup" | "mixreg":
            return RandomPairSampler(keys=keys, value_keys=value_keys)
        case "1nn":
            return NeighborPairSampler(1, search=search, keys=keys, value_keys=value_keys)
        case "nmer" | "interpolated_rewards":
            return NeighborPairSampler(k, search=search, keys=keys, value_keys=value_keys)
        case "ct":
            return TemporalPairSampler(keys=keys, value_keys=value_keys)
        case "noisy":
            return SpreadSampler(keys=(*keys, *value_keys))
        case _:
            return RandomSampler()


def _make_transform(
    kind: str,
    sampler: Sampler,
    generator: torch.Generator | None,
    keys: Sequence[NestedKey],
    value_keys: Sequence[NestedKey],
    *,
    terminated_key: NestedKey,
    alpha: float,
    sigma: float,
    action_bounds: tuple[float, float],
    low: float,
    high: float,
) -> Transform | None:
    match kind:
        case "uniform":
            return None
        case "interpolated_rewards":
            rewards = as_roles(keys, value_keys).rewards
            return RewardMean(reward_keys=rewards, terminated_key=terminated_key)
        case "mixreg":
            return MixReg(alpha, generator=_spawn(generator), mix_keys=keys)
        case "s4rl":
            observations = as_roles(keys, value_keys).observations
            return StateMixup(alpha, generator=_spawn(generator), observation_keys=observations)
        case "ras":
            observations = as_roles(keys, value_keys).observations
            own = _spawn(generator)
            return AmplitudeScaling(low, high, generator=own, observation_keys=observations)
        case "noisy":
            assert isinstance(sampler, SpreadSampler)
            return GaussianNoise(
                sigma,
                spread=sampler.spread,
                generator=_spawn(generator),
                action_keys=as_roles(keys, value_keys).actions,
                action_bounds=action_bounds,
                terminated_key=terminated_key,
            )
        case _:
            return PairMixup(
                alpha,
                generator=_spawn(generator),
                mix_keys=(*keys, *value_keys),
                terminated_key=terminated_key,
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
