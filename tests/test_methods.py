"""Methods: their parts, what they refuse, and how to add one."""

import inspect
import re
import runpy
import sys
from dataclasses import FrozenInstanceError, fields, replace

import pytest
import torch
from helpers import make_transitions
from page_helpers import ROOT, blocks
from recipe_helpers import RECIPES, metrics, run

from nmer_recipes import methods as recipe_methods  # isort: skip
from nmer_recipes.errors import UsageError  # isort: skip

from nmer_torchrl import Method, make_replay_buffer, methods
from nmer_torchrl.methods import GP, METHODS, NMER, PER, RAS, Mixup, Noisy, option_names
from nmer_torchrl.methods.groups import Keyed, Near
from nmer_torchrl.transforms import LinearFraction

pytestmark = pytest.mark.usefixtures("only_recipe_configs")

HOW_TO = ROOT / "docs" / "howto" / "method.md"


def make(method, **options):
    return make_replay_buffer(method, capacity=100, batch_size=16, **options)


@pytest.mark.parametrize("name", METHODS)
def test_an_object_and_its_name_make_the_same_buffer(name):
    batches = []
    for method in (name, METHODS[name]()):
        buffer = make(method, generator=torch.Generator().manual_seed(3))
        buffer.extend(make_transitions(50))
        batches.append(buffer.sample())
    assert (batches[0] == batches[1]).all()


def test_options_of_an_object_reach_its_parts():
    method = NMER(k=3, alpha=0.3, metric="mahalanobis", fraction=LinearFraction(1.0, 0.0, 10))
    first, second = make(method), make(method)
    assert (first.sampler.k, first.transform[0].alpha) == (3, 0.3)
    assert first.sampler is not second.sampler  # one method serves many buffers
    assert first.sampler.metric is not second.sampler.metric
    assert make(replace(method, k=4)).sampler.k == 4
    assert NMER(keys="state").keys == ("state",)
    assert Noisy(action_bounds=None).make_sampler(9).spread.keys[:2] == ("observation", "action")
    assert make(Noisy(action_bounds=None)).transform[0].action_bounds is None


def test_a_method_does_not_change():
    with pytest.raises(FrozenInstanceError):
        NMER().k = 3


@pytest.mark.parametrize("name", METHODS)
def test_every_number_refuses_booleans_and_words(name):
    method = METHODS[name]
    numbers = [field for field in fields(method) if isinstance(field.default, int | float)]
    for field in numbers:
        for bad in (True, False, "3", [3], None, torch.tensor(1.0)):
            with pytest.raises((TypeError, ValueError), match=rf"{field.name}[= ]") as caught:
                method(**{field.name: bad})
            assert f"(the default is {field.default!r})" in str(caught.value)


@pytest.mark.parametrize(
    ("make_wrong", "words"),
    [
        (lambda: NMER(k=0), r"k=0 is out of range; give an integer at least 1 \(the default is 10"),
        (lambda: NMER(fraction=2), "fraction=2 is out of range; give a finite number at least 0"),
        (lambda: NMER(fraction="all"), "Unknown fraction 'all'; the known ones are linear"),
        (lambda: NMER(search="kdtree"), "Unknown search 'kdtree'; the known ones are auto"),
        (lambda: NMER(metric="product", search="graph"), "does not support ProductNorm"),
        (lambda: Mixup(interpolation="delta"), "'delta'; the known ones are beta, uniform, mean"),
        (lambda: Mixup(interpolation="mean", alpha=3.0), "'mean' ignores alpha=3.0; remove one"),
        (lambda: PER(priority_beta=-1), "priority_beta=-1 is out of range"),
        (lambda: RAS(min_factor=2.0), "min_factor=2.0 and max_factor=1.2 .*in order"),
        (lambda: GP(metric="product"), "use 'euclidean' or 'mahalanobis'"),
        (lambda: Noisy(action_bounds=(1, -1)), "action_bounds=.* are not in order"),
        (lambda: methods.ERO(value_keys=[("next", "observation")]), "name exactly one"),
    ],
)
def test_a_method_refuses_values_before_there_is_a_buffer(make_wrong, words):
    with pytest.raises(ValueError, match=words):
        make_wrong()


def test_options_beside_an_object_are_refused():
    with pytest.raises(
        TypeError, match=r"k=3 was given together with the object NMER\(.*NMER\(k=3, "
    ):
        make(NMER(), k=3)


def test_an_unknown_option_is_refused_with_the_nearest_and_the_list():
    with pytest.raises(ValueError, match=r"'gp' does not accept noise=1; did you mean noise"):
        make("gp", noise=1)
    with pytest.raises(ValueError, match=r"does not accept capacty=9; did you mean capacity\?"):
        make("per", capacty=9)
    with pytest.raises(ValueError, match=r"remove it. Its options are: priority_alpha, priority_b"):
        make("per", sigma=0.1)
    with pytest.raises(ValueError, match=r"'uniform' does not .* Its options are: none\."):
        make("uniform", k=3)


@pytest.mark.parametrize("bad", ["nmr", int, None, 3])
def test_what_is_no_method_is_refused(bad):
    with pytest.raises(
        ValueError, match=f"Unknown method .*{', '.join(METHODS)}.* give a Method object"
    ):
        make(bad)


def test_a_class_is_not_yet_a_method():
    with pytest.raises(TypeError, match=r"NMER is a class; give an object, NMER\(\.\.\.\)"):
        make(NMER)


def test_nothing_concrete_is_subclassed():
    for method in METHODS.values():
        for base in method.__mro__[1:]:
            assert not issubclass(base, Method) or inspect.isabstract(base), (method, base)


@pytest.mark.parametrize("name", METHODS)
def test_every_method_is_public(name):
    kind = METHODS[name].__name__
    assert kind in methods.__all__, f"add {kind} to __all__ of nmer_torchrl/methods/__init__.py"


@pytest.mark.parametrize("name", METHODS)
def test_every_method_has_the_options_that_its_parts_take(name):
    method = METHODS[name]
    sampler = method().make_sampler(9)
    reads = hasattr(sampler, "draws") or method().make_transform(sampler) is not None
    for needed, group in ((reads, Keyed), (hasattr(sampler, "neighbors"), Near)):
        told = f"derive {method.__name__} from {group.__name__} in nmer_torchrl/methods/groups.py"
        assert issubclass(method, group) or not needed, told


@pytest.mark.parametrize("name", METHODS)
def test_every_method_says_its_source_and_its_options(name):
    method = METHODS[name]
    where = f"the docstring of {method.__name__}"
    source = re.search(r"^    Source: ", method.__doc__ or "", re.MULTILINE)
    assert source, f"{where} lacks a line `Source: ...`"
    said = "".join(base.__doc__ or "" for base in method.__mro__ if issubclass(base, Method))
    for option in option_names(method):
        text = re.search(rf"^        {option}: ", said, re.MULTILINE)
        assert text, f"{where} lacks its option `{option}: ...` under `Keyword Args:`"


def test_pages_have_what_they_derive_from_the_methods():
    derived = runpy.run_path(str(ROOT / "docs" / "tables.py"))["pages"]()
    old = [page for page, text in derived.items() if page.read_text() != text]
    assert not old, f"{old} are not up to date: run python docs/tables.py"
    table = derived[ROOT / "docs" / "methods.md"]
    row = r"^\| `per_nmer` \| `PERNMER` .* `PairMixup`, `PairPrioritizedReplayBuffer` .*`k=10`"
    assert re.search(row, table, re.MULTILINE)


# -- a method of one's own -------------------------------------------------------------------------


@pytest.fixture
def own_file(tmp_path):
    """Provides the file that the how-to page shows."""
    (code,) = blocks(HOW_TO, "python")
    path = tmp_path / "my_methods.py"
    path.write_text(code)
    return path


def test_a_file_of_thirty_lines_trains(own_file):
    assert len(own_file.read_text().splitlines()) <= 30
    small = ["env=InvertedPendulum", "total_frames=300", "random_frames=100", "replay_ratio=1"]
    small += ["eval_every=150", "eval_episodes=1", "hidden=[16,16]", "batch_size=16", "logger=csv"]
    words = ["replay=my_methods.Closest", "replay.alpha=3", "run_dir=run"]
    run("td3", *words, *small, cwd=own_file.parent)
    rows = metrics(own_file.parent / "run")
    assert [row["frames"] for row in rows] == ["150", "300"]
    assert int(rows[-1]["train/updates"]) == 200
    assert float(rows[-1]["replay/mixed"]) > 0.5
    config = (own_file.parent / "run" / "config.yaml").read_text()
    assert "kind: my_methods.Closest\n  alpha: 3\n" in config


@pytest.fixture
def _beside(own_file, monkeypatch):
    """Runs code in the directory of that file."""
    monkeypatch.chdir(own_file.parent)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(recipe_methods, "_own", set())
    yield
    sys.modules.pop("my_methods", None)


@pytest.mark.usefixtures("_beside")
def test_a_path_names_a_method():
    recipe_methods.register_methods(["-m", "replay=nmer,my_methods.Closest", "seed=1"])
    assert recipe_methods.registered_methods() == {*METHODS, "my_methods.Closest"}
    settings = recipe_methods.settings_of("my_methods.Closest")
    assert settings == {"kind": "my_methods.Closest", "alpha": 2.0}
    method = recipe_methods.make_method({**settings, "alpha": 1.0})
    assert repr(make(method).transform[0]) == "PairMixup(alpha=1.0)"


@pytest.mark.usefixtures("_beside")
@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        ("nmre", {}, r"no replay method nmre; the methods are uniform, .*give MODULE.CLASS"),
        ("my_method.Closest", {}, r"cannot be imported: No module named 'my_method'\..*PYTHON"),
        ("my_methods.Closet", {}, r"my_methods.py has no method Closet; a method is a subclass"),
        ("my_methods.PairMixup", {}, r"my_methods.py has no method PairMixup"),
        ("my_methods.Method", {}, r"my_methods.py has no method Method"),
        ("my_methods.Closest", {"alpha": 0}, r"replay=my_methods.Closest: alpha=0 is out of range"),
        ("my_methods.Closest", {"k": 3}, r"does not accept k=3; remove it. Its options are: alpha"),
    ],
)
def test_a_path_that_names_no_method_is_refused(kind, options, words):
    with pytest.raises(UsageError, match=words):
        recipe_methods.make_method({"kind": kind, **options})


def test_recipes_leave_keys_to_the_package():
    for name in METHODS:
        assert not [key for key in recipe_methods.settings_of(name) if key.endswith("key")]
        assert "keys" not in recipe_methods.settings_of(name)
    assert not (RECIPES / "conf" / "replay").exists()
