"""From runs to tables: numbers compared with hand-computed ones, and all kinds of bad input."""

import csv
import json
import math
import os
import re
import subprocess
import sys
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import matplotlib.image
import numpy as np
import pandas as pd
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf
from recipe_helpers import RECIPES, make_config, train
from rliable import library, metrics

import report  # isort: skip
from nmer_recipes import paper  # isort: skip
from nmer_recipes.runs import Run  # isort: skip
from nmer_recipes.reporting import (
    agents,
    cells,
    estimates,
    figures,
    latex,
    notices,
    read,
    tables,
    text,
)  # isort: skip

REPS = ["--reps", "20"]


def make_run_config(**changes):
    flat = {
        "algorithm": "td3",
        "env.name": "Hopper",
        "env.version": "v5",
        "replay.kind": "nmer",
        "replay_ratio": 1,
        "seed": 0,
        "total_frames": 200_000,
        "eval_every": 10_000,
        "lr": 0.0005,
    }
    return flat | {name.replace("__", "."): value for name, value in changes.items()}


def make_rows(returns, every=10_000):
    return [
        {
            "frames": every * i,
            "eval/return": value,
            "time/seconds": 60 * i,
            "train/updates": 100 * i,
        }
        for i, value in enumerate(returns, 1)
    ]


def make_run(returns=None, source="", **changes):
    returns = np.arange(20.0) if returns is None else returns
    return read.make_run(source, make_run_config(**changes), make_rows(returns))


def constant_runs(scores, **changes):
    """Builds a run for each score, all of whose evaluations equal that score."""
    return [
        make_run([score] * 20, f"{changes}{seed}", seed=seed, **changes)
        for seed, score in enumerate(scores)
    ]


def write_run(directory, returns=None, **changes):
    directory.mkdir(parents=True)
    config = OmegaConf.create()
    for name, value in make_run_config(**changes).items():
        OmegaConf.update(config, name, value)
    (directory / "config.yaml").write_text(OmegaConf.to_yaml(config))
    rows = make_rows(np.arange(20.0) if returns is None else returns)
    with (directory / "metrics.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    return directory


def one_comparison(runs):
    return cells.compare(cells.make_cells(runs, fail))[0]


def fail(line):
    raise AssertionError(line)


# Scores and statistics


def test_the_score_is_the_mean_of_the_last_eleven_evaluations():
    run = make_run()
    assert run.score == np.mean(range(9, 20)) == 14
    assert run.smooth_returns[0] == 0
    assert run.smooth_returns[4] == 2  # five so far
    assert run.smooth_returns[-1] == run.score
    assert make_run([1.0, 3.0]).score == 2


def test_the_score_is_the_one_that_the_recipe_reports(tmp_path):
    overrides = ["env=InvertedPendulum", "total_frames=2000", "random_frames=500", "logger=none"]
    with Run(make_config("td3", *overrides, f"run_dir={tmp_path / 'run'}")) as run:
        for i in range(1, 101):
            run.log(20 * i, [], {"eval/return": math.sin(i)})
        run.finish()
    told = []
    (again,) = read.find_runs(tmp_path, told.append)
    assert not told
    assert again.finished
    assert again.score == pytest.approx(run.score)
    assert again.score == pytest.approx(np.mean([math.sin(i) for i in range(90, 101)]))
    assert (again.method, again.seed, again.total_frames) == ("nmer", 0, 2000)


def test_interquartile_mean():
    scores = np.array([[1.0], [2.0], [3.0], [100.0]])
    estimate = estimates.interquartile_mean(scores, reps=200)
    assert estimate.value == 2.5 == scipy.stats.trim_mean(scores[:, 0], 0.25)
    np.random.seed(0)
    _, expected = library.get_interval_estimates(
        {"": scores}, lambda x: np.array([metrics.aggregate_iqm(x)]), reps=200
    )
    assert (estimate.low, estimate.high) == tuple(expected[""][:, 0])
    assert 1 <= estimate.low < 2.5 < estimate.high <= 100


def test_probability_of_improvement_counts_pairs_and_half_of_ties():
    scores, baseline = np.array([[1.0, 5], [3.0, 6]]), np.array([[0.0, 7], [3.0, 8]])
    estimate = estimates.improvement(scores, baseline, reps=200)
    assert estimate.value == pytest.approx(((1 + 0 + 1 + 0.5) / 4 + 0) / 2)
    by_scipy = scipy.stats.mannwhitneyu(scores[:, 0], baseline[:, 0]).statistic / 4
    assert estimate.value == pytest.approx(by_scipy / 2)
    assert 0 <= estimate.low <= estimate.value <= estimate.high <= 1
    assert math.isnan(estimates.improvement(scores, baseline, reps=0).low)


@given(st.integers(1, 5), st.integers(1, 5), st.integers(0, 2**31))
def test_statistics_are_rliables(runs, others, seed):
    generator = np.random.default_rng(seed)
    scores, baseline = (generator.integers(0, 4, (n, 3)) * 1.0 for n in (runs, others))
    expected = metrics.probability_of_improvement(scores, baseline)
    assert estimates.improvement(scores, baseline, reps=0).value == pytest.approx(expected)
    scores = scores + generator.normal(size=scores.shape) / 8
    assert estimates._trimmed_mean(scores) == metrics.aggregate_iqm(scores)
    thresholds = np.linspace(0, 4, 9)
    shares = library.score_distributions(scores, thresholds)
    assert np.array_equal(estimates._shares_above(scores, thresholds), shares)


def test_a_single_run_has_no_interval():
    estimate = estimates.interquartile_mean(np.array([[3.0, 5.0]]))
    assert estimate.value == 4
    assert math.isnan(estimate.low)
    assert math.isnan(estimate.high)
    better = estimates.improvement(np.array([[3.0]]), np.array([[1.0], [2.0]]))
    assert better.value == 1
    assert math.isnan(better.low)


def test_profiles_are_shares_of_runs_above_a_threshold():
    scores = {"a": np.array([[0.0, 0.5], [1.0, 0.25]])}
    profile = estimates.profiles(scores, reps=50)["a"]
    for threshold, share in ((0.0, 0.75), (0.3, 0.5), (0.5, 0.25), (1.0, 0.0)):
        assert profile.share[np.isclose(profile.thresholds, threshold)] == share
    assert (profile.low <= profile.share).all()
    assert (profile.share <= profile.high).all()


def test_statistics_repeat_and_leave_the_global_generator_alone():
    scores = np.random.default_rng(0).normal(size=(4, 3))
    np.random.seed(7)
    expected = np.random.random(3)
    np.random.seed(7)
    first, second = (estimates.interquartile_mean(scores, reps=50) for _ in range(2))
    assert first == second
    assert np.array_equal(np.random.random(3), expected)


@given(st.lists(st.floats(-1e4, 1e4), min_size=4, max_size=4), st.floats(0.1, 10))
def test_normalized_scores_span_the_unit_interval_whatever_the_scale(values, scale):
    matrix = np.array(values).reshape(2, 2)
    scores = estimates.normalize({"a": matrix * scale, "b": matrix[:1] * scale})
    assert all(part.min() >= 0 and part.max() <= 1 for part in scores.values())
    for task in range(2):
        if matrix[0, task] == matrix[1, task]:
            assert (scores["a"][:, task] == 0.5).all()
        else:
            assert sorted(scores["a"][:, task]) == [0, 1]


# The paper


def results():
    with (RECIPES / "nmer_recipes" / "results.csv").open() as file:
        return list(csv.DictReader(file))


def test_every_figure_of_the_paper_is_found():
    kinds = {name: kind for kind, name in paper.NAMES.items()}
    seen = 0
    for row in results():
        if row["table"] == "quoted" and row["replay"] != "NMER":
            figure = paper.quoted(row["env"])[row["replay"]]
        else:
            figure = paper.result(row["algorithm"].lower(), row["env"], kinds[row["replay"]])
        assert (figure.mean, figure.std) == (float(row["mean"]), float(row["std"]))
        seen += 1
    assert seen == 93
    assert set(paper.quoted("Ant")) == {"SUNRISE", "METRPO", "PETS", "POPLIN-A", "POPLIN-P"}
    assert not paper.quoted("Swimmer")
    assert paper.result("sac", "Humanoid", "nmer") is None
    assert paper.result("td3", "Hopper", "ero") is None


def test_figures_at_a_replay_ratio_are_of_the_ablations():
    assert paper.result_at("td3", "Ant", "uniform", 5).mean == -12
    assert paper.result_at("sac", "Ant", "nmer", 20).mean == 2723  # the better of two
    assert paper.result_at("td3", "Ant", "nmer", 1) is None


@pytest.mark.parametrize(
    ("algorithm", "printed"),
    [
        ("TD3", {"U": -37.5, "PER": -36.8, "CT": -22.1, "NMER": 0}),
        ("TD3", {"Mixup": -36.0, "S4RL": -68.4, "Noisy": -67.9}),
        ("SAC", {"U": -26.0, "PER": -14.4, "CT": -25.1, "NMER": 0}),
        ("METRPO", {"METRPO": -82.8}),
        ("PETS", {"PETS": -84.8}),
        ("POPLIN-A", {"POPLIN-A": -87.7}),
        ("POPLIN-P", {"POPLIN-P": -56.9}),
        ("SUNRISE", {"SUNRISE": -46.7}),
    ],
)
def test_the_change_in_percent_is_the_papers(algorithm, printed):
    reference = {
        row["env"]: float(row["mean"])
        for row in results()
        if row["replay"] == "NMER" and row["algorithm"] == ("SAC" if algorithm == "SAC" else "TD3")
    }
    for method, percent in printed.items():
        changes = {
            row["env"]: estimates.change(float(row["mean"]), reference[row["env"]])
            for row in results()
            if (row["algorithm"], row["replay"]) == (algorithm, method)
        }
        assert np.mean(list(changes.values())) == pytest.approx(percent, abs=0.11)


def test_no_change_in_percent_of_what_is_not_positive():
    assert math.isnan(estimates.change(5, 0))
    assert math.isnan(estimates.change(5, -3))
    assert estimates.change(-1609, 4611) == -100


# Cells and comparisons


def test_a_table_by_hand():
    runs = constant_runs([100, 200, 300, 400], replay__kind="uniform")
    runs += constant_runs([300, 350, 450, 500], replay_ratio=20)
    frame = tables.make_table(one_comparison(runs), reps=50)
    uniform, nmer = frame.to_dict("records")[:2]
    assert (uniform["method"], nmer["method"]) == ("uniform", "nmer")
    assert (uniform["mean"], nmer["mean"]) == (250, 400)
    assert uniform["std"] == pytest.approx(np.std([100, 200, 300, 400], ddof=1))
    assert (uniform["iqm"], nmer["iqm"]) == (250, 400)
    assert nmer["p_improvement"] == (2.5 + 3 + 4 + 4) / 16
    assert math.isnan(uniform["p_improvement"])
    assert uniform["change_percent"] == pytest.approx(-37.5)
    assert nmer["change_percent"] == 0
    assert (uniform["seeds"], uniform["frames"], uniform["version"]) == (4, 200_000, "v5")
    assert (uniform["paper_mean"], uniform["paper_std"]) == (3252, 157)
    assert (nmer["paper_mean"], nmer["paper_table"]) == (3393, "main")
    assert uniform["paper_change_percent"] == pytest.approx(100 * (3252 - 3393) / 3393)
    assert nmer["paper_change_percent"] == 0
    assert nmer["seconds_per_run"] == 1200
    assert nmer["updates_per_second"] == pytest.approx(2000 / 1200)
    assert set(frame["method"][2:]) == set(paper.quoted("Hopper"))
    assert frame["mean"][2:].isna().all()
    assert set(zip(frame["version"][2:], frame["frames"][2:], strict=True)) == {("", 200_000)}
    short = one_comparison(constant_runs([100, 200], total_frames=30_000))
    assert list(tables.make_table(short, reps=20)["method"]) == ["nmer"]  # and no one of 200,000


def test_the_pooled_table_by_hand():
    runs = constant_runs([100, 200, 200], replay__kind="uniform", replay_ratio=5)
    runs += constant_runs([150, 300, 300])
    runs += constant_runs([-1, 1, 0], env__name="Ant", replay__kind="uniform")
    runs += constant_runs([2, 3, 3, 7], env__name="Ant")
    comparison = one_comparison(runs)
    frame = tables.make_pooled_table(comparison, reps=50).set_index("method")
    # Ant from -1 to 3, since the fourth seed has no counterpart on Hopper; Hopper from 100 to 300.
    assert frame.loc["uniform", "iqm"] == pytest.approx((0 + 0.25 + 0.5 + 0.5) / 4)
    assert frame.loc["nmer", "iqm"] == pytest.approx((0.75 + 1 + 1 + 1) / 4)
    assert frame.loc["nmer", "p_improvement"] == pytest.approx((1 + 7 / 9) / 2)
    assert frame.loc["uniform", "change_percent"] == pytest.approx((-100 - 100 / 3) / 2)
    assert frame.loc["nmer", "change_percent"] == 0
    expected = np.mean([100 * (2005 - 4347) / 4347, 100 * (3252 - 3393) / 3393])
    assert frame.loc["uniform", "paper_change_percent"] == pytest.approx(expected)
    assert list(frame["tasks"].dropna()) == [2, 2]
    told = []
    notices.tell_about_comparison(comparison, told.append)
    assert "nmer has 3 to 4 seeds per task; the first 3" in told[0]


def test_methods_that_the_paper_quotes_have_its_change_and_ours():
    """Makes the paper's Table 2 from runs of NMER alone."""
    scores = {"Ant": 2000, "HalfCheetah": 8000, "Hopper": 3000, "Walker2d": 4000}
    runs = []
    for env, score in scores.items():
        runs += constant_runs([score] * 3, env__name=env, replay_ratio=20)
    best, equal = cells.compare(cells.make_cells(runs, fail))
    pooled = tables.make_pooled_table(best, reps=20).set_index("method")
    printed = {"METRPO": -82.8, "PETS": -84.8, "POPLIN-A": -87.7, "POPLIN-P": -56.9}
    printed |= {"SUNRISE": -46.7, "nmer": 0}
    assert dict(pooled["paper_change_percent"]) == pytest.approx(printed, abs=0.11)
    assert set(pooled["change_tasks"]) == set(pooled["paper_change_tasks"]) == {4}
    means = {env: paper.quoted(env)["SUNRISE"].mean for env in scores}
    changes = [100 * (means[env] - score) / score for env, score in scores.items()]
    assert pooled["change_percent"]["SUNRISE"] == pytest.approx(np.mean(changes))
    table = tables.make_table(best, reps=20)
    shown = table.set_index(["env", "method"]).loc["Walker2d", "METRPO"]
    assert (shown["change_percent"], shown["paper_change_percent"]) == (-100, -100)
    header, rows = text.show_table(table)
    line = next(row for row in rows if row[0] == "Ant" and row[2] == "POPLIN-P")
    assert line[header.index("Δ NMER")] == "+16.5 %"
    assert line[header.index("paper's Δ NMER")] == "-46.4 %"
    assert text.show_glance(table, pooled.reset_index())[0] == ["environment", "nmer"]
    # Quoted methods have no replay ratio, so they are not compared at an equal one.
    assert list(tables.make_pooled_table(equal, reps=20)["method"]) == ["nmer"]
    runs += constant_runs([1] * 3, env__name="Ant", env__version="v4", replay_ratio=20)
    both = tables.make_pooled_table(one_comparison(runs), reps=20).set_index("method")
    assert dict(both.loc["SUNRISE", ["change_tasks", "paper_change_tasks"]]) == {
        "change_tasks": 3,  # not on Ant, where two versions were run
        "paper_change_tasks": 4,
    }


def test_two_seeds_have_neither_a_probability_nor_a_normalized_score():
    runs = constant_runs([1, 2], replay__kind="uniform") + constant_runs([3, 4, 5])
    comparison = one_comparison(runs)
    table = tables.make_table(comparison, reps=20).set_index("method")
    assert "p_improvement" not in table
    assert table.loc["nmer", "change_percent"] == 0
    pooled = tables.make_pooled_table(comparison, reps=20)
    assert not {"iqm", "p_improvement"} & set(pooled)
    assert list(pooled["seeds"]) == [2, 3]


def test_seeds_are_paired_by_hand():
    early, late = [0, 0, *[100] * 18], [0, 0, *[50] * 9, *[100] * 9]
    runs = [
        make_run(late, replay__kind="uniform", seed=seed, random_frames=20_000) for seed in (1, 2)
    ]
    runs += [make_run(early, seed=seed, random_frames=20_000) for seed in (2, 3)]
    runs += [make_run([110] * 20, seed=1, random_frames=20_000)]
    score = 100 - (2 * 50 + 9 * 100) / 11  # of seed 2; the third has no counterpart
    frame = tables.make_paired_table(one_comparison(runs))
    (row,) = frame.to_dict("records")
    assert (row["method"], row["seeds"]) == ("nmer", 2)
    gaps = np.array([score + 10, score])
    assert row["score"] == pytest.approx(gaps.mean())
    half = 12.706 * gaps.std(ddof=1) / math.sqrt(2)
    assert row["score_low"] == pytest.approx(gaps.mean() - half, rel=1e-3)
    assert (row["score_ahead"], row["area_ahead"]) == (2, 2)
    assert row["area"] == pytest.approx((110 - 75 + 100 - 75) / 2)
    header, (line,) = text.show_paired_table(frame)
    assert (row["against"], row["verdict"]) == ("uniform", "not shown")
    assert line[header.index("ahead")] == "2 of 2"
    assert "+35.0, +25.0" in line


def test_nmer_is_compared_with_every_method_and_every_method_with_uniform():
    runs = constant_runs([1, 2, 3], replay__kind="uniform") + constant_runs([8, 9, 10])
    runs += constant_runs([8, 9, 20], replay__kind="ct") + constant_runs([30], replay__kind="1nn")
    frame = tables.make_paired_table(one_comparison(runs)).set_index(["method", "against"])
    assert dict(frame["verdict"]) == {
        ("nmer", "uniform"): "ahead",
        ("nmer", "ct"): "not shown",
        ("nmer", "1nn"): "not shown",  # a single seed
        ("ct", "uniform"): "not shown",
        ("1nn", "uniform"): "not shown",
    }
    assert frame["score"]["nmer", "ct"] == pytest.approx(-10 / 3)
    of_nmer = [method == "nmer" for method, _ in frame.index]
    assert frame.index[0] == ("nmer", "uniform")
    assert of_nmer == sorted(of_nmer, reverse=True)
    runs = constant_runs([9, 9, 9], replay__kind="uniform") + constant_runs([1, 2, 3])
    assert list(tables.make_paired_table(one_comparison(runs))["verdict"]) == ["behind"]


def test_tasks_with_returns_of_one_range_are_also_compared_by_their_mean():
    def run_tasks(env):
        return [
            run
            for name, uniform, nmer in (("walk", [1, 2, 3], [5, 6]), ("run", [10, 20], [30, 10, 0]))
            for kind, scores in (("uniform", uniform), ("nmer", nmer))
            for run in constant_runs(scores, env__name=env + name, replay__kind=kind)
        ]

    frame = tables.make_paired_table(one_comparison(run_tasks("dm_control/")))
    (row,) = frame[frame.env == "mean of 2 tasks"].to_dict("records")
    assert (row["method"], row["against"], row["seeds"]) == ("nmer", "uniform", 2)
    assert row["score_by_seed"] == row["area_by_seed"] == f"{(4 + 20) / 2:g} {(4 - 10) / 2:g}"
    assert row["score"] == 4.5
    figures.draw_differences(one_comparison(run_tasks("dm_control/")), frame, ["nmer", "uniform"])
    other = tables.make_paired_table(one_comparison(run_tasks("Own")))
    assert not other.env.str.startswith("mean").any()


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({}, "Hopper-v5"),
        ({"data__source": "runs/log.npz"}, "Hopper-v5 with log.npz"),
        ({"data__source": "log.npz", "data__rows": None}, "Hopper-v5 with log.npz"),
        (
            {"data__source": "log.npz", "data__rows": 5_000, "data__part": "spread"},
            "Hopper-v5 with 5,000 rows of log.npz",
        ),
        (
            {"data__source": "log.npz", "data__rows": 5_000, "data__part": "last"},
            "Hopper-v5 with last 5,000 rows of log.npz",
        ),
    ],
)
def test_runs_on_other_rows_are_another_task(changes, name):
    (cell,) = cells.make_cells([make_run(**changes)], fail)
    assert cell.task.name == name


def test_a_run_that_is_still_random_has_no_area():
    assert math.isnan(make_run(random_frames=200_000).area)


def test_both_comparisons():
    runs = constant_runs([100, 200], replay__kind="uniform", replay_ratio=1)
    runs += constant_runs([50, 60], replay__kind="uniform", replay_ratio=20)
    runs += constant_runs([120, 130], replay_ratio=1)
    runs += constant_runs([300, 310], replay_ratio=20)
    runs += constant_runs([1, 2], replay__kind="ct", replay_ratio=5)
    comparisons = {c.name: c for c in cells.compare(cells.make_cells(runs, fail))}
    assert list(comparisons) == ["best", "ratio-1", "ratio-20"]  # at 5 there is one method
    best = {cell.method: cell.replay_ratio for cell in comparisons["best"].cells}
    assert best == {"uniform": 1, "nmer": 20, "ct": 5}
    equal = {cell.method: cell.mean for cell in comparisons["ratio-20"].cells}
    assert equal == {"uniform": 55, "nmer": 305}
    frame = tables.make_table(comparisons["ratio-20"], reps=20).set_index("method")
    assert frame.loc["uniform", "paper_mean"] == 3252  # U, RR=20 of the ablations
    assert frame.loc["uniform", "change_percent"] == pytest.approx(100 * (55 - 305) / 305)


def test_with_one_replay_ratio_nothing_is_at_its_best():
    runs = constant_runs([1], replay_ratio=5) + constant_runs([2], replay__kind="uniform")
    assert one_comparison(runs).title == "TD3, each method at its best"
    (comparison,) = cells.compare(cells.make_cells(constant_runs([1], replay_ratio=5), fail))
    assert comparison.title == "TD3, replay ratio 5"
    runs = constant_runs([1], replay__kind="uniform")
    (row, *quoted) = tables.make_table(one_comparison(runs), reps=20).to_dict("records")
    assert row["paper_mean"] == 2371  # at ratio 1; its best is at 20
    assert {line["method"] for line in quoted} == set(paper.quoted("Hopper"))


def test_configs_that_differ_are_never_averaged():
    told = []
    runs = constant_runs([1, 2]) + constant_runs([10, 20], lr=0.001)
    made = cells.make_cells(runs, told.append)
    assert [(cell.setting, cell.mean) for cell in made] == [("lr=0.0005", 1.5), ("lr=0.001", 15)]
    (line,) = told
    for words in ("Mixed configs", "Hopper-v5 nmer", "lr=0.0005 (seeds: 2); lr=0.001 (seeds: 2)"):
        assert words in line


def test_what_is_free_makes_no_setting():
    runs = [make_run([1] * 20), make_run([2] * 20, seed=1, threads=2, device="cuda", name="x")]
    (cell,) = cells.make_cells(runs, fail)
    assert cell.mean == 1.5


def test_workers_that_act_by_old_weights_make_a_setting():
    remote = {"collector__kind": "ray", "collector__workers": 2, "collector__address": "auto"}
    local, ray, elsewhere, more = (
        make_run(collector__kind="local"),
        make_run(**remote),
        make_run(**remote | {"collector__address": None}),
        make_run(**remote | {"collector__workers": 8}),
    )
    assert local.setting == make_run().setting
    assert ray.setting == elsewhere.setting
    assert len({run.setting for run in (local, ray, more)}) == 3


def test_a_setting_is_the_same_whether_from_yaml_or_json():
    runs = [make_run(grad_clip=None, gamma=1.0), make_run(seed=1, gamma=1)]
    (cell,) = cells.make_cells(runs, fail)
    assert len(cell.runs) == 2
    assert len(cells.make_cells([*runs, make_run(gamma=True)], lambda _: None)) == 2


def test_a_setting_is_the_same_whether_from_a_sweep_of_wandb_or_not():
    # A sweep's own words, such as `replay: nmer`, stand beside the config.
    drawn = make_run(seed=1, env="Hopper", replay="nmer")
    assert drawn.config.keys().isdisjoint({"env", "replay"})
    assert len(cells.make_cells([make_run(), drawn], fail)) == 1


def test_a_seed_counts_once():
    told = []
    old, new = make_run(range(12), "old"), make_run(range(20), "new")
    (cell,) = cells.make_cells([new, old], told.append)
    assert [run.source for run in cell.runs] == ["new"]
    assert told == ["old is left out: new has the same config and seed."]


def test_unfinished_runs_are_left_out_and_told():
    told = []
    runs = [make_run(), make_run(range(12), "late", seed=1)]
    (cell,) = cells.make_cells(runs, told.append)
    assert len(cell.runs) == 1
    assert "late is left out: it has 120,000 of 200,000 frames; `--at 120000`" in told[0]
    (cell,) = cells.make_cells(runs, fail, at=120_000)
    assert cell.task.frames == 120_000
    assert list(cell.scores) == [6, 6]  # of 1 to 11


def test_runs_without_an_evaluation_up_to_the_step_are_left_out_and_told():
    told = []
    runs = [make_run(None, "often"), make_run(range(1), "once", seed=1)]
    runs[1] = replace(runs[1], frames=runs[1].frames + 190_000)
    (cell,) = cells.make_cells(runs, told.append, at=60_000)
    assert [run.source for run in cell.runs] == ["often"]
    assert told == ["once is left out: it was not evaluated up to 60,000 frames."]


def test_where_no_run_is_finished_all_are_scored_where_all_have_been():
    told = []
    runs = [make_run(range(15), "one"), make_run(range(12), "two", seed=1)]
    (cell,) = cells.make_cells(runs, told.append)
    assert list(cell.scores) == [6, 6]
    assert cell.task.frames == 120_000
    assert "scored at 120,000 frames" in told[0]


def test_a_last_evaluation_need_not_fall_on_the_last_frame():
    assert make_run(total_frames=209_999).finished
    assert not make_run(total_frames=210_000).finished


def test_a_learned_alpha_is_a_method_of_its_own():
    run = make_run(replay__kind="ct", replay__tuned=True)
    assert run.method == "tuned_ct"
    assert paper.result("td3", "Hopper", run.method) is None


# Agents


DROQ = {"algorithm": "redq", "num_critics": 2, "dropout": 0.01, "layer_norm": True}
REDQ = {"algorithm": "redq", "num_critics": 10, "dropout": 0.0, "layer_norm": False}
CROSSQ = {"algorithm": "crossq", "hidden": [256, 256], "critic_hidden": [2048, 2048]}
SAC = {"algorithm": "sac", "hidden": [256, 256], "critic_hidden": [256, 256], "layer_norm": False}


@pytest.mark.parametrize(
    ("config", "key", "name"),
    [
        (SAC, "sac", "SAC"),
        ({"algorithm": "sac"}, "sac", "SAC"),  # as in configs of earlier versions
        (SAC | {"layer_norm": True}, "sac-layer-norm", "SAC + layer norm"),
        (SAC | {"critic_hidden": [512]}, "sac-critics-512", "SAC, critics 512"),
        ({"algorithm": "td3", "layer_norm": True}, "td3-layer-norm", "TD3 + layer norm"),
        ({"algorithm": "ddpg"}, "ddpg", "DDPG"),
        ({"algorithm": "td3", "precision": "bf16"}, "td3-bf16", "TD3 + bf16"),
        (
            SAC | {"layer_norm": True, "precision": "bf16", "critic_hidden": [512]},
            "sac-layer-norm-bf16-critics-512",
            "SAC + layer norm + bf16, critics 512",
        ),
        (REDQ, "redq", "REDQ"),
        (REDQ | {"num_critics": 5.0}, "redq-num_critics-5", "REDQ, num_critics=5"),
        (REDQ | {"layer_norm": True}, "redq-layer-norm", "REDQ + layer norm"),
        (REDQ | {"dropout": 0.01}, "redq-dropout-0.01", "REDQ, dropout=0.01"),
        (DROQ, "droq", "DroQ"),
        (DROQ | {"layer_norm": False}, "droq-no-layer-norm", "DroQ without layer norm"),
        (DROQ | {"dropout": 0.1}, "droq-dropout-0.1", "DroQ, dropout=0.1"),
        (
            DROQ | {"dropout": 0.0},
            "redq-layer-norm-num_critics-2",
            "REDQ + layer norm, num_critics=2",
        ),
        (CROSSQ, "crossq", "CrossQ"),
        (
            CROSSQ | {"critic_hidden": [256, 256]},
            "crossq-critics-256-256",
            "CrossQ, critics 256-256",
        ),
        ({"algorithm": "sunrise"}, "sunrise", "SUNRISE"),
        ({"algorithm": "../my agent"}, "..-my-agent", "../MY AGENT"),
    ],
)
def test_an_agent_is_named_by_its_recipe_and_its_critics(config, key, name):
    assert agents.find_agent(config) == agents.Agent(key, name)


@pytest.mark.parametrize("algorithm", ["crossq", "ddpg", "redq", "sac", "sunrise", "td3"])
def test_the_config_of_a_recipe_is_the_agent_of_its_name(algorithm):
    config = OmegaConf.to_container(make_config(algorithm), resolve=True)
    assert agents.find_agent(config).key == algorithm


def test_the_droq_of_the_recipe_is_droq():
    made = make_config("redq", "num_critics=2", "dropout=0.01", "layer_norm=true")
    assert agents.find_agent(OmegaConf.to_container(made, resolve=True)).name == "DroQ"


def test_runs_of_two_agents_are_neither_pooled_nor_compared():
    kinds = [REDQ, DROQ, REDQ | {"num_critics": 5}, DROQ | {"layer_norm": False}]
    kinds += [SAC, SAC | {"layer_norm": True}, SAC | {"critic_hidden": [512, 512]}]
    runs = []
    for i, kind in enumerate(kinds):
        runs += constant_runs([i, i], **kind)
        runs += constant_runs([10 + i, 10 + i], replay__kind="uniform", **kind)
    made = cells.make_cells(runs, fail)  # not a word of mixed configs
    assert len(made) == 2 * len(kinds)
    assert {cell.setting for cell in made} == {""}
    comparisons = cells.compare(made)
    assert [comparison.agent.name for comparison in comparisons] == [
        "DroQ",
        "DroQ without layer norm",
        "REDQ",
        "REDQ, num_critics=5",
        "SAC",
        "SAC, critics 512-512",
        "SAC + layer norm",
    ]
    assert comparisons[0].title == "DroQ, replay ratio 1"
    for comparison in comparisons:
        (row,) = tables.make_paired_table(comparison).to_dict("records")
        assert (row["seeds"], row["score"]) == (2, -10)
        told = []
        notices.tell_about_comparison(comparison, told.append)
        assert not [line for line in told if "UNEQUAL" in line]


def test_other_settings_of_an_agent_are_rows_of_their_own():
    told = []
    runs = constant_runs([1, 2], **REDQ) + constant_runs([3, 4], **REDQ, num_target_critics=3)
    assert {cell.mean for cell in cells.make_cells(runs, told.append)} == {1.5, 3.5}
    assert "Mixed configs: redq Hopper-v5 nmer" in told[0]


def test_a_run_of_an_earlier_version_is_a_seed_of_the_same_agent():
    old = make_run(algorithm="sac", hidden=[256, 256])
    new = make_run(seed=1, **SAC)
    (cell,) = cells.make_cells([old, new], fail)
    assert cell.task.agent.name == "SAC"
    assert len(cell.runs) == 2


@pytest.mark.parametrize("kind", [REDQ, SAC, {"algorithm": "td3"}])
def test_runs_in_bf16_are_not_compared_and_those_from_before_are_in_float32(kind):
    old, new = make_run(**kind), make_run(seed=1, precision="float32", **kind)
    other = make_run(seed=1, replay__kind="uniform", precision="bf16", **kind)
    third = make_run(seed=2, precision="bf16", **kind)
    made = cells.make_cells([old, new, other, third], fail)  # not a word of mixed configs
    seeds = {(c.task.agent.key, c.method): [run.seed for run in c.runs] for c in made}
    key = kind["algorithm"]
    assert seeds == {
        (key, "nmer"): [0, 1],
        (f"{key}-bf16", "nmer"): [2],
        (f"{key}-bf16", "uniform"): [1],
    }
    assert len(cells.compare(made)) == 2


NOT_IN_PAPER = [REDQ, DROQ, CROSSQ, SAC | {"layer_norm": True}, SAC | {"precision": "bf16"}]


@pytest.mark.parametrize("kind", NOT_IN_PAPER)
def test_an_agent_that_the_paper_lacks_has_no_figures_of_it(kind):
    runs = constant_runs([100, 200, 300], **kind)
    runs += constant_runs([1, 2, 3], replay__kind="uniform", **kind)
    runs += constant_runs([1, 2, 3], replay__kind="uniform", replay_ratio=20, **kind)
    told = []
    made = cells.make_cells(runs, fail)
    notices.tell_about_cells(made, told.append)
    assert not [line for line in told if "PAPER" in line]
    for comparison in cells.compare(made):
        table = tables.make_table(comparison, reps=20)
        ours = table[table["seeds"].notna()]
        assert ours["paper_mean"].isna().all()
        pooled = tables.make_pooled_table(comparison, reps=20)
        assert pooled["paper_change_percent"].isna().all()
        header, rows = text.show_table(table)
        assert rows[0][header.index("paper, 200K")] == text.NONE
        assert rows[0][header.index("paper's Δ NMER")] == text.NONE


def test_the_report_of_real_runs_of_new_agents(tmp_path, capsys):
    droq = ["num_critics=2", "dropout=0.01", "layer_norm=true"]
    runs = [("redq", "uniform", *droq), ("redq", "nmer", *droq), ("redq", "nmer")]
    runs += [("crossq", "nmer"), ("sunrise", "nmer", "members=2")]
    for number, (recipe, replay, *options) in enumerate(runs):
        train(recipe, tmp_path / "runs" / str(number), f"replay={replay}", *options)
    report.main([str(tmp_path / "runs"), "--out", str(tmp_path / "out"), "--no-pdf", *REPS])
    assert "5 runs of 5 settings" in capsys.readouterr().out
    page = (tmp_path / "out" / "report.md").read_text()
    assert "Mixed configs" not in page
    assert re.findall("^## (?!Read)(.*), replay ratio 1$", page, flags=re.MULTILINE) == [
        "CrossQ, critics 8-8",
        "DroQ",
        "REDQ",
        "SUNRISE",
    ]
    pictures = re.findall(r"!\[.*?\]\((.*?)\)", page)
    assert pictures[0] == "curves-crossq-critics-8-8-ratio-1.png"
    assert all((tmp_path / "out" / picture).is_file() for picture in pictures)
    (row,) = pd.read_csv(tmp_path / "out" / "paired.csv").to_dict("records")
    assert (row["algorithm"], row["method"], row["against"]) == ("droq", "nmer", "uniform")


# Tasks


def name_task(**changes):
    (cell,) = cells.make_cells([make_run(**changes)], fail)
    return cell.task.name


def test_a_task_is_named_by_its_id_its_arguments_and_its_wrappers():
    assert name_task() == "Hopper-v5"  # as in older configs, which have no id
    assert name_task(env__id="Hopper-v5", env__kwargs={}, env__wrappers=[]) == "Hopper-v5"
    own = {"env__name": "MyArm", "env__version": "v1", "env__id": "my_arm:MyArm-v0"}
    assert name_task(**own) == "my_arm:MyArm-v0"
    more = {"env__kwargs": {"gravity": 3.0, "robot": {"arms": 2}}, "env__wrappers": ["a.B", "C"]}
    assert name_task(**own, **more) == "my_arm:MyArm-v0 gravity=3 robot.arms=2 a.B C"
    assert name_task(env__max_steps=200) == "Hopper-v5 max_steps=200"
    assert name_task(env__max_steps=None, env__wrappers=None) == "Hopper-v5"


def test_the_better_of_two_tasks_does_not_stand_for_the_method():
    ids = ({"env__id": "Hopper-v5"}, {"env__id": "my_arm:Hopper-v5"})
    kinds = [*ids, {**ids[0], "env__kwargs": {"x": None}}, {**ids[0], "env__wrappers": ["a.B"]}]
    runs = [run for i, kind in enumerate(kinds) for run in constant_runs([i], **kind)]
    comparison = one_comparison(runs)
    assert [cell.mean for cell in comparison.cells] == [0, 3, 2, 1]  # in order of their names
    frame = tables.make_table(comparison, reps=20)
    quoted = frame[frame["seeds"].isna()]
    assert set(quoted["env"]) == {"Hopper"}  # others have no row of the paper's
    shown = text.show_glance(frame, tables.make_pooled_table(comparison, reps=20))[1]
    assert [row[0] for row in shown[:2]] == ["Hopper-v5", "Hopper-v5 a.B"]


def test_another_word_for_the_same_task_makes_no_setting():
    runs = [make_run(), make_run(seed=1, env__name="gym", env__id="Hopper-v5", env__wrappers=[])]
    (cell,) = cells.make_cells(runs, fail)
    assert len(cell.runs) == 2


# What is told loudly


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "FEW SEEDS: 2 of 2 rows have fewer than 10 seeds (td3 Hopper-v5 nmer"),
        ({"total_frames": 100_000}, "BUDGETS DIFFER: td3 on Hopper was scored at 100,000, 200,000"),
        ({"total_frames": 100_000}, "NOT THE PAPER'S BUDGET: the paper's results are at 200,000"),
        ({"env__version": "v4"}, "ENVIRONMENT VERSIONS DIFFER: td3 on Hopper was run on v4, v5"),
        (
            {},
            "NOT THE PAPER'S ENVIRONMENTS: the paper used v2, which is no longer available; these "
            "runs used Hopper-v5",
        ),
    ],
)
def test_what_makes_numbers_incomparable_is_told(changes, words):
    told = []
    runs = [*constant_runs([1, 2, 3, 4]), make_run(replay__kind="uniform", **changes)]
    notices.tell_about_cells(cells.make_cells(runs, told.append), told.append)
    assert any(words in line for line in told), told


def test_a_task_that_the_paper_lacks_is_not_measured_by_it():
    runs = constant_runs(range(10), env__name="InvertedPendulum", total_frames=100_000)
    notices.tell_about_cells(cells.make_cells(runs, fail), fail)


def test_settings_that_differ_between_methods_are_told():
    told = []
    runs = constant_runs([1, 2]) + constant_runs([1, 2], replay__kind="uniform", lr=0.1)
    notices.tell_about_comparison(one_comparison(runs), told.append)
    (line,) = told
    assert "UNEQUAL SETTINGS" in line
    assert "lr is 0.0005 (nmer), 0.1 (uniform)" in line


@pytest.mark.parametrize(
    ("runs", "words"),
    [
        (constant_runs([1, 2]), "there are no runs of uniform"),
        (constant_runs([1, 2], replay__kind="uniform"), "there are no runs of nmer"),
        (constant_runs([-1, -2]), "NMER's mean is -1.5"),
        (
            constant_runs([1, 2], env__name="Ant")
            + constant_runs([1, 2])
            + constant_runs([1, 2], replay__kind="uniform"),
            "pooled over 1 of 2 tasks, because not every method was run on Ant-v5",
        ),
    ],
)
def test_what_cannot_be_computed_is_told(runs, words):
    told = []
    comparison = one_comparison(runs)
    notices.tell_about_comparison(comparison, told.append)
    assert any(words in line for line in told), told
    tables.make_pooled_table(comparison, reps=20)
    tables.make_table(comparison, reps=20)


# Bad input


def spoil(directory, what):
    metrics_file, config_file = directory / "metrics.csv", directory / "config.yaml"
    content = metrics_file.read_text()
    match what:
        case "empty directory":
            metrics_file.unlink()
            config_file.unlink()
        case "no metrics":
            metrics_file.unlink()
        case "no config":
            config_file.unlink()
        case "empty metrics":
            metrics_file.write_text("")
        case "no evaluation":
            metrics_file.write_text(content.splitlines()[0] + "\n")
        case "missing column":
            metrics_file.write_text(content.replace("eval/return", "eval/other"))
        case "no number":
            metrics_file.write_text(content.replace("19.0", "many"))
        case "diverged":
            metrics_file.write_text(content.replace("19.0", "nan"))
        case "short line":
            metrics_file.write_text(content.replace("19.0,1200,2000", "19.0"))
        case "two writers":
            metrics_file.write_text(content + "".join(content.splitlines(keepends=True)[1:]))
        case "binary metrics":
            metrics_file.write_bytes(b"\xff\xfe\x00")
        case "unreadable yaml":
            config_file.write_text("env: [Hopper\nseed: 0")
        case "yaml list":
            config_file.write_text("- a\n- b\n")
        case "empty config":
            config_file.write_text("")
        case "missing setting":
            config_file.write_text(config_file.read_text().replace("kind: nmer", "k: 10"))
        case "no frames":
            metrics_file.write_text(content.replace("200000", "nan"))
        case "zeros":
            metrics_file.write_text(content.replace("200000,", "\x00" * 40 + ","))
        case "no interval":
            changed = config_file.read_text().replace("eval_every: 10000", "eval_every: often")
            config_file.write_text(changed)
        case "no seed":
            config_file.write_text(config_file.read_text().replace("seed: 0", "seed: zero"))


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("empty directory", "it is empty"),
        ("no metrics", "it has no metrics.csv"),
        ("no config", "it has no config.yaml"),
        ("empty metrics", "it has no evaluation yet"),
        ("no evaluation", "it has no evaluation yet"),
        ("missing column", "its metrics have no column eval/return"),
        ("no number", "its column eval/return has an entry that is not a number"),
        ("diverged", "its eval/return is not finite at 200,000 frames"),
        ("short line", "lines that do not fit its header"),
        ("two writers", "its frames do not always increase"),
        ("binary metrics", "its metrics.csv cannot be read"),
        ("unreadable yaml", "its config.yaml cannot be read"),
        ("yaml list", "its config is not a mapping"),
        ("empty config", "its config has no algorithm"),
        ("missing setting", "its config has no replay.kind"),
        ("no seed", "its config has seed=zero, which is not a number"),
        ("no interval", "its config has eval_every=often, which is not a number"),
        ("no frames", "its column frames has an entry that is not a number"),
        ("zeros", "its column frames has an entry that is not a number"),
    ],
)
def test_a_bad_run_gets_a_line_and_does_not_stop_the_rest(tmp_path, what, words):
    write_run(tmp_path / "good", seed=1)
    spoil(write_run(tmp_path / "bad"), what)
    told = []
    runs = read.find_runs(tmp_path, told.append)
    assert [Path(run.source).name for run in runs] == ["good"]
    (line,) = told
    assert line.startswith(f"{tmp_path / 'bad'} is left out: ")
    assert words in line


def test_a_line_that_was_cut_off_is_left_out(tmp_path):
    path = write_run(tmp_path / "run") / "metrics.csv"
    path.write_bytes(path.read_bytes()[:-3])
    told = []
    (run,) = read.find_runs(tmp_path, told.append)
    assert told == [
        f"{tmp_path / 'run'}: the last line of metrics.csv is truncated and is left out."
    ]
    assert len(run.frames) == 19
    assert run.score == np.mean(range(8, 19))


def test_copies_of_configs_that_loggers_keep_are_no_runs(tmp_path):
    for place in ("wandb/offline-run/files", ".hydra"):
        copy = write_run(tmp_path / "run" / place)
        (copy / "metrics.csv").unlink()
    write = write_run(tmp_path / "other")
    assert [run.source for run in read.find_runs(tmp_path, fail)] == [str(write)]


def test_missing_times_are_not_needed():
    rows = [{"frames": 10, "eval/return": "3"}, {"frames": 20, "eval/return": "5"}]
    run = read.make_run("", make_run_config(total_frames=20, eval_every=10), rows)
    frame = tables.make_table(one_comparison([run]), reps=20)
    header, (row, *_) = text.show_table(frame)
    assert row[header.index("mean ± std")] == "4.0"
    assert row[header.index("time per run")] == row[header.index("updates/s")] == text.NONE


# What is written


def write_sweep(root):
    """Writes runs of two methods, two ratios, four and three seeds, on two tasks."""
    for env in ("Hopper", "Ant"):
        for kind, ratio, base in (("uniform", 1, 100), ("nmer", 1, 150), ("nmer", 20, 300)):
            for seed in range(4 if env == "Hopper" else 3):
                write_run(
                    root / f"{env}-{kind}-{ratio}-{seed}",
                    np.linspace(0, base + seed, 20),
                    env__name=env,
                    replay__kind=kind,
                    replay_ratio=ratio,
                    seed=seed,
                )


def test_the_whole_report(tmp_path, capsys):
    write_sweep(tmp_path / "runs")
    out = tmp_path / "report"
    report.main([str(tmp_path / "runs"), "--out", str(out), "--no-pdf", *REPS])
    shown = capsys.readouterr()
    assert "21 runs of 6 settings" in shown.out
    assert "FEW SEEDS" in shown.err
    page = (out / "report.md").read_text()
    for words in ("FEW SEEDS", "TD3, each method at its best", "TD3, replay ratio 1", "SUNRISE"):
        assert words in page
    assert "replay ratio 20" not in page  # where there is one method
    assert page.index("FEW SEEDS") < page.index("| environment |")

    frame = pd.read_csv(out / "table.csv")
    ours = frame[frame["seeds"].notna()].set_index(["comparison", "env", "method"])
    assert len(ours) == 8
    cell = ours.loc["best", "Hopper", "nmer"]
    scores = [np.linspace(0, 300 + seed, 20)[-11:].mean() for seed in range(4)]
    assert cell["mean"] == pytest.approx(np.mean(scores))
    assert cell["std"] == pytest.approx(np.std(scores, ddof=1))
    assert f"{np.mean(scores):.0f} ± {np.std(scores, ddof=1):.0f}" in page
    assert cell["replay_ratio"] == 20
    pooled = pd.read_csv(out / "pooled.csv")
    assert set(pooled[pooled["seeds"].isna()]["method"]) == set(paper.quoted("Hopper"))
    assert pooled["seeds"].notna().sum() == 4
    assert set(pd.read_csv(out / "paired.csv")["method"]) == {"nmer"}
    settings = pd.read_csv(out / "settings.csv")
    assert len(settings) == 6
    assert settings["runs"][0].split()[0].startswith(str(tmp_path))

    pictures = re.findall(r"!\[.*?\]\((.*?)\)", page)
    assert len(pictures) == 8
    for name in pictures:
        picture = matplotlib.image.imread(out / name)
        assert picture.shape[0] > 200
        assert picture.std() > 0.01


def rows_of(page):
    """Returns the lines of Markdown tables, each table as a list of lists."""
    blocks = re.findall(r"(?:^\|.*\|\n)+", page, flags=re.MULTILINE)
    return [
        [re.split(r"(?<!\\)\|", line.strip())[1:-1] for line in block.splitlines()]
        for block in blocks
    ]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    root = tmp_path_factory.mktemp("report")
    write_sweep(root / "runs")
    write_run(root / "runs" / "odd", replay__kind="per_nmer", run_notes="50 % & more_|_{x}")
    write_run(root / "runs" / "odd2", replay__kind="per_nmer", run_notes="a#b$c~^\\")
    report.main([str(root / "runs"), "--out", str(root / "out"), "--no-pdf", *REPS])
    return root / "out"


def test_figures_come_as_pdf_too(written, tmp_path):
    assert {path.suffix for path in written.iterdir()} == {".md", ".csv", ".tex", ".png"}
    write_run(tmp_path / "run")
    report.main([str(tmp_path / "run"), "--out", str(tmp_path / "out"), *REPS])
    (path,) = (tmp_path / "out").glob("*.pdf")
    assert path.with_suffix(".png").is_file()
    assert path.read_bytes().startswith(b"%PDF")
    assert b"/Type3" not in path.read_bytes()  # fonts that publishers refuse


def test_the_markdown_is_well_formed(written):
    made = rows_of((written / "report.md").read_text())
    assert len(made) == 8
    for table in made:
        assert set(map(len, table)) == {len(table[0])}
        assert all(set(entry.strip()) == {"-"} for entry in table[1])
        assert len(table) > 2


TABULAR = re.compile(r"\\begin{tabular}{((?:l|p{100pt})+)}\n(.*?)\\end{tabular}", re.DOTALL)


def test_the_latex_is_well_formed(written):
    source = (written / "tables.tex").read_text()
    plain = source.replace(r"\\", "")
    bodies = TABULAR.findall(source)
    assert source.count(r"\begin{table}") == source.count(r"\end{table}") == len(bodies) > 8
    for columns, body in bodies:
        lines = [line for line in body.splitlines() if line != r"\hline"]
        for line in lines:
            assert line.endswith(r" \tabularnewline" if "p" in columns else r" \\")
            count = len(re.findall("l|p{100pt}", columns))
            assert len(re.findall(r"(?<!\\)&", line)) == count - 1
    assert plain.isascii()
    assert not re.search(r"(?<!\\)[%#_]", plain)
    assert len(re.findall(r"(?<!\\)\$", plain)) % 2 == 0
    assert len(re.findall(r"(?<!\\){", plain)) == len(re.findall(r"(?<!\\)}", plain))
    assert r"50 \% \& more\_|\_\{x\}" in source
    assert r"& $-$" in source
    assert "Hopper-v5" in source


@pytest.mark.parametrize(
    ("entry", "points"),  # as LaTeX itself measures them
    [
        ("HalfCheetah-v5", 57.84),
        ("1743 [1378, 2397]", 63.75),
        ("-46.5 % (1)", 45.33),
        ("paper's Δ NMER", 65.67),
        ("P(> uniform)", 50.89),
    ],
)
def test_entries_are_as_wide_as_in_latex(entry, points):
    assert points - 0.1 < latex.measure(entry) < points + 2


def test_latex_tables_fit_a_page():
    own = "my_package.robots:MyArmWithALongName-v0 xml_file=robots/arm.xml"
    header = ["environment", "method", *(f"number {i}" for i in range(9)), "nothing"]
    rows = [[own, "nmer", *["-5000 [-6000, -4000]"] * 9, "–"]]
    rows += [["Hopper-v5", f"method {i}", *["5 ± 1"] * 9, "–"] for i in range(60)]
    source = latex.latex((header, rows), "x", keys=2)
    assert "nothing" not in source
    seen = []
    for columns, body in TABULAR.findall(source):
        plain = re.sub(r"\\raggedright |\\allowbreak{}| \\tabularnewline| \\\\|\\hline\n", "", body)
        plain = plain.replace("$-$", "-").replace(r"$\pm$", "±").replace(r"\_", "_")
        lines = [line.split(" & ") for line in plain.splitlines()]
        kinds = re.findall("l|p{100pt}", columns)
        widths = [
            100 if kind != "l" else max(map(latex.measure, column))
            for kind, column in zip(kinds, zip(*lines, strict=True), strict=True)
        ]
        assert sum(widths) + 6 * len(widths) <= 345
        assert len(lines) <= 46
        assert lines[0][:2] == header[:2]
        seen += [(*line[:2], name) for line in lines[1:] for name in lines[0][2:]]
    assert sorted(seen) == sorted((*row[:2], name) for row in rows for name in header[2:-1])


def test_a_table_at_a_glance():
    runs = constant_runs([100, 200], replay__kind="uniform", total_frames=200_001)
    runs += constant_runs([150, 350], total_frames=200_001)
    runs += constant_runs([3], env__name="Swimmer")
    runs += constant_runs([4], env__name="Swimmer", total_frames=100_000)
    comparison = one_comparison(runs)
    table = tables.make_table(comparison, reps=20)
    shown = text.show_glance(table, tables.make_pooled_table(comparison, reps=20))
    assert shown == (
        ["environment", "uniform", "nmer"],
        [
            ["Hopper-v5", "150 ± 71", "250 ± 141"],
            ["Swimmer-v5, 100,000 frames", "–", "4.0"],
            ["Swimmer-v5, 200,000 frames", "–", "3.0"],
            ["Δ NMER", "-40.0 % (1)", "+0.0 % (3)"],
        ],
    )


def test_curves_show_seeds_bands_and_quoted_lines():
    runs = constant_runs([100, 200, 300, 400], replay__kind="uniform")
    runs += constant_runs([10, 20], total_frames=100_000)
    runs += constant_runs([10], replay__kind="ct", total_frames=100_000)
    drawn = figures.draw_curves(one_comparison(runs), ["nmer", "uniform", "ct"])
    short, whole = drawn.axes
    assert short.get_ylabel() == "return, mean of last 11 evaluations"
    assert short.get_title() == "Hopper-v5 (1 to 2 seeds)"
    levels = {line.get_label(): line.get_ydata() for line in whole.lines}
    for name, figure in paper.quoted("Hopper").items():
        assert set(levels[f"{name} (quoted)"]) == {figure.mean}
    seeds = [line.get_ydata() for line in whole.lines if line.get_label().startswith("_")]
    assert sorted(line[0] for line in seeds) == [100, 200, 300, 400]
    assert [line.get_linestyle() for line in whole.lines[5:]] == ["--"] * len(
        paper.quoted("Hopper")
    )
    assert list(levels["uniform"]) == [250] * 20
    (band,) = whole.collections
    edges = band.get_paths()[0].vertices[:, 1]
    std = np.std([100, 200, 300, 400], ddof=1)
    assert (edges.min(), edges.max()) == pytest.approx((250 - std, 250 + std))
    mean, *seeds, single = short.lines  # and none of the paper, whose budget is another
    assert [line.get_label() for line in (mean, single)] == ["nmer", "ct"]
    assert all(line.get_linewidth() < mean.get_linewidth() for line in (*seeds, single))
    styles = {line.get_linestyle() for line in (mean, single, whole.lines[0])}
    assert len(styles) == 3


def test_a_method_has_the_same_color_in_every_report():
    assert figures._look(["nmer"], "nmer") == figures._look(["1nn", "nmer", "per"], "nmer")
    others = ["gp", "per", "s4rl", "noisy"]
    methods = ["nmer", "uniform", "ct", "mixup", "1nn", *others]
    assert len({figures._look(others, method)["color"] for method in methods}) == len(methods)


def test_seeds_have_lines_only_where_few_methods_share_a_panel():
    few = constant_runs([1, 2, 3]) + constant_runs([4, 5], replay__kind="uniform")
    many = few + constant_runs([6, 7], replay__kind="ct") + constant_runs([8], replay__kind="1nn")
    for runs, lines in ((few, 2 + 5), (many, 4)):
        (axes,) = figures.draw_curves(one_comparison(runs), []).axes
        drawn = [line for line in axes.lines if "quoted" not in line.get_label()]
        assert len(drawn) == lines


def test_means_show_each_method_with_its_interval_and_its_runs():
    runs = constant_runs([100, 200, 300, 400], replay__kind="uniform")
    runs += constant_runs([500], replay__kind="ct")
    comparison = one_comparison(runs)
    table = tables.make_table(comparison, reps=100)
    (axes,) = figures.draw_means(comparison, table, ["nmer", "uniform", "ct"]).axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["uniform", "ct"]
    seeds, interval, mean, *single = axes.lines
    assert list(seeds.get_xdata()) == [100, 200, 300, 400]
    assert tuple(interval.get_xdata()) == tuple(table[["iqm_low", "iqm_high"]].iloc[0])
    assert mean.get_xdata() == 250
    assert np.isnan(single[1].get_xdata()).all()  # a single run has no interval
    assert single[2].get_xdata() == 500


# The command


def test_nothing_found_says_what_to_do(tmp_path):
    with pytest.raises(SystemExit, match=r"no runs were found\. .*python recipes/td3\.py"):
        report.main([str(tmp_path), "--out", str(tmp_path / "out")])
    with pytest.raises(SystemExit, match="is not a directory"):
        report.main([str(tmp_path / "absent")])
    write_run(tmp_path / "run", range(3))
    with pytest.raises(SystemExit, match="none of the 1 runs can be scored"):
        report.main([str(tmp_path), "--at", "50000", "--out", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()
    with pytest.raises(SystemExit, match="give ENTITY/PROJECT"):
        report.main(["--wandb", "nmer"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "give a directory of runs"),
        (["runs", "--at", "0"], "--at 0"),
        (["runs", "--reps", "-5"], "--reps -5"),
    ],
)
def test_a_bad_command_line_is_refused(arguments, words, capsys):
    with pytest.raises(SystemExit, match="2"):
        report.main(arguments)
    assert words in capsys.readouterr().err


# Weights & Biases: the real client, against a server on this machine that speaks as much GraphQL
# as the client asks for.


class Service(BaseHTTPRequestHandler):
    runs: dict

    def do_POST(self):
        length = self.headers.get("Content-Length")
        body = self.rfile.read(int(length)) if length else b""
        if not self.path.endswith("/graphql"):
            return self.answer(404, {})
        asked = json.loads(body)
        query, variables = asked["query"], asked.get("variables") or {}
        if "query Viewer" in query or "GetDefaultEntity" in query:
            viewer = {"id": "1", "entity": "me", "username": "me", "email": "", "flags": "{}"}
            return self.answer(200, {"viewer": viewer | {"teams": {"edges": []}}})
        if variables.get("project") != "nmer":
            return self.answer(200, {"project": None})
        if "query Runs" in query:
            return self.answer(200, {"project": self.list_runs()})
        assert "sampledHistory" in query
        (spec,) = variables["specs"]
        keys = json.loads(spec)["keys"]
        _, rows = self.runs[variables["name"]]
        if rows is None:
            return self.answer(200, None, errors=[{"message": "gone"}])
        rows = [{**row, "_step": row["frames"]} for row in rows]
        found = [{key: row[key] for key in keys} for row in rows if set(keys) <= set(row)]
        return self.answer(200, {"project": {"run": {"sampledHistory": [found]}}})

    def list_runs(self):
        nodes = [
            {
                "name": name,
                "id": name,
                "displayName": name,
                "state": "finished",
                "config": json.dumps({key: {"value": value} for key, value in config.items()}),
                "summaryMetrics": "{}",
                "systemMetrics": "{}",
                "createdAt": "2026-01-01T00:00:00",
                "historyKeys": None,
                "user": {"name": "me", "username": "me"},
            }
            for name, (config, _) in self.runs.items()
        ]
        return {
            "internalId": "1",
            "runCount": len(nodes),
            "readOnly": False,
            "runs": {
                "edges": [{"node": node, "cursor": node["name"]} for node in nodes],
                "pageInfo": {"endCursor": None, "hasNextPage": False},
            },
        }

    def answer(self, code, data, **more):
        content = json.dumps({"data": data, **more}).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_):
        pass


@pytest.fixture
def service():
    Service.runs = {}
    server = ThreadingHTTPServer(("127.0.0.1", 0), Service)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def report_online(tmp_path, project, url, key="0" * 40):
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WANDB")}
    kept |= {"NETRC": os.devnull, "OMP_NUM_THREADS": "1", "HOME": str(tmp_path)}
    kept |= {"WANDB_BASE_URL": url} | ({"WANDB_API_KEY": key} if key else {})
    command = [sys.executable, str(RECIPES / "report.py"), "--wandb", project, *REPS]
    return subprocess.run(
        command, cwd=tmp_path, env=kept, capture_output=True, text=True, timeout=120
    )


def nested(flat):
    config = OmegaConf.create()
    for name, value in flat.items():
        OmegaConf.update(config, name, value)
    return OmegaConf.to_container(config)


def test_runs_come_from_weights_and_biases(tmp_path, service):
    for seed in range(2):
        config = nested(make_run_config(seed=seed))
        Service.runs[f"run{seed}"] = (config, make_rows(np.arange(20.0) + seed))
    Service.runs["other"] = ({"lr": 0.1}, [])
    Service.runs["early"] = (nested(make_run_config(seed=3)), [])
    Service.runs["broken"] = (nested(make_run_config(seed=4)), None)
    result = report_online(tmp_path, "me/nmer", service)
    assert result.returncode == 0, result.stderr
    assert "other is left out: its config has no algorithm" in result.stderr
    assert "early is left out: it has no evaluation yet" in result.stderr
    assert "broken is left out: its history cannot be fetched" in result.stderr
    frame = pd.read_csv(tmp_path / "report" / "table.csv")
    assert (frame["mean"][0], frame["seeds"][0]) == (14.5, 2)
    assert frame["seconds_per_run"][0] == 1200


@pytest.mark.parametrize(
    ("project", "key", "words"),
    [
        ("me/absent", "0" * 40, "--wandb me/absent cannot be read"),
        ("me/nmer", None, "needs an API key"),
    ],
)
def test_a_project_that_cannot_be_read_is_told(tmp_path, service, project, key, words):
    result = report_online(tmp_path, project, service, key)
    assert result.returncode == 1
    assert words in result.stderr
    assert "Traceback" not in result.stderr


def test_runs_without_fixed_data_are_those_from_before_and_other_data_are_another_task():
    defaults = {"data__clip": False, "data__across": False, "data__cache": "runs/data"}
    before, later = make_run(), make_run(data__source=None, data__share=None, **defaults)
    assert before.config == later.config
    some, others = (make_run(data__source=f"logs/{name}.npz", **defaults) for name in "ab")
    tasks = {run.config["env.task"] for run in (before, some, others)}
    assert tasks == {"Hopper-v5", "Hopper-v5 with a.npz", "Hopper-v5 with b.npz"}
