"""Sends metrics to loggers, besides the run directory's own `metrics.csv`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any, Protocol

from omegaconf import DictConfig, OmegaConf

from nmer_recipes.directories import flatten
from nmer_recipes.errors import UsageError


class Logger(Protocol):
    """Receives rows of metrics.

    A resumed run passes `id` back to its logger. `place` says where the rows are stored: a run that
    continues with a different place sends the rows that it has.
    """

    id: str | None
    place: str

    def log(self, metrics: dict[str, float], frames: int) -> None:
        """Logs metrics at a number of environment frames."""
        ...

    def summarize(self, metrics: dict[str, float]) -> None:
        """Logs the run's summary."""
        ...

    def close(self) -> None:
        """Sends pending metrics."""
        ...


def check_logger(cfg: DictConfig) -> None:
    """Raises a `UsageError` if the logger that `cfg.logger` describes cannot be made."""
    match cfg.logger.kind:
        case "wandb":
            _wandb_mode(cfg)
        case "tensorboard":
            _summary_writer()
        case "csv" | "none":
            pass
        case other:
            raise UsageError(
                f"logger.kind={other} is not valid; give wandb, csv, tensorboard or none."
            )


def make_logger(cfg: DictConfig, directory: Path, run_id: str | None) -> Logger:
    """Builds the logger that `cfg.logger` describes, after `check_logger`."""
    match cfg.logger.kind:
        case "wandb":
            return WandbLogger(cfg, directory, run_id)
        case "tensorboard":
            return TensorboardLogger(directory)
    return NoLogger()  # metrics.csv is written anyway


def _wandb_mode(cfg: DictConfig) -> tuple[str | None, bool]:
    """Returns the mode for wandb, and whether it is offline because no key is set."""
    try:
        import wandb
    except ImportError:
        raise UsageError(
            "logger=wandb needs the package wandb, which is not installed; "
            "run `pip install wandb`, or choose logger=csv."
        ) from None
    mode = cfg.logger.mode or os.environ.get("WANDB_MODE")
    keyless = mode in (None, "online") and not wandb.login(prompt=False, verify=False)
    if keyless and mode == "online":
        raise UsageError(
            "wandb cannot log online without an API key; run `wandb login`, set WANDB_API_KEY, or "
            "leave the mode out to log offline."
        )
    return "offline" if keyless else mode, keyless


def _summary_writer() -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise UsageError(
            "logger=tensorboard needs the package tensorboard, which is not installed; "
            "run `pip install tensorboard`, or choose logger=csv."
        ) from None
    return SummaryWriter


class NoLogger:
    """Writes nothing besides `metrics.csv`."""

    id, place = None, "metrics.csv"

    def log(self, metrics: dict[str, float], frames: int) -> None:
        """Does nothing."""

    def summarize(self, metrics: dict[str, float]) -> None:
        """Does nothing."""

    def close(self) -> None:
        """Does nothing."""


class WandbLogger:
    """Logs to Weights & Biases: online if a key is set, else offline for a later sync."""

    def __init__(self, cfg: DictConfig, directory: Path, run_id: str | None) -> None:
        import wandb

        mode, keyless = _wandb_mode(cfg)
        config: Any = OmegaConf.to_container(cfg)
        if os.environ.get("WANDB_SWEEP_ID"):
            # A sweep's parameters are in the run's config under their own names and cannot be
            # replaced: `replay: nmer` would hide everything below `replay`.
            config = flatten(config)
        self._run = wandb.init(
            project=cfg.logger.project,
            group=cfg.logger.group,
            tags=list(cfg.logger.tags),
            name=cfg.name,
            config=config,
            dir=str(directory),
            id=run_id,
            resume="allow" if run_id else None,
            mode=mode,
            settings=wandb.Settings(silent=True, console="off"),
        )
        self.id: str | None = self._run.id
        self.place = f"wandb, {cfg.logger.project}, {mode or 'online'}"
        if keyless:
            place = Path(self._run.dir).parent
            print(
                f"wandb has no API key and logs offline; to upload the run: wandb sync {place}",
                file=sys.stderr,
            )

    def log(self, metrics: dict[str, float], frames: int) -> None:
        """Logs metrics; the step axis is environment frames."""
        self._run.log(metrics, step=frames)

    def summarize(self, metrics: dict[str, Any]) -> None:
        """Logs the summary, so that the table of runs shows it.

        A sweep optimizes only logged values.
        """
        self._run.log(metrics)

    def close(self) -> None:
        """Sends pending metrics."""
        self._run.finish()


class TensorboardLogger:
    """Writes TensorBoard's event files in the run directory."""

    id, place = None, "tensorboard"

    def __init__(self, directory: Path) -> None:
        self._writer = _summary_writer()(str(directory))

    def log(self, metrics: dict[str, float], frames: int) -> None:
        """Logs metrics; the step axis is environment frames."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, frames)

    def summarize(self, metrics: dict[str, float]) -> None:
        """Does nothing: the curves already show the result."""

    def close(self) -> None:
        """Writes pending metrics."""
        self._writer.close()
