"""Records where a run's numbers come from: version, commit, state of the tree and machine."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

import torch

import nmer_torchrl


def describe_source() -> dict[str, Any]:
    """Returns version, commit (None outside a clone), whether the tree is clean, and machine.

    `preload` names libraries in `LD_PRELOAD`, which may change how matrix products are rounded.
    """
    commit = _git("rev-parse", "HEAD")
    return {
        "version": nmer_torchrl.__version__,
        "commit": commit,
        "clean": None if commit is None else _git("status", "--porcelain") == "",
        "processor": _processor(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "preload": [
            Path(name).name for name in re.split("[ :]+", os.environ.get("LD_PRELOAD", "")) if name
        ],
    }


def misses_avx512() -> bool:
    """Returns whether MKL, which PyTorch multiplies matrices with, ignores this CPU's AVX-512.

    It does so on AMD processors unless a preloaded library tells it otherwise.
    """
    amd = "AuthenticAMD" in _cpuinfo() and "avx512f" in _cpuinfo()
    return amd and torch.backends.mkl.is_available() and not _has_symbol("mkl_serv_intel_cpu_true")


def _has_symbol(name: str) -> bool:
    """Returns whether the program, or a library preloaded into it, defines a function."""
    return hasattr(ctypes.CDLL(None), name)


def _git(*arguments: str) -> str | None:
    """Returns the output of a git command in this file's repository, or None if it fails."""
    command = ["git", "-C", str(Path(__file__).parent), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def _processor() -> str:
    """Returns the processor's name as the system reports it."""
    name = re.search(r"^model name\s*: (.+)$", _cpuinfo(), re.MULTILINE)
    return name[1] if name else platform.processor() or platform.machine()


def _cpuinfo() -> str:
    """Returns what Linux reports about the processor; empty on other systems."""
    try:
        return Path("/proc/cpuinfo").read_text()
    except OSError:
        return ""
