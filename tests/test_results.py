"""The results page: its statements follow from the committed runs."""

import csv
import importlib
import itertools
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
from result_helpers import RESULTS, ROOT, by_seed, range_of, spread, table
from scipy.stats import t, ttest_1samp

import report  # isort: skip
from nmer_recipes.reporting.estimates import mean_difference  # isort: skip

PARTS = sorted(path for path in RESULTS.iterdir() if path.is_dir())
RUNS = sorted(path.parent for path in RESULTS.rglob("metrics.csv"))


def test_reports_are_those_of_the_runs(tmp_path, monkeypatch):
    """Makes every report again by the command that the page names, without any run."""
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
        if program == "docs/why.py":  # see test_words_on_why
            continue
        assert program == "recipes/report.py"
        report.main(words)
    for part in PARTS:
        names = {path.name for path in part.iterdir()}
        assert names == {path.name for path in (made / part.name).iterdir()}
        for name in ("report.md", "tables.tex", "settings.csv"):  # the others are not rounded
            assert (part / name).read_text() == (made / part.name / name).read_text(), name


def test_every_table_is_that_of_a_report():
    """Compares whole tables: no row is left out, and each is below its own header."""
    reports = [(part / "report.md").read_text() for part in PARTS]
    page = (ROOT / "docs" / "results.md").read_text()
    shown = re.findall(r"(?:^\|.*\n)+", page, flags=re.MULTILINE)
    assert shown
    for each in shown:
        if not each.startswith(("| quoted", "| measured")):  # of others; test_words_on_why
            assert any(f"\n\n{each}\n" in report for report in reports), each


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
    """Returns the evaluations of each seed after the random frames."""
    tables = {}
    for run in (RESULTS / part).glob("env=*"):
        config = yaml.safe_load((run / "config.yaml").read_text())
        if (config["env"]["name"], config["replay"]["kind"]) == (env, method):
            rows = pd.read_csv(run / "metrics.csv")
            rows["score"] = rows["eval/return"].rolling(11, min_periods=1).mean()
            rows["learned"] = rows["frames"] - config["random_frames"]
            tables[config["seed"]] = rows[rows["learned"] > 0]
    return [tables[seed] for seed in sorted(tables)]


# Numbers of the text: each sentence is made of the runs, and must stand on the page.


def says(sentence: str, page: str = "docs/results.md") -> None:
    """Fails unless the sentence is on the page, regardless of line breaks."""
    words = " ".join((ROOT / page).read_text().replace("**", "").split())
    assert " ".join(sentence.split()) in words, sentence


def test_words_on_halfcheetah():
    uniform, nmer = (series("main", "HalfCheetah", method) for method in ("uniform", "nmer"))
    pairs = list(zip(uniform, nmer, strict=True))
    there = [b.learned[b.score >= a.score.iloc[-1]].iloc[0] for a, b in pairs]
    says(f"reaches uniform replay's final score after {range_of(there)} of the 25,000 frames")
    rows = table("main", "HalfCheetah")
    ends = f"{spread(rows.loc['nmer'])} where uniform replay {{}} {spread(rows.loc['uniform'])}"
    says(f"NMER ends at {ends.format('ends at')}, and it is ahead by 1,500 or more in each seed")
    assert min(by_seed("main", "HalfCheetah", "score")) >= 1_500
    says(f"NMER scores {ends.format('scores')}", "README.md")
    above = [[t.frames[t["eval/overestimation"] > 0].iloc[-1] for t in x] for x in (uniform, nmer)]
    says(f"With NMER this ends by frame {max(above[1]):,} in each seed, with uniform replay")
    says(f"between frames {range_of(above[0]).replace(' to ', ' and ')}. At the end both under")
    assert all(t["eval/overestimation"].iloc[-1] < 0 for t in uniform + nmer)
    few = series("baseline", "HalfCheetah", "uniform")
    scores = [each.score[each.learned == 25_000].item() for each in few]
    says(f"At ratio 1 uniform replay has {np.mean(scores):.0f} ± {np.std(scores, ddof=1):.0f} on")


def test_words_on_walker():
    uniform, nmer = (series("main", "Walker2d", method) for method in ("uniform", "nmer"))
    areas = by_seed("main", "Walker2d", "area")
    assert (len(areas), min(areas) > 0) == (4, True)
    larger = f"The area is larger in each of four seeds, by {range_of(areas)}"
    says(f"{larger}, and the final score in three of them.")
    lengths = pd.concat([each["eval/length"].tail(11) for each in uniform + nmer])
    says(f"episodes last {range_of(lengths)} of 1,000 steps on average")
    for one, other in zip(uniform, nmer, strict=True):
        errors = [each["eval/overestimation"] for each in (one, other)]
        assert errors[1].mean() < errors[0].mean()
        assert all(error.tail(11).mean() > 0 for error in errors)


def test_words_on_hopper():
    uniform, nmer = (series("main", "Hopper", method) for method in ("uniform", "nmer"))
    stands = [each.frames[each["eval/length"] == 1000] for each in uniform + nmer]
    seeds = [seed for seed, frames in enumerate(stands) if len(frames)]
    assert seeds == [0, 1, 4 + 1]
    says("Two runs with uniform replay (seeds 0 and 1) and one with NMER (seed 1) learned to stand")
    later = range_of([f.iloc[-1] - f.iloc[0] for f in stands if len(f)])
    says(f"Each stopped doing so {later} frames later")
    shares = [
        100 * each["eval/return"][each["eval/length"] == 1000].sum() / each["eval/return"].sum()
        for each in uniform + nmer
    ]
    stood = enumerate_words([f"{share:.0f}" for share in shares if share])
    says(f"make up {stood} % of the area of these three runs")


def test_words_on_the_pendulum():
    first = {}
    for method in ("uniform", "nmer"):
        tables = series("pendulum", "InvertedDoublePendulum", method)
        first[method] = range_of([t.frames[t["eval/length"] == 1000].iloc[0] for t in tables])
    says(
        "the first evaluation in which all episodes last 1,000 steps is at frame "
        f"{first['nmer']}, and with uniform replay at {first['uniform']}."
    )
    paired = pd.read_csv(RESULTS / "pendulum" / "paired.csv").iloc[0]
    area = np.mean(
        [t["eval/return"].mean() for t in series("pendulum", "InvertedDoublePendulum", "uniform")]
    )
    shares = {round(100 * abs(edge) / area) for edge in (paired.area_low, paired.area_high)}
    says(f"its interval extends to {shares.pop()} % of the area on either side of zero")
    assert not shares


@pytest.mark.parametrize(
    ("part", "sentence"),
    [
        ("rivals", "is HalfCheetah with {} frames, the first {} of them random."),
        ("ratio20", "is HalfCheetah with {} frames, the first {} of them random,"),
        ("suite", "finger-spin with {} frames, the first {} of them random."),
        ("main", "{} frames, the first {} of them random, and 5 updates per frame after these."),
        ("pendulum", "{} frames, the first {} of them random, at the same ratio, ten seeds."),
        ("baseline", "{} frames, the first {} of them random, three seeds."),
    ],
)
def test_words_on_budgets(part, sentence):
    names = ("total_frames", "random_frames")
    configs = [yaml.safe_load(path.read_text()) for path in (RESULTS / part).rglob("config.yaml")]
    ((budget, ratio),) = {
        (tuple(f"{config[name]:,}" for name in names), config["replay_ratio"]) for config in configs
    }
    says(sentence.format(*budget))
    assert ratio == {"ratio20": 20, "baseline": 1}.get(part, 5)


def test_words_on_time_and_on_other_pairs():
    shares = []
    for env in ("HalfCheetah", "Hopper", "Walker2d"):
        seconds = table("main", env).seconds_per_run
        shares.append(100 * (seconds["nmer"] / seconds["uniform"] - 1))
    says(f"Depending on the task, NMER's runs took {range_of(shares)} % longer on average")
    scores = [each.score.iloc[-1] for each in series("main", "HalfCheetah", "uniform")]
    says(f"within the range of our four with uniform replay, {range_of(scores, '.0f')} (")


def test_words_on_rivals():
    methods = ("nmer", "ct", "1nn", "mixup")
    runs = {method: series("rivals", "HalfCheetah", method) for method in ("uniform", *methods)}
    complete = min(len(tables) for tables in runs.values())
    state = f"{NUMBERS[complete].capitalize()} of five seeds are complete for all five methods."
    says("All five seeds are complete." if complete == 5 else state)
    paired = pd.read_csv(RESULTS / "rivals" / "paired.csv").set_index(["method", "against"])
    assert (paired.verdict == "ahead").equals(paired.score_low > 0)
    ahead = [method for method in methods if paired.score_low[method, "uniform"] > 0]
    names = ["NMER" if method == "nmer" else f"`{method}`" for method in ahead]
    behind = paired.index[paired.score_high < 0].tolist()
    assert behind == [("nmer", "ct")]
    assert (paired.score_low > 0).sum() == len(ahead)
    says(f"{enumerate_words(names)} are ahead of uniform replay. NMER is behind `ct`. Between NMER")
    assert {"1nn", "mixup"} <= {*ahead}
    assert len(paired) == 7
    says("These are seven comparisons.")
    chances = paired.score_by_seed.map(
        lambda gaps: ttest_1samp(np.array(gaps.split(), float), 0).pvalue
    )
    assert chances.index[chances < 0.05 / 7].tolist() == [("ct", "uniform")]
    says("correction for seven, only `ct` is still ahead of uniform replay.")
    assert chances["nmer", "uniform"] < 0.05 / 2 < chances["nmer", "ct"]
    says(
        "With that for the two main ones, NMER is still ahead of uniform replay, and its difference"
    )
    gaps = by_seed("rivals", "HalfCheetah", "score")
    assert min(gaps) > 0
    says(f"NMER is ahead in each of {NUMBERS[len(gaps)]} seeds. The first study agrees.")
    for other in ("uniform", "ct", "1nn", "mixup"):
        row = paired.loc["nmer", other]
        assert (row.score_low > 0) == (other == "uniform")
        gap = f"{row.score:+.0f} [{row.score_low:+.0f}, {row.score_high:+.0f}]"
        begin = "minus the" if other == "mixup" else "NMER's score minus the"
        name = "uniform replay is" if other == "uniform" else f"`{other}` is"
        says(f"{begin} score of {name.removesuffix(' is') if other == 'mixup' else name} {gap}")
    near, any_row = (
        "{:+.0f} [{:+.0f}, {:+.0f}]".format(*paired.loc[("nmer", other), GAP])
        for other in ("1nn", "mixup")
    )
    says(
        f"NMER's score minus theirs is {near} and {any_row}. Both are ahead of uniform replay, too"
    )
    says("Both are ahead of uniform replay, too.", "README.md")
    says(f", and {range_of(gaps)} by seed.")
    row = paired.loc["nmer", "ct"]
    assert row.area_high < 0
    assert row.score_high < 0
    area = f"[{row.area_low:+.0f}, {row.area_high:+.0f}]"
    says(f"The interval of the area, {area}, lies below zero, too")
    means = {
        name: sum(each.score for each in runs[name]) / len(runs[name]) for name in ("nmer", "ct")
    }
    frames, above = runs["ct"][0].frames, means["ct"] > means["nmer"]
    last = frames[~above].iloc[-1]
    assert above[frames <= last].mean() < 0.25
    says(f"above NMER's in every evaluation after frame {last:,}, and in few of those before.")
    seconds = [
        json.loads(path.read_text())["seconds"]
        for path in (RESULTS / "rivals").rglob("summary.json")
    ]
    says(f"all runs of `rivals` together took {sum(seconds) / 3600:.0f} hours instead of six")


TASKS_33K = {"HalfCheetah": "HalfCheetah, 33K frames", "Walker2d": "Walker2d, 33K"}


def test_words_on_published_results():
    page = (ROOT / "docs" / "results.md").read_text()
    (block,) = re.findall(r"(?:^\| quoted.*\n)(?:^\|.*\n)+", page, flags=re.MULTILINE)
    header, _, *lines = [
        [each.strip() for each in line.split("|")[1:-1]] for line in block.splitlines()
    ]
    rows = {line[0].split("TD3 with ")[-1]: line for line in lines}
    column = header.index("HalfCheetah, 33K frames")
    early = [int(rows[name][column].split()[0]) for name in ("REDQ", "DroQ", "CrossQ")]
    says(f"score {range_of(early, '.0f')}, and SAC {rows['SAC'][column]}")
    quoted = pd.read_csv(ROOT / "docs" / "references" / "quoted.csv")
    for agent, task in itertools.product(("SAC", "REDQ", "DroQ", "CrossQ"), TASKS_33K):
        found = quoted[(quoted.agent == agent) & (quoted.task == f"{task}-v4")]
        (mean,) = found["mean"][found.frames.between(33_000, 34_000)].tail(1)
        cell = rows[agent][header.index(TASKS_33K[task])]
        assert int(cell.split()[0]) == round(mean), (agent, task)
    for name, method in (("uniform replay", "uniform"), ("NMER", "nmer"), ("`ct`", "ct")):
        means = [table("rivals", "HalfCheetah").loc[method]]
        means += [
            table("main", env).loc[method] for env in ("Walker2d", "Hopper") if method != "ct"
        ]
        assert rows[name][1:-4] == [
            "5",
            ", ".join(f"{row.seeds:.0f}" for row in means),
            *(f"{row['mean']:.0f}" for row in means),
            *[""] * (3 - len(means)),
        ]


def test_words_on_the_suite():
    paired = pd.read_csv(RESULTS / "suite" / "paired.csv")
    paired["env"] = paired.env.str.removeprefix("dm_control/")
    rows = paired.set_index(["env", "method", "against"])
    tasks = ["walker-walk", "walker-run", "cheetah-run", "finger-spin"]
    assert len(rows) == 15  # of three pairs of methods, on four tasks and on their mean
    says("These are 15 comparisons")
    names = {"nmer": "NMER", "uniform": "uniform replay", "ct": "`ct`"}
    for pair in (("nmer", "uniform"), ("nmer", "ct"), ("ct", "uniform")):
        one, other = (names[method] for method in pair)
        row = rows.loc["mean of 4 tasks", *pair]
        shown = (
            "no difference is shown" if row.verdict == "not shown" else f"{one} is {row.verdict}"
        )
        words = f"{one}'s score minus the score of {other} is"
        says(f"Over the four tasks, {words} {gap_of(row)}: {shown}.")
        verdicts = {task: rows.loc[task, *pair].verdict for task in tasks}
        found = [
            f"{verdict} {of}{other} on {enumerate_words(there)}"
            for verdict, of in (("ahead", "of "), ("behind", ""))
            if (there := [task for task in tasks if verdicts[task] == verdict])
        ]
        rest = "; no difference is shown on the other tasks" * ("not shown" in verdicts.values())
        none = f"By task, no difference between {one} and {other} is shown."
        by_task = f"By task, {one} is {enumerate_words(found)}{rest}." if found else none
        for page in ["docs/results.md", *(["README.md"] if pair == ("nmer", "uniform") else [])]:
            says(by_task, page)
    gaps = [
        float(gap)
        for task in tasks
        for gap in rows.loc[task, "nmer", "uniform"].score_by_seed.split()
    ]
    says(f"ranges from {min(gaps):+.0f} to {max(gaps):+.0f} on single tasks and seeds")
    says(f"and its four means over the tasks are {means_over_tasks(gaps)}.")
    clip = enumerate_words([f"{gap:+.0f}" for gap in sorted(gaps[:4])[::-1]][1:])
    assert max(gaps[:4]) == gaps[1] == max(gaps)
    says(f"the largest difference in score, {gaps[1]:+.0f}. The others have {clip}.", "README.md")
    share, independent = judge_by_chance(np.reshape(gaps, (4, 4)))
    says(f"only {100 * share:.1f} % give an interval that excludes zero")
    says(f"taken as independent, it is [{independent[0]:+.1f}, {independent[1]:+.1f}] (Welch)")
    ends = {}
    for run in (RESULTS / "suite").glob("*finger-spin*"):
        method = re.search(r"replay=(\w+)", run.name)[1]
        score = json.loads((run / "summary.json").read_text())["score"]
        ends.setdefault(method, []).append(score)
    never = {method: sum(score < 7 for score in scores) for method, scores in ends.items()}
    assert (never, sum(map(len, ends.values()))) == ({"uniform": 2, "ct": 2, "nmer": 1}, 12)
    assert min(score for scores in ends.values() for score in scores if score >= 7) > 200
    says(
        "five of twelve runs never learn and score below 7 (two with uniform replay, two with `ct`"
    )
    row = rows.loc["mean of 4 tasks", "nmer", "uniform"]
    assert row.area_low < 0 < row.area_high
    says(f"The interval of their area, [{row.area_low:+.1f}, {row.area_high:+.1f}], includes zero")
    counts = rows.seeds[tasks]
    state = f"{NUMBERS[counts.min()].capitalize()} of four seeds are complete"
    state += "" if counts.min() == counts.max() else ", and a part of the next"
    says("All four seeds are complete." if counts.min() == 4 else f"{state}.")
    uniform, rival = (rows.loc["mean of 4 tasks", "nmer", other] for other in ("uniform", "ct"))
    assert uniform.verdict == "ahead"
    answer = "ahead by the protocol's rule, but not settled"
    seeds = NUMBERS[uniform.seeds]
    says(f"Faster than uniform replay on four tasks of the DeepMind Control Suite: {answer}.")
    says(f"of uniform replay is {gap_of(uniform)}. This interval is [narrow by chance]")
    says(f"Over the tasks, NMER's score minus the score of `ct` is {gap_of(rival)}")
    says(f"Four tasks of the DeepMind Control Suite: {answer}.", "README.md")
    says(f"of uniform replay is {gap_of(uniform)}, with {seeds} seeds", "README.md")
    assert rival.verdict == "not shown"
    says("Over four tasks of the DeepMind Control Suite, no difference", "docs/howto/choose.md")
    one_by_one = {rows.loc[task, "nmer", "uniform"].verdict for task in tasks}
    single = "single tasks" if one_by_one == {"not shown"} else "most single tasks"
    says(f"InvertedDoublePendulum and {single} of the DeepMind Control Suite, and", "README.md")


def means_over_tasks(gaps: list[float]) -> str:
    """Returns the mean over the tasks for each seed; `gaps` lists the tasks one after another."""
    return enumerate_words([f"{gap:.1f}" for gap in np.reshape(gaps, (4, 4)).mean(0)])


def judge_by_chance(gaps: np.ndarray) -> tuple[float, tuple[float, float]]:
    """Returns two measures of how much the interval of a mean `[tasks, seeds]` owes to chance.

    The first is the share of the ways to match seeds between tasks whose interval excludes zero.
    The second is the interval if the tasks are independent (Welch and Satterthwaite).
    """
    orders = [list(order) for order in itertools.permutations(range(gaps.shape[1]))]
    ways = [
        mean_difference(np.mean([gaps[0], *map(np.take, gaps[1:], chosen)], 0)).low > 0
        for chosen in itertools.product(orders, repeat=len(gaps) - 1)
    ]
    n = gaps.shape[1]
    parts = gaps.var(1, ddof=1) / n / len(gaps) ** 2
    freedom = parts.sum() ** 2 / (parts**2 / (n - 1)).sum()
    interval = t.interval(0.95, freedom, gaps.mean(), np.sqrt(parts.sum()))
    return float(np.mean(ways)), interval


def test_words_on_ratio_20():
    names = {"nmer": "NMER", "uniform": "uniform replay", "ct": "`ct`"}
    few, many = (
        pd.read_csv(RESULTS / part / "paired.csv").set_index(["method", "against"])
        for part in ("rivals", "ratio20")
    )
    assert len(many) == 3
    assert set(many.seeds) == {4}
    for one, other in (("nmer", "uniform"), ("nmer", "ct"), ("ct", "uniform")):
        row = many.loc[one, other]
        verdict = {"not shown": "no difference is shown"}.get(
            row.verdict, f"{names[one]} is {row.verdict}"
        )
        words = f"{names[one]}'s score minus the score of {names[other]} is"
        says(f"{words} {gap_of(row)}: {verdict}.")
        at_20, at_5 = (
            np.array([float(gap) for gap in rows.score_by_seed[one, other].split()[:4]])
            for rows in (many, few)
        )
        change = mean_difference(at_20 - at_5)
        verdict = (
            "larger" if change.low > 0 else "smaller" if change.high < 0 else "no change is shown"
        )
        gap = gap_of(pd.Series([change.value, change.low, change.high], GAP))
        says(f"Minus the same difference at ratio 5, seed by seed, that is {gap}: {verdict}.")
        assert (one, other) != ("nmer", "uniform") or verdict == "no change is shown"
    assert many.verdict["nmer", "uniform"] == "ahead"
    assert many.verdict["nmer", "ct"] == "not shown"
    now, before = table("ratio20", "HalfCheetah"), table("rivals", "HalfCheetah")
    nmer, uniform, rival = (spread(now.loc[name]) for name in ("nmer", "uniform", "ct"))
    says(f"too. NMER scores {nmer}, uniform replay {uniform} and `ct` (see the next line) {rival}")
    says(f"the difference is {gap_of(many.loc['nmer', 'ct'])}: not shown.")
    scores = f"NMER scores {nmer}, uniform replay {uniform} and Continuous Transition {rival}."
    says(scores, "README.md")
    pairs = [(spread(now.loc[name]), spread(before.loc[name])) for name in names]
    words = "Uniform replay scores {1[0]} at ratio 20 and {1[1]} at ratio 5 (five seeds), NMER "
    says((words + "{0[0]} and {0[1]}, and `ct` {2[0]} and {2[1]}.").format(*pairs))
    changes = [-now.loc["uniform", f"{of}change_percent"] for of in ("", "paper_")]
    says(f"at ratio 20 it has {uniform} in the second study. There it is behind NMER by ")
    says("NMER by {:.1f} %, and by {:.1f} % in the paper's ablations".format(*changes))


GAP = ["score", "score_low", "score_high"]


def gap_of(row: pd.Series) -> str:
    form = "+.0f" if abs(row.score) >= 100 else "+.1f"
    return f"{row.score:{form}} [{row.score_low:{form}}, {row.score_high:{form}}]"


def test_first_lines_of_page_and_readme():
    rows = table("rivals", "HalfCheetah")
    nmer, uniform, rival = (spread(rows.loc[name]) for name in ("nmer", "uniform", "ct"))
    says(f"NMER scores {nmer} and uniform replay {uniform} after 30,000 frames")
    says(f"`ct` mixes a row with the next row of its episode and scores {rival}.")
    seeds = NUMBERS[len(by_seed("rivals", "HalfCheetah", "score"))]
    says(
        f"TD3 on HalfCheetah-v5, replay ratio 5, 30,000 frames, {seeds} seeds: {nmer} with NMER, "
        f"{uniform} with uniform replay. NMER is ahead in every seed.",
        "README.md",
    )
    first, second = (
        [f"{gap:+.0f}" for gap in by_seed(part, "HalfCheetah", "score", "ct")]
        for part in ("pairings", "rivals")
    )
    gaps = (
        f"{enumerate_words(first)} in the first study, and {enumerate_words(second)} in the second"
    )
    says(f"NMER's score minus the score of `ct` is {gaps}.")
    says(f"On HalfCheetah, NMER's score minus the rival's is {gaps}.", "README.md")


def test_words_on_why(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    why = importlib.import_module("why")
    assert why.make_table() in (ROOT / "docs" / "results.md").read_text()
    why.main(["--out", str(tmp_path)])
    drawn, committed = (
        re.findall("<!-- (.*) -->", (folder / "why.svg").read_text())
        for folder in (tmp_path, ROOT / "docs" / "figures")
    )
    assert drawn == committed
    errors = why.read_errors("HalfCheetah")
    ratio = errors["nmer_10", 10_000] / errors["ct", 10_000]
    says(f"With 10,000 rows, NMER's on-manifold error is {ratio:.1f} of the error of `ct`")
    for task, sign in (("HalfCheetah", -1), ("Hopper", 1)):
        biases = [why.read_runs(task, m)["eval/overestimation"].mean() for m in why.COLORS]
        assert all(sign * bias > 0 for bias in biases)
    shares, closer = [], []
    for method in why.COLORS:
        runs = why.read_runs("HalfCheetah", method)
        shares.append(-100 * runs["eval/overestimation"].mean() / runs["eval/monte_carlo"].mean())
    says("by {:.0f} % of the return with uniform replay and by {:.0f} % with NMER".format(*shares))
    for task in why.TASKS:
        distance = why.read_runs(task, "nmer").groupby("frames")["replay/neighbor_distance"].mean()
        closer.append(100 - 100 * distance[30_000] / distance[10_200])
    says("come closer by {:.0f} % there and by {:.0f} % on Hopper".format(*closer))
    errors = why.read_errors("Hopper")
    ratio = errors["nmer_10", 10_000] / errors["ct", 10_000]
    says(f"On Hopper, NMER's on-manifold error is {ratio:.1f} times the error of `ct`")


NUMBERS = {1: "one", 2: "two", 3: "three", 4: "four", 5: "five", 6: "six"}


def enumerate_words(words) -> str:
    return " and ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


def test_agents_are_shown_beside_references(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    agents = importlib.import_module("agents")
    shown = [agent for agent in agents.PARTS if agents.read_runs(agent)]
    assert agents.make_table(shown) in (ROOT / "docs" / "agents.md").read_text()
    agents.main(["--out", str(tmp_path)])
    drawn, committed = (
        re.findall("<!-- (.*) -->", (folder / "agents.svg").read_text())
        for folder in (tmp_path, ROOT / "docs" / "figures")
    )
    assert drawn == committed
    absent = [agent for agent in agents.PARTS if agent not in shown]
    if absent:
        says(f"{enumerate_words(absent)} have not been run on HalfCheetah yet", "docs/agents.md")


# Agents that NMER is added to: the part, the agent, and how many seeds it has when complete.
ADDED = [("crossq", "CrossQ", 4), ("droq", "DroQ", 3)]


@pytest.mark.parametrize(("part", "agent", "seeds"), ADDED)
def test_words_on_agents_that_nmer_is_added_to(part, agent, seeds):
    rows = pd.read_csv(RESULTS / part / "paired.csv").set_index("env")
    assert set(rows.seeds) == {seeds}
    says(f"All {NUMBERS[seeds]} seeds are complete.")
    count = f"These are {NUMBERS[len(rows)]} comparisons; no correction"
    says("This is one comparison." if len(rows) == 1 else count)
    for task, row in rows.iterrows():
        ends = table(part, task)
        nmer, uniform = (spread(ends.loc[method]) for method in ("nmer", "uniform"))
        verdict = {"not shown": "no difference is shown"}.get(row.verdict, f"NMER is {row.verdict}")
        gaps = enumerate_words([f"{float(gap):+.0f}" for gap in row.score_by_seed.split()])
        says(f"{task}: {agent} scores {nmer} with NMER and {uniform} with uniform replay.")
        says(
            f"minus the score of uniform replay is {gap_of(row)}: {verdict}. By seed, it is {gaps}."
        )


def test_words_on_crossq():
    rows = pd.read_csv(RESULTS / "crossq" / "paired.csv").set_index("env")
    gaps = [gap_of(rows.loc[task]) for task in ("HalfCheetah", "Walker2d")]
    assert set(rows.verdict) == {"not shown"}
    words = "of uniform replay is {} on HalfCheetah and {} on Walker2d".format(*gaps)
    says(words)
    says(words, "docs/howto/choose.md")
    ends = [
        spread(table("crossq", task).loc[method])
        for task in ("HalfCheetah", "Walker2d")
        for method in ("nmer", "uniform")
    ]
    words = "it scores {} with NMER and {} with uniform replay on HalfCheetah, and {} and {} on"
    says(words.format(*ends), "README.md")
    low, high = [], []
    for run in (RESULTS / "crossq").glob("*env=HalfCheetah*"):
        evaluations = pd.read_csv(run / "metrics.csv")
        most = evaluations["eval/return"][evaluations.frames > 20_000].max()
        score = json.loads((run / "summary.json").read_text())["score"]
        low.append(most) if score < 2_000 else high.append(score)
        assert score > 2_000 or "replay=nmer" in run.name
    assert (len(low), len(high)) == (2, 6)
    says(f"no evaluation after frame 20,000 returns more than {max(low):,.0f}. In all other runs")
    says(f"the score is at least {min(high):,.0f}.")


def test_words_on_droq():
    (row,) = pd.read_csv(RESULTS / "droq" / "paired.csv").iloc
    assert row.verdict == "not shown"
    says(f"is {gap_of(row)} on HalfCheetah, at replay ratio 20 and after 20,000 frames")
    early, most = {}, {}
    for run in sorted((RESULTS / "droq").glob("*env=HalfCheetah*")):
        rows = pd.read_csv(run / "metrics.csv")
        method = re.search(r"replay=(\w+)", run.name)[1]
        means = rows["eval/return"].rolling(11).mean()
        early.setdefault(method, []).append(means[rows.frames == 10_000].item())
        most.setdefault(method, []).append(rows["eval/return"][rows.frames > 10_000].max())
    assert all(a > b for a, b in zip(early["nmer"], early["uniform"], strict=True))
    means = [enumerate_words([f"{x:.0f}" for x in early[m]]) for m in ("nmer", "uniform")]
    says("evaluations is {}, and with uniform replay {}.".format(*means))
    assert min(most["nmer"][:2] + most["uniform"]) > 4_000
    says(f"no evaluation after frame 10,000 returns more than {most['nmer'][2]:,.0f}.")
    ends = [spread(table("droq", "HalfCheetah").loc[method]) for method in ("nmer", "uniform")]
    words = "it scores {} with NMER and {} with uniform replay, with three seeds."
    says(words.format(*ends), "README.md")


def test_words_on_sac_with_layer_normalization():
    (row,) = pd.read_csv(RESULTS / "sac_norm" / "paired.csv").iloc
    assert row.seeds == 1
    ends = table("sac_norm", "HalfCheetah")["mean"]
    says(f"It scores {ends['nmer']:.0f} with NMER and {ends['uniform']:.0f} with uniform replay.")
    says(f"of uniform replay is {row.score:+.0f}. One seed has no interval")


def test_words_on_agents():
    """Compares the table of the agents page, row by row."""
    found = {}
    for run in (RESULTS / "learn").glob("*env=*"):
        config = yaml.safe_load((run / "config.yaml").read_text())
        name = "droq" if config.get("dropout") else config["algorithm"]
        rows = pd.read_csv(run / "metrics.csv")
        reached = rows.frames[rows["eval/return"] == 1000]
        score = json.loads((run / "summary.json").read_text())["score"]
        key = (name, config["env"]["name"], config["replay_ratio"], config["lr"])
        found[key] = (config["total_frames"], reached, score)
    for title, name, ratio, lr in (
        ("DDPG", "ddpg", 1, 1e-3),
        ("CrossQ, critics of 256 units", "crossq", 1, 1e-3),
        ("REDQ", "redq", 10, 3e-4),
        ("DroQ", "droq", 10, 3e-4),
        ("SUNRISE, `lr=0.001`", "sunrise", 1, 1e-3),
    ):
        frames, reached, score = found[name, "InvertedPendulum", ratio, lr]
        row = f"| {title} | {frames:,} | {ratio} | frame {reached.iloc[0]:,} | {score:.0f} |"
        says(row, "docs/agents.md")
    for name in ("redq", "droq"):
        for lr in (3e-4, 1e-3):
            frames, reached, _ = found[name, "InvertedPendulum", 1, lr]
            assert (frames, len(reached)) == (8_000, 0)
    frames, _, score = found["ddpg", "HalfCheetah", 1, 1e-3]
    says(f"| DDPG | {frames:,} | {score:.0f} | 1 |", "docs/agents.md")


def test_words_on_the_paper():
    rows = pd.read_csv(ROOT / "recipes" / "nmer_recipes" / "results.csv")
    means = rows[(rows.algorithm == "TD3") & (rows.table == "main")].set_index(["env", "replay"])
    behind = {
        env: 100 * (1 - means["mean"][env, "U"] / means["mean"][env, "NMER"])
        for env in ("HalfCheetah", "Walker2d", "Hopper")
    }
    says(
        "There uniform replay is behind NMER by {HalfCheetah:.1f} % on HalfCheetah, "
        "{Walker2d:.1f} % on Walker2d and {Hopper:.1f} % on Hopper".format(**behind)
    )


def test_words_on_cells_of_the_paper_that_do_not_agree():
    folder, keys = ROOT / "recipes" / "nmer_recipes", ["algorithm", "env", "replay", "mean", "std"]
    printed = pd.read_csv(folder / "results.csv").query("table == 'main'")[keys]
    rows = pd.read_csv(folder / "paper.csv")
    found = printed.merge(rows[[*keys, "best", "replay_ratio"]].drop_duplicates(), "left", keys)
    assert (found.best.isna().sum(), (found.best != 1).sum()) == (9, 10)
    (other,) = found[found.best == 0].itertuples()
    assert (other.algorithm, other.env, other.replay) == ("SAC", "Ant", "PER")
    (best,) = rows.query(
        "algorithm == 'SAC' and env == 'Ant' and replay == 'PER' and best == 1"
    ).itertuples()
    says(
        f"prints {other.mean} ± {other.std}, the result at replay ratio {other.replay_ratio:.0f}, "
        f"where its ablation has {best.mean} ± {best.std} at ratio {best.replay_ratio}",
        "docs/differences.md",
    )
    says("Nine cells of its Table 1 match no row of its ablations", "docs/differences.md")


def test_words_on_the_mean_gain_over_the_papers_baselines():
    rows = pd.read_csv(ROOT / "recipes" / "nmer_recipes" / "results.csv").query("table == 'main'")
    means = rows.pivot(index=["algorithm", "env"], columns="replay", values="mean")
    gains = means[["U", "PER", "CT"]].rdiv(means["NMER"], axis=0).mul(100).sub(100)
    mean = gains.mean(axis=1).groupby("algorithm").mean()
    words = "mean of NMER's gains over U, PER and CT in Table 1 is {TD3:.0f} % and {SAC:.0f} %"
    says(words.format(**mean), "docs/differences.md")
