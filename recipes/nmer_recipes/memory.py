"""Estimates a replay buffer's memory before it is allocated."""

from __future__ import annotations

import shutil
import sys
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import torch
from omegaconf import DictConfig

from nmer_recipes.errors import UsageError
from nmer_recipes.methods import find_method
from nmer_torchrl.methods import option_names

_GROWTH = 13 / 12  # tables grow by a twelfth at a time
_WORTH_TELLING = 2**30  # bytes
_CGROUP = Path("/sys/fs/cgroup/memory.max")  # a container's limit
_MEMINFO = Path("/proc/meminfo")
DISK = "disk"


class Part(NamedTuple):
    """One part of a replay buffer's memory."""

    name: str
    place: str  # a device, or the disk
    size: int  # bytes


def estimate(cfg: DictConfig, observations: int, actions: int) -> list[Part]:
    """Returns the parts of a run's full buffer, with their devices and sizes."""
    rows, d = min(cfg.buffer_size, cfg.total_frames), observations + actions
    device, where = str(torch.device(cfg.device)), str(torch.device(cfg.storage_device))
    size = 4 * (2 * observations + actions + 1) + 1 + 8  # with reward, flag and TorchRL's index
    parts = [Part("rows", DISK if cfg.storage == "memmap" else where, rows * size)]
    search = search_of(cfg)
    if search is None:
        return parts
    apart = device != where and search != "faiss"
    for place in {where, device if apart else where}:  # if apart, the rows' device has a copy too
        parts.append(Part("points", place, int(rows * (4 * d + 1) * _GROWTH)))
    if search == "graph":
        candidates = max(3 * cfg.replay.get("k", 1) + 2, 16)
        lists = int(rows * (8 * candidates + 10) * _GROWTH)
        parts.append(Part("neighbor lists", device if apart else where, lists))
    return parts


def search_of(cfg: DictConfig) -> str | None:
    """Returns the name of a run's neighbor search, or None for methods without one."""
    if "search" not in option_names(find_method(cfg.replay.kind)):
        return None
    search = cfg.replay.get("search") or "auto"
    if search != "auto":
        return search
    return "keops" if torch.device(cfg.device).type == "cuda" else "graph"


def check_memory(cfg: DictConfig, observations: int, actions: int) -> None:
    """Raises a `UsageError` if the full buffer does not fit; prints the size of a large one."""
    by_place = defaultdict(list)
    for part in estimate(cfg, observations, actions):
        by_place[part.place].append(part)
    for place, parts in by_place.items():
        # A table exists twice while it grows.
        growing = max((part.size for part in parts if part.name != "rows"), default=0)
        needed = sum(part.size for part in parts) + growing
        listed = ", ".join(f"{part.name} {_show(part.size)}" for part in parts)
        if growing:
            listed += "; the largest table is held twice while it grows"
        free = free_space(cfg) if place == DISK else free_memory(place)
        if place == DISK:  # two checkpoints hold them too, until the older one is deleted
            needed *= 3
            listed += "; and as much for each of two checkpoints"
        if free is not None and needed > free:
            raise UsageError(
                f"buffer_size={cfg.buffer_size} needs {_show(needed)} on {place} ({listed}), but "
                f"only {_show(free)} are free. {_remedy(place, parts)}"
            )
        if needed >= _WORTH_TELLING:
            print(f"The full buffer takes {_show(needed)} on {place}: {listed}.", file=sys.stderr)


def _remedy(place: str, parts: list[Part]) -> str:
    ways = ["lower buffer_size"]
    names = {part.name for part in parts}
    if place.startswith("cuda") and "rows" in names:
        ways.append("keep the rows in host memory with storage_device=cpu")
    if place == "cpu" and "rows" in names:
        ways.append("keep the rows in files with storage=memmap")
    if "neighbor lists" in names:
        ways.append("search without neighbor lists with replay.search=torch")
    return "To make it fit: " + ", or ".join(ways) + "."


def free_memory(place: str) -> int | None:
    """Returns the free bytes on a device, or None if unknown."""
    if place.startswith("cuda"):
        try:
            return torch.cuda.mem_get_info(torch.device(place))[0]
        except RuntimeError:  # the driver does not report it
            return None
    known = []
    if _MEMINFO.exists():
        lines = dict(line.split(":", 1) for line in _MEMINFO.read_text().splitlines())
        known.append(1024 * int(lines["MemAvailable"].split()[0]))
    if _CGROUP.exists() and (limit := _CGROUP.read_text().strip()).isdigit():
        known.append(int(limit))
    return min(known, default=None)


def free_space(cfg: DictConfig) -> int:
    """Returns the free bytes on the disk that a run writes to."""
    named = cfg.run_dir or cfg.resume
    folder = Path("runs" if named in (None, "auto") else named).absolute()
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def _show(size: int) -> str:
    return f"{size / 2**30:.1f} GB" if size >= 2**30 else f"{size / 2**20:.0f} MB"
