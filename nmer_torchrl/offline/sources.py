"""Loads recorded data from datasets, files and run directories."""

from __future__ import annotations

import json
import os
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict
from torchrl.data import TensorStorage

from nmer_torchrl.offline.arrays import NAMES, REQUIRED, assemble
from nmer_torchrl.offline.transitions import ABOUT, Transitions
from nmer_torchrl.pairs import SuccessorPairs

# Note on rows that come from a run of the recipes.
SCALED = "The actions are in [-1, 1], to which the recipes scale the bounds of a task."
_CHECKPOINT = "checkpoint.pt"  # in a run directory of the recipes
_HDF5 = b"\x89HDF\r\n\x1a\n"
_ID = re.compile(r"([-\w]+/)*[-\w]+-v\d+")
_ALLOWED = (
    "give the id or the folder of a Minari dataset, an .npz or .hdf5 file with the arrays "
    f"{', '.join(REQUIRED)}, a run directory of the recipes that holds {_CHECKPOINT}, or a folder "
    "that `Transitions.save` has written"
)


def load_transitions(
    source: str | Path, *, max_steps: int | None = None, progress: bool = True
) -> Transitions:
    """Loads recorded transitions from a dataset, a file or a run directory.

    | source | what is read |
    |---|---|
    | id or folder of a Minari dataset | its episodes; nothing is downloaded |
    | `.npz` or `.hdf5` file | arrays in D4RL's layout, see `make_transitions` |
    | run directory of the recipes | the rows in its `checkpoint.pt`, with actions in [-1, 1] |
    | folder of `Transitions.save` | the saved transitions, memory-mapped |

    The content of the path decides, not its name: an existing path is never read as an id. Nothing
    in the files is unpickled or executed. Print the result before you train on it.

    Args:
        source: The path, or the id of a dataset.

    Keyword Args:
        max_steps: Time limit of the task, for files without `timeouts`; see `make_transitions`.
        progress: Whether a progress bar is shown in a terminal, if tqdm is installed.

    Examples:
        >>> import tempfile
        >>> import numpy as np
        >>> from nmer_torchrl.offline import load_transitions
        >>> file = tempfile.NamedTemporaryFile(suffix=".npz")
        >>> np.savez(
        ...     file,
        ...     observations=np.random.randn(50, 3),
        ...     actions=np.random.uniform(-1, 1, (50, 2)),
        ...     rewards=np.zeros(50),
        ...     terminals=np.arange(50) % 10 == 9,
        ... )
        >>> _ = file.flush()
        >>> len(load_transitions(file.name))
        50
    """
    if not isinstance(source, str | os.PathLike):
        raise TypeError(f"source={source!r} is neither a string nor a path; {_ALLOWED}.")
    path = Path(source).expanduser()
    if path.is_dir():
        return _load_folder(path, max_steps, progress)
    if path.is_file():
        return _load_file(path, max_steps, progress)
    if isinstance(source, str) and _ID.fullmatch(source):
        folder = _minari_root() / source
        if not (folder / "data").is_dir():
            raise FileNotFoundError(
                f"{source!r} is neither a path nor a Minari dataset in {_minari_root()}; download "
                f"the dataset with `minari download {source}`, or {_ALLOWED}."
            )
        return _load_minari(folder / "data", max_steps, progress)
    raise FileNotFoundError(f"{str(source)!r} does not exist; {_ALLOWED}.")


def _load_folder(path: Path, max_steps: int | None, progress: bool) -> Transitions:
    if (path / ABOUT).is_file():
        if max_steps is not None:
            raise ValueError(
                f"max_steps={max_steps} has no effect on transitions that were saved in {path}; "
                "leave it out, or load the original source again."
            )
        return Transitions.load(path)
    for folder in (path / "data", path):
        if (folder / "metadata.json").is_file():
            return _load_minari(folder, max_steps, progress)
    if (path / _CHECKPOINT).is_file():
        return _load_run(path / _CHECKPOINT, max_steps)
    raise ValueError(f"The folder {path} holds no data that can be loaded; {_ALLOWED}.")


def _load_file(path: Path, max_steps: int | None, progress: bool) -> Transitions:
    with path.open("rb") as file:
        start = file.read(len(_HDF5))
    if not start:
        raise ValueError(f"The file {path} is empty; write it again, or {_ALLOWED}.")
    if start == _HDF5:
        return _assemble(path, *_read_hdf5(path, progress), max_steps)
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
        if any(name.endswith(".npy") for name in names):
            return _assemble(path, *_read_npz(path), max_steps)
    raise ValueError(
        f"The file {path} is neither an .npz nor an HDF5 file; {_ALLOWED}. For another format, "
        "such as CSV, read the columns and call `make_transitions`."
    )


def _assemble(
    path: Path,
    arrays: dict[str, Any],
    others: list[str],
    max_steps: int | None,
    notes: tuple[str, ...] = (),
) -> Transitions:
    """Builds transitions from arrays, which it empties; errors name the path."""
    arrays.update(dict.fromkeys(others))  # ignored, but named in a note
    try:
        return assemble(arrays, max_steps, notes=notes)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


# -- files -----------------------------------------------------------------------------------------


def _read_npz(path: Path) -> tuple[dict[str, Any], list[str]]:
    arrays = {}
    with np.load(path, allow_pickle=False) as file:
        for name in NAMES:
            if name in file.files:
                try:
                    arrays[name] = file[name]
                except Exception as error:
                    raise ValueError(
                        f"{path}: the array {name!r} cannot be read ({error}); save it again with "
                        "numpy.savez, as an array of numbers."
                    ) from error
        return arrays, [name for name in file.files if name not in arrays and "/" not in name]


def _read_hdf5(path: Path, progress: bool) -> tuple[dict[str, Any], list[str]]:
    try:
        import h5py
    except ImportError as error:
        raise ImportError(
            f"{path} is an HDF5 file, but h5py is not installed; run `pip install h5py`, or "
            '`pip install "minari[hdf5]"` to read Minari datasets as well.'
        ) from error
    arrays = {}
    try:
        with h5py.File(path, "r") as file:
            if not any(name in file for name in REQUIRED) and "episode_0" in file:
                raise ValueError("it is a part of a Minari dataset; give the dataset's folder")
            found = {name: file[name] for name in file if isinstance(file[name], h5py.Dataset)}
            total = sum(found[name].nbytes for name in NAMES if name in found)
            with _bar(path.name, total, "B", progress) as advance:
                for name in NAMES:
                    if name in found:
                        arrays[name] = found[name][()]
                        advance(arrays[name].nbytes)
    except (OSError, KeyError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as HDF5 ({error}).") from error
    return arrays, [name for name in found if name not in arrays]


# -- Minari ----------------------------------------------------------------------------------------


def _minari_root() -> Path:
    """Returns the directory in which Minari keeps its datasets."""
    root = os.environ.get("MINARI_DATASETS_PATH")
    return Path(root) if root else Path.home() / ".minari" / "datasets"


def _load_minari(folder: Path, max_steps: int | None, progress: bool) -> Transitions:
    try:
        import minari
    except ImportError as error:
        raise ImportError(
            f"{folder} is a Minari dataset, but Minari is not installed; run "
            '`pip install "minari[hdf5]"`.'
        ) from error
    about = json.loads((folder / "metadata.json").read_text())
    if not {"observation_space", "action_space"} <= about.keys():
        # Minari would build the environment that the file names, with any arguments in the file.
        raise ValueError(
            f"{folder / 'metadata.json'} has no observation_space or no action_space. Without "
            "them, Minari would run code that the file names; create the dataset again with Minari "
            "0.5 or later."
        )
    space = json.loads(about["observation_space"])
    dataset = minari.MinariDataset(folder)
    parts: dict[str, list[NDArray[Any]]] = {name: [] for name in NAMES}
    with _bar(str(about.get("dataset_id")), dataset.total_episodes, "episode", progress) as advance:
        for episode in dataset.iterate_episodes():
            for name, part in _read_episode(episode, space, folder).items():
                parts[name].append(part)
            advance(1)
    if not parts["rewards"]:
        raise ValueError(f"The Minari dataset {folder} has no episodes; create it again.")
    # One array at a time, so that few are in memory twice.
    arrays = {name: np.concatenate(parts.pop(name)) for name in NAMES}
    return _assemble(folder, arrays, [], max_steps)


def _read_episode(episode: Any, space: Any, folder: Path) -> dict[str, NDArray[Any]]:
    """Returns the arrays of an episode of T steps, which has T + 1 observations."""
    observations = _flat(episode.observations, space, folder)
    steps, actions = len(episode.rewards), np.asarray(episode.actions)
    if len(observations) != steps + 1 or len(actions) != steps:
        raise ValueError(
            f"{folder}: episode {episode.id} has {steps} rewards, {len(actions)} actions and "
            f"{len(observations)} observations; an episode has one observation more than rewards."
        )
    terminals = np.asarray(episode.terminations, np.bool_)
    timeouts = np.array(episode.truncations, np.bool_)
    timeouts[-1:] |= ~terminals[-1:]  # an episode never continues in the next one
    return {
        "observations": observations[:-1],
        "actions": _float32(actions),
        "rewards": _float32(np.asarray(episode.rewards)),
        "terminals": terminals,
        "timeouts": timeouts,
        "next_observations": observations[1:],
    }


def _float32(array: NDArray[Any]) -> NDArray[Any]:
    """Converts wider numbers to float32 to save memory; leaves others for the checks."""
    with np.errstate(over="ignore"):
        return array.astype(np.float32) if array.dtype.kind == "f" else array


def _flat(observations: Any, space: Any, folder: Path) -> NDArray[Any]:
    """Returns observations `[T + 1, o]`; concatenates those of a Dict in the order of its space.

    Gymnasium's `FlattenObservation` uses the same order.
    """
    if isinstance(observations, Mapping):
        inner = space["subspaces"]
        return np.concatenate([_flat(observations[n], inner[n], folder) for n in inner], 1)
    array = np.asarray(observations)
    if array.ndim != 2 or array.dtype.kind not in "fiu" or array.dtype == np.uint8:
        raise ValueError(
            f"{folder}: observations are {array.dtype} of shape {array.shape} in an episode, but "
            "only vectors of numbers, and Dicts of them, can be loaded; convert images or discrete "
            "observations to vectors, and call `make_transitions`."
        )
    return _float32(array)


# -- runs ------------------------------------------------------------------------------------------


def _load_run(path: Path, max_steps: int | None) -> Transitions:
    try:
        state = torch.load(path, weights_only=True, map_location="cpu", mmap=True)
        if "buffer" not in state:
            raise ValueError("the run learned from fixed data and stored no rows")
        state = state["buffer"]
        stored, length = state["_storage"]["_storage"], int(state["_storage"]["_len"])
        cursor = int(state["_writer"]["_cursor"])
        if not length:
            raise ValueError("no rows are stored")
        # From the oldest to the newest row: a full buffer wraps around to its first position.
        time = (torch.arange(length) + cursor) % length
        following = {
            name: stored[f"next.{name}"][time] for name in ("observation", "reward", "terminated")
        }
        rows = TensorDict(
            observation=stored["observation"][time],
            action=stored["action"][time],
            next=TensorDict(following, batch_size=[length]),
            batch_size=[length],
        )
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f"{path} cannot be read as the checkpoint of a run ({reason}); {_ALLOWED}."
        ) from error
    order = _by_episode(rows)
    if order is not None:
        rows = rows[order]
    arrays = {
        "observations": rows["observation"].numpy(),
        "actions": rows["action"].numpy(),
        "rewards": rows["next", "reward"].numpy(),
        "terminals": rows["next", "terminated"].numpy(),
        "next_observations": rows["next", "observation"].numpy(),
    }
    notes = [SCALED]
    if order is not None:
        notes.append("Rows of several environments were put in the order of their episodes.")
    return _assemble(path, arrays, [], max_steps, tuple(notes))


def _by_episode(rows: TensorDict) -> torch.Tensor | None:
    """Returns the order `[N]` in which each row follows its predecessor; None if it already does.

    It is needed if several environments of a run write in turns.
    """
    position = torch.arange(len(rows))
    successor = SuccessorPairs().successors(TensorStorage(rows), position)
    first = position.clone()  # becomes the first row of each row's episode in the loop below
    first[successor[successor >= 0]] = position[successor >= 0]
    while not torch.equal(first, earlier := first[first]):
        first = earlier
    order = first.argsort(stable=True)
    return None if torch.equal(order, position) else order


@contextmanager
def _bar(name: str, total: int, unit: str, progress: bool) -> Iterator[Callable[[int], Any]]:
    """Yields a function that advances a progress bar, or does nothing if tqdm is missing."""
    try:
        from tqdm import tqdm
    except ImportError:
        yield lambda steps: None
        return
    hidden = None if progress else True  # None: hidden unless in a terminal
    with tqdm(total=total, desc=name, unit=unit, unit_scale=unit == "B", disable=hidden) as bar:
        yield bar.update
