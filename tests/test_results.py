"""The results page: what it says is what the committed runs give."""

import csv
import json
import re

import pytest
from test_recipe_parts import RECIPES

import report  # isort: skip

ROOT = RECIPES.parent
RESULTS = ROOT / "docs" / "results"
PARTS = sorted(path for path in RESULTS.iterdir() if path.is_dir())
RUNS = sorted(path.parent for path in RESULTS.rglob("metrics.csv"))


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
def test_each_report_is_that_of_its_runs(part, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    report.main([str(part.relative_to(ROOT)), "--out", str(tmp_path)])
    for path in tmp_path.iterdir():
        assert (part / path.name).exists(), path.name
        if path.name in ("report.md", "tables.tex", "settings.csv"):  # the others are not rounded
            assert path.read_text() == (part / path.name).read_text(), path.name


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
