"""Runs that were logged to Weights & Biases, by its public API."""

from __future__ import annotations

from typing import Any

from common.config import UsageError
from tqdm import tqdm

from reporting.read import BadRunError, RunData, Tell, make_run

_KEYS = ["eval/return", "time/seconds", "train/updates"]
_ROWS = 10_000  # more than any run has evaluations; from more rows the service would draw


def fetch_runs(project: str, tell: Tell) -> list[RunData]:
    """Every run of `ENTITY/PROJECT`; a line is told for each that cannot be used."""
    try:
        import wandb
        from wandb.errors import Error
    except ImportError:
        raise UsageError("--wandb needs the package wandb; `pip install wandb`.") from None
    if project.count("/") != 1 or not all(project.split("/")):
        raise UsageError(f"--wandb {project}; it is ENTITY/PROJECT, as in the project's address.")
    if not wandb.login(prompt=False, verify=False):
        raise UsageError("--wandb needs an account: run `wandb login` or set WANDB_API_KEY.")
    found = []
    try:
        listed = wandb.Api(timeout=60).runs(project, lazy=False)
        for run in tqdm(listed, desc=project, unit="run", disable=None):
            try:
                found.append(_read(run))
            except BadRunError as error:
                tell(f"{run.url}: left out, {error}.")
    except (Error, ValueError, OSError) as error:
        raise UsageError(f"--wandb {project} cannot be read: {error}") from None
    return found


def _read(run: Any) -> RunData:
    rows = run.history(keys=_KEYS, samples=_ROWS, pandas=False)
    rows = sorted(rows, key=lambda row: row["_step"])
    config = {name: value for name, value in run.config.items() if not name.startswith("_")}
    return make_run(run.url, config, ({**row, "frames": row["_step"]} for row in rows))
