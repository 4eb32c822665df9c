"""Recipes on fixed data: what they learn from, what they keep, and what they refuse."""

import importlib
import math
import os
import re
import shutil
import signal

import gymnasium
import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from recipe_helpers import OFFLINE, TINY, make_config, metrics, start, train, train_and_kill
from tensordict import TensorDict
from torchrl.objectives import SoftUpdate
from update_helpers import ACTIONS, OBSERVATIONS, ROWS, make_agent, make_blocks

from nmer_recipes import blocks, config, data, scores, training  # isort: skip
from nmer_recipes.envs import make_env  # isort: skip
from nmer_recipes.networks import find_weights  # isort: skip
from nmer_recipes.policy import load_policy  # isort: skip
from nmer_torchrl.offline import load_transitions  # isort: skip
from nmer_torchrl.pairs import neighbor  # isort: skip


def make_log(path, rows=120, *, following=True, timeouts=True, env="InvertedPendulum-v5"):
    """Records random actions in a task, in D4RL's layout."""
    task = gymnasium.make(env)
    task.action_space.seed(0)
    seen, _ = task.reset(seed=0)
    log = {name: [] for name in ("observations", "actions", "rewards", "terminals", "timeouts")}
    log["next_observations"] = []
    for _ in range(rows):
        action = task.action_space.sample()
        after, reward, terminated, truncated, _ = task.step(action)
        for name, value in zip(
            log, (seen, action, reward, terminated, truncated, after), strict=True
        ):
            log[name].append(value)
        seen = task.reset()[0] if terminated or truncated else after
    for name, given in (("next_observations", following), ("timeouts", timeouts)):
        if not given:
            del log[name]
    np.savez(path, **{name: np.array(values) for name, values in log.items()})
    return path


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    return make_log(tmp_path_factory.mktemp("log") / "log.npz")


def learn(recipe, directory, source, *overrides):
    """Trains on data; returns the rows of metrics without times."""
    fixed = [word for word in TINY if not word.startswith(("total_frames", "random", "replay_r"))]
    cfg = make_config(
        recipe,
        *fixed,
        "total_updates=48",
        f"data.source={source}",
        f"data.cache={directory.parent / 'cache'}",
        f"run_dir={directory}",
        *overrides,
    )
    return training_rows(recipe, cfg, directory)


def training_rows(recipe, cfg, directory):
    OmegaConf.resolve(cfg)
    config.check(cfg)
    importlib.import_module(recipe).train(cfg)
    return [{k: v for k, v in row.items() if "time/" not in k} for row in metrics(directory)]


@pytest.mark.parametrize("recipe", OFFLINE)
@pytest.mark.parametrize("method", ["uniform", "nmer", "per_nmer", "ct"])
def test_methods_learn_from_a_file(recipe, method, log, tmp_path):
    rows = learn(recipe, tmp_path / "run", log, f"replay={method}")
    assert [row["frames"] for row in rows] == ["24", "48"]
    assert rows[-1]["train/updates"] == "48"
    for name in ("train/loss_qvalue", "train/loss_actor", "eval/return"):
        assert all(math.isfinite(float(row[name])) for row in rows)
    assert rows[-1]["replay/size"] == "120.0"
    assert (float(rows[-1]["replay/mixed"]) > 0) == (method != "uniform")
    assert (rows[-1]["train/loss_value"] != "") == (recipe == "iql")


@pytest.mark.parametrize("following", [True, False])
@pytest.mark.parametrize("timeouts", [True, False])
def test_files_with_and_without_following_observations(following, timeouts, tmp_path):
    source = make_log(tmp_path / "log.npz", 60, following=following, timeouts=timeouts)
    rows = learn("td3_bc", tmp_path / "run", source, "replay=uniform")
    assert 55 <= float(rows[-1]["replay/size"]) <= 60


@pytest.mark.parametrize("recipe", OFFLINE)
def test_a_killed_run_goes_on_number_for_number(recipe, log, tmp_path, monkeypatch):
    whole = learn(recipe, tmp_path / "whole", log, "replay=per_nmer")

    class Killed(BaseException):
        pass

    save, saved = training.Checkpoint.save, []

    def save_twice(self, *, last=False):
        save(self, last=last)
        saved.append(last)
        if len(saved) == 2:
            raise Killed

    monkeypatch.setattr(training.Checkpoint, "save", save_twice)
    with pytest.raises(Killed):
        learn(recipe, tmp_path / "killed", log, "replay=per_nmer")
    monkeypatch.undo()
    again = learn(recipe, tmp_path / "killed", log, "replay=per_nmer", "resume=auto")
    assert again == whole
    further = learn(recipe, tmp_path / "more", log, "replay=per_nmer", "total_updates=72")
    start(recipe, f"resume={tmp_path / 'killed'}", "total_updates=72", cwd=tmp_path)
    rows = metrics(tmp_path / "killed")
    assert [row["train/loss_qvalue"] for row in rows[:2]] == [
        row["train/loss_qvalue"] for row in further[:2]
    ]
    assert rows[-1]["frames"] == "72"


def test_the_second_run_reads_no_source_and_draws_what_the_first_would(log, tmp_path, monkeypatch):
    first = learn("iql", tmp_path / "first", log, "replay=nmer")
    (kept,) = (tmp_path / "cache").iterdir()
    monkeypatch.setattr(data, "load_transitions", None)  # which no one calls any more
    assert learn("iql", tmp_path / "second", log, "replay=nmer") == first
    other = learn("iql", tmp_path / "other", log, "replay=nmer", "seed=1")
    assert other[-1]["train/loss_qvalue"] != first[-1]["train/loss_qvalue"]
    monkeypatch.undo()
    learn("iql", tmp_path / "third", log, "replay=nmer", "replay.k=3")  # has lists of its own
    assert len(list((tmp_path / "cache").iterdir())) == 2
    kept.write_bytes(b"half a file")
    with pytest.raises(config.UsageError, match=r"cannot be read.*delete it"):
        learn("iql", tmp_path / "fourth", log, "replay=nmer")


def test_neighbors_are_looked_up_before_the_first_draw(log, tmp_path):
    options = ["env=InvertedPendulum", f"data.source={log}", f"data.cache={tmp_path}"]
    cfg = make_config("td3_bc", *options, "device=cpu")
    buffer = data.load_buffer(cfg, make_env(cfg.env), seed=0)
    made = buffer.sampler.state_dict()
    buffer.sample()
    after = buffer.sampler.state_dict()
    torch.testing.assert_close(made["lists"], after["lists"], equal_nan=True)


def test_an_interrupted_build_of_lists_goes_on_from_those_it_has(log, tmp_path, monkeypatch):
    monkeypatch.setattr(neighbor, "_BLOCK", 40)  # three blocks
    whole = learn("iql", tmp_path / "whole", log, "replay=nmer")
    shutil.rmtree(tmp_path / "cache")
    query, asked = neighbor.NearPairing.neighbors, []

    def interrupt_in_the_second(self, storage, index, k=None):
        asked.append(index)
        if len(asked) == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return query(self, storage, index, k)

    monkeypatch.setattr(neighbor.NearPairing, "neighbors", interrupt_in_the_second)
    with pytest.raises(KeyboardInterrupt):
        learn("iql", tmp_path / "run", log, "replay=nmer")
    assert not (tmp_path / "run").exists()
    assert len(asked) == 2  # the block was completed, and the third not begun
    (kept,) = (tmp_path / "cache").iterdir()
    written = kept.stat().st_mtime_ns
    asked.clear()
    with pytest.raises(KeyboardInterrupt):  # once more, which replaces what there was
        learn("iql", tmp_path / "run", log, "replay=nmer")
    assert kept.stat().st_mtime_ns > written
    monkeypatch.setattr(neighbor.NearPairing, "neighbors", query)
    state = torch.load(kept, weights_only=True)
    assert not state["complete"]
    listed = state["sampler"]["lists"]["listed"]
    assert listed[:80].all()
    built = state["sampler"]["_counts"]["built"]
    assert learn("iql", tmp_path / "run", log, "replay=nmer") == whole
    state = torch.load(kept, weights_only=True)
    assert state["complete"]
    assert state["sampler"]["_counts"]["built"] - built <= 40 + 8  # and a list of a waiting row


@pytest.mark.parametrize("times", [1, 2])
def test_a_second_ctrl_c_stops_a_build_at_once_and_keeps_nothing(times, log, tmp_path, monkeypatch):
    query = neighbor.NearPairing.neighbors

    def interrupt(self, storage, index, k=None):
        for _ in range(times):
            os.kill(os.getpid(), signal.SIGINT)
        return query(self, storage, index, k)

    monkeypatch.setattr(neighbor.NearPairing, "neighbors", interrupt)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        learn("iql", tmp_path / "run", log, "replay=nmer")
    assert signal.getsignal(signal.SIGINT) is before
    assert (tmp_path / "cache").exists() == (times == 1)


def test_transitions_that_were_saved_are_data(log, tmp_path):
    load_transitions(log).save(tmp_path / "saved")
    rows = [
        learn(recipe, tmp_path / f"{recipe}-{number}", source, "replay=nmer")
        for recipe in OFFLINE
        for number, source in enumerate((log, tmp_path / "saved", tmp_path / "saved"))
    ]
    assert rows[0] == rows[1] == rows[2]  # read, read again, and from the cache
    assert rows[3] == rows[4] == rows[5]


@pytest.mark.parametrize("change", ["fewer", "other"])
def test_a_run_does_not_go_on_with_other_data(change, log, tmp_path):
    source = tmp_path / "log.npz"
    shutil.copy(log, source)
    learn("iql", tmp_path / "run", source, "replay=nmer")
    arrays = dict(np.load(source))
    if change == "fewer":
        arrays = {name: array[:-2] for name, array in arrays.items()}
    else:
        arrays["rewards"] = -arrays["rewards"]
    np.savez(source, **arrays)
    with pytest.raises(config.UsageError, match=r"data has changed since the run in .* began"):
        learn(
            "iql",
            tmp_path / "run",
            source,
            "replay=nmer",
            "total_updates=72",
            f"resume={tmp_path / 'run'}",
        )


def test_a_run_with_data_in_its_buffer_does_not_go_on_with_fewer_rows(log, tmp_path):
    source = tmp_path / "log.npz"
    shutil.copy(log, source)
    options = [*SHARED, f"data.source={source}", "data.across=true"]
    train_and_kill("sac", tmp_path / "run", *options)
    arrays = {name: array[:-9] for name, array in np.load(source).items()}
    np.savez(source, **arrays)
    with pytest.raises(config.UsageError, match=r"would now have room for .*data has changed"):
        train("sac", tmp_path / "run", *options, "resume=auto")


def test_rows_of_a_run_are_data_for_another(tmp_path):
    train("td3", tmp_path / "run", "total_frames=60", "random_frames=40", "replay=uniform")
    rows = learn("td3_bc", tmp_path / "next", tmp_path / "run", "replay=uniform")
    assert rows[-1]["replay/size"] == "60.0"
    cfg = make_config("td3_bc", "env=InvertedPendulum", f"data.source={tmp_path / 'run'}")
    stored = data.read_rows(cfg, make_env(cfg.env))
    saved = torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)
    kept = saved["buffer"]["_storage"]["_storage"]
    torch.testing.assert_close(stored["action"], kept["action"])  # in [-1, 1] already
    torch.testing.assert_close(stored["next", "observation"], kept["next.observation"])


def test_actions_are_rescaled_from_the_bounds_of_the_task(tmp_path):
    source = make_log(tmp_path / "log.npz", 50)  # InvertedPendulum takes -3 to 3
    cfg = make_config("td3_bc", f"data.source={source}", "env=InvertedPendulum")
    rows = data.read_rows(cfg, make_env(cfg.env))
    logged = torch.from_numpy(np.load(source)["actions"]).float()
    torch.testing.assert_close(rows["action"], logged / 3)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["env=Hopper"], "observations of 4 entries, but Hopper-v5 has 11"),
        (["data.source=nowhere.npz"], "nowhere.npz"),
        (["data.source=null"], "td3_bc.py needs recorded data; add data=FILE"),
        (["total_frames=9"], "td3_bc.py, which collects no frames; give only total_updates"),
        (["replay=ero"], "replay=ero learns from the returns of collected episodes"),
        (["data.clip=perhaps"], "data.clip=perhaps is not valid; give true or false"),
    ],
)
def test_what_cannot_be_learned_from_is_refused(words, message, log, tmp_path):
    with pytest.raises(config.UsageError, match=re.escape(message)):
        learn("td3_bc", tmp_path / "run", log, *words)
    assert not (tmp_path / "run").exists()


def test_actions_outside_the_bounds_are_refused_or_clipped(tmp_path):
    source = make_log(tmp_path / "log.npz", 60)
    arrays = dict(np.load(source))
    arrays["actions"] = arrays["actions"] * 100
    np.savez(tmp_path / "far.npz", **arrays)
    with pytest.raises(config.UsageError, match=r"dimension 0 range.*accepts -3 to 3.*data.clip"):
        learn("iql", tmp_path / "run", tmp_path / "far.npz")
    learn("iql", tmp_path / "clipped", tmp_path / "far.npz", "data.clip=true")


def test_observations_are_standardized_by_the_data_and_the_policy_keeps_that(log, tmp_path):
    learn("td3_bc", tmp_path / "run", log, "replay=uniform")
    policy = load_policy(tmp_path / "run", "last")
    seen = torch.from_numpy(np.load(log)["observations"]).float()
    layer = policy.actor.module[0]
    torch.testing.assert_close(layer.fixed_mean, seen.mean(0))
    torch.testing.assert_close(1 / layer.fixed_scale, seen.std(0, correction=0) + 1e-3)
    learn("td3_bc", tmp_path / "raw", log, "replay=uniform", "normalize=false")
    assert load_policy(tmp_path / "raw", "last").actor.module[0].fixed_mean.eq(0).all()


def test_td3_bc_has_the_losses_of_torchrl():
    agent, cfg, recipe = make_agent("td3_bc")
    with torch.no_grad():
        for parameter in agent.parameters():
            parameter += torch.randn_like(parameter) / 10
    (block,) = make_blocks(1)
    (batch,) = block.unbind()
    recipe.standardize(cfg, agent, batch.as_rows())
    weights = find_weights(agent)
    critic_loss, actor_loss = recipe.make_losses(cfg, agent)
    torch.manual_seed(1)
    loss, errors = critic_loss(weights, batch, torch.randn(ROWS, ACTIONS))
    torch.manual_seed(1)
    stock, details = agent.qvalue_loss(batch.as_rows())
    torch.testing.assert_close(loss, stock)
    torch.testing.assert_close(errors.square().shape, details["td_error"].shape[-1:])
    torch.testing.assert_close(actor_loss(weights, batch), agent.actor_loss(batch.as_rows())[0])
    grown = [
        torch.autograd.grad(each, weights.actor)
        for each in (actor_loss(weights, batch), agent.actor_loss(batch.as_rows())[0])
    ]
    torch.testing.assert_close(*grown)


def test_iql_has_the_losses_of_torchrl():
    agent, cfg, recipe = make_agent("iql")
    SoftUpdate(agent, tau=cfg.tau)
    with torch.no_grad():
        for parameter in agent.parameters():
            parameter += torch.randn_like(parameter) / 10
    (block,) = make_blocks(1)
    (batch,) = block.unbind()
    weights = find_weights(agent)
    found, _ = recipe.make_losses(cfg, agent)(weights, batch)
    stock = agent(batch.as_rows())
    for name, learned in (
        ("loss_qvalue", weights.critics),
        ("loss_value", list(weights.value)),
        ("loss_actor", weights.actor),
    ):
        torch.testing.assert_close(found[name], stock[name])
        grown = [torch.autograd.grad(x[name], learned, retain_graph=True) for x in (found, stock)]
        torch.testing.assert_close(*grown)


def test_returns_are_normalized_where_a_reference_is_known(log, tmp_path):
    assert scores.normalize("Hopper", 3234.3)["eval/normalized"] == pytest.approx(100)
    assert scores.normalize("HalfCheetah", -280.178953)["eval/normalized"] == pytest.approx(0)
    rows = learn("iql", tmp_path / "run", log)
    assert {row["eval/normalized"] for row in rows} == {""}  # no reference for this task
    source = make_log(tmp_path / "hopper.npz", 60, env="Hopper-v5")
    (first, _) = learn("iql", tmp_path / "hopper", source, "env=Hopper")
    expected = 100 * (float(first["eval/return"]) + 20.272305) / (3234.3 + 20.272305)
    assert float(first["eval/normalized"]) == pytest.approx(expected)


SHARED = ["replay=nmer", "random_frames=20", "device=cpu"]


@pytest.mark.parametrize(("share", "rows"), [(0.5, 4), (0.25, 2), (0, 0), (1, 8)])
def test_each_batch_has_its_share_of_fixed_data(share, rows, log, tmp_path, monkeypatch):
    seen, join = [], blocks.join_blocks

    def note(parts):
        seen.append([part.reward.shape[1] for part in parts])
        return join(parts)

    monkeypatch.setattr(training, "join_blocks", note)
    given = [f"data.source={log}", f"data.cache={tmp_path}", f"data.share={share}"]
    train("td3", tmp_path / "run", *SHARED, *given)
    assert set(map(tuple, seen)) == {tuple(size for size in (rows, 8 - rows) if size)}
    assert len(seen) == 28


@pytest.mark.parametrize("method", ["nmer", "per_nmer"])
def test_a_killed_run_with_fixed_data_beside_goes_on_number_for_number(method, log, tmp_path):
    given = [f"data.source={log}", f"data.cache={tmp_path / 'cache'}", f"replay={method}"]
    options = [*SHARED[1:], *given, "layer_norm=true"]
    whole = train("sac", tmp_path / "whole", *options)
    train_and_kill("sac", tmp_path / "killed", *options)
    assert train("sac", tmp_path / "killed", *options, "resume=auto") == whole
    assert whole != train("sac", tmp_path / "alone", *SHARED[1:], f"replay={method}")


def test_rows_of_both_are_neighbors_in_one_buffer(log, tmp_path):
    given = [f"data.source={log}", f"data.cache={tmp_path / 'cache'}", "data.across=true"]
    options = [*SHARED, *given]
    whole = train("sac", tmp_path / "whole", *options)
    assert whole[-1]["replay/size"] == "168.0"  # 120 of the data, and 48 frames
    train_and_kill("sac", tmp_path / "killed", *options)
    assert train("sac", tmp_path / "killed", *options, "resume=auto") == whole
    with pytest.raises(config.UsageError, match=r"leave one of the two out"):
        train("sac", tmp_path / "other", *options, "data.share=0.5")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["data.share=0.25"], "data.share has no effect without recorded data"),
        (["data.clip=true", "data.max_steps=9"], "data.clip, data.max_steps has no effect without"),
        (
            ["data.source=LOG", "data.share=0.01"],
            "data.share=0.01 of batch_size=8 is less than one row",
        ),
        (["data.source=LOG", "data.across=true", "buffer_size=9"], "would overwrite the data"),
    ],
)
def test_settings_of_data_that_nothing_reads_are_refused(words, message, log, tmp_path):
    words = [word.replace("LOG", str(log)) for word in words]
    with pytest.raises(config.UsageError, match=re.escape(message)):
        train("td3", tmp_path / "run", *words)


def test_rows_in_files_give_the_same_run(log, tmp_path):
    in_memory = learn("iql", tmp_path / "memory", log, "replay=nmer", "device=cpu")
    options = ["replay=nmer", "device=cpu", "storage=memmap"]
    assert learn("iql", tmp_path / "files", log, *options) == in_memory


def test_weights_of_two_buffers_keep_their_shares():
    first, second = make_blocks(2), make_blocks(2, seed=1)
    weights = [torch.rand(2, ROWS) * size for size in (1.0, 0.01)]
    joined = blocks.join_blocks(
        [each[0]._replace(weight=w) for each, w in zip((first, second), weights, strict=True)]
    )
    halves = joined.weight.unflatten(1, (2, ROWS)).mean(2)
    torch.testing.assert_close(halves, torch.ones(2, 2))


def test_blocks_are_joined_batch_by_batch():
    first, second = make_blocks(3), make_blocks(3, seed=1)
    joined = blocks.join_blocks([first[0], second[0]])
    assert joined.observation.shape == (3, 2 * ROWS, OBSERVATIONS)
    assert torch.equal(joined.reward[1], torch.cat([first[0].reward[1], second[0].reward[1]]))
    weighted = first[0]._replace(weight=torch.ones(3, ROWS))
    with pytest.raises(ValueError, match="importance weights"):
        blocks.join_blocks([weighted, second[0]])


def test_an_agent_that_marks_its_rows_takes_no_fixed_data(log, tmp_path):
    with pytest.raises(config.UsageError, match=r"sunrise.py needs entries"):
        train("sunrise", tmp_path / "run", f"data.source={log}")


@pytest.mark.parametrize("search", ["torch", "graph"])
@pytest.mark.parametrize("recipe", OFFLINE)
def test_a_run_on_the_pretended_device_is_that_of_the_cpu(recipe, search, log, cuda, tmp_path):
    if cuda is None:
        pytest.skip("a real device has numbers of its own")
    options = ["replay=nmer", f"replay.search={search}"]
    there = learn(recipe, tmp_path / "there" / "run", log, *options, "device=cuda:0")
    assert learn(recipe, tmp_path / "here" / "run", log, *options, "device=cpu") == there
    for device in ("cuda:0", "cpu"):  # from what the device has kept
        again = learn(recipe, tmp_path / "there" / device, log, *options, f"device={device}")
        assert again == there


def test_data_is_short_for_its_source(log, tmp_path):
    start(
        "iql",
        *[w for w in TINY if not w.startswith(("total", "random", "replay_r"))],
        "total_updates=24",
        f"data={log}",
        "run_dir=run",
        cwd=tmp_path,
    )
    assert (tmp_path / "runs" / "data").exists()
    assert metrics(tmp_path / "run")[-1]["train/updates"] == "24"


def test_a_part_of_the_rows_is_spread_in_stretches_or_the_last():
    rows = TensorDict(observation=torch.arange(1_050.0), batch_size=[1_050])

    def choose(count, part="spread"):
        return data.choose_rows(rows, count, part)["observation"]

    assert choose(3, "last").tolist() == [1_047, 1_048, 1_049]
    assert torch.equal(choose(1_050), rows["observation"])
    for count in (1, 99, 100, 101, 250, 1_000, 1_001, 1_049):
        chosen = choose(count)
        assert len(chosen) == count
        assert (chosen.diff() > 0).all()  # in their order, none twice
        assert (chosen.diff() == 1).sum() >= count - -(-count // 100)  # in stretches
    assert choose(200).tolist() == [*range(100), *range(500, 600)]


def test_a_run_learns_from_a_part_of_its_data(log, tmp_path, capsys):
    options = ("replay=uniform", f"data.cache={tmp_path / 'cache'}")
    learn("td3_bc", tmp_path / "some", log, *options, "data.rows=40")
    learn("td3_bc", tmp_path / "all", log, *options)
    sizes = {name: metrics(tmp_path / name)[-1]["replay/size"] for name in ("some", "all")}
    assert {name: float(size) for name, size in sizes.items()} == {"some": 40, "all": 120}
    with pytest.raises(config.UsageError, match=r"data\.rows=121 is more than the 120 rows of "):
        learn("td3_bc", tmp_path / "more", log, *options, "data.rows=121")


def test_a_part_without_a_number_of_rows_is_refused(log):
    cfg = make_config("td3_bc", f"data.source={log}", "data.part=last")
    with pytest.raises(
        config.UsageError, match=r"data\.part=last has no effect without data\.rows"
    ):
        config.check_run(cfg)
    config.check_run(make_config("td3_bc", f"data.source={log}", "data.part=last", "data.rows=9"))
