"""Manages a run: its directory, its metrics, its progress, and how it stops."""

from __future__ import annotations

import csv
import io
import json
import math
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from tqdm import tqdm

from nmer_recipes.curve import draw_curve
from nmer_recipes.directories import find_directory, update_config
from nmer_recipes.files import DirectoryLock, stopped_by_errors, told_of_errors, write_text
from nmer_recipes.loggers import Logger, check_logger, make_logger
from nmer_recipes.provenance import describe_source, misses_avx512
from nmer_recipes.resume import resume_command
from nmer_recipes.scores import WINDOW, duration
from nmer_recipes.used import settle

COLUMNS = (
    "frames",
    "eval/return",
    "eval/return_std",
    "eval/normalized",
    "eval/length",
    "eval/q_value",
    "eval/monte_carlo",
    "eval/overestimation",
    "train/return",
    "train/episodes",
    "train/updates",
    "train/loss_qvalue",
    "train/loss_value",
    "train/loss_actor",
    "train/loss_alpha",
    "train/entropy",
    "train/alpha",
    "replay/size",
    "replay/mixed",
    "replay/neighbor_distance",
    "time/seconds",
    "time/frames_per_second",
    "time/updates_per_second",
    "time/share_environment",
    "time/share_upkeep",
    "time/share_sample",
    "time/share_update",
    "time/share_evaluation",
)
DESCRIBED = ("index", "mixup_weight", "state_weight")  # entries that `describe` reads
_LONG = 600.0  # seconds from which a run's remaining time is printed
_WIDE = 1_000  # units of a critic's layer above which it takes most of the time
_FIRST = 300  # updates after which the remaining time is estimated


class Clock:
    """Adds up the time spent in named parts of the loop."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(
            ("environment", "upkeep", "sample", "update", "evaluation"), 0.0
        )

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        """Adds the time spent in the block to `part`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[part] += time.perf_counter() - start


class Run:
    """Manages the directory of a run and everything that is logged about it.

    With any logger, the directory holds `config.yaml`, `metrics.csv` and, at the end, `curve.png`
    and `summary.json`. Use it as a context manager: inside, Ctrl-C and SIGTERM set `interrupted`
    instead of raising, so that the loop can write a checkpoint.
    """

    def __init__(self, cfg: DictConfig) -> None:
        self.cfg = cfg
        check_logger(cfg)
        settle(cfg)
        self.directory, self.resumed = find_directory(cfg)
        self._lock = DirectoryLock(self.directory)
        self.clock = Clock()
        self.batch: TensorDictBase | None = None  # the last one, which evaluations describe
        self.rows: list[dict[str, float]] = []
        self.frames = self.updates = 0
        self.interrupted: int | None = None
        self.due: dict[str, float] | None = None  # the buffer's metrics at a pending evaluation
        self.seconds = 0.0  # before the last interruption
        self.logger_id: str | None = None
        self._logged_to: str | None = None  # before the last interruption
        self.sources = [describe_source()]  # several if the run was continued elsewhere
        self._losses: dict[str, tuple[Tensor, int]] = {}  # sum and count since the last row
        self._started = self._marked = time.perf_counter()
        self._marked_at = (0, 0)  # frames and updates at the last row
        self._marked_clock = dict(self.clock.seconds)
        self._since_mark = 0.0  # seconds from the last row to the last interruption
        self._first_update: tuple[float, int] | None = None
        self._told = self._diverged = False
        self._logger: Logger | None = None

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """Deletes the directory of a new run if the block fails, since it holds only a config."""
        try:
            yield
        except BaseException:
            if [path.name for path in self.directory.iterdir()] == ["config.yaml"]:
                with suppress(OSError):
                    (self.directory / "config.yaml").unlink()
                    self.directory.rmdir()
            self._lock.release()
            raise

    def __enter__(self) -> Run:
        cfg = self.cfg
        self._logger = make_logger(cfg, self.directory, self.logger_id)
        self.logger_id = self._logger.id
        if self._logger.place != self._logged_to:
            for row in self.rows:
                self._send(row)
        self._logged_to = self._logger.place
        self._started = self._marked = time.perf_counter()
        with stopped_by_errors(self.directory):
            if self.resumed:
                (self.directory / "summary.json").unlink(missing_ok=True)  # the run is extended
                update_config(self.directory, cfg)
            self._write_metrics()
        unit = "update" if "total_updates" in cfg else "frame"
        self.bar = tqdm(
            total=cfg.total_frames, desc=cfg.name, unit=unit, mininterval=1, disable=None
        )
        if self.resumed:
            what = f"resumes in {self.directory} after {unit} {self.frames} of {cfg.total_frames}"
        elif cfg.resume == "auto" and not _in_sweep():
            what = f"starts in {self.directory}: resume=auto found no run to resume"
        else:
            what = f"writes to {self.directory}"
        self.bar.write(f"{cfg.name} {what}", file=sys.stderr)
        self.bar.update(self.frames)
        self._handlers = {
            number: signal.signal(number, self._interrupt)
            for number in (signal.SIGINT, signal.SIGTERM)
        }
        return self

    def _interrupt(self, number: int, _: Any) -> None:
        if self.interrupted is not None:  # asked twice: stop now
            raise KeyboardInterrupt
        self.interrupted = number
        self.bar.write(
            "Stopping after this frame; interrupt again to stop at once.", file=sys.stderr
        )

    def stops(self) -> bool:
        """Returns whether a signal has asked the run to stop."""
        return self.interrupted is not None

    def __exit__(self, *_: Any) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self.bar.close()
        if self._logger is not None:
            self._logger.close()
        self._lock.release()

    def note(self, losses: dict[str, Tensor], updates: int) -> None:
        """Adds the losses `[n]` of updates to sums on their device, which the next row reads."""
        self.updates += updates
        for name, values in losses.items():
            if name not in self._losses:
                self._losses[name] = (values.new_zeros((), dtype=torch.float64), 0)
            total, number = self._losses[name]
            self._losses[name] = (total.add_(values.sum()), number + len(values))

    def count(self, frames: int) -> None:
        """Counts one frame."""
        self.frames = frames
        if self.updates:
            self._tell_length(frames)
        self.bar.update(frames - self.bar.n)

    def log(self, frames: int, returns: list[float], *groups: dict[str, float]) -> None:
        """Writes a row of metrics; clears `returns`, the returns of training episodes."""
        now = time.perf_counter()
        passed = max(self._since_mark + now - self._marked, 1e-9)
        row: dict[str, float] = {"frames": frames, "train/updates": self.updates}
        row["train/episodes"] = len(returns)
        if returns:
            row["train/return"] = sum(returns) / len(returns)
        for name, (total, number) in self._losses.items():
            row[f"train/{name}"] = float(total) / number
        for group in groups:
            row |= group
        row["time/seconds"] = self.seconds + now - self._started
        row["time/frames_per_second"] = (frames - self._marked_at[0]) / passed
        row["time/updates_per_second"] = (self.updates - self._marked_at[1]) / passed
        for part, seconds in self.clock.seconds.items():
            row[f"time/share_{part}"] = (seconds - self._marked_clock[part]) / passed
        if unknown := row.keys() - set(COLUMNS):
            raise KeyError(f"No column for {sorted(unknown)}; add it to COLUMNS.")
        self.rows.append(row)
        with told_of_errors(self._metrics):
            self._write_metrics()
        self._send(row)
        self._tell_divergence(row)
        self.bar.set_postfix(eval_return=f"{row['eval/return']:.1f}", refresh=False)
        self._mark(now, frames)
        self.due = None
        returns.clear()

    def _tell_divergence(self, row: dict[str, float]) -> None:
        """Warns once if a loss or a return is not finite, since training continues on it."""
        bad = [name for name, value in row.items() if not math.isfinite(value)]
        if bad and not self._diverged:
            self._diverged = True
            self.bar.write(
                f"{', '.join(bad)} is not finite at frame {row['frames']:.0f}: the task returned a "
                "non-finite number, or the agent has diverged. The run continues, but no longer "
                "learns.",
                file=sys.stderr,
            )

    def _send(self, row: dict[str, float]) -> None:
        """Sends a row to the logger."""
        if self._logger is not None:
            metrics = {name: value for name, value in row.items() if name != "frames"}
            self._logger.log(metrics, int(row["frames"]))

    def _mark(self, now: float, frames: int) -> None:
        self._marked, self._marked_at, self._since_mark = now, (frames, self.updates), 0.0
        self._marked_clock = dict(self.clock.seconds)
        self._losses = {}

    def _tell_length(self, frames: int) -> None:
        """Prints once, after the first updates, how long a long run will take."""
        now = time.perf_counter()
        if self._first_update is None:
            self._first_update = (now, self.updates)
        since, first = self._first_update
        if self._told or self.updates - first < _FIRST:
            return
        self._told = True
        rate = (self.updates - first) / (now - since)
        frames_left = self.cfg.total_frames - frames
        ratio = self.cfg.get("replay_ratio", 1)
        seconds = frames_left * ratio / rate
        if seconds >= _LONG:
            fewer = "replay_ratio=1, " if ratio > 1 else ""
            if max(self.cfg.get("critic_hidden") or [0]) > _WIDE:
                fewer += "critic_hidden=[256,256], "
            what, total = f"frames with {ratio} updates each", "total_frames"
            if "total_updates" in self.cfg:
                what, total = "updates", "total_updates"
            self.bar.write(
                f"About {duration(seconds)} left on this machine: {frames_left:,} {what} at "
                f"{rate:.0f} updates/s. To shorten the run, use {fewer}a smaller {total}, or "
                "device=cuda if available. Ctrl-C stops the run, and resume=auto resumes it.",
                file=sys.stderr,
            )
            if torch.device(self.cfg.device).type == "cpu" and misses_avx512():
                self.bar.write(
                    "Some matrix products do not use this AMD processor's AVX-512 instructions. "
                    "The section on AMD processors in docs/benchmarks.md shows how to change that.",
                    file=sys.stderr,
                )

    @property
    def _metrics(self) -> Path:
        return self.directory / "metrics.csv"

    def _write_metrics(self) -> None:
        """Rewrites all rows: some may have failed to write, and some repeat after resuming."""
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, COLUMNS)
        writer.writeheader()
        writer.writerows(self.rows)
        write_text(self._metrics, text.getvalue())

    @property
    def score(self) -> float:
        """The mean of the last evaluations."""
        last = [row["eval/return"] for row in self.rows[-WINDOW:]]
        return sum(last) / len(last) if last else math.nan

    def stop(self) -> None:
        """Ends an interrupted run, and prints how to continue it."""
        command = resume_command(self.directory, self.cfg.algorithm)
        print(f"Stopped after writing a checkpoint. To resume: {command}", file=sys.stderr)
        if _in_sweep():
            print("To resume the sweep, run its command again.", file=sys.stderr)
        raise SystemExit(128 + int(self.interrupted or 0))

    def finish(self) -> float:
        """Writes `curve.png` and `summary.json`; returns the score."""
        seconds = self.seconds + time.perf_counter() - self._started
        names = ("torch", "torchrl", "tensordict", "gymnasium", "mujoco")
        summary = {
            "name": self.cfg.name,
            "score": self.score,
            "last_return": self.rows[-1]["eval/return"],
            "best_return": max(row["eval/return"] for row in self.rows),
            "evaluations": len(self.rows),
            "window": min(WINDOW, len(self.rows)),
            "frames": self.cfg.total_frames,
            "updates": self.updates,
            "seconds": round(seconds, 1),
            "versions": {name: version(name) for name in names},
            "sources": self.sources,
        }
        with stopped_by_errors(self.directory):
            self._write_metrics()
            draw_curve(self.directory / "curve.png", self.rows, self.cfg.name)
            write_text(self.directory / "summary.json", json.dumps(summary, indent=2) + "\n")
        if self._logger is not None:
            self._logger.summarize({"score": self.score})
        print(
            f"{self.cfg.name}: score {self.score:.1f} (mean of the last {summary['window']} "
            f"evaluations), {self.updates:,} updates in {duration(seconds)}; "
            f"see {self.directory}"
        )
        return self.score

    def state_dict(self) -> dict[str, Any]:
        """Returns rows, counters and the logger's id and place."""
        return {
            "rows": self.rows,
            "frames": self.frames,
            "updates": self.updates,
            "due": self.due,
            "losses": {name: [float(total), n] for name, (total, n) in self._losses.items()},
            "marked_at": list(self._marked_at),
            "since_mark": self._since_mark + time.perf_counter() - self._marked,
            "clock": {n: s - self._marked_clock[n] for n, s in self.clock.seconds.items()},
            "batch": None if self.batch is None else _described(self.batch),
            "seconds": self.seconds + time.perf_counter() - self._started,
            "logger_id": self.logger_id,
            "logged_to": self._logged_to,
            "sources": self.sources,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores a saved state."""
        self.rows, self.updates = list(state["rows"]), state["updates"]
        self.frames = state.get("frames", state["marked_at"][0])  # missing in version 0.1
        self._logged_to = state.get("logged_to")
        self.due = state.get("due")
        self._losses = {
            name: (torch.tensor(total, dtype=torch.float64, device=self.cfg.device), number)
            for name, (total, number) in state["losses"].items()
        }
        self._marked_at = tuple(state["marked_at"])
        self._since_mark = state.get("since_mark", 0.0)  # missing in earlier versions, as below
        self._marked_clock |= {n: -seconds for n, seconds in state.get("clock", {}).items()}
        if state.get("batch") is not None:
            self.batch = TensorDict(state["batch"]).to(self.cfg.storage_device)
            self.batch.auto_batch_size_(1)
        self.seconds, self.logger_id = state["seconds"], state["logger_id"]
        before = state.get("sources", [])  # missing in checkpoints of version 0.1
        self.sources = before + [source for source in self.sources if source not in before]


def _described(batch: TensorDictBase) -> dict[str, Tensor]:
    """Returns the entries of a batch that metrics are computed from."""
    return batch.select(*DESCRIBED, strict=False).to("cpu").clone().to_dict()


def _in_sweep() -> bool:
    return HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN
