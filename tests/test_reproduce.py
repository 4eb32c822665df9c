"""The commands for the paper's tables, and the amount of work that they are said to do."""

import csv
import re
import subprocess
import sys

import pandas as pd
import pytest
from omegaconf import OmegaConf
from recipe_helpers import RECIPES, environment, expand, make_config

import reproduce  # isort: skip
from reproduce import Setting, Costs, commands, costs, main, tables  # isort: skip
from nmer_recipes import paper  # isort: skip
from nmer_recipes.reporting.cells import compare, make_cells  # isort: skip
from nmer_recipes.reporting.read import make_run  # isort: skip
from nmer_recipes.reporting.tables import make_table  # isort: skip

pytestmark = pytest.mark.usefixtures("only_recipe_configs")

TABLES = tables()


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch):
    monkeypatch.chdir(RECIPES.parent)


def test_there_is_a_command_for_every_table():
    ablations = {f"td3-{env}" for env in ("Ant", "HalfCheetah", "Hopper", "Humanoid")}
    ablations |= {f"{algorithm}-{env}" for algorithm in ("td3", "sac") for env in ("Swimmer",)}
    ablations |= {"td3-Walker2d", "sac-Walker2d", "sac-Ant", "sac-HalfCheetah", "sac-Hopper"}
    assert set(TABLES) == {"main", "additional", "sunrise"} | ablations
    sizes = {name: len(cells) for name, cells in TABLES.items()}
    assert (sizes["main"], sizes["additional"], sizes["sunrise"]) == (44, 25, 4)
    with (RECIPES / "nmer_recipes" / "paper.csv").open() as file:
        assert sum(sizes[name] for name in ablations) == len(list(csv.DictReader(file)))


@pytest.mark.parametrize("name", TABLES)
def test_the_commands_make_each_cell_once_with_each_seed(name):
    runs = expand(commands(TABLES[name], seeds=3, launcher="joblib"))
    wanted = [
        (
            f"{cell.algorithm}.py",
            (f"env={cell.env}", "env.version=v4", f"replay={cell.kind}", *cell.given, f"seed={i}"),
        )
        for cell in TABLES[name]
        for i in range(3)
    ]
    assert sorted(runs) == sorted(wanted)
    assert len(set(runs)) == len(runs)


def test_rows_of_an_ablation_compose_to_what_they_say():
    with (RECIPES / "nmer_recipes" / "paper.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["algorithm"] == "SAC"]
    rows = [row for row in rows if row["env"] in ("Hopper", "Walker2d")]
    cells = TABLES["sac-Hopper"] + TABLES["sac-Walker2d"]
    for row, cell in list(zip(rows, cells, strict=True))[::3]:
        cfg = make_config("sac", f"env={cell.env}", f"replay={cell.kind}", *cell.given)
        assert cfg.replay_ratio == float(row["replay_ratio"])
        assert cfg.actor_l2 == float(row["actor_l2"] or 1e-2)  # of Walker2d with NMER it is ours
        assert cfg.grad_clip == (float(row["grad_clip"]) if row["grad_clip"] else None)
        assert cfg.replay.get("k", "") == (int(row["k"]) if row["k"] else "")
        assert cell.updates == (cfg.total_frames - cfg.random_frames) * cfg.replay_ratio


def test_tables_share_the_runs_that_they_have_in_common():
    assert set(TABLES["sunrise"]) <= set(TABLES["main"])
    best = [
        cell for name, cells in TABLES.items() if "-" in name for cell in cells if not cell.given
    ]
    assert set(best) == set(TABLES["main"])


@pytest.mark.parametrize("name", ["main", "additional", "sunrise"])
def test_a_report_of_a_table_has_the_numbers_of_the_paper(name):
    """Uses the runs of that table alone."""
    runs = []
    for cell in TABLES[name]:
        cfg = make_config(
            cell.algorithm, f"env={cell.env}", "env.version=v4", f"replay={cell.kind}"
        )
        rows = [{"frames": cfg.total_frames, "eval/return": 1.0}]
        runs.append(make_run("", OmegaConf.to_container(cfg, resolve=True), rows))
    comparisons = compare(make_cells(runs, pytest.fail))
    best = pd.concat(make_table(c, reps=20) for c in comparisons if c.name == "best")
    best = best.set_index(["algorithm", "env", "method"])
    printed = pd.read_csv(RECIPES / "nmer_recipes" / "results.csv")
    printed = printed[printed.table == {"sunrise": "quoted"}.get(name, name)]
    kinds = {label: kind for kind, label in paper.NAMES.items()}
    for row in printed.itertuples():
        place = (row.algorithm.lower(), row.env, kinds.get(row.replay))
        if row.algorithm not in ("TD3", "SAC"):
            place = ("td3", row.env, row.replay)  # a row without seeds
        assert (best["paper_mean"][place], best["paper_std"][place]) == (row.mean, row.std)


def test_costs_are_read_off_the_rows_of_a_run():
    shares = {"environment": 0.1, "upkeep": 0.1, "sample": 0.2, "update": 0.4, "evaluation": 0.2}
    rows = [
        {"frames": 10.0 * n, "time/seconds": 100.0 + 50 * n, "train/updates": 20.0 * (n - 1)}
        | {"eval/length": 100.0}
        | {f"time/share_{part}": share for part, share in shares.items()}
        for n in (1, 2, 3)
    ]
    found = costs(rows)
    assert found.frame == pytest.approx(0.2 * 100 / 20)
    assert found.update == pytest.approx(0.6 * 100 / 40)
    assert found.step == pytest.approx(0.2 * 100 / (2 * 5 * 100))
    cell = Setting("td3", "Ant", "uniform")
    expected = 200_000 * 0.25 + 190_000 * 0.5 + 100 * 5 * 1_000 * 0.125
    assert Costs(0.25, 0.5, 0.125).seconds(cell) == expected


def test_an_estimate_measures_a_real_run(monkeypatch, capsys):
    monkeypatch.setattr(reproduce, "SECONDS", 1.0)
    main(["td3-Hopper", "--estimate", "--seeds", "2"])  # agents that fall are soon evaluated
    told = capsys.readouterr()
    assert told.err == "td3-Hopper: 20 runs, 4,000,000 frames, 37,240,000 gradient steps\n"
    first, *_, last = told.out.splitlines()  # between them, how busy the machine was
    rates = re.fullmatch(
        r"td3: (\d+) updates/s and \d+ frames/s, measured with env=Hopper replay=nmer; "
        r"a run takes (\d+\.\d) to (\d+\.\d) h",
        first,
    )
    updates, _, longest = map(float, rates.groups())
    assert longest >= 0.9 * 3_800_000 / (updates + 1) / 3600
    hours = re.match(r"all 20 runs: ([\d,]+) h one after the other", last)
    assert float(hours[1].replace(",", "")) > 2 * longest


def test_only_commands_are_printed_for_the_shell(capsys):
    main(["main", "--launcher", "submitit_slurm"])
    told = capsys.readouterr()
    assert told.err.startswith("main: 176 runs, 35,200,000 frames, 393,680,000 gradient steps")
    lines = told.out.splitlines()
    assert len(lines) == 2
    assert all(line.startswith("python recipes/") for line in lines)
    assert all(line.endswith("hydra/launcher=submitit_slurm") for line in lines)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["mian"], "invalid choice: 'mian'"),
        (["--estimate"], "needs a table"),
        (["main", "--seeds", "0"], "--seeds 0"),
    ],
)
def test_a_bad_command_line_is_refused(arguments, words, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert words in capsys.readouterr().err


def test_without_a_table_all_are_listed():
    result = subprocess.run(
        [sys.executable, str(RECIPES / "reproduce.py")],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert [line.partition(":")[0] for line in result.stdout.splitlines()] == list(TABLES)
