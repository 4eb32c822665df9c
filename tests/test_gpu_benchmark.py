"""The GPU benchmark, run on the CPU at a small size."""

import csv
import os
import subprocess
import sys
from pathlib import Path

import gpu  # isort: skip

BENCHMARK = Path(__file__).parents[1] / "recipes" / "benchmarks" / "gpu.py"
METHODS = ["uniform", "nmer, torch", "nmer, graph"]


def test_every_part_is_measured_and_written_with_the_versions(
    tmp_path, monkeypatch, capsys, only_recipe_configs
):
    small = ["--device", "cpu", "--sizes", "130", "--widths", "23", "--hidden", "8"]
    words = ["gpu.py", *small, "--methods", *METHODS, "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", words)
    monkeypatch.setattr(gpu, "_SECONDS", 0.01)
    gpu.main()
    told = capsys.readouterr().out
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
    assert "open an issue in the project's repository and attach gpu.csv" in told


def test_a_machine_without_a_gpu_is_told_what_to_try(tmp_path):
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(BENCHMARK), "--out", str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240)
    assert result.returncode == 1
    assert "--device cpu" in result.stderr
