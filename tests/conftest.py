import os
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

sys.path.insert(0, str(Path(__file__).parent))

# KeOps compiles into a cache that two processes must not write at the same time.
_WORKER = os.environ.get("PYTEST_XDIST_WORKER", "main")
os.environ["KEOPS_CACHE_FOLDER"] = str(Path.home() / ".cache" / f"keops_tests_{_WORKER}")

# The same examples in each run; how long one takes is the machine's matter.
settings.register_profile(
    "default", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("default")


@pytest.fixture(autouse=True)
def _one_thread_and_seed():
    torch.set_num_threads(1)
    torch.manual_seed(0)
