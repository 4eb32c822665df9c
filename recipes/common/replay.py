"""The replay buffer of a recipe: made from its config, drawn from, looked at."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from omegaconf import DictConfig
from tensordict import TensorDictBase
from torchrl.data import PrioritizedSampler, TensorDictReplayBuffer

from common.errors import UsageError
from common.runs import Clock
from nmer_torchrl import (
    NeighborPairSampler,
    ReplayOptimizationSampler,
    TunedMixup,
    make_replay_buffer,
)


def make_buffer(cfg: DictConfig, seed: int) -> TensorDictReplayBuffer:
    """The buffer that `cfg.replay` describes; a run never stores more than its frames."""
    try:
        return make_replay_buffer(
            **cfg.replay,
            capacity=min(cfg.buffer_size, cfg.total_frames),
            batch_size=cfg.batch_size,
            device=cfg.device,
            generator=torch.Generator(cfg.device).manual_seed(seed),
        )
    except (TypeError, ValueError, ImportError) as error:
        raise UsageError(f"replay={cfg.replay.kind}: {error}") from None


def store(buffer: TensorDictReplayBuffer, row: TensorDictBase, ended: float | None) -> None:
    """Stores a row, and has the neighbour search take it up now rather than at the next draw.

    `ended` is the return of an episode that ends with it.
    """
    buffer.add(row)  # in two thirds of the time of `extend`
    if ended is not None and isinstance(buffer.sampler, ReplayOptimizationSampler):
        buffer.sampler.finish_episode(ended, buffer.storage)
    if isinstance(buffer.sampler, NeighborPairSampler):
        nobody = torch.empty(0, dtype=torch.int64, device=row.device)
        buffer.sampler.neighbors(buffer.storage, nobody)


def draw(buffer: TensorDictReplayBuffer, batches: int, clock: Clock) -> Iterator[TensorDictBase]:
    """That many batches. Nothing is stored between them, so one draw serves them all.

    Priorities change with every update, and a tuned alpha with every draw: they ask for one each.
    """
    if not batches:
        return
    learns = any(isinstance(transform, TunedMixup) for transform in buffer.transform)
    if batches == 1 or learns or isinstance(buffer.sampler, PrioritizedSampler):
        for _ in range(batches):
            with clock("sample"):
                batch = buffer.sample()
            yield batch
        return
    with clock("sample"):
        drawn = buffer.sample(batches * buffer.batch_size).split(buffer.batch_size)
    yield from drawn


def report(buffer: TensorDictReplayBuffer, batch: TensorDictBase) -> None:
    """Tells samplers that go by them the TD errors of an update, `[B]` under `"td_error"`."""
    if isinstance(buffer.sampler, PrioritizedSampler):
        buffer.update_tensordict_priority(batch)
    elif isinstance(buffer.sampler, ReplayOptimizationSampler):
        buffer.update_priority(batch["index"], batch["td_error"])


@torch.no_grad()
def describe(buffer: TensorDictReplayBuffer, batch: TensorDictBase | None) -> dict[str, float]:
    """Size, and of a batch of pairs how many were mixed and how far apart they lay.

    The distance is over Z-scored observation and action, whatever the metric, so that runs compare.
    """
    metrics = {"replay/size": float(len(buffer)), "replay/mixed": 0.0}
    if batch is None or batch.get("mixup_weight", None) is None:
        return metrics
    mixed = batch["mixup_weight"][:, 0] < 1
    if batch["index"].ndim == 2:
        anchor, partner = batch["index"][:, :1], batch["index"][:, 1:]
        mixed &= (anchor != partner).any(-1)  # a row without a partner is paired with itself
        stored = buffer.storage.get(slice(0, len(buffer)))
        points = torch.cat([stored["observation"], stored["action"]], -1)
        spread = points.std(0, correction=0)
        scale = torch.where(spread > 0, 1 / spread, 1.0)
        distance = ((points[anchor] - points[partner]) * scale).norm(dim=-1)
        metrics["replay/neighbor_distance"] = float(distance.mean())
    metrics["replay/mixed"] = float(mixed.float().mean())
    return metrics
