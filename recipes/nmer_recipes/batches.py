"""Acting by TorchRL's collectors: in this process, in others of this machine, or by Ray."""

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

_AFTER = ("observation", "reward", "terminated")  # entries of a row under "next"
_PATIENCE = 4.0  # seconds in which processes are to end by themselves
MakeEnv = Callable[[], EnvBase]


def find_collector(kind: str) -> type[BatchCollector]:
    """Returns the class of `collector.kind`."""
    if kind == "ray":
        from nmer_recipes.remote import RemoteCollector

        return RemoteCollector
    return {"torchrl": InProcessCollector, "multiprocess": ProcessCollector}[kind]


class BatchCollector(ABC):
    """Hands out, one at a time, the rows of batches that a TorchRL collector brings.

    Each worker has `cfg.env.count` environments and a copy of the policy on the CPU, which act for
    `frames_per_batch` frames and then get fresh weights. Rows of a batch come in the order of time,
    those of its environments in turns, and rows of an episode always in its order. All
    environments start new episodes when a run is resumed.

    Args:
        cfg: Of the run.
        policy: What acts, with its exploration, after the random frames; its weights are sent.
        make_copy: Makes the same on the CPU, where workers act.
        seed: Of the workers.
        stream: Where exploration in this process draws from. Its state, and that of the generators
            outside it, go into checkpoints.
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
        self.ended: float | None = None  # the return of an episode that ended with the last frame
        self.returns: list[float] = []  # of episodes that ended since someone took them
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
        """Makes TorchRL's collector, with one worker for each maker of environments."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self._stop()

    def step(self) -> TensorDictBase:
        """The next transition, which has no batch dimension.

        A step that ends by the time limit is stored as not terminated, whatever else it was.
        """
        if not self._rows:
            self._rows.extend(self._unpack(self._receive()))
        row, self.ended = self._rows.popleft()
        self.frames += 1
        if self.ended is not None:
            self.returns.append(self.ended)
        return row

    def _unpack(self, batch: TensorDictBase) -> Iterator[tuple[TensorDictBase, float | None]]:
        # The last dimension is time, those before it are workers and environments.
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
        """Returns the next batch, after workers were begun if there are none."""
        self._policy.random.fill_(self.frames < self.cfg.random_frames)
        self._copy.update_(self._weights.to("cpu"))
        with self.stream:
            if self._collector is None:
                self._start()
            return next(self._batches)

    def _start(self) -> None:
        """Begins workers, each with a new seed."""
        seeds = np.random.SeedSequence([self.seed, self.frames, self._starts]).generate_state(
            self.workers
        )
        self._starts += 1
        self._collector = self._make(
            [partial(make_envs, self.cfg.env, int(seed % 2**31)) for seed in seeds]
        )
        self._batches = iter(self._collector)

    def _stop(self) -> None:
        """Ends the workers, whatever state they are in."""
        if self._collector is not None:
            self._collector.shutdown()
        self._collector = None

    def state_dict(self) -> dict[str, Any]:
        """What has been counted; where the workers stand is not in it."""
        return {
            "frames": self.frames,
            "returns": list(self.returns),
            "stream": self.stream.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from there, with new episodes, and says so."""
        self.frames, self.returns = state["frames"], list(state["returns"])
        self.stream.load_state_dict(state["stream"])
        tqdm.write(
            f"collector={self.cfg.collector.kind} goes on with a new episode in every environment; "
            "only collector=local resumes within an episode.",
            file=sys.stderr,
        )


@final
class InProcessCollector(BatchCollector):
    """Acts by TorchRL's `Collector` in this process."""

    def _make(self, make_envs: list[MakeEnv]) -> BaseCollector:
        return Collector(
            make_envs[0],
            self._policy,
            frames_per_batch=self.cfg.collector.frames_per_batch,
            total_frames=-1,
            auto_register_policy_transforms=False,  # policies here keep no state of an episode
        )


@final
class ProcessCollector(BatchCollector):
    """Acts by TorchRL's `MultiSyncCollector` or `MultiAsyncCollector` in processes of this machine.

    In step, all workers act at the same time and wait while the learner updates: the same seed
    gives the same rows. Out of step, a worker acts as soon as its batch was taken, while the rows
    of the others are handed out. Which is first is then a matter of time, and weights are older.
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
                # Out of step no one waits for receipts, which a lost worker would not send.
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
        except (RuntimeError, ValueError) as error:  # the latter where others end too slowly
            reason = str(error).strip().splitlines()[0]
            raise UsageError(
                f"A worker of collector=multiprocess was lost at frame {self.frames} ({reason}); "
                "what it printed is above. resume=auto goes on from the last checkpoint."
            ) from error


@contextmanager
def _import_once() -> Iterator[None]:
    """Has workers fork from a process that has imported TorchRL, instead of each importing it."""
    before = multiprocessing.get_start_method()
    if "forkserver" in multiprocessing.get_all_start_methods():
        multiprocessing.set_forkserver_preload(["torchrl.collectors", "torchrl.envs"])
        multiprocessing.set_start_method("forkserver", force=True)
    try:
        yield
    finally:
        multiprocessing.set_start_method(before, force=True)


def _leave_interrupts_to_the_learner() -> None:
    """Has Ctrl-C, which reaches every process of a terminal, end workers by the learner alone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


class _StartsAtRandom(TensorDictModuleBase):
    """Uniform actions in [-1, 1] as long as `random` is set, which comes with the weights."""

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
    """The environments of a worker, with the returns of their episodes.

    Exploration there draws from torch's generator, which is seeded too.
    """
    torch.manual_seed(seed)
    if cfg.count == 1:
        task = make_env(cfg)
    else:
        makers = [partial(make_env, cfg)] * cfg.count
        task = SyncVectorEnv(makers, autoreset_mode=AutoresetMode.DISABLED)  # TorchRL resets
    env = TransformedEnv(GymWrapper(task), Compose(DoubleToFloat(), RewardSum()))
    env.set_seed(seed)
    return env
