"""Recorded transitions, with a report to check before training, and files to save them in."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from tensordict import NestedKey, TensorDict
from torch import Tensor

from nmer_torchrl.functional import fingerprint

ABOUT, ROWS = "transitions.json", "rows.tdz"  # files in the folder that `save` writes
_FORMAT = 1
_CHUNK = 65_536
_NUMBERS: tuple[NestedKey, ...] = (
    "observation",
    "action",
    ("next", "observation"),
    ("next", "reward"),
)
_FLAGS: tuple[NestedKey, ...] = (("next", "terminated"), ("next", "truncated"), ("next", "done"))


@dataclass(frozen=True, eq=False)
class Transitions:
    """Transitions in temporal order, with a report on the rows that were left out.

    `make_transitions` and `load_transitions` return them. `print(transitions)` shows what to check
    before training, and `buffer.extend(transitions.rows)` works with every method.

    Args:
        rows: `[N]` transitions: `observation` `[N, o]`, `action` `[N, a]`, `("next",
            "observation")` `[N, o]` and `("next", "reward")` `[N, 1]` in float32; `("next",
            "terminated")`, `("next", "truncated")` and `("next", "done")` `[N, 1]` as booleans.
            `truncated` is set if an episode ends by a time limit or if the next row is missing.
            Otherwise the next row continues the episode.
        left_out: Number of rows that were left out, by reason. Each row counts once.
        notes: Assumptions that were made, and findings that look wrong.

    Examples:
        >>> import numpy as np
        >>> from nmer_torchrl.offline import make_transitions
        >>> log = {
        ...     "observations": np.array([[0.0, 5.0], [0.5, 5.0], [1.0, 5.0]]),
        ...     "actions": np.array([[0.1], [-0.2], [0.3]]),
        ...     "rewards": np.array([1.0, 2.0, 4.0]),
        ...     "terminals": np.array([0, 0, 1]),
        ...     "timeouts": np.array([0, 0, 0]),
        ... }
        >>> print(make_transitions(log))
        rows            3 of 2 observations and 1 action
        episodes        1: 1 ended by a terminal state, 0 by a time limit or a missing row
        steps           mean 3, from 3 to 3 in an episode
        returns         mean 7, from 7 to 7 of an episode
        rewards         from 1 to 4
        action 0        from -0.2 to 0.3
        constant        observation 1
        duplicates      0 rows equal to an earlier row
        left out        0 rows
    """

    rows: TensorDict
    left_out: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __str__(self) -> str:
        return self.describe()

    def describe(self) -> str:
        """Returns a table of what to check before training, one fact per line."""
        lines = [f"{name:<16}{text}" for name, text in _facts(self.rows)]
        lines.append(f"{'left out':<16}{_count(sum(self.left_out.values()), 'row')}")
        lines += [f"{'':<16}{count:,}: {reason}" for reason, count in self.left_out.items()]
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join(lines)

    def save(self, folder: str | Path) -> None:
        """Writes the rows and the report to a new folder, from which `load` reads them.

        The folder appears once it is complete. If the process is killed before that, it leaves a
        folder next to it whose name ends in `.tmp`, which can be deleted.

        Args:
            folder: Path of the folder. It must not exist yet, or be an empty folder.
        """
        target = Path(folder)
        if target.exists() and not (target.is_dir() and not any(target.iterdir())):
            raise FileExistsError(
                f"{target} already exists; give the path of a new folder, or delete it first."
            )
        draft = target.with_name(f"{target.name}.{os.getpid()}.tmp")
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        about = {
            "format": _FORMAT,
            "rows": len(self),
            "left_out": dict(self.left_out),
            "notes": list(self.notes),
        }
        try:
            self.rows.save(draft / ROWS)
            (draft / ABOUT).write_text(json.dumps(about, indent=1))
            for name in (ROWS, ABOUT):
                with (draft / name).open("rb+") as file:
                    os.fsync(file.fileno())
            if target.exists():
                target.rmdir()
            draft.rename(target)
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise

    @classmethod
    def load(cls, folder: str | Path) -> Self:
        """Returns the transitions that `save` has written to a folder.

        The file is memory-mapped, so this takes milliseconds, and rows are read when they are used.
        Changes to the rows stay in memory and do not reach the file. Nothing in the files is
        executed: tensordict rejects entries that it would have to unpickle.

        Args:
            folder: Path of the folder.
        """
        folder = Path(folder)
        if not (folder / ABOUT).is_file():
            raise FileNotFoundError(
                f"{folder} is not a folder of saved transitions: it has no {ABOUT}. Give a folder "
                "that `Transitions.save` has written."
            )
        try:
            about: dict[str, Any] = json.loads((folder / ABOUT).read_text())
            if about["format"] != _FORMAT:
                raise ValueError(f"its format is {about['format']!r}, not {_FORMAT}")
            rows = TensorDict.load_memmap(folder / ROWS, allow_pickle=False)
            if len(rows) != about["rows"]:
                raise ValueError(f"{ROWS} has {len(rows)} rows, {ABOUT} says {about['rows']}")
            left_out = {str(reason): int(count) for reason, count in about["left_out"].items()}
            return cls(rows, left_out, tuple(str(note) for note in about["notes"]))
        except Exception as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise ValueError(
                f"{folder} cannot be read as saved transitions ({reason}); create it again from "
                "the source with `load_transitions` and `save`."
            ) from error


def _check(rows: Any) -> None:
    """Raises an error unless the rows have the entries and shapes that `Transitions` documents."""
    if type(rows) is not TensorDict or rows.ndim != 1:
        raise ValueError(
            f"`rows` is a {type(rows).__name__}, but Transitions holds a TensorDict of batch size "
            "[N]; use make_transitions."
        )
    for key in (*_NUMBERS, *_FLAGS):
        entry = rows.get(key, None)
        dtype = torch.bool if key in _FLAGS else torch.float32
        if not isinstance(entry, Tensor) or entry.dtype != dtype or entry.ndim != 2:
            found = f"{entry.dtype} {list(entry.shape)}" if isinstance(entry, Tensor) else "missing"
            raise ValueError(
                f"The entry {key!r} is {found}, but Transitions holds {dtype} of shape [N, width]; "
                "use make_transitions."
            )


def _facts(rows: TensorDict) -> Iterator[tuple[str, str]]:
    """Yields names and texts of the facts in `describe` about the rows."""
    observation, action = rows["observation"], rows["action"]
    reward = rows["next", "reward"].reshape(-1).double().numpy()
    done = rows["next", "done"].reshape(-1).numpy()
    terminals = int(rows["next", "terminated"].sum())
    starts = np.flatnonzero(np.concatenate([[True], done[:-1]]))
    returns = np.add.reduceat(reward, starts)
    steps = np.diff(np.append(starts, len(reward)))
    widths = (_count(observation.shape[1], "observation"), _count(action.shape[1], "action"))
    yield "rows", f"{len(rows):,} of {widths[0]} and {widths[1]}"
    yield (
        "episodes",
        f"{len(starts):,}: {terminals:,} ended by a terminal state, {len(starts) - terminals:,} by "
        "a time limit or a missing row",
    )
    yield "steps", f"mean {steps.mean():.6g}, from {steps.min():,} to {steps.max():,} in an episode"
    yield "returns", f"mean {returns.mean():.6g}, {_range(returns)} of an episode"
    yield "rewards", _range(reward)
    lowest, highest = action.amin(0).tolist(), action.amax(0).tolist()
    for i, (low, high) in enumerate(zip(lowest, highest, strict=True)):
        yield f"action {i}", f"from {low:.6g} to {high:.6g}"
    constant = (observation.amin(0) == observation.amax(0)).nonzero().reshape(-1).tolist()
    yield "constant", f"observation {', '.join(map(str, constant))}" if constant else "none"
    yield "duplicates", f"{_count(_duplicates(rows), 'row')} equal to an earlier row"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _range(values: np.ndarray[Any, np.dtype[np.float64]]) -> str:
    return f"from {values.min():.6g} to {values.max():.6g}"


def _duplicates(rows: TensorDict) -> int:
    """Counts the rows that equal an earlier one in all numbers and in `terminated`."""
    marks = torch.cat([fingerprint(_joined(part)) for part in rows.split(_CHUNK)])
    order = marks.argsort(stable=True)
    same = (marks[order[1:]] == marks[order[:-1]]).nonzero().reshape(-1)
    return sum(
        int((_joined(rows[order[part]]) == _joined(rows[order[part + 1]])).all(1).sum())
        for part in same.split(_CHUNK)
    )


def _joined(rows: TensorDict) -> Tensor:
    """Returns the entries that distinguish rows, concatenated to `[n, d]`."""
    terminated = rows["next", "terminated"].float()
    return torch.cat([*(rows[key] for key in _NUMBERS), terminated], 1)
