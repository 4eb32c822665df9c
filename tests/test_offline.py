"""Recorded data becomes transitions: each row is kept as recorded or counted as left out."""

import importlib
import io
import json
import os
import pickle
import re
import shutil
import signal
import sys
import warnings
import zipfile
from collections import OrderedDict
from contextlib import redirect_stdout
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import NonTensorData, TensorDict
from torchrl.envs.transforms import MultiStepTransform

from nmer_torchrl import make_replay_buffer, offline
from nmer_torchrl.methods import METHODS
from nmer_torchrl.offline import Transitions, load_transitions, make_transitions

ROOT = Path(__file__).parents[1]
KEYS = ("observation", "action", ("next", "observation"), ("next", "reward"))
FLAGS = (("next", "terminated"), ("next", "truncated"), ("next", "done"))


def make_log(n: int = 60, *, episode: int = 10, following: bool = False, seed: int = 0) -> dict:
    """Builds episodes of that many steps, ended by a terminal state or a time limit in turn."""
    rng = np.random.default_rng(seed)
    ends = np.arange(n) % episode == episode - 1
    limits = ends & (np.arange(n) // episode % 2 == 1)
    states = rng.normal(size=(n, 3)).astype(np.float32)
    log = {
        "observations": states,
        "actions": rng.uniform(-1, 1, (n, 2)).astype(np.float32),
        "rewards": rng.normal(size=n).astype(np.float32),
        "terminals": ends & ~limits,
        "timeouts": limits,
    }
    if following:
        after = np.concatenate([states[1:], states[:1]])
        after[ends] = rng.normal(size=(ends.sum(), 3))
        log["next_observations"] = after
    return log


def assert_same(left: TensorDict, right: TensorDict) -> None:
    assert left.batch_size == right.batch_size
    for key in (*KEYS, *FLAGS):
        assert left[key].dtype == right[key].dtype
        assert torch.equal(left[key], right[key]), key


# -- rows ------------------------------------------------------------------------------------------


@st.composite
def logs(draw, *, following=None, limits=None, broken=True, max_steps=None):
    """Draws logs of few distinct numbers, so that equal rows and chance matches occur."""
    n = draw(st.integers(1, 12))
    number = st.sampled_from([0.0, 1.0, 2.0] + [np.nan, np.inf, 1e300] * broken)

    def column(width: int) -> np.ndarray:
        return np.array(draw(st.lists(number, min_size=n * width, max_size=n * width)))

    def flags() -> np.ndarray:
        return np.array(draw(st.lists(st.booleans(), min_size=n, max_size=n)))

    log = {
        "observations": column(2).reshape(n, 2),
        "actions": column(1).reshape(n, 1),
        "rewards": column(1),
        "terminals": flags(),
    }
    if draw(st.booleans()) if limits is None else limits:
        log["timeouts"] = flags()
    if draw(st.booleans()) if following is None else following:
        log["next_observations"] = column(2).reshape(n, 2)
        if draw(st.booleans()):  # rows that follow each other
            log["next_observations"][:-1] = log["observations"][1:]
    return log, draw(st.none() | st.integers(1, 4))


def by_loop(log: dict, max_steps: int | None) -> tuple[list[tuple], dict[str, int]]:
    """Does the work of `make_transitions` step by step; returns rows, and left-out rows."""

    def row(name: str, t: int) -> tuple[float, ...]:
        with np.errstate(over="ignore"):
            return tuple(np.float32(np.ravel(log[name][t])).tolist())

    n, given_next = len(log["rewards"]), "next_observations" in log
    terminated, truncated, steps = [], [], 0
    for t in range(n):
        steps += 1
        ends = bool(log["terminals"][t])
        apart = (
            given_next
            and t + 1 < n
            and any(
                a != b and a == a and b == b
                for a, b in zip(
                    row("next_observations", t), row("observations", t + 1), strict=True
                )
            )
        )
        limit = False
        if "timeouts" in log:
            limit = bool(log["timeouts"][t])
            ends = ends and not limit
        elif max_steps is not None:
            limit = not ends and steps % max_steps == 0
        if ends or apart:
            steps = 0
        terminated.append(ends)
        truncated.append(limit or (apart and not ends))

    rows, kept, left_out = [], [], {}
    for t in range(n):
        names = ["observations", "actions", "rewards"] + ["next_observations"] * given_next
        bad = [name for name in names if not np.isfinite(row(name, t)).all()]
        reason, after = None, row("observations", t)
        if bad:
            reason = f"NaN or infinite number in {bad[0]}"
        elif given_next:
            after = row("next_observations", t)
        elif not terminated[t]:
            if truncated[t]:
                reason = "time limit without a next observation"
            elif t == n - 1:
                reason = "last row without a next observation"
            elif not np.isfinite(row("observations", t + 1)).all():
                reason = "NaN or infinite number in the observations of the next row"
            else:
                after = row("observations", t + 1)
        if reason:
            left_out[reason] = left_out.get(reason, 0) + 1
        else:
            kept.append(t)
            numbers = (row("observations", t), row("actions", t), after, row("rewards", t))
            rows.append([*numbers, terminated[t], truncated[t]])
    for i, t in enumerate(kept):
        alone = i + 1 == len(kept) or kept[i + 1] != t + 1
        rows[i][-1] = rows[i][-1] or (alone and not terminated[t])
    return [tuple(each) for each in rows], left_out


def as_tuples(rows: TensorDict) -> list[tuple]:
    columns = [map(tuple, rows[key].tolist()) for key in KEYS]
    flags = [rows[key].flatten().tolist() for key in FLAGS[:2]]
    assert torch.equal(rows["next", "done"], rows[FLAGS[0]] | rows[FLAGS[1]])
    return list(zip(*columns, *flags, strict=True))


@given(logs())
def test_rows_are_those_of_a_slow_loop(case):
    log, max_steps = case
    rows, left_out = by_loop(log, max_steps)
    if not rows:
        with pytest.raises(ValueError, match=r"None of the .* rows can be used"):
            make_transitions(log, max_steps)
        return
    made = make_transitions(log, max_steps)
    assert as_tuples(made.rows) == rows
    assert made.left_out == left_out
    assert len(made) + sum(made.left_out.values()) == len(log["rewards"])


@given(logs())
def test_a_row_continues_the_one_before_unless_that_ended(case):
    if not by_loop(*case)[0]:
        return
    rows = make_transitions(*case).rows
    follows = (rows["next", "observation"][:-1] == rows["observation"][1:]).all(1)
    assert (follows | rows["next", "done"][:-1, 0]).all()
    assert rows["next", "done"][-1]
    assert not (rows["next", "terminated"] & rows["next", "truncated"]).any()


@given(logs(following=False, limits=True, broken=False))
def test_sequences_give_the_rows_that_next_observations_give_where_both_can(case):
    log, _ = case
    states = log["observations"]
    after = np.concatenate([states[1:], states[-1:]])
    after[log["terminals"]] = states[log["terminals"]]
    whole = make_transitions(log | {"next_observations": after}).rows
    ended = log["timeouts"].copy()
    ended[-1] |= not log["terminals"][-1]
    possible = torch.from_numpy(~ended)
    if not possible.any():
        return
    made = make_transitions(log).rows
    for key in (*KEYS, FLAGS[0]):
        assert torch.equal(made[key], whole[key][possible])


def test_time_limits_are_inferred_from_the_length_of_episodes():
    log = make_log(50) | {"timeouts": None}
    del log["timeouts"]
    log["terminals"] = (
        np.arange(50) == 24
    )  # after 20 + 5 steps, so steps 10, 20, 35 and 45 are limits
    made = make_transitions(log, max_steps=10)
    assert made.left_out == {
        "time limit without a next observation": 4,
        "last row without a next observation": 1,
    }
    ends = made.rows["next", "done"].flatten().nonzero().flatten().tolist()
    assert [len(part) for part in np.split(np.arange(45), np.array(ends) + 1)] == [
        9,
        9,
        5,
        9,
        9,
        4,
        0,
    ]
    assert "Time limits inferred from max_steps=10: 4." in made.notes


def test_a_terminal_step_at_the_limit_stays_terminal():
    log = make_log(20)
    del log["timeouts"]
    log["terminals"] = np.arange(20) % 10 == 9
    assert not make_transitions(log, max_steps=10).left_out


def test_without_time_limits_a_note_says_that_episodes_are_joined():
    log = make_log()
    del log["timeouts"]
    (note,) = make_transitions(log).notes
    assert "`timeouts`" in note
    assert "`max_steps`" in note
    assert not make_transitions(make_log()).notes


def test_a_row_that_is_terminal_and_a_time_limit_counts_as_a_time_limit():
    log = make_log(following=True)
    log["terminals"] = log["terminals"] | log["timeouts"]
    made, plain = make_transitions(log), make_transitions(make_log(following=True))
    assert_same(made.rows, plain.rows)
    note = "Rows that are both terminal and a time limit: 3. They count as time limits."
    assert note in made.notes


def test_ends_are_found_where_the_next_row_starts_elsewhere():
    log = make_log(following=True)
    flagged = make_transitions(log).rows
    del log["timeouts"]
    found = make_transitions(log)
    assert_same(found.rows, flagged)
    assert any("not the observation of the row after them: 2" in note for note in found.notes)
    log["next_observations"] = log["next_observations"][::-1]
    assert any("most of the rows" in note for note in make_transitions(log).notes)


def test_rows_are_copies_in_float32():
    log = {name: array.astype(np.float64) for name, array in make_log(following=True).items()}
    single = make_log(following=True)
    for each in (log, single):
        made = make_transitions(each)
        before = made.rows.clone()
        for array in each.values():
            array[:] = 0
        assert_same(made.rows, before)
        assert_same(before, make_transitions(make_log(following=True)).rows)


def test_forms_that_logs_have_are_accepted():
    log = make_log()
    other = {name: array[:, None] for name, array in log.items() if array.ndim == 1}
    other |= {"terminals": log["terminals"].astype(float), "timeouts": log["timeouts"].tolist()}
    assert_same(make_transitions(log | other).rows, make_transitions(log).rows)
    narrow = make_transitions(log | {"observations": np.arange(60), "actions": np.zeros(60)})
    assert narrow.rows["observation"].shape == narrow.rows["action"].shape == (57, 1)


LOG = make_log()
WRONG = {
    "missing": (
        {"rewards": None},
        "lack 'rewards'; the given arrays are 'observations', 'actions'",
    ),
    "length": ({"actions": np.zeros((59, 2))}, "'actions' has 59 rows, but 'observations' has 60"),
    "flags length": ({"timeouts": np.zeros(3)}, "'timeouts' has 3 rows"),
    "width": ({"next_observations": np.zeros((60, 4))}, "has 4 numbers per row, but .* has 3"),
    "images": ({"observations": np.zeros((60, 8, 8, 3))}, r"shape \(60, 8, 8, 3\).*images"),
    "bytes": ({"observations": np.zeros((60, 8), np.uint8)}, "uint8.*images"),
    "discrete": ({"actions": np.zeros((60, 1), int)}, "int64.*discrete.*astype"),
    "booleans": ({"actions": np.zeros((60, 1), bool)}, "bool.*discrete"),
    "text": ({"rewards": ["a"] * 60}, "'rewards' is <U1; give numbers"),
    "objects": ({"rewards": np.array([None] * 60)}, "'rewards' is object; give numbers"),
    "ragged": ({"observations": [[1.0], [1.0, 2.0]]}, "'observations' is not an array"),
    "scalar": ({"observations": 3.0}, r"has shape \(\); give shape"),
    "no columns": ({"actions": np.zeros((60, 0))}, r"has shape \(60, 0\); give shape"),
    "two rewards": ({"rewards": np.zeros((60, 2))}, r"\(60, 2\); give one number per row"),
    "flag": ({"terminals": np.arange(60)}, "'terminals' is 2 in row 2, and 58 rows are neither"),
    "flag NaN": ({"timeouts": np.full(60, np.nan)}, "'timeouts' is nan in row 0"),
    "flag shape": ({"terminals": np.zeros((60, 2))}, "one flag per row"),
    "spelling": ({"timeouts": None, "timeout": np.zeros(60)}, "did you mean 'timeouts'"),
    "empty": ({name: array[:0] for name, array in LOG.items()}, "no rows; give at least one"),
    "masked": (
        {"rewards": np.ma.masked_equal(LOG["rewards"], LOG["rewards"][3])},
        "'rewards' has masked entries, which are not supported.*filled",
    ),
    "all NaN": ({"rewards": np.full(60, np.nan)}, r"None of the 60 rows .* in rewards \(60\)"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_used_is_refused(case):
    changes, message = WRONG[case]
    log = {name: array for name, array in (LOG | changes).items() if array is not None}
    with pytest.raises(ValueError, match=message):
        make_transitions(log)


@pytest.mark.parametrize(("value", "kind"), [(0, ValueError), (2.5, TypeError), (True, TypeError)])
def test_max_steps_is_a_number_of_steps(value, kind):
    with pytest.raises(kind, match=f"max_steps={value}"):
        make_transitions(LOG, max_steps=value)


def test_notes_name_what_looks_wrong():
    log = make_log() | {"energy": np.zeros(60)}
    log["terminals"] = log["terminals"] | (np.arange(60) == 10)  # right after that of row 9
    log["rewards"][[3, 29]] = np.nan  # in the middle of an episode, and a terminal row
    made = make_transitions(log, max_steps=7)
    assert made.notes == (
        "Ignored: 'energy'.",
        "Terminal rows right after another terminal row: 1. If the flag stays set after an episode "
        "has ended, remove the rows up to the beginning of the next episode.",
        "max_steps=7 is not used: the data has time limits.",
        "Places where rows left out interrupt an episode: 1. The rows after each place count as "
        "another episode.",
        "Terminal rows among those left out: 1.",
    )


# -- buffers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_every_method_takes_the_rows(method):
    rows = make_transitions(make_log(200, following=True)).rows
    buffer = make_replay_buffer(method, capacity=200, batch_size=16)
    buffer.extend(rows)
    batch = buffer.sample()
    assert batch["observation"].shape == (16, 3)
    assert_same(buffer.storage[:], rows)


def test_successors_are_the_next_rows_of_the_episode():
    rows = make_transitions(make_log()).rows
    buffer = make_replay_buffer("ct", capacity=100, batch_size=16)
    buffer.extend(rows)
    index = torch.arange(len(rows))
    successors = buffer.sampler.unit.successors(buffer.storage, index)
    assert torch.equal(successors, torch.where(rows["next", "done"][:, 0], -1, index + 1))


def test_n_step_returns_stay_within_episodes():
    log = make_log()
    log["rewards"] = np.ones(60)
    log["observations"][33] = np.nan
    buffer = make_replay_buffer("nmer", capacity=100, batch_size=16)
    buffer.append_transform(MultiStepTransform(3, 1.0, done_keys=["done", "truncated"]))
    rows = make_transitions(log).rows
    buffer.extend(rows)  # which refuses rows that are not in the order of time
    done = rows["next", "done"].flatten().tolist()
    left = [next(i for i, end in enumerate(done[t:]) if end) + 1 for t in range(len(buffer))]
    returns = buffer[:]["next", "reward"].flatten().tolist()
    assert returns == [min(3, steps) for steps in left]


# -- what a person checks --------------------------------------------------------------------------


def test_description_says_what_to_check():
    log = make_log()
    log["observations"][:, 1] = 7.0
    log["actions"][:, 0] = np.linspace(-2, 3, 60)
    log["rewards"] = np.ones(60)
    for name, array in log.items():  # the fifth episode once more
        log[name] = np.concatenate([array, array[40:50]])
    made = make_transitions(log)
    text = {line[:16].strip(): line[16:] for line in made.describe().splitlines()}
    assert str(made) == made.describe()
    assert text == {
        "rows": "67 of 3 observations and 2 actions",
        "episodes": "7: 4 ended by a terminal state, 3 by a time limit or a missing row",
        "steps": "mean 9.57143, from 9 to 10 in an episode",
        "returns": "mean 9.57143, from 9 to 10 of an episode",
        "rewards": "from 1 to 1",
        "action 0": "from -2 to 2.91525",  # the last but one: the last is left out
        "action 1": text["action 1"],
        "constant": "observation 1",
        "duplicates": "10 rows equal to an earlier row",
        "left out": "3 rows",
        "": "3: time limit without a next observation",
    }


def test_rows_with_equal_fingerprints_are_compared(monkeypatch):
    def same_for_all(numbers):
        return torch.zeros(len(numbers), dtype=torch.int64)

    module = importlib.import_module("nmer_torchrl.offline.transitions")
    monkeypatch.setattr(module, "fingerprint", same_for_all)
    assert "0 rows equal" in str(make_transitions(make_log()))


def test_transitions_refuse_rows_without_their_entries():
    rows = make_transitions(LOG).rows
    with pytest.raises(ValueError, match=r"'done'\) is missing.*use make_transitions"):
        Transitions(rows.exclude(("next", "done")))
    with pytest.raises(ValueError, match=r"'action' is torch.float64 \[57, 2\]"):
        Transitions(rows.clone().set("action", rows["action"].double()))
    with pytest.raises(ValueError, match="batch size"):
        Transitions(rows.reshape(3, 19))


# -- files -----------------------------------------------------------------------------------------


def write_hdf5(path: Path, arrays: dict) -> None:
    h5py = pytest.importorskip("h5py")
    with h5py.File(path, "w") as file:
        for name, array in arrays.items():
            file[name] = array


def write_npz(path: Path, arrays: dict) -> None:
    with path.open("wb") as file:  # under exactly this name
        np.savez(file, **arrays)


@pytest.mark.parametrize("write", [write_npz, write_hdf5])
@pytest.mark.parametrize("following", [False, True])
def test_files_give_the_rows_of_their_arrays(write, following, tmp_path):
    log = make_log(following=following)
    write(tmp_path / "log", log | {"infos/velocity": np.zeros(60), "energy": np.zeros(60)})
    made = load_transitions(tmp_path / "log")  # what is there decides, not the name
    expected = make_transitions(log)
    assert_same(made.rows, expected.rows)
    assert made.left_out == expected.left_out
    assert made.notes == ("Ignored: 'energy'.",)
    assert_same(load_transitions(str(tmp_path / "log"), progress=False).rows, expected.rows)


@pytest.mark.parametrize("write", [write_npz, write_hdf5])
def test_errors_of_arrays_name_the_file(write, tmp_path):
    log = make_log()
    del log["terminals"]
    write(tmp_path / "log", log)
    with pytest.raises(ValueError, match=r"/log: The arrays lack 'terminals'"):
        load_transitions(tmp_path / "log")


def test_time_limits_of_a_file_are_inferred(tmp_path):
    log = make_log()
    del log["timeouts"]
    write_npz(tmp_path / "log.npz", log)
    assert_same(
        load_transitions(tmp_path / "log.npz", max_steps=10).rows,
        make_transitions(log, max_steps=10).rows,
    )


@pytest.mark.parametrize("module", ["h5py", "tqdm"])
def test_packages_that_are_missing(module, tmp_path, monkeypatch):
    write_hdf5(tmp_path / "log.hdf5", make_log())
    monkeypatch.setitem(sys.modules, module, None)
    if module == "tqdm":  # without a bar
        assert len(load_transitions(tmp_path / "log.hdf5")) == 57
    else:
        with pytest.raises(ImportError, match=r"pip install h5py.*minari\[hdf5\]"):
            load_transitions(tmp_path / "log.hdf5")


def test_sources_that_are_none_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    Path("log.csv").write_text("a,b\n1,2\n")
    Path("empty").mkdir()
    write_npz(Path("good.npz"), make_log())
    Path("cut.npz").write_bytes(Path("good.npz").read_bytes()[:500])
    write_hdf5(Path("good.h5"), make_log())
    Path("cut.h5").write_bytes(Path("good.h5").read_bytes()[:500])
    torch.save({"actor": torch.zeros(3)}, "policy.pt")
    for source, kind, message in (
        (3, TypeError, "source=3 is neither"),
        ("missing.npz", FileNotFoundError, "'missing.npz' does not exist"),
        (Path("missing"), FileNotFoundError, "'missing' does not exist"),
        ("D4RL/hopper/medium-v0", FileNotFoundError, "minari download D4RL/hopper/medium-v0"),
        ("empty", ValueError, "The folder empty holds no data that can be loaded"),
        ("log.csv", ValueError, r"neither an \.npz nor an HDF5 file.*make_transitions"),
        ("cut.npz", ValueError, r"neither an \.npz"),
        ("cut.h5", ValueError, "cut.h5 cannot be read as HDF5"),
        ("policy.pt", ValueError, r"neither an \.npz"),
    ):
        with pytest.raises(kind, match=message) as error:
            load_transitions(source)
        assert "Minari dataset" in str(error.value) or "HDF5" in str(error.value)


# -- Minari ----------------------------------------------------------------------------------------


DATASET = "robot/random-v0"


@pytest.fixture
def write_minari(tmp_path, monkeypatch):
    """Writes episodes, each a dict of arrays, as a dataset; returns its folder."""
    minari = pytest.importorskip("minari")
    pytest.importorskip("h5py")
    spaces = importlib.import_module("gymnasium.spaces")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))

    def space_of(values):
        if isinstance(values, dict):
            return spaces.Dict({name: space_of(value) for name, value in values.items()})
        if values.dtype == np.int64:
            return spaces.Discrete(5)
        limits = (0, 255) if values.dtype == np.uint8 else (-np.inf, np.inf)
        return spaces.Box(*limits, values.shape[1:], values.dtype)

    def write(episodes: list[dict], observation_space=None) -> Path:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there is no environment and no author
            minari.create_dataset_from_buffers(
                DATASET,
                [
                    minari.data_collector.EpisodeBuffer(id=number, **episode)
                    for number, episode in enumerate(episodes)
                ],
                observation_space=observation_space or space_of(episodes[0]["observations"]),
                action_space=space_of(episodes[0]["actions"]),
            )
        return tmp_path / "minari" / DATASET

    return write


def play(steps: int, end: str, seed: int = 0) -> dict:
    rng = np.random.default_rng(seed)
    last = np.arange(steps) == steps - 1
    return {
        "observations": rng.normal(size=(steps + 1, 3)),
        "actions": rng.uniform(-1, 1, (steps, 2)).astype(np.float32),
        "rewards": rng.normal(size=steps),
        "terminations": last & (end in ("terminal", "both")),
        "truncations": last & (end in ("limit", "both")),
    }


def test_a_minari_dataset_is_loaded_by_id_and_by_folder(write_minari):
    episodes = [
        play(7, "terminal", 0),
        play(5, "limit", 1),
        play(1, "nothing", 2),
        play(4, "both", 3),
    ]
    folder = write_minari(episodes)
    made = load_transitions(DATASET)
    number = 0
    for episode, ends in zip(episodes, ("terminal", "limit", "limit", "limit"), strict=True):
        for step in range(len(episode["rewards"])):
            row, last = made.rows[number], step + 1 == len(episode["rewards"])
            for key, value in (
                ("observation", episode["observations"][step]),
                ("action", episode["actions"][step]),
                (("next", "observation"), episode["observations"][step + 1]),
                (("next", "reward"), episode["rewards"][step : step + 1]),
            ):
                assert torch.equal(row[key], torch.as_tensor(value, dtype=torch.float32))
            assert bool(row["next", "terminated"]) == (last and ends == "terminal")
            assert bool(row["next", "truncated"]) == (last and ends == "limit")
            number += 1
    assert number == len(made)
    assert made.notes == (
        "Rows that are both terminal and a time limit: 1. They count as time limits.",
    )
    for source in (folder, folder / "data", str(folder)):
        assert_same(load_transitions(source).rows, made.rows)
    with pytest.raises(ValueError, match="part of a Minari dataset; give the dataset's folder"):
        load_transitions(folder / "data" / "main_data.hdf5")


@pytest.mark.parametrize("kind", [dict, OrderedDict])
def test_dict_observations_are_joined_as_gymnasium_flattens_them(kind, write_minari):
    spaces = pytest.importorskip("gymnasium").spaces
    plain = play(6, "terminal")
    parts = {"place": plain["observations"], "goal": np.ones((7, 2))}
    boxes = [(name, spaces.Box(-9, 9, part.shape[1:], float)) for name, part in parts.items()]
    space = spaces.Dict(kind(boxes))  # which sorts a plain dict, and nothing else
    write_minari([plain | {"observations": parts}], space)
    flat = spaces.flatten(space, {name: part[0] for name, part in parts.items()})
    loaded = load_transitions(DATASET).rows["observation"][0]
    assert torch.equal(loaded, torch.from_numpy(flat).float())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"actions": np.zeros(6, np.int64)}, "int64.*discrete actions"),
        ({"observations": np.zeros((7, 8, 8, 3), np.uint8)}, "uint8.*only vectors of numbers"),
        ({"observations": np.zeros(7, np.int64)}, "int64 of shape.*only vectors of numbers"),
        ({"observations": np.zeros((6, 3))}, "6 rewards, 6 actions and 6 observations"),
    ],
)
def test_episodes_that_cannot_be_used_are_refused(changes, message, write_minari):
    write_minari([play(6, "limit") | changes])
    with pytest.raises(ValueError, match=message):
        load_transitions(DATASET)


def test_without_minari_the_error_says_what_to_install(write_minari, monkeypatch):
    write_minari([play(6, "limit")])
    monkeypatch.setitem(sys.modules, "minari", None)
    with pytest.raises(ImportError, match=r'pip install "minari\[hdf5\]"'):
        load_transitions(DATASET)


def test_a_dataset_that_would_make_an_environment_is_refused(write_minari, tmp_path):
    """Minari creates the environment that the file names if the spaces are missing."""
    folder = write_minari([play(6, "limit")])
    path, marker = folder / "data" / "metadata.json", tmp_path / "executed"
    about = json.loads(path.read_text())
    del about["observation_space"]
    about["env_spec"] = json.dumps(
        {
            "id": "Robot-v0",
            "entry_point": "os:mkdir",
            "kwargs": {"path": str(marker)},
            "additional_wrappers": [],
            "vector_entry_point": None,
        }
    )
    path.write_text(json.dumps(about))
    with pytest.raises(ValueError, match="run code that the file names"):
        load_transitions(folder)
    assert not marker.exists()
    minari = importlib.import_module("minari")
    with pytest.raises(Exception):  # noqa: B017, PT011  # it is no environment
        minari.load_dataset(DATASET)
    assert marker.exists()  # it would


# -- runs ------------------------------------------------------------------------------------------


def write_run(folder: Path, rows: TensorDict, capacity: int) -> None:
    """Writes a checkpoint with a buffer that was filled row by row, as the recipes do."""
    buffer = make_replay_buffer("uniform", capacity=capacity, batch_size=4)
    for row in rows.exclude(("next", "truncated"), ("next", "done")):
        buffer.add(row)
    folder.mkdir()
    torch.save({"buffer": buffer.state_dict(), "frames": 3}, folder / "checkpoint.pt")


@pytest.mark.parametrize("capacity", [100, 60, 45])
def test_rows_of_a_run_come_from_the_oldest_to_the_newest(capacity, tmp_path):
    rows = make_transitions(make_log(following=True)).rows
    write_run(tmp_path / "run", rows, capacity)
    made = load_transitions(tmp_path / "run")
    assert_same(made.rows, rows[-capacity:])
    assert "[-1, 1]" in made.notes[0]


@pytest.mark.parametrize("capacity", [200, 85])
def test_environments_that_wrote_in_turns_are_told_apart(capacity, tmp_path):
    parts = [make_transitions(make_log(following=True, seed=seed)).rows for seed in range(2)]
    for part in parts:  # the ends of a run are not marked
        part["next", "truncated"][-1] = part["next", "done"][-1] = True
    written = torch.stack(parts, 1).reshape(-1)
    write_run(tmp_path / "run", written, capacity)
    made = load_transitions(tmp_path / "run")
    assert made.notes[1] == "Rows of several environments were put in the order of their episodes."
    stored = written[-capacity:]
    assert len(made) == len(stored)
    follows = (made.rows["next", "observation"][:-1] == made.rows["observation"][1:]).all(1)
    assert torch.equal(follows, ~made.rows["next", "done"][:-1, 0])
    ends = stored["next", "done"][:, 0]
    assert made.rows["next", "done"].sum() == ends.sum()

    def sorted_rows(rows):
        return sorted(as_tuples(rows))

    assert sorted_rows(made.rows) == sorted_rows(stored)


def test_a_run_of_a_recipe_is_loaded(tmp_path):
    recipes = importlib.import_module("recipe_helpers")  # not above: its tests are not counted
    recipes.train("td3", tmp_path / "run")
    made = load_transitions(tmp_path / "run")
    stored = torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)["buffer"]["_storage"]
    assert len(made) == stored["_len"] == 48
    assert torch.equal(made.rows["observation"], stored["_storage"]["observation"])
    assert torch.equal(made.rows["next", "reward"], stored["_storage"]["next.reward"])


# -- saving ----------------------------------------------------------------------------------------


def test_saved_transitions_come_back(tmp_path):
    log = make_log() | {"energy": np.zeros(60)}
    made = make_transitions(log)
    made.save(tmp_path / "deep" / "saved")
    for again in (
        Transitions.load(tmp_path / "deep" / "saved"),
        load_transitions(tmp_path / "deep" / "saved"),
    ):
        assert_same(again.rows, made.rows)
        assert (again.left_out, again.notes) == (made.left_out, made.notes)
        assert str(again) == str(made)
    assert os.listdir(tmp_path / "deep") == ["saved"]
    with pytest.raises(ValueError, match="max_steps=10 has no effect"):
        load_transitions(tmp_path / "deep" / "saved", max_steps=10)


def test_changes_to_loaded_rows_leave_the_files_as_they_are(tmp_path):
    made = make_transitions(LOG)
    made.save(tmp_path / "saved")
    rows = Transitions.load(tmp_path / "saved").rows
    rows["next", "reward"] *= 10
    rows["observation"].zero_()
    rows["extra"] = torch.zeros(len(rows))
    assert_same(Transitions.load(tmp_path / "saved").rows, made.rows)


def test_a_save_takes_no_place_that_is_taken(tmp_path):
    made = make_transitions(LOG)
    (tmp_path / "empty").mkdir()
    made.save(tmp_path / "empty")
    with pytest.raises(FileExistsError, match="already exists"):
        make_transitions(LOG).save(tmp_path / "empty")
    assert_same(Transitions.load(tmp_path / "empty").rows, made.rows)


def test_a_save_that_fails_leaves_nothing(tmp_path, monkeypatch):
    def full(*_):
        raise OSError("no space left")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space"):
        make_transitions(LOG).save(tmp_path / "saved")
    assert not any(tmp_path.iterdir())


def test_a_save_that_is_killed_is_noticed(tmp_path):
    target = tmp_path / "saved"
    if not (child := os.fork()):
        os.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL)
        try:
            make_transitions(LOG).save(target)
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert not target.exists()
    assert [path.suffix for path in tmp_path.iterdir()] == [".tmp"]
    with pytest.raises(FileNotFoundError, match="saved' does not exist"):
        load_transitions(target)
    make_transitions(LOG).save(target)
    assert len(load_transitions(target)) == 57


def test_damaged_files_are_noticed(tmp_path):
    made = make_transitions(LOG)

    def damage(name: str, content: bytes) -> str:
        shutil.rmtree(tmp_path / "saved", ignore_errors=True)
        made.save(tmp_path / "saved")
        (tmp_path / "saved" / name).write_bytes(content)
        with pytest.raises(ValueError, match="cannot be read as saved transitions") as error:
            load_transitions(tmp_path / "saved")
        return str(error.value)

    made.save(tmp_path / "saved")
    whole = (tmp_path / "saved" / "rows.tdz").read_bytes()
    damage("rows.tdz", whole[: len(whole) // 2])
    damage("rows.tdz", b"")
    damage("transitions.json", b"{")
    about = {"format": 1, "rows": 12, "left_out": {}, "notes": []}
    assert "has 57 rows" in damage("transitions.json", json.dumps(about).encode())
    assert "format is 2" in damage("transitions.json", json.dumps(about | {"format": 2}).encode())
    (tmp_path / "saved" / "transitions.json").unlink()
    with pytest.raises(FileNotFoundError, match="has no transitions"):
        Transitions.load(tmp_path / "saved")


# -- files of others -------------------------------------------------------------------------------


class Payload:
    """Makes a directory when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


class Plain:
    """A harmless class."""


@pytest.fixture
def payload(tmp_path):
    """Provides an object that leaves a mark if executed, and checks that there is none."""
    marker = tmp_path / "executed"
    yield Payload(marker)
    assert not marker.exists()
    pickle.loads(pickle.dumps(Payload(marker)))
    assert marker.is_dir()  # it would


def test_pickles_in_arrays_are_not_executed(payload, tmp_path):
    write_npz(tmp_path / "log.npz", make_log() | {"rewards": np.array([payload] * 60)})
    with pytest.raises(ValueError, match="'rewards' cannot be read"):
        load_transitions(tmp_path / "log.npz")


def test_pickles_in_checkpoints_are_not_executed(payload, tmp_path):
    torch.save({"buffer": payload}, tmp_path / "checkpoint.pt")
    with pytest.raises(ValueError, match="cannot be read as the checkpoint of a run"):
        load_transitions(tmp_path)
    torch.save(
        {"buffer": {"_storage": {"_storage": {}, "_len": 0}, "_writer": {"_cursor": 0}}},
        tmp_path / "checkpoint.pt",
    )
    with pytest.raises(ValueError, match="no rows are stored"):
        load_transitions(tmp_path)


def test_pickles_in_saved_rows_are_not_executed(payload, tmp_path):
    made = make_transitions(LOG)
    made.save(tmp_path / "saved")
    rows = made.rows.clone()
    rows["note"] = NonTensorData(Plain(), batch_size=[57])  # which is not JSON
    rows.save(tmp_path / "other.tdz")
    found = 0
    with (
        zipfile.ZipFile(tmp_path / "other.tdz") as archive,
        zipfile.ZipFile(tmp_path / "saved" / "rows.tdz", "w") as changed,
    ):
        for name in archive.namelist():
            content = archive.read(name)
            if "pickle" in name:
                content, found = pickle.dumps(payload), found + 1
            changed.writestr(name, content)
    assert found
    with pytest.raises(ValueError, match="Refusing to load pickled"):
        load_transitions(tmp_path / "saved")


# -- words -----------------------------------------------------------------------------------------


def test_public_names_have_an_example_and_are_in_the_reference():
    text = (ROOT / "docs" / "api" / "offline.md").read_text()
    shown = set(re.findall(r"^::: nmer_torchrl\.offline\.(\w+)$", text, re.MULTILINE))
    assert shown == set(offline.__all__)
    assert all(">>> " in getattr(offline, name).__doc__ for name in offline.__all__)


def test_the_page_shows_the_lines_that_are_printed(tmp_path, monkeypatch):
    """Compares only the names, since numbers depend on the version of the simulator."""
    pages = importlib.import_module("page_helpers")  # not above: its tests are not counted
    page = ROOT / "docs" / "howto" / "robot_log.md"
    monkeypatch.chdir(tmp_path)
    with redirect_stdout(io.StringIO()) as printed:
        exec(compile("\n".join(pages.blocks(page, "python")[:2]), str(page), "exec"), {})
    shown = pages.blocks(page, "text")[0]
    names = [[line[:16] for line in text.splitlines()] for text in (shown, printed.getvalue())]
    assert names[0] == names[1]
