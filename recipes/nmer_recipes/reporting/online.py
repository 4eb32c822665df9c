"""Reads runs from Weights & Biases through its public API."""

from __future__ import annotations

from typing import Any

from tqdm import tqdm

from nmer_recipes.errors import UsageError
from nmer_recipes.reporting.read import BadRunError, RunData, Tell, make_run

_KEYS = ["eval/return", "time/seconds", "train/updates"]
_ROWS = 10_000  # the service subsamples longer histories; a run has 100 evaluations


def fetch_runs(project: str, tell: Tell) -> list[RunData]:
    """Returns every run of `ENTITY/PROJECT`; reports each that cannot be used."""
    if project.count("/") != 1 or not all(project.split("/")):
        raise UsageError(
            f"--wandb {project} is not a project; give ENTITY/PROJECT, as in the project's URL."
        )
    try:
        import wandb
    except ImportError:
        raise UsageError(
            "--wandb needs the package wandb, which is not installed; run `pip install wandb`."
        ) from None
    if not wandb.login(prompt=False, verify=False):
        raise UsageError("--wandb needs an API key; run `wandb login` or set WANDB_API_KEY.")
    try:
        listed = list(wandb.Api(timeout=60).runs(project, lazy=False))
    except Exception as error:  # the client passes on any error of its service
        raise UsageError(f"--wandb {project} cannot be read: {error}") from None
    found = []
    for run in tqdm(listed, desc=project, unit="run", disable=None):
        try:
            found.append(_read(run))
        except BadRunError as error:
            tell(f"{run.url} is left out: {error}.")
    return found


def _read(run: Any) -> RunData:
    try:
        rows = run.history(keys=_KEYS, samples=_ROWS, pandas=False)
    except Exception as error:
        raise BadRunError(f"its history cannot be fetched ({error})") from None
    config = {name: value for name, value in run.config.items() if not name.startswith("_")}
    ordered = sorted(rows, key=lambda row: row["_step"])
    return make_run(run.url, config, ({**row, "frames": row["_step"]} for row in ordered))
