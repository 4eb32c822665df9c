"""Loads recorded rows: reads them, checks them against the task, and caches them."""

from __future__ import annotations

import hashlib
import json
import math
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import gymnasium
import torch
from omegaconf import DictConfig, OmegaConf
from tensordict import TensorDict
from torch import Tensor
from torchrl.data import TensorDictReplayBuffer
from tqdm import tqdm

from nmer_recipes.checkpoint import read_state
from nmer_recipes.errors import UsageError
from nmer_recipes.files import told_of_errors, write_state
from nmer_recipes.replay import Source, make_buffer
from nmer_torchrl import loop
from nmer_torchrl.offline import load_transitions
from nmer_torchrl.offline.sources import SCALED
from nmer_torchrl.storages import move_state

_AFTER = ("observation", "reward", "terminated")
_STRETCH = 100  # rows of a stretch that are kept together, as CT needs
_TOLERANCE = 1e-3  # how far actions may exceed their bounds, to allow for rounding


def make_sources(
    cfg: DictConfig, env: gymnasium.Env, seed: dict[str, int], directory: Path
) -> dict[str, Source]:
    """Returns the sources of a run's batches, by name: collected rows, `cfg.data`, or both."""
    size = cfg.batch_size
    if cfg.data.source is None:
        return {"buffer": Source(make_buffer(cfg, seed["replay"], directory), size)}
    if "collector" not in cfg:
        return {"data": Source(load_buffer(cfg, env, seed["data"], directory), size)}
    if cfg.data.across:
        rows = read_rows(cfg, env)
        capacity = len(rows) + cfg.total_frames
        buffer = make_buffer(cfg, seed["replay"], directory, capacity=capacity)
        buffer.extend(rows.to(cfg.storage_device))
        return {"buffer": Source(buffer, size)}
    given = 0.5 if cfg.data.share is None else cfg.data.share
    share = round(size * given)
    if given and not share:
        raise UsageError(
            f"data.share={given} of batch_size={size} is less than one row; raise one of the two."
        )
    buffer = make_buffer(cfg, seed["replay"], directory)
    fixed = load_buffer(cfg, env, seed["data"])
    return {"data": Source(fixed, share), "buffer": Source(buffer, size - share)}


def load_buffer(
    cfg: DictConfig, env: gymnasium.Env, seed: int, directory: Path | None = None
) -> TensorDictReplayBuffer:
    """Returns a buffer with the rows of `cfg.data.source`, whose neighbors are looked up.

    The first run reads the source and looks up the neighbors, which may take minutes. It stores
    both in `cfg.data.cache`, where the next run with this source and method finds them. If it is
    interrupted, the next run goes on from the neighbors found so far. With `storage=memmap`, rows
    are kept in files of `directory`, if given.
    """
    path, kept = cache_file(cfg, env), None
    if path is not None and path.exists():
        kept = read_state(path, f"delete it to read {cfg.data.source} again")
    if kept is None:
        rows = read_rows(cfg, env)
    else:
        rows = TensorDict(kept["rows"], kept["size"])
        tqdm.write(f"{cfg.data.source}: {len(rows):,} rows, read from {path}", file=sys.stderr)
    buffer = make_buffer(cfg, seed, directory, capacity=len(rows))
    if hasattr(buffer.sampler, "finish_episode"):
        raise UsageError(
            f"replay={cfg.replay.kind} learns from the returns of collected episodes and does not "
            "work with recorded data; use another method."
        )
    buffer.extend(rows.to(cfg.storage_device))
    if kept is not None:
        buffer.sampler.load_state_dict(move_state(kept["sampler"], buffer.storage.device))
        if kept.get("complete", True):
            return buffer
    try:
        build_lists(buffer)
    except _StoppedBetweenBlocks:
        # If none was there at the start, another run may have completed it since.
        if path is not None and (kept is not None or not path.exists()):
            _write_cache(path, rows, buffer, complete=False)
            tqdm.write(
                f"The lists built so far are in {path}; the same command continues from them.",
                file=sys.stderr,
            )
        raise
    if path is not None:
        _write_cache(path, rows, buffer, complete=True)
    return buffer


def _write_cache(
    path: Path, rows: TensorDict, buffer: TensorDictReplayBuffer, *, complete: bool
) -> None:
    """Stores rows and neighbor lists; `complete` means that all lists have been built."""
    with told_of_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        sampler = move_state(buffer.sampler.state_dict(), torch.device("cpu"))
        draft = path.with_name(f"{path.name}.{os.getpid()}")  # other runs may write the same file
        entries = {"rows": rows.to_dict(), "size": len(rows)}
        write_state(draft, {**entries, "sampler": sampler, "complete": complete})
        draft.replace(path)


def read_rows(cfg: DictConfig, env: gymnasium.Env) -> TensorDict:
    """Prints a summary of `cfg.data.source` and returns its rows with actions in [-1, 1].

    Raises a `UsageError` if the rows' widths or actions do not fit the task.
    """
    try:
        found = load_transitions(cfg.data.source, max_steps=cfg.data.max_steps)
    except (ImportError, OSError, TypeError, ValueError) as error:
        text = str(error).removeprefix(f"{cfg.data.source}: ")
        raise UsageError(f"data={cfg.data.source}: {text}") from None
    tqdm.write(f"{cfg.data.source}:\n{found}", file=sys.stderr)
    # A copy, since saved transitions are views of one file, which `torch.save` does not take.
    rows = found.rows.select("observation", "action", *(("next", name) for name in _AFTER)).clone()
    if cfg.data.get("rows") is not None:  # older runs do not name it
        if cfg.data.rows > len(rows):
            raise UsageError(
                f"data.rows={cfg.data.rows} is more than the {len(rows)} rows of "
                f"{cfg.data.source}; lower it or leave it out."
            )
        rows = choose_rows(rows, cfg.data.rows, cfg.data.part)
    width, actions = env.observation_space.shape[0], env.action_space.shape[0]
    for name, given, wanted in (
        ("observations", rows["observation"].shape[-1], width),
        ("actions", rows["action"].shape[-1], actions),
    ):
        if given != wanted:
            raise UsageError(
                f"data={cfg.data.source} has {name} of {given} entries, but {cfg.env.id} has "
                f"{wanted}; give data of this task, or the task of this data."
            )
    if SCALED not in found.notes:  # a run's own rows are rescaled already
        rows["action"] = rescale(cfg, env, rows["action"])
    return rows


def choose_rows(rows: TensorDict, count: int, part: str) -> TensorDict:
    """Returns `count` of `[N]` rows in their order: the last ones, or stretches spread over all."""
    if part == "last":
        return rows[len(rows) - count :]
    stretches = torch.arange(len(rows)).split(_STRETCH)
    wanted = math.ceil(count / _STRETCH)
    chosen = [stretches[i * len(stretches) // wanted] for i in range(wanted)]
    return rows[torch.cat(chosen)[:count]]


def rescale(cfg: DictConfig, env: gymnasium.Env, actions: Tensor) -> Tensor:
    """Rescales actions `[N, m]` from the task's bounds to [-1, 1]."""
    bounds = env.env.action_space  # the task's own bounds, before rescaling
    low, high = (torch.from_numpy(bound.copy()).float() for bound in (bounds.low, bounds.high))
    scaled = 2 * (actions - low) / (high - low) - 1
    outside = (scaled.abs() > 1 + _TOLERANCE).any(0)
    if outside.any() and not cfg.data.clip:
        i = int(outside.nonzero()[0])
        raise UsageError(
            f"data={cfg.data.source}: actions of dimension {i} range from {actions[:, i].min():g} "
            f"to {actions[:, i].max():g}, but {cfg.env.id} accepts {low[i]:g} to {high[i]:g}; "
            "convert them to the task's units, or clip them with data.clip=true."
        )
    return scaled.clamp(-1, 1)


def build_lists(buffer: TensorDictReplayBuffer) -> None:
    """Builds the neighbor lists of all rows, so that sampling need not; shows a progress bar."""
    loop.synchronize(buffer)
    if hasattr(buffer.sampler, "build"):
        buffer.sampler.build(buffer.storage, progress=_show_progress)


class _StoppedBetweenBlocks(KeyboardInterrupt):
    """Ctrl-C was pressed while a block of lists was built, and that block is complete."""


def _show_progress(blocks: Sequence[Tensor]) -> Iterator[Tensor]:
    """Prints what is built, which a log shows too, and a progress bar in a terminal.

    The first Ctrl-C stops after the current block, and a second one at once.
    """
    rows, asked = sum(map(len, blocks)), []

    def interrupt(*_: Any) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(True)

    tqdm.write(f"Building the neighbor lists of {rows:,} rows.", file=sys.stderr)
    alone = threading.current_thread() is threading.main_thread()  # which alone gets signals
    before = signal.signal(signal.SIGINT, interrupt) if alone else None
    try:
        for block in tqdm(blocks, desc="neighbor lists", unit="block", disable=None):
            yield block
            if asked:
                raise _StoppedBetweenBlocks
    finally:
        if alone:
            signal.signal(signal.SIGINT, before)


def cache_file(cfg: DictConfig, env: gymnasium.Env) -> Path | None:
    """Returns the path of the cached buffer of these data and this method.

    The path changes with the file, the method and the task. It is None for a dataset id, since the
    dataset's files may change unnoticed.
    """
    source = Path(cfg.data.source)
    if not source.exists():
        return None
    files = sorted(source.rglob("*")) if source.is_dir() else [source]
    known = [
        (file.name, file.stat().st_size, file.stat().st_mtime_ns)
        for file in files[:1000]
        if file.is_file()
    ]
    bounds = env.env.action_space
    parts: dict[str, Any] = {
        "version": 1,
        "source": str(source.absolute()),
        "files": known,
        "options": {name: cfg.data.get(name) for name in ("max_steps", "clip", "rows", "part")},
        "replay": OmegaConf.to_container(cfg.replay, resolve=True),
        "bounds": [bounds.low.tolist(), bounds.high.tolist()],
        "width": env.observation_space.shape[0],
    }
    digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]
    return Path(cfg.data.cache) / f"{source.stem}-{cfg.replay.kind}-{digest}.pt"
