"""Adds noise to whole transitions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import final

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from nmer_torchrl.composition import check_spread
from nmer_torchrl.keys import TERMINATED_KEY, as_keys, get_continuous, get_entry
from nmer_torchrl.tracking.spread import Spread
from nmer_torchrl.tracking.standardize import looks_every
from nmer_torchrl.transforms.augmentation import Augmentation
from nmer_torchrl.transforms.rows import choose_rows, is_terminal, restore_rows


@final
class GaussianNoise(Augmentation):
    """Adds zero-mean Gaussian noise to each number of rows `[*B]`: `x + sigma * std * n`.

    `n ~ N(0, 1)` is drawn for each number. `std` is the standard deviation of its dimension among
    all rows stored now, so that `sigma` means the same for every dimension; constant dimensions get
    no noise. Noise is added to the entries of `spread`, by default observation, action, reward and
    next observation. Actions are then clipped to their bounds. Terminal transitions and rows with a
    non-finite entry are not changed.

    Use it with `SpreadSampler`, which keeps `spread` up to date with the storage. As with
    `StateMixup`, `buffer[:]` is changed too; `buffer.storage[:]` returns the stored rows.

    Args:
        sigma: Standard deviation of the noise, as a share of the dimension's standard deviation.

    Keyword Args:
        spread: The `spread` of the buffer's `SpreadSampler`.
        generator: Generator of the noise; `None` uses torch's global one.
        action_keys: Entries that are actions.
        action_bounds: Least and greatest value to which actions are clipped; `None` does not clip.
        terminated_key: Entry that marks a terminal row.

    Examples:
        >>> from nmer_torchrl import make_replay_buffer
        >>> buffer = make_replay_buffer("noisy", capacity=1_000, batch_size=32, sigma=0.1)
        >>> buffer.transform[0]
        GaussianNoise(sigma=0.1)
        >>> buffer.transform[0].spread is buffer.sampler.spread
        True
    """

    def __init__(
        self,
        sigma: float = 0.1,
        *,
        spread: Spread,
        generator: torch.Generator | None = None,
        action_keys: Sequence[NestedKey] = ("action",),
        action_bounds: tuple[float, float] | None = (-1.0, 1.0),
        terminated_key: NestedKey = TERMINATED_KEY,
    ) -> None:
        if not (math.isfinite(sigma) and sigma >= 0):
            raise ValueError(
                f"sigma={sigma!r} is out of range; give a finite number, at least 0 "
                "(the default is 0.1)."
            )
        super().__init__(spread.keys, "keys", generator)
        self.sigma = float(sigma)
        self.spread = spread
        self.action_bounds = None if action_bounds is None else _check_bounds(action_bounds)
        self.action_keys = as_keys(action_keys, "action_keys") if action_bounds is not None else ()
        for key in self.action_keys:
            if key not in spread.keys:
                raise ValueError(
                    f"{key!r} is named in `action_keys`, but the entries with noise are "
                    f"{spread.keys}; name actions among these, or set `action_bounds` to None."
                )
        self.terminated_key = as_keys([terminated_key], "terminated_key")[0]
        # By key: least and greatest action seen on a device so far, and the number of calls.
        self._extremes: dict[NestedKey, tuple[Tensor, int]] = {}

    def augment(self, rows: TensorDictBase) -> TensorDictBase:
        """Returns rows `[*B]` with added noise."""
        check_spread(self, self.spread)
        std, entries = self.spread.std, self.schema.entries(rows)
        if not std:
            raise RuntimeError(
                "GaussianNoise has no spread yet, because its SpreadSampler has not drawn a batch; "
                "build it with `spread=sampler.spread` of the sampler of the same buffer, and "
                "sample first. To read stored rows, use `buffer.storage[:]`."
            )
        noisy = {key: self._add_noise(entry, std[key]) for key, entry in entries.items()}
        for key in self.action_keys:
            noisy[key] = self._bound(noisy[key], entries[key], key)
        restore_rows(noisy, entries, rows.ndim)
        choose_rows(~is_terminal(rows, self.terminated_key, rows.ndim), noisy, entries)
        return rows.copy().update(noisy)

    def _add_noise(self, entry: Tensor, std: Tensor) -> Tensor:
        noise = torch.randn(
            entry.shape, generator=self.generator, device=entry.device, dtype=entry.dtype
        )
        return torch.addcmul(entry, noise, std, value=self.sigma)

    def _bound(self, noisy: Tensor, action: Tensor, key: NestedKey) -> Tensor:
        assert self.action_bounds is not None
        self._check_action(action, key)
        return noisy.clamp(*self.action_bounds)

    def _check_action(self, action: Tensor, key: NestedKey) -> None:
        """Raises an error if an action is out of bounds; rarely checks on a device, as it waits."""
        assert self.action_bounds is not None
        low, high = self.action_bounds
        if action.device.type != "cpu":
            finite = action.isfinite()
            seen = torch.stack(
                [action.where(finite, low).amin(), action.where(finite, high).amax()]
            )
            last, calls = self._extremes.get(key, (seen, 0))
            last = torch.stack([torch.minimum(last[0], seen[0]), torch.maximum(last[1], seen[1])])
            self._extremes[key] = last, calls + 1
            if (calls + 1) % looks_every(action.device):
                return
            action = last.cpu()
        outside = ((action < low) | (action > high)) & action.isfinite()
        if outside.any():
            raise ValueError(
                f"The entry {key!r} holds {float(action[outside][0]):.6g}, outside of "
                f"action_bounds=({low}, {high}); give the bounds of the environment's actions."
            )

    def _inv_call(self, tensordict: TensorDictBase | None) -> TensorDictBase | None:
        """Checks rows before they are stored."""
        if tensordict is not None:
            get_entry(tensordict, self.terminated_key)
            for key in self.action_keys:
                self._check_action(get_continuous(tensordict, key, "action_keys"), key)
        return super()._inv_call(tensordict)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(sigma={self.sigma})"


def _check_bounds(bounds: tuple[float, float]) -> tuple[float, float]:
    try:
        low, high = (float(bound) for bound in bounds)
    except (TypeError, ValueError):
        raise ValueError(
            f"action_bounds={bounds!r} is not a pair of numbers; give (least, greatest), such as "
            "(-1, 1)."
        ) from None
    if not low <= high:
        raise ValueError(
            f"action_bounds={bounds!r} are not in order; give (least, greatest), such as (-1, 1)."
        )
    return low, high
