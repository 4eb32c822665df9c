import os
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

# Where the modules are that tests, recipes and benchmarks share.
sys.path.insert(0, str(Path(__file__).parents[1] / "recipes"))
sys.path.insert(0, str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parents[1] / "recipes" / "benchmarks"))

from pretend_cuda import some_cuda

# One cache for all workers, which take turns to compile into it.
os.environ["KEOPS_CACHE_FOLDER"] = str(Path.home() / ".cache" / "keops_tests")

# How long an example takes is the machine's matter. The same examples in each run, unless
# `--hypothesis-profile=soak` asks for new ones: those of a `--hypothesis-seed`, and no others.
_MACHINE = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("default", derandomize=True, **_MACHINE)
settings.register_profile("soak", derandomize=False, database=None, print_blob=True, **_MACHINE)
settings.load_profile("default")


def pytest_collection_modifyitems(items):
    """Excludes tests of the recipes and pages from coverage, which counts only the package.

    Counting makes Hydra, which composes each of their configs, take five times as long.
    """
    for item in items:
        names = vars(getattr(item, "module", None) or object).values()
        if {getattr(each, "__module__", None) for each in names} & {
            "recipe_helpers",
            "page_helpers",
        }:
            item.add_marker(pytest.mark.no_cover)


def pytest_terminal_summary(terminalreporter, config):
    """Prints how to draw the examples of a failure again."""
    seed, failed = config.getoption("--hypothesis-seed"), terminalreporter.stats.get("failed", [])
    if seed is not None and failed:
        size = os.environ.get("NMER_SOAK") or 1
        terminalreporter.section("examples were drawn by a seed; the same again")
        for test in failed:
            options = f"--hypothesis-profile=soak --hypothesis-seed={seed}"
            terminalreporter.line(f"NMER_SOAK={size} python -m pytest {options} '{test.nodeid}'")


@pytest.fixture(autouse=True)
def _one_thread_and_seed():
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture
def cuda():
    """Provides `cuda:0`: yields None if it is real, else the counts of the simulated device."""
    with some_cuda() as waits:
        yield waits


@pytest.fixture
def only_recipe_configs(monkeypatch):
    """Hides configs of other projects, some of which share names with settings of the recipes."""
    from hydra.core.config_store import ConfigStore
    from recipe_helpers import recipe_configs

    monkeypatch.setattr(ConfigStore.instance(), "repo", recipe_configs())
