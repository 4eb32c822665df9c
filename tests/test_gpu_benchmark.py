"""The benchmark for people who have a GPU, on the CPU and small."""

import csv
import os
import subprocess
import sys
from pathlib import Path

BENCHMARK = Path(__file__).parents[1] / "recipes" / "benchmarks" / "gpu.py"
METHODS = ["uniform", "nmer, torch", "nmer, graph"]


def run(*arguments: str, code: int = 0) -> subprocess.CompletedProcess:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(BENCHMARK), *arguments]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240)
    assert result.returncode == code, result.stderr
    return result


def test_every_part_is_measured_and_written_with_the_versions(tmp_path):
    small = ["--device", "cpu", "--sizes", "130", "--widths", "23", "--hidden", "8"]
    told = run(*small, "--methods", *METHODS, "--out", str(tmp_path)).stdout
    with (tmp_path / "gpu.csv").open() as file:
        rows = list(csv.DictReader(file))
    found = {(row["what"], row["method"], row["batches"]) for row in rows}
    expected = {("update", "", batches) for batches in ("1", "20")}
    for method in METHODS:
        expected |= {(what, method, b) for what in ("sample", "frame") for b in ("1", "20")}
        expected.add(("write", method, "1"))
    assert found == expected
    assert all(float(row["ms"]) > 0 and "torchrl 0." in row["versions"] for row in rows)
    assert (tmp_path / "gpu.png").stat().st_size > 10_000
    assert "| sample | 23 | 130 | 20 x 256 |" in told
    assert "open an issue on the project's page and attach gpu.csv" in told


def test_a_machine_without_a_gpu_is_told_what_to_try(tmp_path):
    import torch

    if not torch.cuda.is_available():
        assert "--device cpu" in run("--out", str(tmp_path), code=1).stderr
