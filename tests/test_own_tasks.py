"""A user's own tasks: they can be trained on, killed and resumed, and the policy acts."""

import re
import signal
import sys

import gymnasium
import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from recipe_helpers import TINY, make_config, metrics, start, train, train_and_kill

import play  # isort: skip
from nmer_recipes import config, envs, evaluate, paper, settings  # isort: skip
from nmer_recipes.errors import UsageError  # isort: skip
from nmer_recipes.plain import as_plain, from_plain  # isort: skip
from nmer_recipes.policy import load_policy  # isort: skip
from nmer_recipes.torchrl_task import TorchRLTask  # isort: skip

pytestmark = pytest.mark.usefixtures("only_recipe_configs")

ARM = ["env=gym", "env.id=own_tasks:Arm-v0"]
GOAL = ["env=gym", "env.id=own_tasks:Goal-v0"]
ENDLESS = ["env=gym", "env.id=own_tasks:Endless-v0", "env.max_steps=15"]
SWING = ["env=torchrl", "env.id=own_tasks.make_swing", "env.max_steps=15"]
SMALL = [word for word in TINY if not word.startswith("env=")]


@pytest.fixture(scope="module")
def arm(tmp_path_factory):
    """Provides a complete run, made by one command."""
    folder = tmp_path_factory.mktemp("arm")
    given = ["env.kwargs.reach=2.5", "env.wrappers=[own_tasks.Doubled]", "video=true"]
    start("td3", *SMALL, *ARM, *given, cwd=folder)
    (directory,) = folder.glob("runs/td3-Arm-v0-nmer-seed0/*")
    return directory


def test_one_command_trains_on_a_task_of_ones_own(arm):
    rows = metrics(arm)
    assert [row["frames"] for row in rows] == ["24", "48"]
    cfg = OmegaConf.load(arm / "config.yaml")
    assert cfg.env.kwargs == {"reach": 2.5}
    with envs.make_env(cfg.env, rescale=False) as env:
        assert env.unwrapped.reach == 2.5
        env.reset(seed=evaluate._SEED)
        goal = env.unwrapped.goal
        assert env.step(np.full(2, 2.5, np.float32))[1] == pytest.approx(
            -2 * abs(goal - env.unwrapped.arm).sum()
        )
    assert (arm / "video.mp4").stat().st_size > 100


@pytest.mark.parametrize(
    ("recipe", "task", "name"), [("sac", ENDLESS, "Endless-v0"), ("td3", SWING, "make_swing")]
)
def test_a_run_is_named_after_its_task_and_tells_its_settings(recipe, task, name, tmp_path, capsys):
    start(recipe, *SMALL, *task, "replay=ct", "~replay_ratio", "+replay_ratio=2", cwd=tmp_path)
    told = capsys.readouterr().err
    assert "tasks that are not in the paper, the same for every method: actor_l2=0.0" in told
    assert "replay_ratio=" not in told  # was given
    (directory,) = tmp_path.glob(f"runs/{recipe}-{name}-ct-seed0/*")
    assert float(metrics(directory)[-1]["eval/length"]) == 15


def test_a_file_of_ones_own_needs_the_id_alone(tmp_path):
    (tmp_path / "mine" / "env").mkdir(parents=True)
    (tmp_path / "mine" / "env" / "arm.yaml").write_text(
        "id: own_tasks:Arm-v0\nkwargs: {reach: 3.0}\nmax_steps: 7\n"
    )
    start("td3", "--config-dir", "mine", *SMALL, "env=arm", "run_dir=run", cwd=tmp_path)
    cfg = OmegaConf.load(tmp_path / "run" / "config.yaml")
    assert (cfg.name, cfg.env.kwargs.reach) == ("td3-Arm-v0-nmer-seed0", 3.0)
    assert float(metrics(tmp_path / "run")[-1]["eval/length"]) == 7


# -- settings ----------------------------------------------------------------------------------


def test_other_tasks_have_the_same_settings_with_every_method():
    for kind in ("nmer", "uniform"):
        cfg = make_config("sac", "env=gym", "env.id=mine:Walker2d-v5", f"replay={kind}")
        assert (cfg.replay_ratio, cfg.random_frames, cfg.lr, cfg.actor_l2) == (5, 10_000, 3e-4, 0)
    assert paper.setting("random_frames", "td3", "mine:A-v0", "nmer", 30_000) == 1_500
    assert make_config("sac", "env=dm_control").replay_ratio == 5
    assert make_config("sac", "env=Pendulum").replay_ratio == 1  # what results rest on


@pytest.mark.parametrize(
    ("task", "method", "rule"),
    [
        ("Walker2d", "ct", "The paper's settings for SAC on Walker2d with ct"),
        (
            "Walker2d",
            "gp",
            "The paper's settings for SAC on Walker2d with nmer, used for Walker2d with gp",
        ),
        (
            "Humanoid",
            "nmer",
            "The paper's settings for SAC on Ant with nmer, used for Humanoid with nmer",
        ),
        ("Pendulum", "nmer", "Defaults of this project for Pendulum, the same for every method"),
    ],
)
def test_the_rule_behind_the_settings_is_named(task, method, rule):
    assert paper.rule("sac", task, method) == rule


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "env.id=mine:A-v0",
            r"does not match the settings of Walker2d-v5; .* env=gym env.id=mine:A-v0",
        ),
        (
            "env=gym",
            r"No task .* as in env.id=my_package:MyRobot-v0 \(see docs/howto/own_task.md\)",
        ),
        ("env=torchrl", r"No task was given; add env.id, as in env.id=torchrl.envs.PendulumEnv"),
        (
            "env=gym env.id=a:B-v0 env.wrappers=a.W",
            r"not a list of paths; give env.wrappers=\[a.W\]",
        ),
    ],
)
def test_contradictions_are_refused(words, message):
    with pytest.raises(UsageError, match=message):
        config.check(make_config("sac", *words.split()))


def test_the_page_of_the_errors_is_there():
    page = settings.CONF.parents[1] / settings.TASK_PAGE
    assert "\n## Resume a run\n" in page.read_text()  # `#resume-a-run` in a notice


# -- checks ------------------------------------------------------------------------------------

FAULTS = {
    "matrix": r"Box\(\(2, 3\), float32\).*env.wrappers=\[gymnasium.wrappers.FlattenObservation\]",
    "tuple": "observations in Tuple.*convert them to a Box",
    "image": r"Box\(\(8, 8, 3\), uint8\).*remove images",
    "integer": "observations in MultiDiscrete",
    "entry": r"entry 'camera', has observations in Box\(\(8, 8\), uint8\)",
    "missing": r"reset\(\) returned .*, but the observation space has the entries \['goal'\]",
    "unbounded": "unbounded actions",
    "huge": "unbounded actions",
    "discrete": r"actions in Discrete\(3\)",
    "flat": r"actions of shape \(2, 2\)",
    "fixed": "some of which are fixed",
    "shape": r"reset\(\) returned an observation of shape \(3,\), .* has shape \(2,\)",
    "reward": r"the reward array\(\[-.*\]\), but a reward must be one finite number",
    "nan": "the reward nan, but a reward must be one finite number",
    "old": r"terminated, truncated, info.; .* not enough values .*expected 5, got 4",
}


def task_config(name, **fields):
    return OmegaConf.create({"id": f"own_tasks:{name}-v0", **fields})


@pytest.mark.parametrize("fault", FAULTS)
def test_what_cannot_be_trained_on_is_refused_before_training(fault):
    with pytest.raises(UsageError, match=FAULTS[fault]):
        envs.check_task(task_config("Faulty", kwargs={"fault": fault}))


@pytest.mark.parametrize(
    "options", [[], ["env.count=2"], ["collector=torchrl", "collector.frames_per_batch=7"]]
)
def test_rows_of_a_task_that_changes_its_array_in_place_are_right(options, tmp_path):
    reused = ["env=gym", "env.id=own_tasks:Reused-v0"]
    start("td3", *SMALL, *reused, *options, "replay=uniform", f"run_dir={tmp_path}", cwd=tmp_path)
    saved = torch.load(tmp_path / "checkpoint.pt", weights_only=True)["buffer"]
    rows = saved["_storage"]["_storage"]
    before, after = rows["observation"][:48, 0], rows["next.observation"][:48, 0]
    torch.testing.assert_close(after, before + 1)
    assert torch.equal(rows["next.terminated"][:48, 0], after == 5)


@pytest.mark.filterwarnings("ignore:The row at position .* has a non-finite entry")
def test_a_run_whose_losses_are_not_finite_says_so_once(tmp_path, capsys):
    late = ["env=gym", "env.id=own_tasks:Faulty-v0", "env.kwargs.fault=late", "env.max_steps=15"]
    start("td3", *SMALL, *late, "run_dir=run", cwd=tmp_path)
    told = capsys.readouterr().err
    assert told.count("is not finite at frame") == 1
    assert "train/loss_qvalue" in told


@pytest.mark.parametrize(
    ("cfg", "message"),
    [
        (task_config("Endless"), "no time limit.*env.max_steps=1000"),
        (
            task_config("Faulty"),
            "without arguments: .*missing 1 .*'fault'; .*env.kwargs.NAME",
        ),
        (task_config("Arm", kwargs={"rech": 1}), "with rech: .*unexpected keyword argument 'rech'"),
        (task_config("Arm", wrappers=["own_tasks.Nope"]), "has no class or function Nope"),
        (task_config("Arm", wrappers=["nope.Wrapper"]), "nope.Wrapper cannot be imported"),
        (task_config("Arm", wrappers=["Wrapper"]), "Wrapper is not a path; give MODULE.NAME"),
        (task_config("Arm", wrappers=["own_tasks.not_a_wrapper"]), "returned str, but a wrapper"),
        (
            task_config("Arm", wrappers=["gymnasium.wrappers.TimeLimit"]),
            "missing 1 required.*is called with the task only",
        ),
        (
            OmegaConf.create({"id": "nope:A-v0"}),
            "nope:A-v0 cannot be created: No module.*own_task.md",
        ),
        (
            OmegaConf.create({"kind": "torchrl", "id": "own_tasks.Arm"}),
            "returned Arm, but env=torchrl needs a TorchRL environment.* env=gym",
        ),
    ],
)
def test_a_task_that_cannot_be_made_is_told_in_one_line(cfg, message):
    with pytest.raises(UsageError, match=message) as caught:
        envs.check_task(cfg)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (GOAL, r"Goal-v0 cannot be filmed: Goal\(\) takes no"),
        (SWING, "make_swing cannot be filmed: it does not"),
    ],
)
def test_a_video_of_what_does_not_render_is_refused_before_training(task, message, tmp_path):
    with pytest.raises(UsageError, match=message):
        train("td3", tmp_path / "run", *task, "video=true")
    assert not (tmp_path / "run").exists()


# -- stopping and going on ---------------------------------------------------------------------


def killed_and_resumed(tmp_path, *task):
    train_and_kill("td3", tmp_path / "killed", *task)
    return train("td3", tmp_path / "killed", *task, "resume=auto")


def test_a_task_that_offers_its_state_goes_on_number_for_number(tmp_path, capsys):
    task = [*ARM, "env.wrappers=[own_tasks.Doubled]", "random_frames=20"]
    rows = killed_and_resumed(tmp_path, *task)  # at frame 32, in the middle of an episode
    assert rows == train("td3", tmp_path / "whole", *task)
    assert "resumes with a new episode" not in capsys.readouterr().err


@pytest.mark.parametrize("task", [GOAL, SWING, [*ARM, "env.wrappers=[own_tasks.Unspoken]"]])
def test_another_task_goes_on_with_a_new_episode_and_says_so(task, tmp_path, capsys):
    killed_and_resumed(tmp_path, *task, "replay=ct", "random_frames=20")
    told = capsys.readouterr().err
    assert "cannot be restored, so the run resumes with a new episode" in told
    assert "own_task.md#resume-a-run" in told
    state = torch.load(tmp_path / "killed" / "checkpoint.pt", weights_only=True)
    rows = state["buffer"]["_storage"]["_storage"]
    before, after = rows["observation"][:48], rows["next.observation"][:48]
    starts = 1 + (before[1:] != after[:-1]).any(-1).nonzero().flatten()
    # In the middle of an episode, at 32, another one starts: `ct` finds no successor there.
    assert starts.tolist() == ([15, 30, 32, 47] if task is SWING else [20, 32])
    if task is GOAL:
        assert torch.equal(before[:, 1], after[:, 1])  # no row has two goals


def test_an_evaluation_that_a_signal_ends_is_made_on_resuming(tmp_path, monkeypatch):
    task = [*ARM, "random_frames=20", "total_frames=72", "checkpoint_every=72"]
    whole = train("td3", tmp_path / "whole", *task)
    assert float(whole[0]["replay/mixed"]) > 0  # of rows that a resumed run has not drawn itself
    original, steps = evaluate.Evaluator.play, []

    def play_and_interrupt(self, actor, stop):
        def stop_at_third_step():
            steps.append(1)
            if len(steps) == 3:
                signal.raise_signal(signal.SIGINT)
            return stop()

        return original(self, actor, stop_at_third_step)

    monkeypatch.setattr(evaluate.Evaluator, "play", play_and_interrupt)
    for resume in ("resume=null", "resume=auto"):  # the same evaluation twice
        steps.clear()
        with pytest.raises(SystemExit) as ended:
            train("td3", tmp_path / "run", *task, resume)
        assert (ended.value.code, len(steps)) == (130, 3)
        assert metrics(tmp_path / "run") == []
        state = torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)
        assert state["collector"]["frames"] == 24
    monkeypatch.undo()
    assert train("td3", tmp_path / "run", *task, "resume=auto") == whole


def test_states_of_a_task_are_plain_and_come_back_as_they_were():
    state = {
        "a": np.arange(3),
        "b": [1, (2.5, None)],
        "c": {"d": torch.ones(2), "e": np.float32(1)},
    }
    back = from_plain(as_plain(state))
    assert back["a"].dtype == np.int64
    assert back["b"] == [1, [2.5, None]]
    assert torch.equal(back["c"]["d"], torch.ones(2))
    assert back["c"]["e"] == 1.0
    with pytest.raises(TypeError, match="cannot hold Generator"):
        as_plain([np.random.default_rng(0)])


@pytest.mark.parametrize("kind", [np.random.MT19937, np.random.Philox, np.random.SFC64])
def test_generators_of_every_kind_are_restored(kind):
    env = gymnasium.make("own_tasks:Goal-v0")
    env.reset(seed=0)
    env.unwrapped.np_random = np.random.Generator(kind(3))
    state = envs.get_state(env)
    expected = env.reset()[0]
    assert not envs.set_state(env, state)  # no episode
    assert np.array_equal(env.reset()[0], expected)


def test_a_subclass_of_a_known_task_is_not_known():
    pendulum = gymnasium.make("Pendulum-v1").unwrapped
    mine = type("Mine", (type(pendulum),), {"__module__": "mine"})()
    pendulum.reset(seed=0)
    mine.reset(seed=0)
    assert "state" in envs.get_state(pendulum)
    assert envs.get_state(mine).keys() == {"random"}


# -- TorchRL -----------------------------------------------------------------------------------


def test_a_torchrl_environment_is_a_task_with_a_stream_of_its_own():
    first, second = (TorchRLTask("own_tasks.make_swing", {"scale": 2.0}) for _ in range(2))
    torch.manual_seed(0)
    expected = torch.rand(2)
    torch.manual_seed(0)
    starts = [task.reset(seed=3)[0] for task in (first, second)]
    assert torch.equal(torch.rand(2), expected)
    assert starts[0].keys() >= {"th", "thdot"}
    assert "step_count" not in starts[0]
    for _ in range(3):
        one, two = (task.step(np.ones(1, np.float32)) for task in (first, second))
        assert one == two
    again = first.reset()[0]
    assert again["th"] != starts[0]["th"]
    plain = TorchRLTask("own_tasks.make_swing", {})
    plain.reset(seed=3)
    assert first.action_space.high == pytest.approx([2.0])


# -- what was learned --------------------------------------------------------------------------


def test_play_shows_a_task_of_ones_own(arm, tmp_path, capsys):
    film = tmp_path / "film.mp4"
    play.main([str(arm), "--episodes", "2", "--seed", "10000", "--video", str(film)])
    told = capsys.readouterr().out
    assert "td3-Arm-v0-nmer-seed0, best policy" in told
    assert "| 10000 | " in told
    assert film.stat().st_size > 100


def test_a_policy_acts_on_dicts_without_importing_the_task(arm, monkeypatch):
    monkeypatch.delitem(sys.modules, "own_tasks")
    policy = load_policy(arm)
    observation = {"goal": np.float32([0.5, -0.5]), "arm": np.array([0.0, 0.1])}
    action = policy.act(observation)
    assert action.shape == (2,)
    assert ((action >= 0) & (action <= 5)).all()
    np.testing.assert_allclose(action, policy.act(np.array([0.0, 0.1, 0.5, -0.5])), rtol=1e-6)
    several = {name: np.stack([value] * 3) for name, value in observation.items()}
    np.testing.assert_allclose(policy.act(several), np.stack([action] * 3), rtol=1e-5)
    assert "own_tasks" not in sys.modules
    with pytest.raises(ValueError, match="has no 'arm'"):
        policy.act({"goal": np.ones(2)})


def test_a_run_chooses_no_module_by_its_config(arm, tmp_path):
    text = (arm / "config.yaml").read_text()
    (tmp_path / "config.yaml").write_text(re.sub("algorithm: td3", "algorithm: os", text))
    (tmp_path / "policy_best.pt").write_bytes((arm / "policy_best.pt").read_bytes())
    with pytest.raises(UsageError, match=r"algorithm='os' is not known; the recipes are .*sac"):
        load_policy(tmp_path)
