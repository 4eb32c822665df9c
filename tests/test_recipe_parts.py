"""What the recipes share: the paper's settings, resumable tasks, random streams."""

import csv
import json
import sys

import gymnasium
import numpy as np
import pytest
import torch
from helpers import make_transitions
from hydra._internal.utils import get_args_parser
from hydra.errors import MissingConfigException
from recipe_helpers import ALGORITHMS, RECIPES, make_config, start, train

from nmer_recipes import checkpoint, collect, compiling, config, envs, evaluate  # isort: skip
from nmer_recipes import provenance, seeding  # isort: skip
from nmer_recipes.policy import Policy, find_entries, load_recipe  # isort: skip
from nmer_recipes.replay import Source, describe, draw, make_buffer  # isort: skip
from nmer_recipes.runs import Clock, Run  # isort: skip

from nmer_torchrl import Mahalanobis, make_replay_buffer
from nmer_torchrl.methods import METHODS as METHOD_CLASSES
from nmer_torchrl.pairs import QuantileCap
from nmer_torchrl.transforms import MeanMixup, TunedMixup

METHODS = {"U": "uniform", "NMER": "nmer"}
TASKS = sorted(
    {path.stem for path in (RECIPES / "conf" / "env").glob("*.yaml")}
    - {"dm_control", "gym", "torchrl"}
)


def best_rows():
    with (RECIPES / "nmer_recipes" / "paper.csv").open() as file:
        return [row for row in csv.DictReader(file) if row["best"] == "1"]


def test_the_papers_best_settings_are_the_defaults():
    seen = 0
    for row in best_rows():
        if row["replay"] not in METHODS:
            continue
        cfg = make_config(
            row["algorithm"].lower(), f"env={row['env']}", f"replay={METHODS[row['replay']]}"
        )
        ours = (row["algorithm"], row["env"], row["replay"]) == ("SAC", "Walker2d", "NMER")
        assert cfg.replay_ratio == int(row["replay_ratio"])
        assert cfg.actor_l2 == (1e-2 if ours else float(row["actor_l2"] or 0))
        assert cfg.grad_clip == (float(row["grad_clip"]) if row["grad_clip"] else None)
        assert cfg.random_frames == 10_000
        if row["replay"] == "NMER":
            assert cfg.replay.k == int(row["k"])
        seen += 1
    assert seen == 22


@pytest.mark.parametrize(
    ("recipe", "overrides", "expected"),
    [
        ("sac", ["env=Humanoid"], (20, 2e-3, 25, 10_000)),  # as SAC on Ant
        ("sac", ["env=Walker2d"], (20, 1e-2, 25, 10_000)),
        ("td3", ["env=Reacher"], (1, 0.0, 10, 1_500)),
        ("td3", ["env=Ant", "replay_ratio=3", "replay.k=7"], (3, 0.0, 7, 10_000)),
    ],
)
def test_settings_that_the_paper_lacks(recipe, overrides, expected):
    cfg = make_config(recipe, *overrides)
    assert (cfg.replay_ratio, cfg.actor_l2, cfg.replay.k, cfg.random_frames) == expected


@pytest.mark.parametrize(
    ("recipe", "env", "lr"),
    [
        ("sac", "Ant", 3e-4),
        ("sac", "Pendulum", 1e-3),
        ("td3", "Ant", 5e-4),
        ("td3", "Reacher", 5e-4),
    ],
)
def test_learning_rates(recipe, env, lr):
    assert make_config(recipe, f"env={env}").lr == lr


def test_methods_without_a_row_run_as_nmer_does():
    nmer, mixup = (make_config("sac", "env=Hopper", f"replay={kind}") for kind in ("nmer", "mixup"))
    for name in ("replay_ratio", "actor_l2", "grad_clip"):
        assert mixup[name] == nmer[name]
    assert mixup.grad_clip == 40


def test_evaluations_and_checkpoints_are_shares_of_the_run():
    cfg = make_config("td3", "total_frames=30000")
    assert (cfg.eval_every, cfg.checkpoint_every) == (300, 3_000)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("total_frames=0", "total_frames=0"),
        ("replay_ratio=-1", "replay_ratio=-1"),
        ("eval_every=300000", "never be evaluated"),
        ("grad_clip=0", "null for no clipping"),
        ("seed=one", "seed=one"),
        ("device=tpu9", "device=tpu9 is not available .*; try device=cpu"),
        ("losses=torchrl compile=true", "losses=torchrl does not support compile=true"),
        ("storage_device=meta", "differs from device=cpu; give storage_device=cpu"),
    ],
)
def test_values_that_no_run_could_use_are_refused(override, words):
    with pytest.raises(config.UsageError, match=words):
        config.check(make_config("sac", *override.split()))


@pytest.mark.parametrize(("group", "known"), [("replay", "nmer"), ("logger", "wandb")])
def test_an_unknown_choice_lists_the_known_ones(group, known):
    with pytest.raises(MissingConfigException, match=rf"(?s)best.*Available options.*{known}"):
        make_config("sac", f"{group}=best")


@pytest.mark.parametrize("word", ["logger.kind=wandb", "collector.kind=torchrl"])
def test_a_choice_is_made_by_its_group(word, tmp_path):
    with pytest.raises(SystemExit, match=f"choose {word.replace('.kind', '')} instead"):
        start("td3", word, cwd=tmp_path)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("env=gym env.id=CartPole-v1", r"Discrete\(2\).*need a Box of floats"),
        ("env=gym env.id=Nothing-v0", "Nothing"),
        ("env.version=v2", "Walker2d"),
    ],
)
def test_tasks_that_cannot_be_learned_are_refused(override, words):
    with pytest.raises(config.UsageError, match=words):
        envs.make_env(make_config("sac", *override.split()).env)


def test_a_task_of_dm_control_by_name():
    pytest.importorskip("shimmy")  # which has no wheels of its dependencies for Python 3.13
    cfg = make_config("td3", "env=dm_control", "env.name=reacher-easy")
    first, second = envs.make_env(cfg.env), envs.make_env(cfg.env)
    assert np.array_equal(first.reset(seed=3)[0], second.reset(seed=3)[0])
    assert first.reset()[0].shape == (6,)
    assert not envs.set_state(second, envs.get_state(first))  # its episode cannot be restored
    assert np.array_equal(first.reset()[0], second.reset()[0])  # but the next ones are the same
    with pytest.raises(config.UsageError, match="finger-spin"):
        envs.make_env(make_config("td3", "env=dm_control", "env.name=finger-fly").env)


@pytest.mark.parametrize(
    ("name", "width"),
    [("walker-walk", 24), ("walker-run", 24), ("cheetah-run", 17), ("finger-spin", 9)],
)
def test_tasks_of_the_study_pass_the_checks(name, width):
    pytest.importorskip("shimmy")
    cfg = make_config("td3", "env=dm_control", f"env.name={name}")
    envs.check_task(cfg.env)
    env = envs.make_env(cfg.env)
    observation = env.reset(seed=0)[0]
    assert observation.shape == (width,)


def test_a_policy_acts_on_dicts_with_single_numbers():
    pytest.importorskip("shimmy")
    cfg = make_config("td3", "env=dm_control", "env.name=walker-walk", "hidden=[8]")
    env = envs.make_env(cfg.env)
    actor = load_recipe("td3").make_agent(cfg, 24, 6, torch.device("cpu"))[0]
    state = {
        "frames": 0,
        "return": 0.0,
        "low": torch.full((6,), -1.0),
        "high": torch.ones(6),
        "observations": 24,
        "entries": find_entries(env),
        "actor": actor.state_dict(),
    }
    policy, task = Policy(cfg, state), envs.make_env(cfg.env, rescale=False)
    observation = task.reset(seed=0)[0]
    expected = policy.act(env.reset(seed=0)[0])
    assert np.allclose(policy.act(observation), expected)
    several = {key: np.stack([entry, entry]) for key, entry in observation.items()}
    assert np.allclose(policy.act(several), np.stack([expected, expected]))


def test_a_file_that_is_no_checkpoint_is_refused(tmp_path):
    (tmp_path / checkpoint.CHECKPOINT).write_bytes(b"not a checkpoint")
    with pytest.raises(config.UsageError, match="cannot be read as a checkpoint"):
        checkpoint.Checkpoint(tmp_path).load()


def test_contact_forces_give_ant_as_many_observations_as_in_the_paper():
    options = ["env=Ant", "env.version=v4"]
    for more, size in (([], 27), (["env.kwargs.use_contact_forces=true"], 111)):
        cfg = make_config("td3", *options, *more)
        assert envs.make_env(cfg.env).observation_space.shape == (size,)


@pytest.mark.parametrize(
    ("name", "version"),
    [*((name, None) for name in TASKS), ("Ant", "v4"), ("Humanoid", "v4")],
)
def test_a_restored_task_takes_the_same_path(name, version):
    cfg = make_config("sac", f"env={name}", *([f"env.version={version}"] if version else []))
    task, copy = envs.make_env(cfg.env), envs.make_env(cfg.env)
    assert (task.action_space.low == -1).all()
    assert (task.action_space.high == 1).all()
    random = np.random.default_rng(0)

    def play(*tasks):
        action = random.uniform(-1, 1, task.action_space.shape).astype(np.float32)
        steps = [each.step(action)[:4] for each in tasks]
        if steps[0][2] or steps[0][3]:
            steps = [(each.reset()[0], *step[1:]) for each, step in zip(tasks, steps, strict=True)]
        return steps

    task.reset(seed=0)
    for _ in range(17):
        play(task)
    state = envs.get_state(task)
    copy.reset(seed=1)
    assert envs.set_state(copy, state)
    for _ in range(250):
        first, second = play(task, copy)
        assert np.array_equal(first[0], second[0])
        assert first[1:] == second[1:]


class Ending(gymnasium.Env):
    """Terminates at the step of its time limit."""

    observation_space = gymnasium.spaces.Box(-1, 1, (2,))
    action_space = gymnasium.spaces.Box(-3, 5, (1,))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.steps += 1
        return (
            np.full(2, action[0], np.float32),
            float(action[0]),
            self.steps == self.end,
            False,
            {},
        )


@pytest.mark.parametrize(("end", "terminated"), [(5, False), (4, True)])
def test_the_horizon_is_no_termination(end, terminated):
    name = f"Ending{end}-v0"
    gymnasium.register(name, type("Task", (Ending,), {"end": end}), max_episode_steps=5)
    cfg = make_config("sac", "env=gym", f"env.id={name}")
    device = torch.device("cpu")
    acting = collect.FrameCollector(
        [envs.make_env(cfg.env)],
        lambda seen: seen.set("action", torch.ones(1)),
        seed=0,
        random_frames=0,
        stream=seeding.Stream(0, device),
        device=device,
    )
    data = torch.stack([acting.step() for _ in range(end)])
    assert data["next", "terminated"].flatten().tolist() == [False] * (end - 1) + [terminated]
    assert (data["next", "reward"] == 5).all()  # 1 is the upper bound of the task's own actions
    assert acting.ended == 5 * end
    assert acting.returns == [5 * end]
    after, again = data["next", "observation"][-1], acting.step()["observation"]
    assert (after == 5).all()
    assert (again == 0).all()  # the first of the next episode
    assert acting.ended is None


def test_streams_do_not_disturb_one_another():
    device = torch.device("cpu")
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    stream = seeding.Stream(7, device)
    with stream:
        inside = torch.rand(2)
    outside = torch.rand(2)
    state = stream.state_dict()
    with stream:
        more = torch.rand(2)
    assert torch.equal(torch.cat([outside, torch.rand(2)]), expected)
    torch.manual_seed(7)
    assert torch.equal(torch.cat([inside, more]), torch.rand(4))
    stream.load_state_dict(state)
    with stream:
        assert torch.equal(torch.rand(2), more)
    assert torch.equal(torch.rand(2), expected[2:])
    assert len(set(seeding.seeds(0).values())) == 5
    assert seeding.seeds(0) != seeding.seeds(1)


class Counting(torch.nn.Module):
    """Acts by half of the first observation."""

    def forward(self, batch):
        return batch.set("action", batch["observation"][:, :1] / 2)


def test_evaluation_starts_from_the_same_states_each_time(monkeypatch):
    cfg = make_config("sac", "env=Pendulum")
    evaluator = evaluate.Evaluator(cfg.env, 3, gamma=0.9, device=torch.device("cpu"))
    monkeypatch.setattr(evaluate, "q_values", lambda loss, seen, action: torch.zeros(len(seen)))
    first, second = evaluator(Counting(), None), evaluator(Counting(), None)
    assert first == second
    assert first["eval/length"] == 200

    # By hand: one episode after the other.
    totals, discounted = [], []
    for seed in range(3):
        env = envs.make_env(cfg.env)
        observation, _ = env.reset(seed=evaluate._SEED + seed)
        rewards = []
        for _ in range(200):
            action = observation[:1].astype(np.float32) / np.float32(2)
            observation, reward, *_ = env.step(action)
            rewards.append(float(reward))
        totals.append(sum(rewards))
        whole = [t for t in range(200) if 0.9 ** (200 - t) <= 0.01]
        discounted.append(
            np.mean([sum(r * 0.9**i for i, r in enumerate(rewards[t:])) for t in whole])
        )
    assert first["eval/return"] == pytest.approx(np.mean(totals))
    assert first["eval/monte_carlo"] == pytest.approx(np.mean(discounted))
    assert first["eval/overestimation"] == pytest.approx(-np.mean(discounted))


def test_returns_without_discount_are_the_rewards(tmp_path):
    rows = train("td3", tmp_path, "gamma=0")
    steps = float(rows[-1]["eval/length"])  # each has a reward of 1, except for the last
    assert float(rows[-1]["eval/monte_carlo"]) == pytest.approx((steps - 1) / steps)


def test_a_generator_state_is_plain_text():
    env = envs.make_env(make_config("sac", "env=Pendulum").env)
    env.reset(seed=0)
    assert json.loads(envs.get_state(env)["random"])["bit_generator"] == "PCG64"


def test_a_loss_that_comes_at_every_other_update_is_averaged_over_those(tmp_path):
    cfg = make_config("td3", "env=Pendulum", "logger=none", f"run_dir={tmp_path / 'run'}")
    with Run(cfg) as run:
        run.note({"loss_qvalue": torch.tensor([4.0])}, 1)
        run.note({"loss_qvalue": torch.tensor([5.0, 6.0]), "loss_actor": torch.tensor([3.0])}, 2)
        returns = [1.0, 2.0]
        run.log(2, returns, {"eval/return": 7.0})
    (row,) = run.rows
    assert (row["train/loss_qvalue"], row["train/loss_actor"]) == (5.0, 3.0)
    assert row["train/updates"] == 3
    assert row["train/return"] == 1.5
    assert returns == []
    assert run.score == 7.0


def test_updates_are_compiled_where_it_pays(monkeypatch):
    def compiles(works: bool, *overrides: str) -> bool:
        monkeypatch.setattr(compiling, "why_not", lambda device: None if works else "no c++")
        cfg, update = make_config("sac", *overrides), print
        compiled = compiling.maybe_compile(cfg, update) is not update
        captured = compiling.maybe_capture(cfg, update) is not update
        assert captured == (compiled and cfg.device == "cuda")
        return compiled

    long, short, cuda = "total_frames=200000", "total_frames=20000", "device=cuda"
    assert compiles(True, long, cuda)
    assert compiles(True, long)
    assert not compiles(True, short, cuda, "replay_ratio=1")
    assert not compiles(True, long, cuda, "compile=false")
    assert not compiles(True, long, cuda, "losses=torchrl")
    assert compiles(True, short, "replay_ratio=1", "compile=true")
    assert not compiles(False, long, cuda)
    with pytest.raises(config.UsageError, match=r"does not work on this machine \(no c\+\+\)"):
        compiles(False, long, "compile=true")
    with pytest.raises(config.UsageError, match="compile=maybe"):
        config.check(make_config("sac", "compile=maybe"))


def test_a_machine_that_cannot_compile_says_why(monkeypatch):
    def fail(function):
        raise RuntimeError("no compiler\nmore lines")

    compiling.why_not.cache_clear()
    monkeypatch.setattr(torch, "compile", fail)
    assert compiling.why_not("cpu") == "no compiler"
    compiling.why_not.cache_clear()


def test_a_logger_that_cannot_be_made_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "config"))
    place = f"run_dir={tmp_path / 'run'}"
    with pytest.raises(config.UsageError, match="cannot log online without an API key"):
        Run(make_config("sac", place, "logger.mode=online"))
    with pytest.raises(config.UsageError, match=r"logger.kind=paper"):
        Run(make_config("sac", place, "logger.kind=paper"))
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(config.UsageError, match="pip install tensorboard"):
        Run(make_config("sac", place, "logger=tensorboard"))
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(config.UsageError, match="pip install wandb"):
        Run(make_config("sac", place))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("kind", ["uniform", "s4rl", "noisy", "ct"])
def test_every_layout_of_a_batch_is_described(kind):
    buffer = make_replay_buffer(kind, capacity=50, batch_size=20)
    rows = make_transitions(40)
    rows["observation"][1:] = rows["next", "observation"][:-1]  # one episode
    buffer.extend(rows.exclude(("next", "done")))
    metrics = describe(buffer, buffer.sample())
    assert metrics["replay/size"] == 40
    assert (metrics["replay/mixed"] > 0.5) == (kind in ("s4rl", "ct"))
    assert ("replay/neighbor_distance" in metrics) == (kind == "ct")


def test_every_method_has_a_config_of_its_name():
    for name in METHOD_CLASSES:
        assert make_config("sac", f"replay={name}").replay.kind == name


# Every method with agents whose batches differ, and every agent with the methods whose do.
PAIRS = [(recipe, method) for recipe in ("sac", "sunrise", "td3") for method in METHOD_CLASSES]
PAIRS += [(recipe, method) for recipe in ALGORITHMS for method in ("uniform", "nmer", "per_nmer")]


@pytest.mark.parametrize(("recipe", "method"), dict.fromkeys(PAIRS))
def test_every_method_trains(tmp_path, recipe, method):
    small = ["env=Hopper", "hidden=[16,16]", "batch_size=16", "eval_every=20"]
    frames = ["total_frames=60", "random_frames=30", "replay_ratio=1"]
    rows = train(recipe, tmp_path / "run", f"replay={method}", *small, *frames)
    assert [int(row["frames"]) for row in rows] == [20, 40, 60]
    assert int(rows[-1]["train/updates"]) == 30
    for name in ("train/loss_qvalue", "train/loss_actor", "eval/return"):
        assert np.isfinite([float(row[name]) for row in rows[1:]]).all()
    mixes = method == "s4rl" or hasattr(METHOD_CLASSES[method]().make_sampler(9), "draws")
    assert (float(rows[-1]["replay/mixed"]) > 0.3) == mixes


def test_metrics_and_interpolations_by_override():
    overrides = [
        "replay.metric=mahalanobis",
        "replay.fraction={linear:{first:1.0,last:0.5,rows:1e6}}",
        "replay.interpolation=mean",
        "replay.max_distance={quantile:0.9}",
    ]
    buffer = make_buffer(make_config("sac", *overrides), seed=0)
    assert isinstance(buffer.sampler.metric, Mahalanobis)
    (fold,) = buffer.transform
    assert isinstance(fold, MeanMixup)
    (gate,) = fold.gates
    assert repr(gate) == "Fraction(LinearFraction(first=1.0, last=0.5, rows=1000000.0))"
    assert buffer.sampler.unit.cap.max_distance == QuantileCap(0.9)
    weights = "replay.metric={euclidean:{weights:{action:0.5}}}"
    buffer = make_buffer(make_config("td3", "replay=neighborhood", weights), seed=0)
    assert buffer.sampler.metric.weights == {"action": 0.5}
    assert make_buffer(make_config("sac", "replay=nmer"), seed=0).transform[0].alpha == 0.75
    with pytest.raises(config.UsageError, match="Unknown metric 'cosine'"):
        make_buffer(make_config("sac", "replay.metric=cosine"), seed=0)


def test_continuous_transition_learns_its_alpha_where_it_is_asked_to():
    assert make_buffer(make_config("sac", "replay=ct"), seed=0).transform[0].alpha == 0.75
    cfg = make_config("sac", "replay=tuned_ct", "batch_size=16")
    buffer = make_buffer(cfg, seed=0)
    (fold,) = buffer.transform
    assert isinstance(fold, TunedMixup)
    assert fold.alpha == 1
    fold.tolerance = 1e-6
    rows = make_transitions(40)
    rows["observation"][1:] = rows["next", "observation"][:-1]
    buffer.extend(rows.exclude(("next", "done")))
    alphas = [fold.alpha for _ in draw([Source(buffer, 16)], 5, Clock())]
    assert (np.diff(alphas) < 0).all()  # each batch is a step


@pytest.mark.parametrize(
    ("recipe", "ratio", "advised"),
    [("td3", 20, ["replay_ratio=1"]), ("td3", 1, []), ("crossq", 1, ["critic_hidden=[256,256]"])],
)
def test_a_long_run_is_told_what_would_shorten_it(recipe, ratio, advised, tmp_path, capsys):
    options = [f"replay_ratio={ratio}", "logger=none", f"run_dir={tmp_path / 'run'}"]
    with Run(make_config(recipe, *options)) as run:
        run.note({}, 1)
        run.count(1)
        since, first = run._first_update
        run._first_update = since - 1_000, first  # the 400 updates took so many seconds
        run.note({}, 400)
        run.count(2)
    told = capsys.readouterr().err
    assert "left on this machine" in told
    for advice in ("replay_ratio=1", "critic_hidden=[256,256]"):
        assert (advice in told) == (advice in advised)


@pytest.mark.parametrize(
    "line",
    ["", "seed=1", "-m seed=1,2 lr=0.1", "--cfg job seed=1", "seed=1 --cfg job", "--cfg job -m"],
)
def test_overrides_of_a_script_go_where_hydra_takes_them(line):
    words = config.with_overrides(line.split(), ["replay=uniform"])
    parsed = get_args_parser().parse_args(words)
    given = [word for word in line.split() if "=" in word]
    assert parsed.overrides == ["replay=uniform", *given]
    assert (parsed.cfg == "job") == ("--cfg" in line)
    assert bool(parsed.multirun) == ("-m" in line.split())


@pytest.mark.parametrize(
    ("processor", "preloaded", "misses"),
    [
        ("vendor_id : AuthenticAMD\nflags : avx2 avx512f", False, True),
        ("vendor_id : AuthenticAMD\nflags : avx2 avx512f", True, False),
        ("vendor_id : AuthenticAMD\nflags : avx2", False, False),
        ("vendor_id : GenuineIntel\nflags : avx2 avx512f", False, False),
        ("", False, False),
    ],
)
def test_mkl_ignores_avx512_on_amd_processors_unless_told_otherwise(
    processor, preloaded, misses, monkeypatch
):
    monkeypatch.setattr(provenance, "_cpuinfo", lambda: processor)
    monkeypatch.setattr(provenance, "_has_symbol", lambda name: preloaded)
    assert provenance.misses_avx512() == (misses and torch.backends.mkl.is_available())


def test_the_source_of_a_run_names_preloaded_libraries_without_their_place(monkeypatch):
    monkeypatch.setenv("LD_PRELOAD", "/home/user/libmkl_amd.so:libother.so")
    assert provenance.describe_source()["preload"] == ["libmkl_amd.so", "libother.so"]
    monkeypatch.delenv("LD_PRELOAD")
    assert provenance.describe_source()["preload"] == []
