"""Settings of the recipes: unknown names are refused, and every number has its range."""

import math
import sys

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf
from recipe_helpers import ALGORITHMS, RECIPES, make_config, run

from nmer_recipes import config, settings  # isort: skip
from nmer_recipes.directories import flatten  # isort: skip
from nmer_recipes.errors import UsageError  # isort: skip
from nmer_recipes.methods import make_method, settings_of  # isort: skip

from nmer_torchrl.methods import METHODS, option_names

pytestmark = pytest.mark.usefixtures("only_recipe_configs")

INF, NAN = math.inf, math.nan
COUNT = [1, 7, 10**6], [0, -1, 1.5]
SIZE = [0, 0.5, 3], [-1, -1e-9]
POSITIVE = [1e-9, 1, 30], [0, -1]
SHARE = [1e-6, 0.5, 1], [0, -0.1, 1.01, 2]
LIST = [[1], [256, 256], []], [[0], [8, -1], [8, 1.5], ["a"], 64]
# Values that each number may and may not have; what no number may be is `NEVER`.
VALUES = {
    "seed": ([0, 3, 2**32 - 1], [-1, 0.5, 2**32]),
    "total_frames": COUNT,
    "random_frames": COUNT,
    "replay_ratio": SIZE,
    "actor_l2": SIZE,
    "grad_clip": ([None, *POSITIVE[0]], POSITIVE[1]),
    "buffer_size": COUNT,
    "batch_size": COUNT,
    "hidden": LIST,
    "critic_hidden": LIST,
    "lr": SHARE,
    "gamma": ([0, 0.99, 1], [-0.1, 1.01, 2]),
    "tau": SHARE,
    "threads": ([1, 64], [0, 1.5, 10**6]),
    "eval_every": COUNT,
    "eval_episodes": COUNT,
    "checkpoint_every": COUNT,
    "alpha_init": POSITIVE,
    "target_entropy": ([None, -17, 0, 2.5], []),
    "policy_delay": COUNT,
    "target_interval": COUNT,
    "target_noise": SIZE,
    "target_noise_clip": SIZE,
    "exploration_noise": SIZE,
    "total_updates": COUNT,
    "data.share": ([None, 0, 0.5, 1], [-0.1, 1.01]),
    "data.rows": ([None, 2, 10], [1, 0, -1, 2.5]),
    "data.max_steps": ([None, *COUNT[0]], COUNT[1]),
    "bc_alpha": SIZE,
    "expectile": ([0.5, 0.7, 0.999], [0.4, 1]),
    "temperature": SIZE,
    "num_critics": COUNT,
    "num_target_critics": COUNT,
    "dropout": ([0, 0.01, 0.99], [-0.1, 1, 2]),
    "adam_beta": ([0, 0.5, 0.999], [-0.1, 1]),
    "norm_momentum": SHARE,
    "norm_warm_up": ([0, 7, 10**6], [-1, 1.5]),
    "members": COUNT,
    "mask_share": ([0, 0.5, 1], [-0.1, 1.01]),
    "backup_temperature": SIZE,
    "ucb_bonus": SIZE,
    "sizes": ([[2], [1000, 5000]], [[1], [5, 2.5], 1000]),
    "rows": COUNT,
    "repeats": COUNT,
    "stretch": COUNT,
    "alpha": POSITIVE,
    "env.max_steps": ([None, *COUNT[0]], COUNT[1]),
    "env.count": COUNT,
    "collector.workers": COUNT,
    "collector.frames_per_batch": COUNT,
    "collector.cpus": ([0.01, 2], [0, -1]),
    "collector.patience": SIZE,
}
NEVER = ["abc", True, NAN, INF, -INF, [[1]]]
RESOLVED_NUMBERS = ("${paper:", "${share:", "${alpha}")


def read_all() -> dict[str, list]:
    """Returns every setting of every config file, with its values there."""
    found: dict[str, list] = {}
    for path in sorted((RECIPES / "conf").rglob("*.yaml")):
        tree = {k: v for k, v in settings._load(path).items() if k not in ("hydra", "defaults")}
        group = path.parent.name
        for name, value in flatten(tree if group == "conf" else {group: tree}).items():
            found.setdefault(name, []).append(value)
    return found


def is_numeric(value) -> bool:
    if isinstance(value, str):
        return value.startswith(RESOLVED_NUMBERS)
    entries = value if isinstance(value, list) and value else [value]
    return all(isinstance(e, int | float) and not isinstance(e, bool) for e in entries)


def one_setting(name: str, value):
    """Builds a config with only this setting."""
    for part in reversed(name.split(".")):
        value = {part: value}
    return OmegaConf.create(value)


def is_allowed(name: str, value) -> bool:
    try:
        settings.check_values(one_setting(name, value))
    except UsageError:
        return False
    return True


def test_every_number_of_every_config_file_has_a_range():
    found = read_all()
    numeric = {
        name
        for name, values in found.items()
        if any(map(is_numeric, values)) and not name.startswith("methods.")
    }
    assert len(numeric) > 25
    assert numeric <= settings.RANGES.keys()
    assert {*settings.RANGES, *settings.CHOICES, *settings.TEXTS} <= found.keys()


def test_every_default_is_allowed():
    for name, values in read_all().items():
        for value in values:
            assert "${" in str(value) or is_allowed(name, value), (name, value)
    for recipe in ALGORITHMS:
        config.check(make_config(recipe, "collector=ray"))


def test_values_are_listed_for_every_number():
    assert VALUES.keys() == settings.RANGES.keys()


@pytest.mark.parametrize("name", VALUES)
def test_a_number_is_refused_outside_its_range_and_its_type(name):
    good, bad = VALUES[name]
    assert [value for value in good if not is_allowed(name, value)] == []
    assert [value for value in [*bad, *NEVER] if is_allowed(name, value)] == []
    if None not in good:
        assert not is_allowed(name, None)
    assert not is_allowed(name, {"linear": 1})


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("gamma", 2, "gamma=2 is not valid; give a number from 0 to 1."),
        ("lr", "abc", "lr=abc is not valid; give a number above 0, at most 1."),
        ("exploration_noise", -1, "exploration_noise=-1 is not valid; give a number, at least 0."),
        ("seed", -1, "seed=-1 is not valid; give an integer from 0 to 4294967295."),
        ("hidden", 64, "hidden=64 is not valid; give a list of integers, each at least 1."),
        (
            "grad_clip",
            0,
            "grad_clip=0 is not valid; give a number above 0, or null for no clipping.",
        ),
        ("tau", None, "tau=null is not valid; give a number above 0, at most 1."),
        ("video", "yes", "video=yes is not valid; give true or false."),
        ("compile", 1, "compile=1 is not valid; give true, false or auto."),
        ("losses", "mine", "losses=mine is not valid; give direct or torchrl."),
        ("precision", "fp16", "precision=fp16 is not valid; give float32 or bf16."),
        (
            "logger.mode",
            "on",
            "logger.mode=on is not valid; give online, offline, disabled or null.",
        ),
        ("run_dir", 5, "run_dir=5 is not text; put it in quotes: run_dir=\"'5'\"."),
    ],
)
def test_a_refusal_says_what_was_given_and_what_is_allowed(name, value, message):
    with pytest.raises(UsageError) as caught:
        settings.check_values(one_setting(name, value))
    assert str(caught.value) == message


GOOD = {
    "k": COUNT[0],
    "alpha": POSITIVE[0],
    "first_alpha": SHARE[0],
    "fraction": [0, 0.5, 1, {"linear": {"first": 1, "last": 0, "rows": 10}}],
    "max_distance": [None, {"quantile": 0.9}, *POSITIVE[0]],
    "lengthscale": POSITIVE[0],
    "noise_variance": POSITIVE[0],
    "max_variance": SHARE[0],
    "sigma": SIZE[0],
    "min_factor": [1e-9, 1],
    "max_factor": [0.7, 30],
    "priority_alpha": SIZE[0],
    "priority_beta": SIZE[0],
    "priority_eps": POSITIVE[0],
}
BAD = {
    "k": COUNT[1],
    "first_alpha": SHARE[1],
    "fraction": [-0.1, 1.01],
    "max_variance": SHARE[1],
    "sigma": SIZE[1],
    "priority_alpha": SIZE[1],
    "priority_beta": SIZE[1],
}  # others: what is not positive


@pytest.mark.parametrize("option", GOOD)
def test_the_package_checks_every_number_of_replay(option):
    kind = next(kind for kind in ("nmer", *METHODS) if option in option_names(METHODS[kind]))
    replay = make_config("sac", f"replay={kind}").replay

    def accepts(value) -> bool:
        replay[option] = value
        try:
            make_method(replay)
        except UsageError:
            return False
        return True

    assert [value for value in GOOD[option] if not accepts(value)] == []
    bad = [*BAD.get(option, POSITIVE[1]), *NEVER]
    assert [value for value in bad if accepts(value)] == []


def test_every_number_of_a_method_is_checked():
    options = {name: value for kind in METHODS for name, value in settings_of(kind).items()}
    numeric = {name for name, value in options.items() if is_numeric(value)} - {"action_bounds"}
    assert numeric | {"max_distance"} == GOOD.keys(), "GOOD lists values of each option"


# -- names -------------------------------------------------------------------------------------


def check_names(recipe: str, *overrides: str) -> None:
    """Checks names as a job does, with the groups that these overrides choose."""
    config.register_resolvers()
    with initialize_config_dir(str(RECIPES / "conf"), version_base="1.3"):
        whole = compose(recipe, list(overrides), return_hydra_config=True)
    HydraConfig.instance().set_config(whole)
    choices = HydraConfig.get().runtime.choices
    settings.check_names(make_config(recipe, *overrides), recipe, choices)


@pytest.mark.parametrize(
    ("recipe", "overrides"),
    [
        ("td3", "env=dm_control env.name=cheetah-run logger=wandb logger.tags=[a] collector=ray"),
        ("sac", "replay.metric={euclidean:{weights:{action:0.5}}} ++gamma=0.9"),
        ("sac", "replay.fraction={linear:{first:1,last:0,rows:1e6}} logger.group=mine"),
        ("sac", "replay=uniform replay.kind=stable-baselines3 logger=csv"),
        ("td3", "env=gym env.id=a:B-v0 env.kwargs.gravity=3.7 env.wrappers=[a.W] env.max_steps=9"),
        ("sac", "env=Ant env.version=v4 env.kwargs.use_contact_forces=true"),
        ("on_manifold", "+methods.mine={kind:nmer,k:3} +methods.mixup.fraction=0.5"),
    ],
)
def test_settings_that_exist_are_known(recipe, overrides):
    check_names(recipe, *overrides.split())
    settings.check_words(overrides.split(), recipe)


@pytest.mark.parametrize(
    ("recipe", "overrides", "message"),
    [
        ("td3", "+foo=1", r"no setting foo\. The settings are: actor_l2, .*, video\.$"),
        ("td3", "+foo={}", r"no setting foo\."),
        ("td3", "+gama=0.9", r"no setting gama\. Did you mean gamma\?"),
        ("td3", "+alpha_init=1", r"no setting alpha_init\."),
        ("td3", "+env.kwarg.x=1", r"no setting env.kwarg.*env=HalfCheetah.*env.id, env.kwargs,"),
        ("sac", "+replay.nearest=3", r"no setting replay.nearest with replay=nmer\..*replay.k,"),
        ("sac", "replay=uniform +replay.k=3", r"no setting replay.k with replay=uniform\."),
        ("sac", "logger=csv +logger.project=x", r"no setting logger.project with logger=csv"),
        ("sac", "+collector.workers=2", r"no setting collector.workers with collector=local"),
        ("on_manifold", "+replay.k=3", r"no setting replay"),
        ("on_manifold", "+method.x=3", r"no setting method.*The settings are: alpha, "),
    ],
)
def test_unknown_settings_are_refused_with_what_is_allowed(recipe, overrides, message):
    with pytest.raises(UsageError, match=message):
        check_names(recipe, *overrides.split())
    with pytest.raises(UsageError, match=message.partition(r" with ")[0].partition(".*env=")[0]):
        settings.check_words(overrides.split(), recipe)  # before Hydra composes anything
    plain = overrides.replace("+", "").split()
    with pytest.raises(UsageError, match="no setting"):
        settings.check_words(plain, recipe)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("~lr", "setting lr is missing; do not remove"),
        ("~env.version", "setting env.version is missing"),
        ("~logger", "setting logger is missing"),
        ("algorithm=sac", "algorithm=sac cannot be set: td3.py trains td3"),
    ],
)
def test_settings_that_are_needed_are_not_taken_away(overrides, message):
    with pytest.raises(UsageError, match=message):
        check_names("td3", overrides)


@pytest.mark.parametrize(
    "line",
    [
        "-m replay=uniform,nmer replay.k=3 seed=range(3)",
        "hydra/launcher=joblib hydra.launcher.n_jobs=2",
        "-m hydra.sweep.dir=x --cfg job",
        "--config-dir mine +env=Own env.kwargs.x=1",
        "hydra.searchpath=[file://mine] env.kwargs.x=1",
    ],
)
def test_words_that_hydra_understands_are_left_to_it(line):
    settings.check_words(line.split(), "td3")


# -- the commands themselves -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("recipe", "words", "message"),
    [
        ("td3", "gamma=2", "td3.py: gamma=2 is not valid; give a number from 0 to 1."),
        (
            "td3",
            "exploration_noise=-1",
            "td3.py: exploration_noise=-1 is not valid; give a number, at ",
        ),
        ("sac", "lr=abc", "sac.py: lr=abc is not valid; give a number above 0, at most 1."),
        (
            "sac",
            "total_frames=abc",
            "sac.py: total_frames=abc is not valid; give an integer, at least 1.",
        ),
        ("sac", "lr=${nothing}", "sac.py: Interpolation key 'nothing' not found"),
        (
            "td3",
            "gama=0.9",
            "td3.py: There is no setting gama. Did you mean gamma? The settings are: ",
        ),
        ("td3", "+foo=1", "td3.py: There is no setting foo. The settings are: "),
        ("td3", "~lr", "td3.py: The setting lr is missing"),
        (
            "sac",
            "losses=torchrl precision=bf16",
            "sac.py: losses=torchrl does not support precision=bf16; leave one of the two out.",
        ),
        ("on_manifold", "+env.kwargs.x=1", "on_manifold.py: There is no setting env.kwargs"),
    ],
)
def test_a_wrong_setting_ends_the_command_before_it_trains(recipe, words, message, monkeypatch):
    monkeypatch.setattr(sys, "argv", [f"{recipe}.py", *words.split()])
    monkeypatch.setenv("PYTHONPATH", "")  # which the launchers add to
    with pytest.raises(SystemExit) as ended:
        config.run_recipe(lambda cfg: pytest.fail("it trains"), recipe)
    assert str(ended.value).startswith(message)


def test_a_wrong_setting_is_told_without_a_traceback(tmp_path):
    errors = run("td3", "exploration_noise=-1", cwd=tmp_path, code=1).stderr
    assert errors == "td3.py: exploration_noise=-1 is not valid; give a number, at least 0.\n"
    assert not list(tmp_path.iterdir())


def test_every_run_of_a_sweep_refuses_what_nothing_reads(tmp_path, monkeypatch, capsys):
    """With the user's own config files, only the job knows which settings exist."""
    (tmp_path / "mine" / "env").mkdir(parents=True)
    (tmp_path / "mine" / "env" / "Own.yaml").write_text("name: Own\nid: Own-v0\nextra: 1\n")
    words = ["--config-dir", "mine", "-m", "env=Own", "env.extra=2", "+foo=1,2", "logger=none"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["td3.py", *words])
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.setattr(sys, "gettrace", lambda: None)  # Hydra takes coverage for a debugger
    with pytest.raises(SystemExit):
        config.run_recipe(lambda cfg: pytest.fail("it trains"), "td3")
    assert "td3.py: There is no setting foo. The settings are: " in capsys.readouterr().err
    assert not list(tmp_path.glob("runs/td3/*/config.yaml"))
