"""The agents in plain PyTorch that the recipes are compared with, and the benchmark itself."""

import importlib
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import loops
import numpy as np
import pandas as pd
import peers
import plain
import pytest
import torch
from recipe_helpers import RECIPES, make_batch, make_config, start

from nmer_recipes import networks  # isort: skip
from nmer_recipes.blocks import as_block  # isort: skip

ROWS, OBSERVATIONS, ACTIONS, HIDDEN = 16, 4, 2, (8, 8)
MEMBERS = 3
SOFT = partial(plain.SAC, policy_delay=2, reduce=torch.mean)
AGENTS = {
    "td3": (plain.TD3, ["target_interval=2"]),
    "ddpg": (plain.DDPG, []),
    "sac": (plain.SAC, []),
    "redq": (partial(SOFT, num_critics=5), ["policy_delay=2", "num_critics=5"]),
    "droq": (
        partial(SOFT, dropout=0.2, layer_norm=True),
        ["policy_delay=2", "num_critics=2", "dropout=0.2", "layer_norm=true"],
    ),
    "crossq": (plain.CrossQ, []),
    "sunrise": (partial(plain.SUNRISE, members=MEMBERS), [f"members={MEMBERS}"]),
}
RECIPE = {name: loops.AGENTS[name].recipe or name for name in AGENTS}


def make_rows(n):
    rows = make_batch(n, OBSERVATIONS, ACTIONS)
    rows["mask"] = torch.rand(n, MEMBERS) < 0.5
    return rows


@torch.no_grad()
def parts_of(agent):
    """Returns networks and other learned parts of a plain agent, in the order of a recipe.

    Stacked as the recipes have them: critics, and the actors of an ensemble.
    """

    def stack(modules, names="parameters"):
        return [
            torch.stack(each) for each in zip(*(getattr(m, names)() for m in modules), strict=True)
        ]

    if isinstance(agent, plain.SUNRISE):
        members = agent.members
        return {
            "actor": stack([member.actor.network for member in members]),
            "critics": stack([critic for member in members for critic in member.critics]),
            "target_critics": stack([critic for member in members for critic in member.targets]),
            "log_alpha": [torch.stack([member.actor.log_alpha for member in members])],
        }
    if isinstance(agent, plain.TD3):
        target_actor, targets = agent.targets
        parts = {
            "actor": list(agent.actor.parameters()),
            "critics": stack(agent.critics),
            "target_actor": list(target_actor.parameters()),
            "target_critics": stack(targets),
        }
        if len(agent.critics) == 1:  # DDPG's is not stacked
            parts |= {name: [x[0] for x in parts[name]] for name in ("critics", "target_critics")}
        return parts
    network = agent.actor.network
    parts = {"actor": list(network.parameters()), "critics": stack(agent.critics)}
    parts["log_alpha"] = [agent.actor.log_alpha]
    if isinstance(agent, plain.CrossQ):
        parts["actor_statistics"] = list(network.buffers())
        parts["critic_statistics"] = stack(agent.critics, "buffers")
    else:
        parts["target_critics"] = stack(agent.targets)
    return parts


@torch.no_grad()
def copy_weights(weights, agent):
    """Copies the weights of a recipe to a plain agent; targets equal the networks they follow."""

    def fill(modules, stacked):
        for module, own in zip(modules, networks.unstack(stacked), strict=True):
            for old, new in zip(module.parameters(), own, strict=True):
                old.copy_(new)

    members = getattr(agent, "members", [agent])
    actors = [getattr(member.actor, "network", member.actor) for member in members]
    fill(actors, weights.actor if len(members) > 1 else [w[None] for w in weights.actor])
    critics = [critic for member in members for critic in member.critics]
    fill(critics, weights.critics if len(critics) > 1 else [w[None] for w in weights.critics])
    for member in members:
        if isinstance(member, plain.TD3):
            member.targets[0].load_state_dict(member.actor.state_dict())
            member.targets[1].load_state_dict(member.critics.state_dict())
        elif isinstance(member, plain.SAC):
            member.targets.load_state_dict(member.critics.state_dict())


def draw_noise(name, steps, delay):
    """Draws what a recipe does; returns normal noise and ranks as plain agents need them."""
    shape = (ROWS, ACTIONS)
    if name == "ddpg":
        return [], []
    if name == "td3":
        return list(torch.randn(steps, *shape)), []
    if name == "sunrise":
        return [
            each for step in torch.randn(steps, 2, MEMBERS, *shape) for each in step.flatten(0, 1)
        ], []
    critics = {"redq": 5, "droq": 2}.get(name, 0)
    drawn, noise, ranks = torch.randn(steps, critics + 2 * ROWS * ACTIONS), [], []
    for number, step in enumerate(drawn, 1):
        first, second = step[critics:].view(2, *shape)
        noise += [first, second] if number % delay == 0 else [first]
        if name != "crossq":  # which has no targets to draw
            ranks.append(step[:critics].topk(2).indices if critics else torch.arange(2))
    return noise, ranks


@pytest.fixture
def in_float64():
    """Keeps rounding below Adam's epsilon, at which it would decide the sign of a step."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("name", AGENTS)
def test_a_plain_agent_makes_the_steps_of_the_recipe(name, in_float64, monkeypatch):
    # SAC's recipe moves the actor by the critics as they were, the plain loop as they have become.
    steps = 1 if name in ("sac", "sunrise") else 6
    make, options = AGENTS[name]
    common = [f"hidden={list(HIDDEN)}", f"critic_hidden={list(HIDDEN)}", f"batch_size={ROWS}"]
    common += ["lr=0.001", "actor_l2=0", "grad_clip=null", "replay_ratio=1", "compile=false"]
    if RECIPE[name] not in ("td3", "ddpg"):
        common.append(f"target_entropy={-ACTIONS}")
    recipe = importlib.import_module(RECIPE[name])
    cfg = make_config(RECIPE[name], *common, *options)
    agent = recipe.make_agent(cfg, OBSERVATIONS, ACTIONS, torch.device("cpu"))[-1].double()
    update, _ = recipe.make_update(cfg, agent)
    other = make(OBSERVATIONS, ACTIONS, HIDDEN)
    copy_weights(networks.find_weights(agent), other)
    before = {part: [x.clone() for x in each] for part, each in parts_of(other).items()}
    rows = make_rows(steps * ROWS)

    torch.manual_seed(1)
    update(as_block(rows, ROWS, torch.device("cpu")), 0)
    torch.manual_seed(1)  # dropout, where there is some, goes on from the same noise
    noise, ranks = map(iter, draw_noise(name, steps, cfg.get("policy_delay", 1)))
    monkeypatch.setattr(torch, "randn_like", lambda _: next(noise))
    monkeypatch.setattr(torch, "randperm", lambda _: next(ranks))
    for batch in rows.split(ROWS):
        other.update(batch)
    assert [*noise, *ranks] == []

    found, expected = parts_of(other), networks.find_weights(agent)._asdict()
    if steps == 1:
        del found["actor"]
    assert len(found) > 2
    for part, values in found.items():
        torch.testing.assert_close(values, [*expected[part]], rtol=1e-6, atol=1e-9)
        assert not any(map(torch.equal, values, before[part]))


@pytest.mark.parametrize("name", AGENTS)
def test_critics_of_a_plain_agent_learn_the_reward(name):
    agent = AGENTS[name][0](OBSERVATIONS, ACTIONS, HIDDEN)
    rows = make_rows(64)
    rows["next", "reward"] = rows["action"].sum(-1, keepdim=True)
    rows["next", "terminated"] = torch.ones(64, 1, dtype=torch.bool)
    members = getattr(agent, "members", [agent])

    @torch.no_grad()
    def find_error():
        critics = [critic.eval() for member in members for critic in member.critics]
        found = plain.values(critics, rows["observation"], rows["action"])
        [critic.train() for critic in critics]
        return float((found - rows["next", "reward"]).square().mean())

    before = find_error()
    for _ in range(200):
        agent.update(rows)
    assert find_error() < before / 2
    actions = np.stack([agent.act(row) for row in rows["observation"].numpy()])
    assert actions.shape == (64, ACTIONS)
    assert (np.abs(actions) <= 1).all()


@pytest.fixture
def tiny(monkeypatch, tmp_path):
    """Sets small networks, short episodes, and recipes in this process."""

    def run(command, **_):
        start(Path(command[1]).stem, *command[2:], cwd=tmp_path)

    for name, setup in loops.AGENTS.items():
        options = {**setup.options, "env.max_steps": 20}
        small = setup._replace(hidden=HIDDEN, batch=8, options=options)
        monkeypatch.setitem(loops.AGENTS, name, small)
    monkeypatch.setattr(loops, "subprocess", SimpleNamespace(run=run, DEVNULL=None))


@pytest.mark.parametrize("name", loops.AGENTS)
def test_each_agent_is_timed_as_plain_loop_and_as_recipe(name, tiny):
    for ratio in (1, *loops.AGENTS[name].ratios[-1:]):
        for loop in ("plain", "recipe"):
            assert 0 < loops.time_loop(loop, name, ratio, updates=3) < 10


def test_the_recipe_has_the_plain_agents_networks(tiny, monkeypatch):
    given = []
    monkeypatch.setattr(loops.subprocess, "run", lambda command, **_: given.append(command[1:]))
    for name in ("crossq", "droq"):
        with pytest.raises(FileNotFoundError):  # of the metrics
            loops.time_recipe(name, 20, 40, compile=False)
    crossq, droq = given
    assert crossq[0] == str(RECIPES / "crossq.py")
    assert {"hidden=[8, 8]", "critic_hidden=[8, 8]", "batch_size=8"} <= {*crossq}
    assert droq[0] == str(RECIPES / "redq.py")
    assert {"num_critics=2", "dropout=0.01", "layer_norm=True", "replay_ratio=20"} <= {*droq}


def test_whole_frames_are_timed_after_some_that_warm_up():
    assert loops.count_frames(1_500, 1) == (1_500, 200)
    assert loops.count_frames(1_500, 20) == (75, 10)
    assert loops.count_frames(500, 20) == (25, 10)
    assert loops.count_frames(3, 20) == (2, 1)


def test_a_peer_is_told_to_be_the_same_agent(monkeypatch):
    made = []

    class Model:
        def __init__(self, *args, **options):
            made.append(options)

        def learn(self, steps, callback):
            for callback.num_timesteps in range(1, steps + 1):
                assert callback._on_step()

    def run(command, **_):
        package, name, *numbers = command[2:]
        hidden = numbers.index("--hidden")
        given = {k: int(v) for k, v in (x[2:].split("=") for x in numbers[:hidden])}
        given["hidden"] = [int(x) for x in numbers[hidden + 1 :]]
        return SimpleNamespace(stdout=f"{peers.time_peer(package, name, **given)}\n")

    callbacks = SimpleNamespace(BaseCallback=object)
    monkeypatch.setitem(sys.modules, "sbx", SimpleNamespace(DDPG=Model))
    monkeypatch.setitem(sys.modules, "stable_baselines3", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "stable_baselines3.common", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "stable_baselines3.common.callbacks", callbacks)
    monkeypatch.setattr(loops, "subprocess", SimpleNamespace(run=run, PIPE=None))
    assert loops.time_loop("SBX", "ddpg", 1, updates=4) > 0
    (options,) = made
    assert options["policy_kwargs"] == {"net_arch": [400, 300]}
    assert (options["batch_size"], options["learning_starts"]) == (100, 1)


def run_main(monkeypatch, tmp_path, *arguments):
    """Returns the table of `main`, with each loop's place in `LOOPS`, from 1, as its seconds."""
    asked = []

    def run(command, env, **_):
        loop, algorithm, ratio, peers, python, *more = command[command.index("--one") + 1 :]
        assert (peers, python) == ("--peers", sys.executable)
        asked.append((algorithm, int(ratio), loop, *more))
        seconds = (loops.LOOPS.index(loop) + 1.0) / (2 if env.get("LD_PRELOAD") else 1)
        return SimpleNamespace(returncode=0, stdout=f"a word\n{seconds}\n")

    monkeypatch.setattr(loops, "subprocess", SimpleNamespace(run=run))
    loops.main(["--rounds", "1", "--out", str(tmp_path), *arguments])
    return pd.read_csv(tmp_path / "loops.csv"), asked


def test_the_table_has_a_row_for_each_agent_and_ratio(monkeypatch, tmp_path, capsys):
    table, asked = run_main(monkeypatch, tmp_path)
    assert list(zip(table["algorithm"], table["replay ratio"], strict=True)) == [
        ("TD3", 1),
        ("TD3", 20),
        ("SAC", 1),
        ("SAC", 20),
        ("DDPG", 1),
        ("REDQ", 20),
        ("DroQ", 20),
        ("CrossQ, critics of 256 units", 1),
        ("SUNRISE", 1),
    ]
    assert len(asked) == 9 * 5 - 4 * 2
    assert ("redq", 20, "SBX") not in asked
    committed = pd.read_csv(RECIPES.parent / "docs" / "benchmarks" / "loops.csv")
    assert list(table) == list(committed)
    rates, ratios = [1, 1 / 2, 1 / 3, 1 / 4, 1 / 5], [4, 2, 4 / 3, 5, 5 / 2, 5 / 3]
    assert list(table.iloc[0, 2:]) == pytest.approx([*rates, *ratios])
    alone = [1, 0, 0, 1 / 4, 1 / 5, 4, 0, 0, 5, 0, 0]
    assert list(table.iloc[:, 2:].fillna(0).iloc[5]) == pytest.approx(alone)
    assert "| REDQ | 20 | 1 |  |  | 0.25 | 0.2 | 4 |  |  | 5 |  |  |" in capsys.readouterr().out
    rounds = pd.read_csv(tmp_path / "loops_rounds.csv")
    assert (len(rounds), rounds["ms"].max()) == (37, 5_000)


def test_agents_ratios_and_updates_can_be_chosen(monkeypatch, tmp_path):
    options = ["--algorithms", "droq", "ddpg", "--ratios", "2", "--updates", "7"]
    table, asked = run_main(monkeypatch, tmp_path, *options)
    assert list(table["algorithm"]) == ["DroQ", "DDPG"]
    assert asked[0] == ("droq", 2, "plain", "--updates", "7")
    assert {ratio for _, ratio, *_ in asked} == {2}


def test_loops_that_are_left_out_are_empty(monkeypatch, tmp_path):
    options = ["--algorithms", "sac", "--loops", "plain", "recipe", "--ratios", "1"]
    table, asked = run_main(monkeypatch, tmp_path, *options)
    assert [loop for _, _, loop in asked] == ["plain", "recipe"]
    assert list(table.dropna(axis=1)) == [
        "algorithm",
        "replay ratio",
        "plain, updates/s",
        "recipe, updates/s",
        "recipe / plain",
    ]


def test_loops_are_timed_again_with_a_preloaded_library(monkeypatch, tmp_path):
    options = ["--algorithms", "td3", "--loops", "plain", "SBX", "recipe", "--ratios", "1"]
    table, asked = run_main(monkeypatch, tmp_path, *options, "--preload", "./lib.so")
    assert [loop for _, _, loop in asked] == ["plain", "SBX", "recipe", "plain", "recipe"]
    (row,) = table.to_dict("records")
    (again,) = pd.read_csv(tmp_path / "loops_preload.csv").to_dict("records")
    assert again["recipe, updates/s"] == 2 * row["recipe, updates/s"]
    assert again["SBX, updates/s"] == row["SBX, updates/s"]  # has no PyTorch
    assert again["recipe / SBX"] == row["recipe / SBX"] / 2


def test_a_loop_that_fails_says_why(monkeypatch, tmp_path):
    failed = SimpleNamespace(returncode=1, stdout="", stderr="No module named stable_baselines3")
    monkeypatch.setattr(loops, "subprocess", SimpleNamespace(run=lambda *_, **__: failed))
    with pytest.raises(SystemExit, match=r"plain of td3 failed:\nNo module named"):
        loops.main(["--out", str(tmp_path)])
