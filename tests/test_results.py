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
    for name in ("report.md", "settings.csv"):
        assert (tmp_path / name).read_text() == (part / name).read_text(), name


def test_every_table_row_stands_in_a_report():
    reported = {line for part in PARTS for line in (part / "report.md").read_text().splitlines()}
    shown = [
        line for line in (ROOT / "docs" / "results.md").read_text().splitlines() if "|" in line
    ]
    assert len(shown) > 5
    assert [line for line in shown if line not in reported] == []


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
