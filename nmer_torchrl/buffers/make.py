"""One word to a ready replay buffer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from tensordict import NestedKey
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.data.replay_buffers import RandomSampler, Sampler, Storage
from torchrl.envs.transforms import Transform

from nmer_torchrl.buffers.prioritized import PairPrioritizedReplayBuffer
from nmer_torchrl.keys import POINT_KEYS, TERMINATED_KEY, VALUE_KEYS, Roles, as_keys, as_roles
from nmer_torchrl.neighbors import NeighborSearch
from nmer_torchrl.rows import check_layout
from nmer_torchrl.samplers import (
    CheckedPrioritizedSampler,
    NeighborPairSampler,
    PairSampler,
    PrioritizedNeighborPairSampler,
    RandomPairSampler,
    ReplayOptimizationSampler,
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
    TunedMixup,
)

_KEYS = frozenset({"keys", "value_keys"})
_FOLD = _KEYS | {"alpha", "terminated_key"}
_PRIORITY = frozenset({"priority_alpha", "priority_beta", "priority_eps"})
# What each kind of buffer has a use for, beyond what every buffer has.
KINDS: dict[str, frozenset[str]] = {
    "uniform": frozenset(),
    "per": _PRIORITY,
    "mixup": _FOLD,
    "1nn": _FOLD | {"search"},
    "nmer": _FOLD | {"k", "search"},
    "per_nmer": _FOLD | _PRIORITY | {"k", "search"},
    "ct": _FOLD | {"tuned"},
    "s4rl": _KEYS | {"alpha"},
    "noisy": _KEYS | {"sigma", "action_bounds", "terminated_key"},
    "ras": _KEYS | {"low", "high"},
    "mixreg": _KEYS | {"alpha"},
    "interpolated_rewards": _KEYS | {"k", "search", "terminated_key"},
    "ero": _KEYS,
}
_ALPHAS = {"mixreg": 0.2}  # of those whose source has another


class _Options(NamedTuple):
    """What depends on the kind, with its default."""

    k: int = 10
    alpha: float = 0.75
    tuned: bool = False
    search: str | NeighborSearch = "auto"
    keys: tuple[NestedKey, ...] = POINT_KEYS
    value_keys: tuple[NestedKey, ...] = VALUE_KEYS
    terminated_key: NestedKey = TERMINATED_KEY
    sigma: float = 0.1
    action_bounds: tuple[float, float] = (-1.0, 1.0)
    low: float = 0.6
    high: float = 1.2
    priority_alpha: float = 0.6
    priority_beta: float = 0.4
    priority_eps: float = 1e-6

    @property
    def roles(self) -> Roles:
        """Which of the keys are observations, actions and rewards."""
        return as_roles(self.keys, self.value_keys)


def make_replay_buffer(
    kind: str,
    *,
    capacity: int,
    batch_size: int,
    k: int | None = None,
    alpha: float | None = None,
    tuned: bool | None = None,
    search: str | NeighborSearch | None = None,
    keys: Sequence[NestedKey] | None = None,
    value_keys: Sequence[NestedKey] | None = None,
    terminated_key: NestedKey | None = None,
    priority_alpha: float | None = None,
    priority_beta: float | None = None,
    priority_eps: float | None = None,
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
    | `"per"` | by priority | none | stored rows |
    | `"mixup"` | uniform | any other row | mixed |
    | `"1nn"` | uniform | the nearest neighbour | mixed |
    | `"nmer"` | uniform | one of the k nearest neighbours | mixed |
    | `"per_nmer"` | by priority | one of the k nearest neighbours | mixed |
    | `"ct"` | uniform | what followed in the episode | mixed |
    | `"s4rl"` | uniform | none | observation mixed with the next one |
    | `"noisy"` | uniform | none | with Gaussian noise |
    | `"ras"` | uniform | none | observation and next one times a random factor |
    | `"mixreg"` | uniform | any other row | inputs mixed, targets of either |
    | `"interpolated_rewards"` | uniform | one of the k nearest neighbours | rewards averaged |
    | `"ero"` | uniform among rows that a learned policy keeps | none | stored rows |

    Kinds with priorities put importance weights `[B]` under `"priority_weight"`, and take new TD
    errors, written to the batch under `"td_error"`, by `update_tensordict_priority(batch)`.
    TorchRL's schedulers anneal `buffer.sampler.beta`. `"ero"` takes TD errors by
    `update_priority(index, error)`, and wants `buffer.sampler.finish_episode` at the end of each
    episode.

    Args:
        kind: Which method.

    Keyword Args:
        capacity: Number of rows that the buffer holds before it overwrites the oldest.
        batch_size: Number of rows that `sample()` returns.
        k: Number of neighbours; 10 unless given.
        alpha: Parameter of the Beta distribution of the weights; 0.75 unless given, for `"mixreg"`
            0.2, and 1 where it is tuned.
        tuned: Whether alpha is learned, for `"ct"` (see `TunedMixup`).
        search: The neighbour search (see `NeighborPairSampler`); `"auto"` unless given.
        keys: Entries in which neighbours are measured; `["observation", "action"]` unless given.
        value_keys: Entries that are mixed besides `keys`; next observation and reward unless given.
        terminated_key: The flag that keeps a pair unmixed; `("next", "terminated")` unless given.
        priority_alpha: Exponent of the priorities; 0.6 unless given.
        priority_beta: Exponent of the importance weights; 0.4 unless given.
        priority_eps: Added to each priority; 1e-6 unless given.
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
    given: dict[str, Any] = {
        "k": k,
        "alpha": alpha,
        "tuned": tuned,
        "search": search,
        "keys": keys,
        "value_keys": value_keys,
        "terminated_key": terminated_key,
        "sigma": sigma,
        "action_bounds": action_bounds,
        "low": low,
        "high": high,
        "priority_alpha": priority_alpha,
        "priority_beta": priority_beta,
        "priority_eps": priority_eps,
    }
    given = {name: value for name, value in given.items() if value is not None}
    for name, value in given.items():
        if name not in KINDS[kind]:
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
    for name in _KEYS & given.keys():
        given[name] = as_keys(given[name], name)
    default = 1.0 if tuned else _ALPHAS.get(kind, 0.75)
    options = _Options(**{"alpha": default, **given})
    sampler = _make_sampler(kind, capacity, options)
    make = PairStorage if isinstance(sampler, PairSampler) else LazyTensorStorage
    storage = _make_storage(make, capacity, device, storage)
    if kind not in ("uniform", "per"):
        check_layout(storage)
    buffer = PairPrioritizedReplayBuffer if kind == "per_nmer" else TensorDictReplayBuffer
    return buffer(
        storage=storage,
        sampler=sampler,
        transform=_make_transform(kind, sampler, generator, options),
        batch_size=batch_size,
        prefetch=prefetch,
        generator=generator,
    )


def _make_sampler(kind: str, capacity: int, options: _Options) -> Sampler:
    keys: dict[str, Any] = {"keys": options.keys, "value_keys": options.value_keys}
    priority: dict[str, Any] = {
        "alpha": options.priority_alpha,
        "beta": options.priority_beta,
        "eps": options.priority_eps,
    }
    match kind:
        case "per":
            return CheckedPrioritizedSampler(capacity, **priority)
        case "mixup" | "mixreg":
            return RandomPairSampler(**keys)
        case "1nn":
            return NeighborPairSampler(1, search=options.search, **keys)
        case "nmer" | "interpolated_rewards":
            return NeighborPairSampler(options.k, search=options.search, **keys)
        case "per_nmer":
            return PrioritizedNeighborPairSampler(
                capacity,
                options.k,
                search=options.search,
                keys=options.keys,
                value_keys=options.value_keys,
                **priority,
            )
        case "ct":
            return TemporalPairSampler(**keys)
        case "noisy":
            return SpreadSampler(keys=(*options.keys, *options.value_keys))
        case "ero":
            rewards = options.roles.rewards
            if len(rewards) != 1:
                raise ValueError(
                    f"An 'ero' buffer scores rows by one reward, but `value_keys` names {rewards} "
                    "besides next observations; name exactly one."
                )
            return ReplayOptimizationSampler(reward_key=rewards[0])
        case _:
            return RandomSampler()


def _make_transform(
    kind: str, sampler: Sampler, generator: torch.Generator | None, options: _Options
) -> Transform | None:
    if kind in ("uniform", "per", "ero"):
        return None
    end = options.terminated_key
    if kind == "interpolated_rewards":
        return RewardMean(reward_keys=options.roles.rewards, terminated_key=end)
    own = _spawn(generator)
    match kind:
        case "mixreg":
            return MixReg(options.alpha, generator=own, mix_keys=options.keys)
        case "s4rl":
            observations = options.roles.observations
            return StateMixup(options.alpha, generator=own, observation_keys=observations)
        case "ras":
            return AmplitudeScaling(
                options.low,
                options.high,
                generator=own,
                observation_keys=options.roles.observations,
            )
        case "noisy":
            assert isinstance(sampler, SpreadSampler)
            return GaussianNoise(
                options.sigma,
                spread=sampler.spread,
                generator=own,
                action_keys=options.roles.actions,
                action_bounds=options.action_bounds,
                terminated_key=end,
            )
        case "ct" if options.tuned:
            return TunedMixup(
                options.alpha,
                generator=own,
                keys=options.keys,
                value_keys=options.value_keys,
                terminated_key=end,
            )
        case _:
            return PairMixup(
                options.alpha,
                generator=own,
                mix_keys=(*options.keys, *options.value_keys),
                terminated_key=end,
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
