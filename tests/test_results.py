"""The results page: what it says is what the committed runs give."""

import csv
import json
import os
import re
import shutil
import subprocess

import numpy as np
import pandas as pd
import pytest
import yaml
from recipe_helpers import RECIPES

import report  # isort: skip

ROOT = RECIPES.parent
RESULTS = ROOT / "docs" / "results"
PARTS = sorted(path for path in RESULTS.iterdir() if path.is_dir())
RUNS = sorted(path.parent for path in RESULTS.rglob("metrics.csv"))


def test_reports_are_those_of_the_runs(tmp_path, monkeypatch):
    """By the command that the page names, without a run: it makes every report anew."""
    made = tmp_path / "docs" / "results"
    shutil.copytree(RESULTS, made, ignore=shutil.ignore_patterns("*.png", "*.tex", "report.md"))
    (tmp_path / "recipes").symlink_to(RECIPES)
    told = tmp_path / "python"  # tells what it would run; one process is enough for all of it
    told.write_text("#!/bin/sh\nprintf '%s\\t' \"$@\"\necho\n")
    told.chmod(0o755)
    script = ["bash", str(made / "study.sh"), "keep"]
    environment = os.environ | {"PYTHON": str(told)}
    result = subprocess.run(script, env=environment, check=True, capture_output=True, text=True)
    monkeypatch.chdir(tmp_path)
    for line in result.stdout.splitlines():
        program, *words = line.rstrip("\t").split("\t")
        assert program == "recipes/report.py"
        report.main(words)
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


def series(part: str, env: str, method: str) -> list[pd.DataFrame]:
    """The evaluations of each seed after the random frames."""
    tables = {}
    for run in (RESULTS / part).glob("env=*"):
        config = yaml.safe_load((run / "config.yaml").read_text())
        if (config["env"]["name"], config["replay"]["kind"]) == (env, method):
            table = pd.read_csv(run / "metrics.csv")
            table["score"] = table["eval/return"].rolling(11, min_periods=1).mean()
            table["learned"] = table["frames"] - config["random_frames"]
            tables[config["seed"]] = table[table["learned"] > 0]
    return [tables[seed] for seed in sorted(tables)]


def span(values) -> tuple[float, float]:
    return min(values), max(values)


# Numbers of the page's text that stand in no table.


def test_words_on_halfcheetah():
    uniform, nmer = (series("main", "HalfCheetah", method) for method in ("uniform", "nmer"))
    pairs = list(zip(uniform, nmer, strict=True))
    there = [b.learned[b.score >= a.score.iloc[-1]].iloc[0] for a, b in pairs]
    assert span(there) == (10_300, 16_600)
    above = [[t.frames[t["eval/overestimation"] > 0].iloc[-1] for t in x] for x in (uniform, nmer)]
    assert span(above[0]) == (13_500, 19_200)
    assert max(above[1]) == 9_300
    few = series("baseline", "HalfCheetah", "uniform")
    scores = [table.score[table.learned == 25_000].item() for table in few]
    assert len(scores) == 3
    assert (round(np.mean(scores)), round(np.std(scores, ddof=1))) == (1302, 177)


def test_words_on_walker():
    uniform, nmer = (series("main", "Walker2d", method) for method in ("uniform", "nmer"))
    lengths = pd.concat([table["eval/length"].tail(11) for table in uniform + nmer])
    assert span(lengths.round()) == (71, 379)
    for one, other in zip(uniform, nmer, strict=True):
        errors = [table["eval/overestimation"] for table in (one, other)]
        assert errors[1].mean() < errors[0].mean()
        assert all(error.tail(11).mean() > 0 for error in errors)


def test_words_on_hopper():
    uniform, nmer = (series("main", "Hopper", method) for method in ("uniform", "nmer"))
    stands = [table.frames[table["eval/length"] == 1000] for table in uniform + nmer]
    assert [seed for seed, frames in enumerate(stands) if len(frames)] == [0, 1, 4 + 1]
    assert span([f.iloc[-1] - f.iloc[0] for f in stands if len(f)]) == (1_500, 6_300)


@pytest.mark.parametrize(("method", "frames"), [("uniform", (4500, 5700)), ("nmer", (4200, 6600))])
def test_words_on_the_pendulum(method, frames):
    tables = series("pendulum", "InvertedDoublePendulum", method)
    assert span([table.frames[table["eval/length"] == 1000].iloc[0] for table in tables]) == frames
