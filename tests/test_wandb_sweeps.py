"""Sweeps of Weights & Biases: their files, their commands, and the real `wandb agent`."""

import csv
import json
import os
import subprocess
import sys
import threading
import warnings
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import yaml
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from recipe_helpers import RECIPES, environment, make_config
from wandb.sdk.launch.sweeps.utils import create_sweep_command_args

from nmer_recipes import config  # isort: skip
from nmer_recipes.directories import place_in_wandb_sweep  # isort: skip
from nmer_recipes.reporting.agents import find_agent  # isort: skip

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # written for pydantic 1
    import sweeps

pytestmark = pytest.mark.usefixtures("only_recipe_configs")

FILES = sorted((RECIPES / "sweeps").glob("*.yaml"))
BAYES = RECIPES / "sweeps" / "td3_bayes.yaml"
CRITICS = ("num_critics=", "dropout=", "layer_norm=", "critic_hidden=")


def read(path: Path) -> dict:
    return yaml.safe_load(path.read_text())


def draw(sweep: dict, most: int) -> list[dict]:
    """Draws what the service would: all runs of a grid, or `most` runs of a search."""
    if sweep["method"] == "grid":
        drawn = [run for run in sweeps.next_runs(sweep, [], n=10_000) if run is not None]
        return [run.config for run in drawn]
    np.random.seed(0)  # the package knows no other randomness
    done: list[sweeps.SweepRun] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a Gaussian process with few points
        for _ in range(most):
            run = sweeps.next_run(sweep, done)
            k, alpha = (run.config[f"replay.{name}"]["value"] for name in ("k", "alpha"))
            score = -((k - 20) ** 2) - 1000 * (alpha - 1) ** 2
            done.append(run.copy(update={"state": "finished", "summary_metrics": {"score": score}}))
    return [run.config for run in done]


def command_line(drawn: dict) -> list[str]:
    """Returns the arguments that `wandb agent` makes from it for `${args_no_hyphens}`."""
    plain = {
        name: {"value": getattr(v["value"], "item", lambda v=v: v["value"])()}
        for name, v in drawn.items()
    }
    return create_sweep_command_args({"args": plain})["args_no_hyphens"]


def covering(lines: list[list[str]]) -> list[list[str]]:
    """Returns a few lines that contain every argument, since composing one takes long."""
    missing, chosen = set().union(*lines), []
    while missing:
        line = max(lines, key=lambda line: len(missing.intersection(line)))
        chosen.append(line)
        missing.difference_update(line)
    return chosen


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_sweep_file_is_valid_and_what_is_drawn_from_it_composes(path):
    sweep = read(path)
    assert sweeps.schema_violations_from_proposed_config(sweep) == []
    assert sweep["command"] == ["${env}", "${interpreter}", "${program}", "${args_no_hyphens}"]
    assert sweep["metric"] == {"name": "score", "goal": "maximize"}
    recipe = RECIPES.parent / sweep["program"]
    assert recipe.exists()
    lines = [command_line(drawn) for drawn in draw(sweep, most=12)]
    if sweep["method"] == "grid":
        assert f"{len(lines)} runs" in path.read_text()
    config.register_resolvers()
    with initialize_config_dir(str(RECIPES / "conf"), version_base="1.3"):
        for line in covering(lines):
            cfg = compose(recipe.stem, overrides=line)
            config.check(cfg)
            for name, value in (argument.split("=") for argument in line):
                name = {"env": "env.name", "replay": "replay.kind"}.get(name, name)
                assert OmegaConf.select(cfg, name) == yaml.safe_load(value)


def test_the_sweeps_hold_every_value_that_the_paper_tried():
    with (RECIPES / "nmer_recipes" / "paper.csv").open() as file:
        rows = list(csv.DictReader(file))
    tried = {
        (row["algorithm"].lower(), name, float(row[name]))
        for row in rows
        for name in ("replay_ratio", "actor_l2", "grad_clip", "k")
        if row[name]
    }
    swept = set()
    for path in FILES:
        sweep = read(path)
        for name, parameter in sweep["parameters"].items():
            for value in parameter.get("values", []):
                if not isinstance(value, str):
                    name = name.removeprefix("replay.")
                    swept.add((Path(sweep["program"]).stem, name, float(value)))
    assert tried <= swept
    assert len(tried) == 3 + 3 + 8 + 1 + 2 + 2


def test_sweeps_of_values_that_the_paper_tried_run_the_version_closest_to_its_own():
    version = {"value": "v4"}
    for path in FILES:
        ours = "future" in path.read_text() or "paper" not in path.read_text()
        assert read(path)["parameters"].get("env.version") == (None if ours else version), path


def test_every_agent_has_a_sweep_of_nmer_beside_uniform_replay():
    agents = set()
    for path in FILES:
        sweep = read(path)
        if {"uniform", "nmer"} <= {*sweep["parameters"]["replay"].get("values", [])}:
            lines = map(command_line, draw(sweep, most=1))
            critics = {tuple(word for word in line if word.startswith(CRITICS)) for line in lines}
            for words in critics:
                cfg = make_config(Path(sweep["program"]).stem, *words)
                agents.add(find_agent(OmegaConf.to_container(cfg, resolve=True)).name)
    expected = {"CrossQ", "DDPG", "DroQ", "REDQ", "SAC", "SAC + layer norm", "SUNRISE", "TD3"}
    assert agents == expected


def test_the_search_moves_to_where_the_score_is_best():
    drawn = draw(read(BAYES), most=30)
    ks = np.array([run["replay.k"]["value"] for run in drawn])
    assert all(isinstance(run["replay.k"]["value"], int) for run in drawn)
    assert np.abs(ks[15:] - 20).mean() < np.abs(ks[:8] - 20).mean()


def test_runs_of_a_sweep_have_a_directory_each(monkeypatch, tmp_path):
    monkeypatch.setenv("WANDB_SWEEP_ID", "abc")
    places = []
    for run in ("one", "two"):
        monkeypatch.setenv("WANDB_RUN_ID", run)
        cfg = make_config("td3")
        place_in_wandb_sweep(cfg)
        places.append((cfg.run_dir, cfg.resume))
    assert places == [("runs/sweep-abc/one", "auto"), ("runs/sweep-abc/two", "auto")]
    cfg = make_config("td3", "run_dir=mine")
    place_in_wandb_sweep(cfg)
    assert (cfg.run_dir, cfg.resume) == ("mine", None)


def test_only_seeds_of_one_setting_share_a_group(monkeypatch):
    monkeypatch.setenv("WANDB_SWEEP_ID", "abc")
    monkeypatch.setenv("WANDB_RUN_ID", "one")
    groups = []
    for overrides in ("seed=0", "seed=1", r"hidden=\[8\,8\],layer_norm=true,seed=0"):
        cfg = make_config("sac", "logger=wandb")
        place_in_wandb_sweep(cfg, overrides)
        groups.append(cfg.logger.group)
    first, second, other = groups
    assert first == second
    assert other == f"{first}-hidden=[8,8]-layer_norm=true"


# The real `wandb agent`, against a server on this machine that speaks as much GraphQL as it asks
# for, draws by the service's own package, and takes the score from the finished run's directory.


class Service(BaseHTTPRequestHandler):
    sweep: dict
    folder: Path
    done: list
    asked: list

    def do_POST(self):
        length = self.headers.get("Content-Length")
        body = self.rfile.read(int(length)) if length else b"{}"
        asked = json.loads(body)
        query, variables = asked.get("query", ""), asked.get("variables") or {}
        self.asked.append(query.split("(")[0].strip())
        if "query SweepWithRuns" in query:
            sweep = {"id": "1", "name": "abc", "config": yaml.safe_dump(self.sweep)}
            data = {"project": {"sweep": sweep | {"runs": {"edges": []}}}}
        elif "mutation CreateAgent" in query:
            data = {"createAgent": {"agent": {"id": "agent"}}}
        elif "mutation Heartbeat" in query:
            running = json.loads(variables["runState"])
            commands = [] if running else [self.next_command()]
            beat = {"agent": {"id": "agent"}, "commands": json.dumps(commands)}
            data = {"agentHeartbeat": beat}
        else:
            viewer = {"id": "1", "entity": "me", "username": "me", "email": "", "flags": "{}"}
            data = {"viewer": viewer | {"teams": {"edges": []}}}
        content = json.dumps({"data": data}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def next_command(self) -> dict:
        if self.done:
            summary = self.folder / f"run{len(self.done) - 1}" / "summary.json"
            self.done[-1].state = sweeps.RunState.finished
            score = json.loads(summary.read_text())["score"]
            self.done[-1].summary_metrics = {"score": score}
        if len(self.done) == 2:
            return {"type": "exit"}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run = sweeps.next_run(self.sweep, self.done)
        self.done.append(run)
        args = dict(zip(run.config, command_line(run.config), strict=True))
        values = {name: yaml.safe_load(line.split("=", 1)[1]) for name, line in args.items()}
        return {
            "type": "run",
            "run_id": f"run{len(self.done) - 1}",
            "program": self.sweep["program"],
            "args": {name: {"value": value} for name, value in values.items()},
        }

    def log_message(self, *_):
        pass


@pytest.fixture
def service(tmp_path):
    tiny = {
        "env": "InvertedPendulum",
        "total_frames": 60,
        "random_frames": 40,
        "eval_every": 30,
        "eval_episodes": 1,
        "hidden": "[8,8]",
    }
    sweep = read(BAYES)
    sweep["program"] = str(RECIPES / "td3.py")
    sweep["parameters"] |= {name: {"value": value} for name, value in tiny.items()}
    Service.sweep, Service.folder = sweep, tmp_path / "runs" / "sweep-abc"
    Service.done, Service.asked = [], []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Service)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def inspect(directory: Path) -> list[dict]:
    """Returns what an offline run would send, as wandb itself reads it."""
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(directory)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_the_real_agent_runs_what_the_search_draws(service, tmp_path):
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    result = subprocess.run(
        [sys.executable, "-m", "wandb", "agent", "me/nmer/abc"],
        cwd=tmp_path,
        env=environment()
        | {"WANDB_BASE_URL": service, "WANDB_API_KEY": "0" * 40, "WANDB_MODE": "offline"}
        | {"PATH": path, "HOME": str(tmp_path), "WANDB_AGENT_REPORT_INTERVAL": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert result.returncode == 0, result.stderr
    assert len(Service.done) == 2, result.stderr
    assert Service.asked.count("mutation CreateAgent") == 1
    for number, drawn in enumerate(Service.done):
        directory = Service.folder / f"run{number}"
        cfg = OmegaConf.load(directory / "config.yaml")
        assert cfg.replay.k == drawn.config["replay.k"]["value"]
        assert cfg.replay.alpha == pytest.approx(drawn.config["replay.alpha"]["value"])
        summary = json.loads((directory / "summary.json").read_text())

        (file,) = directory.rglob("*.wandb")
        sent = inspect(file.parent)
        (run,) = [record["run"] for record in sent if record["type"] == "run"]
        assert (run["sweep_id"], run["run_id"]) == ("abc", f"run{number}")
        logged = run["config"]["update"]
        assert logged["replay"] == "nmer"  # the sweep's own word
        assert (logged["replay.kind"], logged["replay.search"]) == ("nmer", "graph")
        assert logged["replay.k"] == cfg.replay.k
        rows = [record["history"]["item"] for record in sent if record["type"] == "history"]
        assert [row["_step"] for row in rows] == [30, 60]
        assert ["score" in row for row in rows] == [False, True]
        assert rows[-1]["score"] == pytest.approx(summary["score"])
