"""Writes files that stay intact after a kill or on a full disk."""

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

CHECKPOINT = "checkpoint.pt"  # file name in a run's directory


class DirectoryLock:
    """Keeps other processes from writing to a run's directory; ends with the process at the latest.

    Where the system has no such locks, it does nothing.
    """

    def __init__(self, directory: Path) -> None:
        self._file: int | None = None
        self._owner = os.getpid()
        try:
            self._file = _lock(directory)
        except BlockingIOError:
            raise UsageError(
                f"Another run uses {directory}; wait until it ends, or choose another run_dir."
            ) from None

    def release(self) -> None:
        """Lets other processes write."""
        if self._file is not None:
            if self._owner == os.getpid():  # a child that was forked keeps the file open
                _unlock(self._file)
            os.close(self._file)
        self._file = None

    __del__ = release

    @classmethod
    def is_held(cls, directory: Path) -> bool:
        """Returns whether another process, or another run of this one, holds the lock."""
        try:
            cls(directory).release()
        except UsageError:
            return True
        return False


def _lock(directory: Path) -> int | None:
    try:
        import fcntl
    except ImportError:  # Windows
        return None
    file = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        raise
    except OSError:  # some network file systems
        os.close(file)
        return None
    return file


def _unlock(file: int) -> None:
    import fcntl

    fcntl.flock(file, fcntl.LOCK_UN)


@contextmanager
def replaced(path: Path) -> Iterator[IO[bytes]]:
    """Opens a file that replaces `path` atomically once it is complete.

    Until then, `path` stays unchanged.
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
    """Writes a text atomically."""
    with replaced(path) as file:
        file.write(text.encode())


def write_state(path: Path, state: dict[str, Any]) -> None:
    """Writes a state for `torch.load` atomically; raises an `OSError` if it cannot."""
    import torch  # imported here, so that a report starts faster

    try:
        with replaced(path) as file:
            torch.save(state, file)
    except RuntimeError as error:
        if isinstance(error.__context__, OSError):  # torch hides the cause behind its own error
            raise error.__context__ from None
        raise


@contextmanager
def told_of_errors(path: Path) -> Iterator[None]:
    """Prints a message and continues if a file cannot be written in the block."""
    try:
        yield
    except OSError as error:
        with suppress(OSError):  # the messages may go to a file on the same disk
            tqdm.write(
                f"{path} cannot be written ({error.strerror}) and was not changed. "
                "The run continues and tries again later.",
                file=sys.stderr,
            )


@contextmanager
def stopped_by_errors(directory: Path) -> Iterator[None]:
    """Ends the run with a remedy if a file cannot be written in the block."""
    try:
        yield
    except OSError as error:
        raise UsageError(
            f"{error.filename or directory} cannot be written ({error.strerror}); earlier files "
            f"are intact. Free some disk space, then resume with {resume_word(directory)}."
        ) from None


def resume_word(directory: Path) -> str:
    """Returns `resume=DIR`, quoted for a shell and Hydra if needed."""
    from hydra.core.override_parser.overrides_parser import OverridesParser  # not for a report
    from hydra.core.override_parser.types import Quote, QuotedString
    from hydra.errors import HydraException

    word = f"resume={directory}"
    with suppress(HydraException):
        if OverridesParser.create().parse_override(word).value() == str(directory):
            return shlex.quote(word)
    return shlex.quote("resume=" + QuotedString(str(directory), Quote.double).with_quotes())
