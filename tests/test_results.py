"""The results page: what it says is what the committed runs give."""

import csv
import json
import os
import re
import shutil
import subprocess
import sys

import pytest
from test_recipe_parts import RECIPES

ROOT = RECIPES.parent
RESULTS = ROOT / "docs" / "results"
PARTS = sorted(path for path in RESULTS.iterdir() if path.is_dir())
RUNS = sorted(path.parent for path in RESULTS.rglob("metrics.csv"))


def test_reports_are_those_of_the_runs(tmp_path):
    """By the command that the page names, without a run: it makes every report anew."""
    made = tmp_path / "docs" / "results"
    shutil.copytree(RESULTS, made, ignore=shutil.ignore_patterns("*.png", "*.tex", "report.md"))
    (tmp_path / "recipes").symlink_to(RECIPES)
    subprocess.run(
        ["bash", str(made / "study.sh"), "keep"],
        env=os.environ | {"PYTHON": sys.executable, "PYTHONPATH": str(ROOT)},
        check=True,
        capture_output=True,
    )
    for part in PARTS:
        names = {path.name for path in part.iterdir()}
        assert names == {path.name for path in (made / part.name).iterdir()}
        for name in ("report.md", "tables.tex", "settings.csv"):  # the others are not rounded
            assert (part / name).read_text() == (made / part.name / name).read_text(), name


def test_every_table_is_that_of_a_report():
    """Whole tables: no row is left out, and each stands under its own header."""
    reports = [(part / "report.md").read_text() for part in PARTS]
    page = (ROOT / "docs" / "results.md").read_text()
    shown = re.findall(r"(?:^\|.*\n)+", page, flags=re.MULTILINE)
    assert shown
    for table in shown:
        assert any(f"\n\n{table}\n" in report for report in reports), table


def test_runs_are_complete_and_say_nothing_of_the_machine():
    assert RUNS
    for run in RUNS:
        summary = json.loads((run / "summary.json").read_text())
        with (run / "metrics.csv").open() as file:
            rows = list(csv.DictReader(file))
        last = [float(row["eval/return"]) for row in rows[-11:]]
        assert int(rows[-1]["frames"]) == summary["frames"], run.name
        assert summary["score"] == pytest.approx(sum(last) / len(last))
        assert summary["versions"].keys() >= {"torch", "torchrl", "mujoco"}
        assert not re.search(r"(^|\s)/\w", (run / "config.yaml").read_text()), run.name
