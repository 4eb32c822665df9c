"""The paper's settings for an algorithm, an environment and a replay method.

`paper.csv` is its table of ablations at 200K frames; the rows marked best are the defaults here.
Where it has no row, the rules below decide; they are ours.
"""

from __future__ import annotations

import csv
from functools import cache
from pathlib import Path

LOCOMOTION = ("Ant", "HalfCheetah", "Hopper", "Swimmer", "Walker2d", "Humanoid")
KINDS = {"uniform": "U", "per": "PER", "ct": "CT", "nmer": "NMER"}


@cache
def best_rows() -> dict[tuple[str, str, str], dict[str, str]]:
    """The best row of each algorithm, environment and replay method."""
    with (Path(__file__).parent / "paper.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["best"] == "1"]
    return {(row["algorithm"], row["env"], row["replay"]): row for row in rows}


def setting(name: str, algorithm: str, env: str, kind: str) -> int | float | None:
    """One of `k`, `replay_ratio`, `actor_l2`, `grad_clip`, `random_frames`, and SAC's `lr`."""
    if name == "lr":
        # 3e-3 is printed, 3e-4 released. On small tasks 1e-3 is ours: docs/benchmarks.md has the
        # scores of both on InvertedPendulum.
        return 3e-4 if env in LOCOMOTION else 1e-3
    if name == "random_frames":  # TD3's table; for SAC and small tasks as the released code
        return 10_000 if env in LOCOMOTION else 1_500
    small = {"k": 10, "replay_ratio": 1, "actor_l2": 0.0, "grad_clip": None}
    if name not in small:
        raise ValueError(f"The paper's table has no {name!r}; it has {', '.join(small)}.")
    if env not in LOCOMOTION:
        return small[name]
    if (algorithm, env) == ("sac", "Humanoid"):  # the paper has no SAC on Humanoid
        env = "Ant"
    method = KINDS.get(kind, "NMER")  # methods that the table lacks run as NMER does
    if (name, algorithm, env, method) == ("actor_l2", "sac", "Walker2d", "NMER"):
        return 1e-2  # not printed; that of the other methods there
    text = best_rows()[algorithm.upper(), env, method][name]
    if not text:
        return small[name]
    return int(text) if name in ("k", "replay_ratio") else float(text)
