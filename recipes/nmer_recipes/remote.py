"""Acting in environments on other processes and machines, by Ray."""

from __future__ import annotations

import math
import socket
import sys
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torchrl.collectors.distributed import RayCollector
from torchrl.envs import Compose, DoubleToFloat, EnvBase, GymWrapper, RewardSum, TransformedEnv
from tqdm import tqdm

import nmer_recipes
from nmer_recipes.envs import make_env
from nmer_recipes.errors import UsageError
from nmer_recipes.seeding import Stream

try:
    import ray
except ImportError:
    ray = None

_TRIES = 3  # to begin workers anew without a batch from them
_AFTER = ("observation", "reward", "terminated")  # entries of a row under "next"
_NOBODY = (
    "collector.address={}: no Ray cluster answers there ({}). Start one by `ray start --head`, or "
    "leave the address out."
)


class RemoteCollector:
    """Hands out, one at a time, rows that environment workers collect on Ray.

    TorchRL's `RayCollector` gives each worker an environment and a copy of the policy, which act
    for `frames_per_batch` frames and then wait for fresh weights. While the rows of one worker are
    handed out the others act, so that weights are old by what has arrived meanwhile: about what all
    workers collect at a time, more where one is slow. Which worker is first is a matter of time:
    the same seed does not give the same rows. Rows of an episode come in its order, with those of
    others in between.

    A worker that is lost cannot be replaced alone: all are begun anew, and with them their
    episodes. So they are when a run is resumed.

    Args:
        cfg: Of the run.
        policy: What acts, with its exploration, after the random frames; its weights are sent.
        make_copy: Makes the same on the CPU, where workers act.
        seed: Of the workers.
        stream: Its state, and that of the generators outside it, go into checkpoints.
    """

    def __init__(
        self,
        cfg: DictConfig,
        policy: TensorDictModuleBase,
        make_copy: Callable[[], TensorDictModuleBase],
        *,
        seed: int,
        stream: Stream,
    ) -> None:
        if ray is None:
            raise UsageError(
                'collector=ray needs Ray, which is not installed: pip install "ray>=2.60", or '
                "leave it out to act in this process."
            )
        _check_address(cfg.collector.address)
        self.cfg, self.seed, self.stream = cfg, seed, stream
        self.device = torch.device(cfg.device)
        self.frames = 0
        self.ended: float | None = None  # the return of an episode that ended with the last frame
        self.returns: list[float] = []  # of episodes that ended since someone took them
        with torch.random.fork_rng(devices=[]):
            self._policy = _StartsAtRandom(make_copy())
        self._weights = TensorDict.from_module(policy).data
        self._copy = TensorDict.from_module(self._policy.policy).data
        self._rows: deque[tuple[TensorDictBase, float | None]] = deque()
        self._workers: RayCollector | None = None
        self._batches: Iterator[TensorDictBase] = iter(())
        self._places: Any = None
        self._starts = 0

    def __enter__(self) -> RemoteCollector:
        cfg = self.cfg.collector
        # What workers run of ours goes to them whole: their machines need no copy of the recipes.
        ray.cloudpickle.register_pickle_by_value(nmer_recipes)
        options: dict[str, Any] = {"logging_level": "error", "log_to_driver": False}
        if cfg.address is None:  # has room for the workers, whether or not there are as many cores
            options |= {"num_cpus": math.ceil(cfg.workers * cfg.cpus), "include_dashboard": False}
            options["object_store_memory"] = 2**27
        try:
            ray.init(cfg.address or "local", **options)
        except ConnectionError as error:
            raise UsageError(_NOBODY.format(cfg.address, error)) from None
        return self

    def __exit__(self, *_: Any) -> None:
        self._stop()
        ray.shutdown()

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
        after = batch["next"]
        done, returns = after["done"].flatten().tolist(), after["episode_reward"].flatten().tolist()
        after["terminated"] &= ~after["truncated"]
        rows = batch.select("observation", "action", *(("next", name) for name in _AFTER))
        for row, ends, episode_return in zip(
            rows.to(self.device).unbind(0), done, returns, strict=True
        ):
            yield row, episode_return if ends else None

    def _receive(self) -> TensorDictBase:
        """The batch of the first worker that has one."""
        for _ in range(_TRIES):
            self._policy.random.fill_(self.frames < self.cfg.random_frames)
            self._copy.update_(self._weights.to("cpu"))
            try:
                if self._workers is None:
                    self._start()
                return next(self._batches)
            except ray.exceptions.RayTaskError:
                raise  # an error within the task, which would come again
            except (ray.exceptions.RayError, RuntimeError) as error:
                reason = str(error).strip().splitlines()[0]
                tqdm.write(
                    f"A worker was lost at frame {self.frames} ({reason}); all begin anew, each "
                    "with a new episode.",
                    file=sys.stderr,
                )
                self._stop()
        raise UsageError(
            f"Workers were lost {_TRIES} times in a row without a batch from them, last by: "
            f"{reason} What was learned is in the last checkpoint, from which resume=auto goes on."
        )

    def _start(self) -> None:
        """Begins workers, spread over the machines of the cluster."""
        cfg = self.cfg.collector
        self._places = ray.util.placement_group([{"CPU": cfg.cpus}] * cfg.workers, "SPREAD")
        if not self._places.wait(cfg.patience):
            there = ray.cluster_resources().get("CPU", 0)
            raise UsageError(
                f"collector.workers={cfg.workers} with collector.cpus={cfg.cpus} each did not find "
                f"room within {cfg.patience} s; the cluster has {there:g} CPUs in all. Lower "
                "either, or add machines; resume=auto goes on from a checkpoint."
            )
        place = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(self._places)
        seeds = np.random.SeedSequence([self.seed, self.frames, self._starts]).generate_state(
            cfg.workers
        )
        self._starts += 1
        self._workers = RayCollector(
            [partial(_make_env, self.cfg.env, int(seed % 2**31)) for seed in seeds],
            self._policy,
            frames_per_batch=cfg.frames_per_batch,
            total_frames=sys.maxsize,
            remote_configs={"num_cpus": cfg.cpus, "scheduling_strategy": place},
            update_after_each_batch=True,
        )
        self._workers.update_policy_weights_()
        self._batches = iter(self._workers)

    def _stop(self) -> None:
        """Ends the workers, whatever state they are in."""
        if self._workers is not None:
            self._workers.shutdown()
        if self._places is not None:
            ray.util.remove_placement_group(self._places)
        self._workers = self._places = None

    def state_dict(self) -> dict[str, Any]:
        """What has been counted; where the workers stand is not in it."""
        return {
            "frames": self.frames,
            "returns": list(self.returns),
            "stream": self.stream.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from there, with new episodes."""
        self.frames, self.returns = state["frames"], list(state["returns"])
        self.stream.load_state_dict(state["stream"])


def _check_address(address: str | None) -> None:
    """Whether anyone listens there; Ray would take minutes to say so."""
    if address in (None, "auto"):
        return
    try:
        host, port = address.rsplit(":", 1)
        socket.create_connection((host, int(port)), timeout=5).close()
    except (OSError, ValueError) as error:
        raise UsageError(_NOBODY.format(address, error)) from None


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


def _make_env(cfg: DictConfig, seed: int) -> EnvBase:
    """The task of a worker; exploration there draws from torch's generator, which is seeded too."""
    torch.manual_seed(seed)
    env = TransformedEnv(GymWrapper(make_env(cfg)), Compose(DoubleToFloat(), RewardSum()))
    env.set_seed(seed)
    return env
