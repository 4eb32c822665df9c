"""Acts in environments in other processes and on other machines, with Ray."""

from __future__ import annotations

import math
import socket
import sys
from typing import Any, Self, final

from omegaconf import DictConfig
from tensordict import TensorDictBase
from torchrl.collectors import BaseCollector
from torchrl.collectors.distributed import RayCollector
from tqdm import tqdm

import nmer_recipes
from nmer_recipes.batches import BatchCollector, MakeEnv
from nmer_recipes.errors import UsageError

try:
    import ray
except ImportError:
    ray = None

_TRIES = 3  # attempts to restart workers without a batch from them
_NOBODY = (
    "collector.address={}: no Ray cluster was found ({}). Start one with `ray start --head`, or "
    "leave the address out."
)


@final
class RemoteCollector(BatchCollector):
    """Acts with TorchRL's `RayCollector`.

    While the rows of one worker are returned, the other workers act. Weights are therefore older by
    the rows that arrived meanwhile: about one batch of all workers, more if one is slow. The order
    of workers depends on timing, so the same seed does not give the same rows.

    A lost worker cannot be replaced alone: all workers are restarted with new episodes.
    """

    def __init__(self, cfg: DictConfig, *arguments: Any, **options: Any) -> None:
        if ray is None:
            raise UsageError(
                'collector=ray needs Ray, which is not installed; run `pip install "ray>=2.60"`, '
                "or use collector=local to act in this process."
            )
        _check_address(cfg.collector.address)
        super().__init__(cfg, *arguments, **options)
        self.workers = cfg.collector.workers
        self._places: Any = None

    def __enter__(self) -> Self:
        cfg = self.cfg.collector
        # Workers receive our code by value: their machines need no copy of the recipes.
        ray.cloudpickle.register_pickle_by_value(nmer_recipes)
        options: dict[str, Any] = {"logging_level": "error", "log_to_driver": False}
        if cfg.address is None:  # make room for the workers, even with fewer cores
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

    def _receive(self) -> TensorDictBase:
        """Returns the batch of the first worker that has one."""
        for _ in range(_TRIES):
            try:
                return super()._receive()
            except ray.exceptions.RayTaskError:
                raise  # an error in the task, which would occur again
            except (ray.exceptions.RayError, RuntimeError) as error:
                reason = str(error).strip().splitlines()[0]
                tqdm.write(
                    f"A worker was lost at frame {self.frames} ({reason}); all workers restart "
                    "with new episodes.",
                    file=sys.stderr,
                )
                self._stop()
        raise UsageError(
            f"Workers were lost {_TRIES} times in a row without returning a batch ({reason}). To "
            "resume from the last checkpoint, add resume=auto."
        )

    def _make(self, make_envs: list[MakeEnv]) -> BaseCollector:
        """Distributes the workers over the machines of the cluster."""
        cfg = self.cfg.collector
        self._places = ray.util.placement_group([{"CPU": cfg.cpus}] * cfg.workers, "SPREAD")
        if not self._places.wait(cfg.patience):
            there = ray.cluster_resources().get("CPU", 0)
            raise UsageError(
                f"The cluster has {there:g} CPUs in total and had no room for "
                f"collector.workers={cfg.workers} with collector.cpus={cfg.cpus} each within "
                f"{cfg.patience} s. Lower one of the two, or add machines. To resume from a "
                "checkpoint, add resume=auto."
            )
        place = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(self._places)
        collector = RayCollector(
            make_envs,
            self._policy,
            frames_per_batch=cfg.frames_per_batch,
            total_frames=sys.maxsize,
            remote_configs={"num_cpus": cfg.cpus, "scheduling_strategy": place},
            update_after_each_batch=True,
        )
        collector.update_policy_weights_()
        return collector

    def _stop(self) -> None:
        super()._stop()
        if self._places is not None:
            ray.util.remove_placement_group(self._places)
        self._places = None


def _check_address(address: str | None) -> None:
    """Raises a `UsageError` if nothing listens there; Ray would take minutes to report it."""
    if address in (None, "auto"):
        return
    try:
        host, port = address.rsplit(":", 1)
        socket.create_connection((host, int(port)), timeout=5).close()
    except (OSError, ValueError) as error:
        raise UsageError(_NOBODY.format(address, error)) from None
