"""Type checkers: names are checked, and the documentation's code passes in strict mode.

mypy runs with the settings of pyproject.toml: strict, but the names of TorchRL and tensordict are
`Any`, since neither ships types. (mypy 2.4 crashes when it is told to read tensordict's source.)

pyright (here basedpyright, which brings its own Node.js) runs in strict mode and reads TorchRL's
source. It does so without the rules about unknown types and missing stubs (`NOT_OURS`): they report
functions that TorchRL, tensordict and torch leave without annotations. All other rules hold, among
them those about arguments, attributes and missing annotations, for our names and for TorchRL's.
"""

import inspect
import json
import os
import subprocess
import sys
import typing
from dataclasses import fields
from pathlib import Path

import pytest
from page_helpers import ROOT, blocks, first_column, name, pages

from nmer_torchrl import make_replay_buffer, metrics
from nmer_torchrl.methods import METHODS, Mixup
from nmer_torchrl.methods.options import METRICS, InterpolationName, MetricName
from nmer_torchrl.metrics import FeatureSpace, Metric
from nmer_torchrl.neighbors import SearchName, check_search
from nmer_torchrl.typed import BufferOptions, MethodName, NamedOptions

NOT_OURS = {
    "reportMissingTypeStubs": False,
    "reportUnknownArgumentType": False,
    "reportUnknownLambdaType": False,
    "reportUnknownMemberType": False,
    "reportUnknownParameterType": False,
    "reportUnknownVariableType": False,
}

# Of each method, as its `make_sampler` says.
SAMPLERS = {
    kind: typing.get_type_hints(method.make_sampler)["return"] for kind, method in METHODS.items()
}

# Each kind has a sampler of a known type. One test runs this code.
RIGHT = """\
from typing import assert_type

import torch
from torch import Tensor
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

from nmer_torchrl import (
    NMER,
    Method,
    __version__,
    make_replay_buffer,
    methods,
)
from nmer_torchrl.buffers import MethodName, PairPrioritizedReplayBuffer

assert_type(__version__, str)
"""
for sampler in sorted(set(SAMPLERS.values()), key=lambda kind: kind.__name__):
    RIGHT += f"from {sampler.__module__} import {sampler.__name__}\n"
RIGHT += "".join(
    f"""
buffer = make_replay_buffer({kind!r}, capacity=9, batch_size=2)
sampler = assert_type(buffer.sampler, {sampler.__name__})
assert type(sampler) is {sampler.__name__}
assert_type(
    make_replay_buffer(methods.{METHODS[kind].__name__}(), capacity=9, batch_size=2).sampler,
    {sampler.__name__},
)
"""
    for kind, sampler in SAMPLERS.items()
)
RIGHT += """
def neighbors_of_the_first(k: int) -> Tensor:
    buffer = make_replay_buffer("nmer", capacity=9, batch_size=2, k=k)
    return assert_type(buffer.sampler.neighbors(buffer.storage, torch.tensor([0])), Tensor)


def of_any_name(name: MethodName) -> TensorDictReplayBuffer:
    return make_replay_buffer(name, capacity=9, batch_size=2)


def of_any_method(method: Method[RandomPairSampler]) -> RandomPairSampler:
    return make_replay_buffer(method, capacity=9, batch_size=2).sampler


def both_members(buffer: PairPrioritizedReplayBuffer) -> Tensor:
    return buffer.sampler.priorities(torch.tensor([0]))


both_members(make_replay_buffer("per_nmer", capacity=9, batch_size=2))
both_members(make_replay_buffer(methods.PERNMER(k=3), capacity=9, batch_size=2))
make_replay_buffer(NMER(k=3), capacity=9, batch_size=2).sampler.metric
make_replay_buffer("nmer", storage=LazyTensorStorage(9), batch_size=2, pin_memory=True)
make_replay_buffer(
    "nmer",
    capacity=9,
    batch_size=2,
    search="torch",
    interpolation="mean",
    metric={"euclidean": {"weights": {"action": 0.5}}},
    fraction={"linear": {"first": 1.0, "last": 0.0, "rows": 100}},
    max_distance={"quantile": 0.9},
)
"""

# One wrong call to a line, after the import.
WRONG = """\
from nmer_torchrl import NMER, NeighborPairSampler, PrioritizedNeighborPairSampler, make_replay_buffer, methods
make_replay_buffer("nmmer", capacity=9, batch_size=2)
make_replay_buffer("nmer", capacity=9, batch_size=2, search="kepos")
make_replay_buffer("nmer", capacity=9, batch_size=2, interpolation="betta")
make_replay_buffer("nmer", capacity=9, batch_size=2, metric="euclid")
make_replay_buffer("nmer", capacity=9, batch_size=2, metric={"euclid": {}})
make_replay_buffer("nmer", capacity=9, batch_size=2, fraction={"lineal": {"first": 1.0}})
make_replay_buffer("nmer", capacity=9, batch_size=2, max_distance={"quantil": 0.9})
make_replay_buffer("nmer", capacity=9, batch_size=2, kk=3)
make_replay_buffer("nmer", capacity="9", batch_size=2)
make_replay_buffer("nmer", capacity=9)
make_replay_buffer("nmer", capacity=9, batch_size=2).sampler.neighbors("storage", 0, "3")
NeighborPairSampler(search="kepos")
NeighborPairSampler(metric="euclidean")
PrioritizedNeighborPairSampler(9, search="kepos")
make_replay_buffer(NMER(), capacity=9, batch_size=2, k=3)
make_replay_buffer(NMER, capacity=9, batch_size=2)
make_replay_buffer(NMER(), capacity=9, batch_size=2).sampler.neighbors("storage", 0, "3")
NMER(kk=3)
NMER(search="kepos")
methods.Uniform(k=3)
"""  # noqa: E501

Errors = dict[str, list[tuple[int, str]]]  # by file: line and message


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Provides files to check: one for each page, a correct one and a wrong one."""
    folder = tmp_path_factory.mktemp("typing")
    for page in pages():
        if code := blocks(page, "python"):
            stem = name(page).removesuffix(".md").replace("/", "_")
            (folder / f"page_{stem}.py").write_text("\n".join(code))
    (folder / "right.py").write_text(RIGHT)
    (folder / "wrong.py").write_text(WRONG)
    config = {
        "typeCheckingMode": "strict",
        "pythonVersion": "3.11",
        "extraPaths": [str(ROOT), str(ROOT / "recipes")],
        **NOT_OURS,
    }
    (folder / "pyrightconfig.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def mypy(folder) -> Errors:
    command = [sys.executable, "-m", "mypy", "--output", "json", *sorted(folder.glob("*.py"))]
    environment = {**os.environ, "MYPYPATH": os.pathsep.join([str(ROOT), str(ROOT / "recipes")])}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.returncode == 1, result.stdout + result.stderr  # there are errors in wrong.py
    errors: Errors = {}
    for line in result.stdout.splitlines():
        found = json.loads(line)
        if found["severity"] == "error":
            file = errors.setdefault(Path(found["file"]).name, [])
            file.append((found["line"], found["message"]))
    return errors


@pytest.fixture(scope="module")
def pyright(folder) -> Errors:
    command = [sys.executable, "-m", "basedpyright", "--project", folder, "--outputjson"]
    command += ["--pythonpath", sys.executable]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert result.returncode == 1, result.stdout + result.stderr
    errors: Errors = {}
    for found in json.loads(result.stdout)["generalDiagnostics"]:
        file = errors.setdefault(Path(found["file"]).name, [])
        file.append((found["range"]["start"]["line"] + 1, found["message"]))
    return errors


@pytest.fixture(params=["mypy", "pyright"])
def errors(request) -> Errors:
    return request.getfixturevalue(request.param)


def test_pages_and_right_calls_pass_in_strict_mode_and_wrong_calls_do_not(errors, folder):
    """Runs one test for each checker, since each takes long to start."""
    assert len(list(folder.glob("page_*.py"))) > 10
    assert {file: found for file, found in errors.items() if file.startswith("page_")} == {}
    told = "name each method in nmer_torchrl/typed.py, by the type of its sampler"
    assert errors.get("right.py", []) == [], told  # the sampler of each kind has a known type
    assert {line for line, _ in errors["wrong.py"]} == set(range(2, WRONG.count("\n") + 1))


def test_the_sampler_of_each_kind_is_what_its_type_says():
    exec(compile(RIGHT, "right.py", "exec"), {"__name__": "right"})


def test_names_are_those_that_are_known_at_run_time():
    listed = "name each method of METHODS once in nmer_torchrl/typed.py, by the type of its sampler"
    assert sorted(typing.get_args(MethodName)) == sorted(METHODS), listed
    for search in typing.get_args(SearchName):
        check_search(search)
    with pytest.raises(ValueError, match=", ".join(typing.get_args(SearchName))):
        check_search("kepos")
    for interpolation in typing.get_args(InterpolationName):
        Mixup(interpolation=interpolation)


def test_every_metric_has_a_name_and_a_row_in_its_page():
    told = "MetricName and METRICS in nmer_torchrl/methods/options.py differ"
    assert typing.get_args(MetricName) == tuple(METRICS), told
    rows = first_column(ROOT / "docs" / "metrics.md", "metric")
    for kind in vars(metrics).values():
        if inspect.isclass(kind) and issubclass(kind, Metric) and kind is not Metric:
            named = kind is FeatureSpace or kind in METRICS.values()  # the one needs a function
            assert named, f"add {kind.__name__} to METRICS in nmer_torchrl/methods/options.py"
            shown = any(row.startswith(f"{kind.__name__}(") for row in rows)
            assert shown, f"give {kind.__name__} a row in docs/metrics.md"


def test_overloads_take_what_the_function_and_the_methods_take():
    signature = typing.get_type_hints(make_replay_buffer)
    for other in ("method", "options", "return"):
        del signature[other]
    assert typing.get_type_hints(BufferOptions) == signature
    named = typing.get_type_hints(NamedOptions)
    options = {}
    for method in METHODS.values():
        hints = typing.get_type_hints(method)
        options |= {field.name: hints[field.name] for field in fields(method)}
        for field in fields(method):
            told = f"say in NamedOptions of nmer_torchrl/typed.py what {field.name} is"
            assert named.get(field.name) == hints[field.name], told
    assert named == signature | options
