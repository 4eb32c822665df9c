"""Files that a kill or a full disk leaves whole."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from tqdm import tqdm

from nmer_recipes.errors import UsageError

CHECKPOINT = "checkpoint.pt"  # in the directory of a run


@contextmanager
def replaced(path: Path) -> Iterator[IO[bytes]]:
    """A file to write to, which takes the place of `path` in one step once it is complete.

    Until then, whatever happens, `path` is as it was before.
    """
    draft = path.with_name(path.name + ".tmp")
    try:
        with draft.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except Exception:
        with suppress(OSError):
            draft.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> None:
    """Writes a text that is either there as a whole or not at all."""
    with replaced(path) as file:
        file.write(text.encode())


def write_state(path: Path, state: dict[str, Any]) -> None:
    """Writes what `torch.load` reads, whole or not at all; an `OSError` where it cannot."""
    import torch  # here, so that a report need not wait for it

    try:
        with replaced(path) as file:
            torch.save(state, file)
    except RuntimeError as error:
        if isinstance(error.__context__, OSError):  # torch hides what happened behind its own
            raise error.__context__ from None
        raise


@contextmanager
def told_of_errors(path: Path) -> Iterator[None]:
    """Says so on the screen, and goes on, where a file cannot be written within."""
    try:
        yield
    except OSError as error:
        with suppress(OSError):  # the messages may go to a file on the same disk
            tqdm.write(
                f"{path} cannot be written ({error.strerror}) and stays as it was. "
                "The run goes on, and tries again the next time.",
                file=sys.stderr,
            )


@contextmanager
def stopped_by_errors(directory: Path) -> Iterator[None]:
    """Ends the run, and says how to go on, where a file cannot be written within."""
    try:
        yield
    except OSError as error:
        raise UsageError(
            f"{error.filename or directory} cannot be written ({error.strerror}); all that was "
            f"written before is whole. Make room, then go on with {resume_word(directory)}."
        ) from None


def resume_word(directory: Path) -> str:
    """Returns `resume=DIR` as a shell and Hydra take it, in quotes where they need them."""
    from hydra.core.override_parser.overrides_parser import OverridesParser  # not for a report
    from hydra.core.override_parser.types import Quote, QuotedString
    from hydra.errors import HydraException

    word = f"resume={directory}"
    with suppress(HydraException):
        if OverridesParser.create().parse_override(word).value() == str(directory):
            return shlex.quote(word)
    return shlex.quote("resume=" + QuotedString(str(directory), Quote.double).with_quotes())
