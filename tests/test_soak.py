"""Property tests draw new examples on request and the same ones otherwise; workflows run both."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import settings
from soak import soak

ROOT = Path(__file__).parents[1]
PROPERTY = """
from hypothesis import given, strategies as st

@given(number=st.integers(0, 2**60))
def test_{0}(number):
    print("{0} drew", number)
    assert number < 2**59
"""


def test_a_seed_decides_the_examples_and_a_failure_prints_it(tmp_path):
    source = "".join(PROPERTY.format(name) for name in ("first", "second"))
    (tmp_path / "test_property.py").write_text(source)
    options = ["--hypothesis-profile=soak", "--hypothesis-seed=7"]
    command = [sys.executable, "-m", "pytest", "-p", "conftest", "-p", "no:cacheprovider", "-s"]
    result = subprocess.run(
        [*command, *options, "test_property.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT / "tests"), "NMER_SOAK": "3"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    first, second = (
        re.findall(f"{name} drew (\\d+)", result.stdout) for name in ("first", "second")
    )
    assert len(first) > 1, result.stdout + result.stderr
    assert first == second  # without the seed they would be those of the test's name
    again = f"NMER_SOAK=3 python -m pytest {' '.join(options)} 'test_property.py::test_first'"
    assert again in result.stdout


def test_examples_are_fixed_unless_asked_for():
    assert settings.get_profile("default").derandomize
    assert not settings.get_profile("soak").derandomize


def test_a_soak_multiplies_examples(monkeypatch):
    monkeypatch.setattr("soak.SOAK", 25.0)
    assert soak(40) == 1_000
    monkeypatch.setattr("soak.SOAK", 0.001)
    assert soak(40) == 1


@pytest.mark.parametrize(
    ("name", "triggers", "target"),
    [
        ("test", {"push", "pull_request"}, "coverage"),
        ("soak", {"schedule", "workflow_dispatch"}, "soak"),
    ],
)
def test_workflows_run_targets_of_the_makefile(name, triggers, target):
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / f"{name}.yml").read_text())
    assert set(workflow[True]) == triggers  # YAML reads `on` as true
    (job,) = workflow["jobs"].values()
    assert job["steps"][-1]["run"] == f"make {target}"
    assert f"\n{target}: $(INSTALLED)" in (ROOT / "Makefile").read_text()
