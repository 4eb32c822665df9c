"""A sampler with a learned choice of the rows that are replayed."""

from __future__ import annotations

import math
from collections import deque
from copy import deepcopy
from typing import Any

import torch
from tensordict import NestedKey
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torchrl.data.replay_buffers import Storage

from nmer_torchrl import _compat
from nmer_torchrl.checks import is_integer
from nmer_torchrl.functional import as_rows, to_device
from nmer_torchrl.generators import draw_seed
from nmer_torchrl.keys import get_entry
from nmer_torchrl.networks import CarefulAdam, make_mlp
from nmer_torchrl.samplers.base import LockedSampler
from nmer_torchrl.tracking.rows import check_layout, stored_entries

_FEATURES = 3  # reward, TD error, age
_TENSORS = ("_kept", "_judged", "_error", "_written")


class ReplayOptimizationSampler(LockedSampler):
    """Draws rows uniformly from the subset that a learned policy keeps.

    It follows Zha et al., Experience Replay Optimization (2019). A small network scores every row
    by its reward, its last TD error and its age (the first two Z-scored over the stored rows, the
    age as a share of the oldest row's). A row is kept with the probability that its score gives.
    New rows are kept until the next choice. At the end of each training episode, `finish_episode`
    trains the network by REINFORCE on some rows and the choices made for them, with the increase of
    the mean return of the last episodes as the reward. It then chooses again.

    The general method follows the publication. The network's size, its learning rate and the number
    of episodes in the mean are our choices.

    Keyword Args:
        episodes: Number of last episodes over which the return is averaged.
        rows: Number of rows in each training step of the network.
        lr: Learning rate of the network.
        hidden: Widths of its two hidden layers.
        reward_key: Entry of the reward.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
        >>> sampler = ReplayOptimizationSampler(reward_key="reward")
        >>> buffer = TensorDictReplayBuffer(
        ...     storage=LazyTensorStorage(100), sampler=sampler, batch_size=8
        ... )
        >>> _ = buffer.extend(TensorDict(reward=torch.randn(100, 1), batch_size=[100]))
        >>> sampler.kept(buffer.storage)
        100
        >>> sampler.finish_episode(1.0, buffer.storage)
        >>> sampler.kept(buffer.storage) < 100
        True
    """

    def __init__(
        self,
        *,
        episodes: int = 10,
        rows: int = 64,
        lr: float = 1e-4,
        hidden: tuple[int, int] = (64, 64),
        reward_key: NestedKey = ("next", "reward"),
    ) -> None:
        for name, count in (("episodes", episodes), ("rows", rows)):
            if not is_integer(count) or count < 1:
                raise ValueError(
                    f"{name}={count!r} is not a number of {name}; give an integer, at least 1."
                )
        if not lr > 0:
            raise ValueError(f"lr={lr!r} is out of range; give a learning rate above 0.")
        self.rows, self.lr, self.hidden, self.reward_key = rows, lr, tuple(hidden), reward_key
        super().__init__()
        self._returns: deque[float] = deque(maxlen=episodes)
        self._policy: nn.Sequential | None = None
        self._optimizer: CarefulAdam | None = None
        self._empty()

    def _empty(self) -> None:
        with self._lock:
            self._forget()

    def _forget(self) -> None:
        self._size = 0  # number of known rows; the tables may be longer
        self._pool: Tensor | None = None  # cached positions of the kept rows
        self._kept = torch.empty(0, dtype=torch.bool)
        self._judged = torch.empty(0, dtype=torch.bool)  # whether the policy has chosen this row
        self._error = torch.empty(0)  # last TD error of each row; infinite if it has none yet
        self._faults: Tensor | None = None  # faults in errors given on a device, not checked yet
        self._written = torch.empty(0, dtype=torch.int64)  # time of each write, counted in rows
        self._count = 0
        self._chosen = False  # whether the policy has chosen the kept rows

    # -- notifications from the buffer -------------------------------------------------------------

    def mark_update(self, index: int | Tensor, *, storage: Storage | None = None) -> None:
        """Records that the buffer has written these positions, so that their rows are new."""
        if storage is not None:
            check_layout(storage)
        index = torch.as_tensor(index).reshape(-1).cpu()
        index = index[index >= 0]
        if not len(index):
            return
        with self._lock:
            self._reserve(int(index.max()) + 1)
            self._kept[index], self._judged[index] = True, False
            self._error[as_rows(index, self._error.device)] = math.inf
            self._written[index] = torch.arange(self._count, self._count + len(index))
            self._count += len(index)
            self._pool = None

    def update_priority(
        self, index: int | Tensor, priority: float | Tensor, *, storage: Storage | None = None
    ) -> None:
        """Records the TD errors of these rows.

        On a device, where a check would wait, invalid errors are rejected when the episode ends.
        """
        error = torch.as_tensor(priority).detach().abs().float().reshape(-1)
        position = torch.as_tensor(index).reshape(-1)
        if len(error) not in (1, len(position)):
            raise ValueError(
                f"{len(error)} TD errors were given for {len(position)} rows; give one for each "
                "row."
            )
        with self._lock:
            self._reserve(self._size if storage is None else max(self._size, len(storage)))
            if error.device.type != "cpu":
                self._error = self._error.to(error.device)
            device = self._error.device
            error, position = (to_device(x, device) for x in (error, position))
            inside = (position >= 0) & (position < self._size)
            faults = ~torch.stack([error.isfinite().all(), inside.all()])
            self._faults = faults if self._faults is None else self._faults | faults
            if device.type == "cpu":
                self._refuse_faults()
            self._error[torch.where(inside, position, 0)] = error

    def _refuse_faults(self) -> None:
        """Raises an error if given TD errors were not finite, or belonged to rows not stored."""
        faults, self._faults = self._faults, None
        infinite, outside = (False, False) if faults is None else faults.tolist()
        if infinite:
            raise ValueError("A TD error is not finite; leave such rows out of the update.")
        if outside:
            raise IndexError(
                f"A TD error was given for a position without a row; rows are at 0 to "
                f"{self._size - 1}."
            )

    def _reserve(self, size: int) -> None:
        """Registers rows; rows stored before the sampler was attached count as the oldest."""
        missing = max(size - len(self._kept), len(self._kept) // 8)
        if size > len(self._kept):
            self._kept = torch.cat([self._kept, torch.ones(missing, dtype=torch.bool)])
            self._judged = torch.cat([self._judged, torch.zeros(missing, dtype=torch.bool)])
            self._error = torch.cat([self._error, self._error.new_zeros(missing)])
            self._written = torch.cat([self._written, torch.zeros(missing, dtype=torch.int64)])
        if size > self._size:
            self._size, self._pool = size, None

    # -- sampling ----------------------------------------------------------------------------------

    def sample(self, storage: Storage, batch_size: int) -> tuple[Tensor, dict[str, Any]]:
        """Draws positions `[B]` uniformly from the kept rows, or from all if none is kept."""
        data = stored_entries(storage)
        size = len(storage)
        device = data.device or get_entry(data, self.reward_key).device
        generator = _compat.generator(self)
        with self._lock:
            self._reserve(size)
            if self._pool is None and self._chosen:
                self._pool = to_device(self._kept[:size].nonzero().squeeze(1), device)
            pool = self._pool
        if pool is None or not len(pool):
            return torch.randint(size, (batch_size,), generator=generator, device=device), {}
        chosen = torch.randint(len(pool), (batch_size,), generator=generator, device=device)
        return pool[chosen], {}

    def kept(self, storage: Storage) -> int:
        """Returns the number of kept rows."""
        with self._lock:
            self._reserve(len(storage))
        return int(self._kept[: len(storage)].sum())

    # -- learning ----------------------------------------------------------------------------------

    def finish_episode(self, episode_return: float, storage: Storage) -> None:
        """Trains the policy on the return of a finished episode, and chooses rows again."""
        if not math.isfinite(episode_return):
            raise ValueError(f"The return of an episode is {episode_return}; it must be finite.")
        with self._lock:
            self._learn(float(episode_return), storage)

    def _learn(self, episode_return: float, storage: Storage) -> None:
        before = sum(self._returns) / len(self._returns) if self._returns else None
        self._returns.append(episode_return)
        if not len(storage):
            return
        gain = 0.0 if before is None else sum(self._returns) / len(self._returns) - before
        features = self._features(storage)
        policy, optimizer = self._ready()
        kept, judged = (each[: len(features)] for each in (self._kept, self._judged))
        choices = judged.nonzero().squeeze(1)  # not the new rows, which no choice has kept
        if len(choices) and gain != 0.0:
            drawn = torch.randint(len(choices), (self.rows,), generator=self._generator)
            rows = choices[drawn]
            with torch.enable_grad():
                logits = policy(features[rows]).squeeze(-1)
                # The log-probability of the choices is minus this cross-entropy.
                surprise = binary_cross_entropy_with_logits(logits, kept[rows].float())
                optimizer.step(gain * surprise)
        with torch.no_grad():
            scores = torch.cat([policy(part).squeeze(-1) for part in features.split(65_536)])
        draws = torch.rand(len(scores), generator=self._generator)
        kept[:], judged[:] = draws < scores.sigmoid(), True
        self._chosen, self._pool = True, None

    def _features(self, storage: Storage) -> Tensor:
        """Returns features `[n, 3]`: reward, TD error (the largest if a row has none yet), age."""
        size = len(storage)
        self._reserve(size)
        self._refuse_faults()
        error = self._error[:size].cpu()
        seen = error[error.isfinite()]
        error = error.clamp_max(float(seen.max()) if len(seen) else 0.0)
        reward = get_entry(stored_entries(storage), self.reward_key)[:size].detach().float().cpu()
        reward = reward.reshape(size, -1).sum(-1)
        age = (self._count - self._written[:size]).float()
        age = age / age.max().clamp_min(1.0)
        return torch.stack([_standardized(reward), _standardized(error), age], -1)

    def _ready(self, seed: int | None = None) -> tuple[nn.Sequential, CarefulAdam]:
        if self._policy is None or self._optimizer is None:
            seed = draw_seed(_compat.generator(self)) if seed is None else seed
            self._policy = make_mlp([_FEATURES, *self.hidden, 1], seed)
            self._optimizer = CarefulAdam(self._policy.parameters(), self.lr)
            # A separate generator, so that the ends of episodes do not change which rows are drawn.
            self._generator = torch.Generator().manual_seed(seed + 1)
        return self._policy, self._optimizer

    # -- saving ------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Returns the policy, its optimizer, and the data of each row."""
        with self._lock:
            state: dict[str, Any] = {n: getattr(self, n)[: self._size].cpu() for n in _TENSORS}
            state |= {"count": self._count, "chosen": self._chosen, "returns": list(self._returns)}
            if self._policy is not None and self._optimizer is not None:
                state["policy"] = self._policy.state_dict()
                state["optimizer"] = self._optimizer.state_dict()
                state["generator"] = self._generator.get_state()
            return deepcopy(state)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores a state that `state_dict` returned; an empty state changes nothing."""
        if not state_dict:
            return
        state = deepcopy(state_dict)  # the optimizer would otherwise change the given tensors
        with self._lock:
            self._forget()
            self._policy = self._optimizer = None
            self._returns.clear()
            state.setdefault("_judged", torch.zeros_like(state["_kept"]))  # of earlier versions
            for name in _TENSORS:
                setattr(self, name, state[name].cpu())
            self._size, self._count, self._chosen = len(self._kept), state["count"], state["chosen"]
            self._returns.extend(state["returns"])
            if "policy" in state:
                policy, optimizer = self._ready(seed=0)  # the loaded state replaces all parameters
                policy.load_state_dict(state["policy"])
                optimizer.load_state_dict(state["optimizer"])
                self._generator.set_state(state["generator"].cpu())

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        if self._policy is not None:
            state["_generator"] = self._generator.get_state()
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if self._policy is not None:
            self._generator = torch.Generator().set_state(state["_generator"])

    def __repr__(self) -> str:
        return f"{type(self).__name__}(episodes={self._returns.maxlen}, rows={self.rows})"


def _standardized(values: Tensor) -> Tensor:
    """Returns Z-scores based on the finite values; 0 for the others."""
    finite = values.isfinite()
    values = values.double()  # the squares may exceed float32
    spread, mean = torch.std_mean(values[finite], correction=0)
    scores = (values - mean) / torch.where(spread > 0, spread, 1.0)
    return torch.where(finite, scores, 0.0).float()
