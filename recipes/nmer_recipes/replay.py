"""Builds a recipe's replay buffer from its config, samples from it and describes it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from omegaconf import DictConfig
from tensordict import TensorDict, TensorDictBase
from torchrl.data import TensorDictReplayBuffer
from torchrl.envs.transforms import MultiStepTransform

from nmer_recipes.errors import UsageError
from nmer_recipes.memory import search_of
from nmer_recipes.methods import make_method
from nmer_recipes.rows import RowFiles
from nmer_recipes.runs import Clock
from nmer_torchrl import loop, make_replay_buffer
from nmer_torchrl.neighbors import DeviceSearch, make_search


def make_buffer(
    cfg: DictConfig, seed: int, directory: Path | None = None, *, capacity: int | None = None
) -> TensorDictReplayBuffer:
    """Builds the buffer that `cfg.replay` describes, with at most as many rows as the run's frames.

    With `storage=memmap`, rows are kept in files in the run's directory.

    Args:
        cfg: The run's config.
        seed: The sampling seed.
        directory: The run's directory.
        capacity: Number of rows, if it differs from the run's.
    """
    method = make_method(cfg.replay)
    if capacity is None:
        capacity = min(cfg.buffer_size, cfg.total_frames)
    place: dict[str, Any] = {"capacity": capacity, "device": cfg.storage_device}
    if cfg.storage == "memmap" and directory is not None:
        place = {"storage": RowFiles(capacity, directory)}
    try:
        if torch.device(cfg.device) != torch.device(cfg.storage_device):
            name, device = search_of(cfg), torch.device(cfg.device)
            if name not in (None, "faiss"):  # faiss searches on the CPU
                search = make_search(name, cfg.replay.get("k", 1), device)
                method = replace(method, search=DeviceSearch(search, device))
        buffer = make_replay_buffer(
            method,
            **place,
            batch_size=cfg.batch_size,
            generator=torch.Generator(cfg.storage_device).manual_seed(seed),
        )
    except (TypeError, ValueError, ImportError) as error:
        raise UsageError(f"replay={cfg.replay.kind}: {error}") from None
    if any(isinstance(part, MultiStepTransform) for part in buffer.transform.modules()):
        raise UsageError(
            f"replay={cfg.replay.kind} has a MultiStepTransform, but the recipes store single "
            "rows and alternate between environments; leave it out, or store rows of shape "
            "[envs, steps] in your own training loop."
        )
    return buffer


def store(buffer: TensorDictReplayBuffer, row: TensorDictBase, ended: float | None) -> None:
    """Stores a row, and updates the neighbor search now instead of at the next sample.

    `ended` is the return of the episode that ends with this row, if one does.
    """
    buffer.add(row)  # takes two thirds of the time of `extend`
    if ended is not None:
        loop.finish_episode(buffer, ended)
    loop.synchronize(buffer)


class Source(NamedTuple):
    """A buffer, and the number of rows that each batch takes from it."""

    buffer: TensorDictReplayBuffer
    rows: int


def draw(sources: Sequence[Source], batches: int, clock: Clock) -> Iterator[list[TensorDictBase]]:
    """Samples the rows of several batches at once, since nothing is stored between them.

    Priorities change with every update, and a tuned alpha with every sample. These methods sample
    each batch separately. Each result lists the rows by source.
    """
    if not batches:
        return
    learns = any(loop.learns(source.buffer) for source in sources)
    for size in [1] * batches if learns else [batches]:
        with clock("sample"):
            drawn = [source.buffer.sample(size * source.rows) for source in sources]
        yield drawn


@torch.no_grad()
def describe(buffer: TensorDictReplayBuffer, batch: TensorDictBase | None) -> dict[str, float]:
    """Returns the size, and for a batch of pairs the mixed share and the mean distance.

    The distance is over Z-scored observation and action, whatever the metric, so that runs can be
    compared.
    """
    metrics = {"replay/size": float(len(buffer)), "replay/mixed": 0.0}
    batch = TensorDict() if batch is None else batch
    weight = batch.get("mixup_weight", batch.get("state_weight", None))
    if weight is None:
        return metrics
    mixed = weight[:, 0] < 1
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
