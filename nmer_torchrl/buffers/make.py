"""One word to a ready replay buffer."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Real
from typing import Any

import torch
from tensordict import NestedKey
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.data.replay_buffers import Storage

from nmer_torchrl.buffers.options import (
    DistanceOption,
    FractionOption,
    MetricOption,
    check_interpolation,
    check_tuned,
)
from nmer_torchrl.buffers.parts import Options, make_sampler, make_transform
from nmer_torchrl.buffers.prioritized import PairPrioritizedReplayBuffer
from nmer_torchrl.keys import as_keys
from nmer_torchrl.neighbors import NeighborSearch
from nmer_torchrl.rows import check_layout
from nmer_torchrl.samplers import PairSampler
from nmer_torchrl.storages import PairStorage

_KEYS = frozenset({"keys", "value_keys"})
_FOLD = _KEYS | {"alpha", "terminated_key"}
_PAIRS = _FOLD | {"fraction", "interpolation"}
_NEAR = frozenset({"search", "metric", "fraction", "max_distance"})
_PRIORITY = frozenset({"priority_alpha", "priority_beta", "priority_eps"})
# What each kind of buffer has a use for, beyond what every buffer has.
KINDS: dict[str, frozenset[str]] = {
    "uniform": frozenset(),
    "per": _PRIORITY,
    "mixup": _PAIRS,
    "1nn": _PAIRS | _NEAR,
    "nmer": _PAIRS | _NEAR | {"k"},
    "per_nmer": _PAIRS | _NEAR | _PRIORITY | {"k"},
    "neighborhood": _FOLD | _NEAR | {"k"},
    "gp": _FOLD | _NEAR | {"k", "lengthscale", "noise", "max_variance"},
    "ct": _PAIRS | {"tuned"},
    "s4rl": _KEYS | {"alpha"},
    "noisy": _KEYS | {"sigma", "action_bounds", "terminated_key"},
    "ras": _KEYS | {"low", "high"},
    "mixreg": _KEYS | {"alpha"},
    "interpolated_rewards": _KEYS | {"k", "search", "metric", "terminated_key"},
    "ero": _KEYS,
}
_NUMBERS = _PRIORITY | {"alpha", "lengthscale", "noise", "max_variance", "sigma", "low", "high"}
_ALPHAS = {"mixreg": 0.2}  # of those whose source has another


def make_replay_buffer(
    kind: str,
    *,
    capacity: int,
    batch_size: int,
    k: int | None = None,
    alpha: float | None = None,
    tuned: bool | None = None,
    search: str | NeighborSearch | None = None,
    metric: MetricOption | None = None,
    interpolation: str | None = None,
    fraction: FractionOption | None = None,
    max_distance: DistanceOption | None = None,
    lengthscale: float | None = None,
    noise: float | None = None,
    max_variance: float | None = None,
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
    | `"neighborhood"` | uniform | all k nearest neighbours | mixed by Dirichlet weights |
    | `"gp"` | uniform | all k nearest neighbours | inputs mixed, outcomes predicted |
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
        alpha: Parameter of the Beta distribution of the weights, of whole neighbourhoods of the
            Dirichlet distribution; 0.75 unless given, for `"mixreg"` 0.2, and 1 where it is tuned.
        tuned: Whether alpha is learned, for `"ct"` (see `TunedMixup`).
        search: The neighbour search (see `NeighborPairSampler`); `"auto"` unless given.
        metric: How far apart rows are: `"euclidean"` unless given, `"mahalanobis"`, `"product"`,
            with arguments as in `{"euclidean": {"weights": {"action": 0.5}}}`, or a metric.
        interpolation: `"beta"` unless given; `"uniform"` for weights that are all alike likely
            (SMOTE), `"mean"` for one half, `"delta"` to mix the change of state (`DeltaMixup`).
        fraction: Share of rows that are mixed; 1 unless given. A schedule such as
            `LinearFraction(...)`, or `{"linear": {...}}`, `{"exponential": {...}}`,
            `{"density": {...}}` with its arguments, moves it as training goes on.
        max_distance: Distance beyond which pairs stay unmixed, or `{"quantile": 0.9}` for that of
            most pairs drawn of late; none unless given.
        lengthscale: Of the regression of `"gp"`, as `noise` and `max_variance`: see
            `GaussianProcess`.
        noise: See there.
        max_variance: See there.
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
    if not isinstance(kind, str) or kind not in KINDS:
        raise ValueError(f"Unknown kind {kind!r}; the known ones are {', '.join(KINDS)}.")
    given: dict[str, Any] = {
        "k": k,
        "alpha": alpha,
        "tuned": tuned,
        "search": search,
        "metric": metric,
        "interpolation": interpolation,
        "fraction": fraction,
        "max_distance": max_distance,
        "lengthscale": lengthscale,
        "noise": noise,
        "max_variance": max_variance,
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
    for name in _NUMBERS & given.keys():
        if isinstance(given[name], bool) or not isinstance(given[name], Real):
            raise TypeError(f"{name}={given[name]!r}, but it is a number.")
    check_interpolation(given)
    check_tuned(given)
    _check_common(capacity, batch_size, prefetch, generator, storage)
    for name in _KEYS & given.keys():
        given[name] = as_keys(given[name], name)
    default = 1.0 if tuned else _ALPHAS.get(kind, 0.75)
    options = Options(**{"alpha": default, **given})
    sampler = make_sampler(kind, capacity, options)
    make = PairStorage if isinstance(sampler, PairSampler) else LazyTensorStorage
    storage = _make_storage(make, capacity, device, storage)
    if kind not in ("uniform", "per"):
        check_layout(storage)
    buffer = PairPrioritizedReplayBuffer if kind == "per_nmer" else TensorDictReplayBuffer
    return buffer(
        storage=storage,
        sampler=sampler,
        transform=make_transform(kind, sampler, storage, generator, options),
        batch_size=batch_size,
        prefetch=prefetch,
        generator=generator,
    )


def _check_common(
    capacity: int,
    batch_size: int,
    prefetch: int | None,
    generator: torch.Generator | None,
    storage: Storage | None,
) -> None:
    """Raises if an argument that every kind takes is none."""
    for name, count in (("capacity", capacity), ("batch_size", batch_size)):
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ValueError(
                f"{name}={count!r}, but it is a number of rows: an integer, at least 1."
            )
    ahead = 0 if prefetch is None else prefetch
    if isinstance(ahead, bool) or not isinstance(ahead, int) or ahead < 0:
        raise ValueError(
            f"prefetch={prefetch!r}, but it is a number of batches: an integer, at least 0."
        )
    if generator is not None and not isinstance(generator, torch.Generator):
        raise TypeError(
            f"generator={generator!r}, but it is a torch.Generator, such as "
            "torch.Generator().manual_seed(0)."
        )
    if storage is not None and not isinstance(storage, Storage):
        raise TypeError(f"storage={storage!r}, but it is a storage, such as LazyTensorStorage(10).")


def _make_storage(
    make: type[LazyTensorStorage],
    capacity: int,
    device: torch.device | str | None,
    storage: Storage | None,
) -> Storage:
    if storage is None:
        try:
            place = torch.device("cpu" if device is None else device)
        except (TypeError, RuntimeError) as error:
            raise ValueError(f"device={device!r} is none: {error}") from None
        return make(capacity, device=place)
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
