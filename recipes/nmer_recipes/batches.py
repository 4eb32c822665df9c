"""Collects rows with TorchRL's collectors: in this process, in other processes, or with Ray."""

from __future__ import annotations

import multiprocessing
import signal
import sys
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Self, final

import numpy as np
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import TransformObservation
from omegaconf import DictConfig
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torchrl.collectors import BaseCollector, Collector, MultiAsyncCollector, MultiSyncCollector
from torchrl.envs import Compose, DoubleToFloat, EnvBase, GymWrapper, RewardSum, TransformedEnv
from torchrl.weight_update import SharedMemWeightSyncScheme
from tqdm import tqdm

from nmer_recipes.envs import make_env
from nmer_recipes.errors import UsageError
from nmer_recipes.seeding import Stream

_AFTER = ("observation", "reward", "terminated")  # the entries of a row under "next"
_PATIENCE = 4.0  # seconds that processes have to end by themselves
MakeEnv = Callable[[], EnvBase]


def find_collector(kind: str) -> type[BatchCollector]:
    """Returns the class for `collector.kind`."""
    if kind == "ray":
        from nmer_recipes.remote import RemoteCollector

        return RemoteCollector
    return {"torchrl": InProcessCollector, "multiprocess": ProcessCollector}[kind]


class BatchCollector(ABC):
    """Returns, one at a time, the rows of the batches that a TorchRL collector collects.

    Each worker has `cfg.env.count` environments and a copy of the policy on the CPU. It acts for
    `frames_per_batch` frames and then receives new weights. Rows of a batch are in time order,
    alternating between environments, and rows of an episode are always in order. All environments
    start new episodes when a run is resumed.

    Args:
        cfg: The run's config.
        policy: The exploring policy that acts after the random frames; workers receive its weights.
        make_copy: Returns the same policy on the CPU, where workers act.
        seed: The workers' seed.
        stream: The random stream for exploration in this process. Checkpoints include its state and
            the state of the generators outside it.
    """

    workers = 1

    def __init__(
        self,
        cfg: DictConfig,
        policy: TensorDictModuleBase,
        make_copy: Callable[[], TensorDictModuleBase],
        *,
        seed: int,
        stream: Stream,
    ) -> None:
        self.cfg, self.seed, self.stream = cfg, seed, stream
        self.storage_device = torch.device(cfg.storage_device)
        self.frames = 0
        self.ended: float | None = None  # return of the episode that ended with the last frame
        self.returns: list[float] = []  # of the episodes that ended since the list was last taken
        with torch.random.fork_rng(devices=[]):
            self._policy = _StartsAtRandom(make_copy())
        self._weights = TensorDict.from_module(policy).data
        self._copy = TensorDict.from_module(self._policy.policy).data
        self._rows: deque[tuple[TensorDictBase, float | None]] = deque()
        self._collector: BaseCollector | None = None
        self._batches: Iterator[TensorDictBase] = iter(())
        self._starts = 0

    @abstractmethod
    def _make(self, make_envs: list[MakeEnv]) -> BaseCollector:
        """Builds TorchRL's collector, with one worker per environment factory."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self._stop()

    def step(self) -> TensorDictBase:
        """Returns the next transition, which has no batch dimension.

        A truncated step is stored as not terminated, even if it also terminated.
        """
        if not self._rows:
            self._rows.extend(self._unpack(self._receive()))
        row, self.ended = self._rows.popleft()
        self.frames += 1
        if self.ended is not None:
            self.returns.append(self.ended)
        return row

    def _unpack(self, batch: TensorDictBase) -> Iterator[tuple[TensorDictBase, float | None]]:
        # The last dimension is time; the others are workers and environments.
        batch = batch.permute(batch.ndim - 1, *range(batch.ndim - 1)).reshape(-1)
        after = batch["next"]
        done, returns = after["done"].flatten().tolist(), after["episode_reward"].flatten().tolist()
        rows = batch.select("observation", "action", *(("next", name) for name in _AFTER))
        rows["next", "terminated"] = after["terminated"] & ~after["truncated"]
        for row, ends, episode_return in zip(
            rows.to(self.storage_device).unbind(0), done, returns, strict=True
        ):
            yield row, episode_return if ends else None

    def _receive(self) -> TensorDictBase:
        """Returns the next batch; starts workers if there are none."""
        self._policy.random.fill_(self.frames < self.cfg.random_frames)
        self._copy.update_(self._weights.to("cpu"))
        with self.stream:
            if self._collector is None:
                self._start()
            return next(self._batches)

    def _start(self) -> None:
        """Starts workers, each with a new seed."""
        seeds = np.random.SeedSequence([self.seed, self.frames, self._starts]).generate_state(
            self.workers
        )
        self._starts += 1
        self._collector = self._make(
            [partial(make_envs, self.cfg.env, int(seed % 2**31)) for seed in seeds]
        )
        self._batches = iter(self._collector)

    def _stop(self) -> None:
        """Stops the workers, whatever state they are in."""
        if self._collector is not None:
            self._collector.shutdown()
        self._collector = None

    def state_dict(self) -> dict[str, Any]:
        """Returns the counters, without the workers' state."""
        return {
            "frames": self.frames,
            "returns": list(self.returns),
            "stream": self.stream.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the counters, starts new episodes and prints a notice."""
        self.frames, self.returns = state["frames"], list(state["returns"])
        self.stream.load_state_dict(state["stream"])
        tqdm.write(
            f"collector={self.cfg.collector.kind} resumes with a new episode in every environment; "
            "only collector=local resumes within an episode.",
            file=sys.stderr,
        )


@final
class InProcessCollector(BatchCollector):
    """Acts with TorchRL's `Collector` in this process."""

    def _make(self, make_envs: list[MakeEnv]) -> BaseCollector:
        return Collector(
            make_envs[0],
            self._policy,
            frames_per_batch=self.cfg.collector.frames_per_batch,
            total_frames=-1,
            auto_register_policy_transforms=False,  # these policies keep no state of an episode
        )


@final
class ProcessCollector(BatchCollector):
    """Acts with TorchRL's `MultiSyncCollector` or `MultiAsyncCollector` in local processes.

    If `sync`, all workers act at the same time and wait while the learner updates, so the same seed
    gives the same rows. Otherwise a worker acts as soon as its batch is taken, while rows of other
    workers are returned. The order then depends on timing, and weights are older.
    """

    def __init__(self, cfg: DictConfig, *arguments: Any, **options: Any) -> None:
        super().__init__(cfg, *arguments, **options)
        self.workers = cfg.collector.workers

    def _make(self, make_envs: list[MakeEnv]) -> BaseCollector:
        cfg = self.cfg.collector
        collector = MultiSyncCollector if cfg.sync else MultiAsyncCollector
        with _import_once():
            return collector(
                make_envs,
                self._policy,
                frames_per_batch=cfg.frames_per_batch * (self.workers if cfg.sync else 1),
                total_frames=-1,
                auto_register_policy_transforms=False,
                update_at_each_batch=True,
                # An asynchronous collector waits for no receipts: a lost worker would not send one.
                weight_sync_schemes={"policy": SharedMemWeightSyncScheme(sync=cfg.sync)},
                num_threads=self.cfg.threads,
                init_fn=_leave_interrupts_to_the_learner,
            )

    def _stop(self) -> None:
        if self._collector is not None:
            self._collector.shutdown(timeout=_PATIENCE, raise_on_error=False)
        self._collector = None

    def _receive(self) -> TensorDictBase:
        try:
            return super()._receive()
        except (RuntimeError, ValueError) as error:  # a ValueError if other workers end too slowly
            reason = str(error).strip().splitlines()[0]
            raise UsageError(
                f"A worker of collector=multiprocess was lost at frame {self.frames} ({reason}); "
                "its output is above. To resume from the last checkpoint, add resume=auto."
            ) from error


@contextmanager
def _import_once() -> Iterator[None]:
    """Makes workers fork from a process that has already imported TorchRL."""
    before = multiprocessing.get_start_method()
    if "forkserver" in multiprocessing.get_all_start_methods():
        multiprocessing.set_forkserver_preload(["torchrl.collectors", "torchrl.envs"])
        multiprocessing.set_start_method("forkserver", force=True)
    try:
        yield
    finally:
        multiprocessing.set_start_method(before, force=True)


def _leave_interrupts_to_the_learner() -> None:
    """Makes a worker ignore Ctrl-C, which reaches every process; the learner stops the workers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


class _StartsAtRandom(TensorDictModuleBase):
    """Acts uniformly in [-1, 1] while `random` is set; the flag is sent with the weights."""

    def __init__(self, policy: TensorDictModuleBase) -> None:
        super().__init__()
        self.in_keys, self.out_keys = ["observation"], ["action"]
        self.policy = policy
        self.register_buffer("random", torch.ones(()))

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        action = self.policy(tensordict.select("observation"))["action"]
        if self.random:
            action = 2 * torch.rand_like(action) - 1
        return tensordict.set("action", action)


def make_envs(cfg: DictConfig, seed: int) -> EnvBase:
    """Returns a worker's environments, which also sum the rewards of their episodes.

    Seeds torch's generator too, which exploration in the worker draws from.
    """
    torch.manual_seed(seed)
    if cfg.count == 1:
        # Copies observations: a task may change the array that it returned.
        task = TransformObservation(make_env(cfg), np.array, None)
    else:
        makers = [partial(make_env, cfg)] * cfg.count
        task = SyncVectorEnv(makers, autoreset_mode=AutoresetMode.DISABLED)  # TorchRL resets them
    env = TransformedEnv(GymWrapper(task), Compose(DoubleToFloat(), RewardSum()))
    env.set_seed(seed)
    return env
