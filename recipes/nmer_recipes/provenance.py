"""Records where a run's numbers come from: version, commit, state of the tree and machine."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

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


def _git(*arguments: str) -> str | None:
    """Returns the output of a git command in this file's repository, or None if it fails."""
    command = ["git", "-C", str(Path(__file__).parent), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def _processor() -> str:
    """Returns the processor's name as the system reports it."""
    try:
        name = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        name = None
    return name[1] if name else platform.processor() or platform.machine()
