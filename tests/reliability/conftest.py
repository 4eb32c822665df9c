import os
from collections.abc import Iterator
from multiprocessing.context import BaseContext

import pytest
from recipe_helpers import RECIPES
from soak import soak as times
from torch import multiprocessing

IMPORTED = ["pytest", "torchrl.collectors", "td3", "matplotlib.pyplot"]
IMPORTED += ["gymnasium.envs.mujoco.inverted_pendulum_v5"]


@pytest.fixture(scope="session")
def soak() -> int:
    """Returns how many times longer than in CI the tests run, at least 1."""
    return times(1)


@pytest.fixture(scope="session")
def processes() -> Iterator[BaseContext]:
    """Starts processes, also TorchRL's, from one that has already imported what they need."""
    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method("forkserver", force=True)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(RECIPES), prepend=os.pathsep)
        patch.setenv("OMP_NUM_THREADS", "1")
        context.Process(target=int).start()  # has it import them under these variables
    yield context
    multiprocessing.set_start_method(before, force=True)
