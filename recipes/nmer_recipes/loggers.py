"""Where metrics go besides the run directory's own `metrics.csv`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any, Protocol

from omegaconf import DictConfig, OmegaConf

from nmer_recipes.directories import flatten
from nmer_recipes.errors import UsageError


class Logger(Protocol):
    """Takes rows of metrics.

    `id` is what a resumed run gives back to it. `place` tells where the rows are: a run that goes
    on elsewhere sends those that it has.
    """

    id: str | None
    place: str

    def log(self, metrics: dict[str, float], frames: int) -> None:
        """Takes the metrics at that many environment frames."""
        ...

    def summarize(self, metrics: dict[str, float]) -> None:
        """Takes what sums up the run."""
        ...

    def close(self) -> None:
        """Sends what is left."""
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
            raise UsageError(f"logger.kind={other}; it is wandb, csv, tensorboard or none.")


def make_logger(cfg: DictConfig, directory: Path, run_id: str | None) -> Logger:
    """The logger that `cfg.logger` describes, which `check_logger` has passed."""
    match cfg.logger.kind:
        case "wandb":
            return WandbLogger(cfg, directory, run_id)
        case "tensorboard":
            return TensorboardLogger(directory)
    return NoLogger()  # metrics.csv is written anyway


def _wandb_mode(cfg: DictConfig) -> tuple[str | None, bool]:
    """The mode to give to wandb, and whether that is offline for want of a key."""
    try:
        import wandb
    except ImportError:
        raise UsageError(
            "logger=wandb needs the package wandb, which is not installed; "
            "`pip install wandb`, or choose logger=csv."
        ) from None
    mode = cfg.logger.mode or os.environ.get("WANDB_MODE")
    keyless = mode in (None, "online") and not wandb.login(prompt=False, verify=False)
    if keyless and mode == "online":
        raise UsageError(
            "wandb is asked to log online, but has no key; run `wandb login`, set "
            "WANDB_API_KEY, or leave the mode out to log offline."
        )
    return "offline" if keyless else mode, keyless


def _summary_writer() -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise UsageError(
            "logger=tensorboard needs the package tensorboard, which is not installed; "
            "`pip install tensorboard`, or choose logger=csv."
        ) from None
    return SummaryWriter


class NoLogger:
    """Leaves it at `metrics.csv`."""

    id, place = None, "metrics.csv"

    def log(self, metrics: dict[str, float], frames: int) -> None:
        """Nothing to do."""

    def summarize(self, metrics: dict[str, float]) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Nothing to do."""


class WandbLogger:
    """Weights & Biases: online where a key is set, else offline, to be synchronized later."""

    def __init__(self, cfg: DictConfig, directory: Path, run_id: str | None) -> None:
        import wandb

        mode, keyless = _wandb_mode(cfg)
        config: Any = OmegaConf.to_container(cfg)
        if os.environ.get("WANDB_SWEEP_ID"):
            # A sweep's parameters stand in the run's config as they are called, and nothing may
            # replace them: `replay: nmer` would hide all that is below `replay`.
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
                f"wandb has no key, so it logs offline; to send it: wandb sync {place}",
                file=sys.stderr,
            )

    def log(self, metrics: dict[str, float], frames: int) -> None:
        """The step axis is environment frames."""
        self._run.log(metrics, step=frames)

    def summarize(self, metrics: dict[str, Any]) -> None:
        """Shown in the table of runs, and logged: a sweep optimizes only what is."""
        self._run.log(metrics)

    def close(self) -> None:
        """Sends what is left."""
        self._run.finish()


class TensorboardLogger:
    """TensorBoard's event files in the run directory."""

    id, place = None, "tensorboard"

    def __init__(self, directory: Path) -> None:
        self._writer = _summary_writer()(str(directory))

    def log(self, metrics: dict[str, float], frames: int) -> None:
        """The step axis is environment frames."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, frames)

    def summarize(self, metrics: dict[str, float]) -> None:
        """The curves say it all."""

    def close(self) -> None:
        """Writes what is left."""
        self._writer.close()
