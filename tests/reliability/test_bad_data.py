"""Bad rows and arguments raise a clear error or stay isolated, and never spoil a buffer.

Each row that is written and each call counts as one bad input.
"""

import gymnasium
import numpy as np
import pytest
import torch
from definitions import NEAR, Stored, assert_equal, check_batch, nearest_first
from helpers import MIX_KEYS, assert_neighbors, make_transitions
from hypothesis import given, settings
from hypothesis import strategies as st
from soak import soak

from nmer_torchrl import NeighborPairSampler, PairMixup, make_replay_buffer
from nmer_torchrl.methods import METHODS, option_names
from nmer_torchrl.neighbors import NeighborGraph, TorchSearch
from nmer_torchrl.tracking.standardize import RunningStandardizer
from nmer_torchrl.transforms import TunedMixup

from nmer_recipes import collect, seeding  # isort: skip
from nmer_recipes.replay import store  # isort: skip

pytestmark = pytest.mark.filterwarnings("ignore:The row at position")

CAPACITY, BAD = 200, 80
HUGE = (1e10, 1e20, 1e30, -1e30, 3.4e38, -3.4e38)
NUMBERS = torch.tensor([torch.nan, torch.inf, -torch.inf, 1e-45, -1e-40, 1e-30, 0.0, -0.0, *HUGE])


def make(kind, seed=0, **options):
    generator = torch.Generator().manual_seed(seed)
    return make_replay_buffer(
        kind, capacity=CAPACITY, batch_size=32, generator=generator, **options
    )


def make_bad(n: int, generator: torch.Generator) -> torch.Tensor:
    """Draws rows in which one number, a whole entry or all numbers are bad."""
    rows = make_transitions(
        n, terminated=0.1, seed=int(torch.randint(999, (), generator=generator))
    )

    def draw(high: int) -> torch.Tensor:
        return torch.randint(high, (n,), generator=generator)

    numbers, which, form = NUMBERS[draw(len(NUMBERS))], draw(len(MIX_KEYS)), draw(6)
    for i in range(n):
        key = MIX_KEYS[int(which[i])]
        if form[i] < 3:
            rows[key][i, 0] = numbers[i]
        elif form[i] < 5:
            rows[key][i] = numbers[i]
        else:
            for key in MIX_KEYS:
                rows[key][i] = numbers[i]
    constant = int(draw(4)[0])
    if constant < 3:  # one dimension is the same in all of these rows
        rows["observation"][:, constant] = numbers[0]
    return rows


def check(kind: str, buffer, scores: list[float]) -> None:
    stored = Stored(buffer.storage[:].clone())
    newest = (buffer.writer.state_dict()["_cursor"] - 1) % CAPACITY
    scores.append(check_batch(kind, buffer.sample(), stored, buffer, newest))
    if kind not in NEAR:
        return
    index = torch.arange(len(stored.rows))
    neighbors = buffer.sampler.neighbors(buffer.storage, index)
    search = buffer.sampler.unit.search
    if isinstance(search, NeighborGraph) and not search.exact:
        scores.append(nearest_first(stored, index, neighbors))
    else:
        assert_neighbors(stored.points, index, neighbors, stored.scale)
    statistics = buffer.sampler.unit.space.statistics
    finite = stored.points[stored.usable]
    assert statistics.count == len(finite)
    if len(finite):
        torch.testing.assert_close(statistics.scale, stored.scale, rtol=1e-6, atol=0)


@pytest.mark.parametrize("kind", METHODS)
@settings(max_examples=soak(2))
@given(seed=st.integers(0, 2**31), search=st.sampled_from(["graph", "torch", "faiss"]))
def test_bad_numbers_stay_by_themselves_and_leave_nothing_behind(kind, seed, search):
    """Writes good rows, then bad ones among them, then good ones over all of them."""
    generator = torch.Generator().manual_seed(seed)
    buffer = make(kind, **({"search": search} if kind in NEAR else {}))
    scores: list[float] = []
    buffer.extend(make_transitions(30, terminated=0.1, seed=seed % 999))
    for _ in range(2):
        bad = make_bad(BAD, generator)
        if kind == "noisy":
            bad["action"] = bad["action"].clamp(-1, 1)  # others are refused: see below
        buffer.extend(bad)
        check(kind, buffer, scores)
        if kind == "ero":
            buffer.update_priority(torch.arange(len(buffer)), torch.rand(len(buffer)) * 1e30)
            for episode_return in (1.0, 1e30):
                buffer.sampler.finish_episode(episode_return, buffer.storage)
            policy = buffer.sampler.state_dict()["policy"]
            assert all(weight.isfinite().all() for weight in policy.values())
    buffer.extend(make_transitions(CAPACITY, terminated=0.1, seed=seed % 998))
    check(kind, buffer, scores)
    batch = buffer.sample()
    assert all(batch[key].isfinite().all() for key in MIX_KEYS)
    assert sum(scores) / len(scores) >= 0.995, scores


SHAPES = st.sampled_from([(), (1,), (2,), (3,), (4,), (3, 3), (0,)])
REALS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
DTYPES = st.sampled_from([*REALS, torch.int64, torch.uint8, torch.bool, torch.complex64])


def write_by(how: str, buffer, rows) -> None:
    if how == "extend":
        buffer.extend(rows)
    elif how == "add":
        buffer.add(rows[0])
    else:
        buffer[torch.arange(3)] = rows


@pytest.mark.parametrize("kind", METHODS)
@settings(max_examples=soak(3))
@given(data=st.data())
def test_rows_of_another_form_are_refused_and_change_nothing(kind, data):
    buffer = make(kind)
    good = make_transitions(20)
    buffer.extend(good)
    before, writer = buffer.storage[:].clone(), buffer.writer.state_dict()
    for _ in range(10):
        rows = make_transitions(3, seed=1)
        key = data.draw(st.sampled_from(list(rows.keys(True, True))))
        shape, dtype = data.draw(SHAPES), data.draw(DTYPES)
        fits = rows[key].shape[1:] == shape and rows[key].dtype == dtype
        rows[key] = torch.zeros(3, *shape, dtype=dtype)
        if fits:
            continue
        how = data.draw(st.sampled_from(["extend", "add", "set"]))
        with pytest.raises(ValueError, match=r"in each row|stored before it is|continuous"):
            write_by(how, buffer, rows)
        assert buffer.writer.state_dict() == writer
    for key in before.keys(True, True):
        assert_equal(buffer.storage[:][key], before[key])
    check(kind, buffer, [])


def test_actions_out_of_bounds_are_refused_where_noise_keeps_them():
    buffer = make("noisy")
    buffer.extend(make_transitions(10))
    rows = make_transitions(3)
    rows["action"][1, 0] = 1e30
    with pytest.raises(ValueError, match=r"'action' holds 1e\+30, outside of action_bounds"):
        buffer.extend(rows)
    assert len(buffer) == 10


@pytest.mark.parametrize("number", [1e20, 1e30, 3.4e38])
def test_huge_rows_do_not_spoil_what_a_tuned_alpha_learns(number):
    buffer = make("tuned_ct")
    rows = make_transitions(40)
    rows["next", "done"][:] = False
    rows["observation"][1:] = rows["next", "observation"][:-1]
    buffer.extend(rows)
    buffer.sample()
    bad = rows[:10].clone()
    bad["next", "reward"][:] = number
    buffer.extend(bad)
    for _ in range(3):
        buffer.sample()
    fold = buffer.transform[0]
    assert isinstance(fold, TunedMixup)
    learner = fold.get_extra_state()["learner"]
    assert 0 < fold.alpha <= 1
    tensors = [*learner["layers"].values(), learner["alpha"]]
    for name in ("layers_optimizer", "alpha_optimizer"):
        state = learner[name]
        tensors += [*state["means"], *state["squares"], state["steps"]]
    assert all(tensor.isfinite().all() for tensor in tensors)


# -- arguments -------------------------------------------------------------------------------------

JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 40),
    st.floats(),
    st.text(max_size=5),
    st.lists(st.one_of(st.text(max_size=3), st.integers(), st.none()), max_size=3),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
    st.tuples(st.text(max_size=3), st.floats()),
    st.sampled_from([torch.zeros(2), torch.tensor(1.0), object(), b"x", 1j, print, TorchSearch]),
)
OTHER_NAMES = {"terminated_key": "key"}
COMMON = ("method", "capacity", "batch_size", "device", "storage", "prefetch", "generator")


@pytest.mark.filterwarnings("ignore:.* but the rows also hold")  # without some of the keys
@settings(max_examples=soak(150))
@given(kind=st.sampled_from(list(METHODS)), junk=JUNK, data=st.data())
def test_bad_arguments_of_a_buffer_are_named_or_make_one_that_works(kind, junk, data):
    name = data.draw(
        st.sampled_from(sorted({*option_names(METHODS[kind]), *COMMON, "k", "alpha", "sigma"}))
    )
    arguments = {"method": kind, "capacity": CAPACITY, "batch_size": 8, name: junk}
    rows = make_transitions(20)
    try:
        buffer = make_replay_buffer(arguments.pop("method"), **arguments)
        buffer.extend(rows)
        batch = buffer.sample()
    except (ValueError, TypeError, KeyError, RuntimeError) as error:
        short = name.removeprefix("priority_")
        said = str(error)
        named = any(word in said for word in (name, short, OTHER_NAMES.get(name, name)))
        # A key that no row has is named when there are rows; a number beyond float32 when drawn.
        known = "no entry" in said or "NestedKey" in said or "without overflow" in said
        known |= callable(junk) or name in ("device", "keys", "value_keys", "action_bounds")
        assert named or known, (name, junk, said)
        return
    assert all(batch[key].isfinite().all() for key in MIX_KEYS)


@settings(max_examples=soak(100))
@given(junk=JUNK, function=st.integers(0, 9))
def test_bad_arguments_of_what_the_package_offers_raise_and_change_nothing(junk, function):
    buffer = make("per_nmer")
    buffer.extend(make_transitions(20))
    batch, sampler = buffer.sample(), buffer.sampler
    batch["td_error"] = torch.ones(32)
    statistics = RunningStandardizer(5)
    calls = [
        lambda: sampler.neighbors(buffer.storage, junk),
        lambda: sampler.neighbors(buffer.storage, torch.arange(3), junk),
        lambda: buffer.update_priority(torch.tensor([0]), junk),
        lambda: sampler.update_priority(torch.tensor([CAPACITY]), junk),
        lambda: buffer.update_tensordict_priority(batch.set("td_error", torch.full((32,), -1.0))),
        lambda: statistics.update(junk),
        lambda: RunningStandardizer(junk),
        lambda: NeighborPairSampler(junk),
        lambda: PairMixup(junk),
        lambda: buffer.extend(junk),
    ]
    before = sampler.priorities(torch.arange(20))
    try:
        calls[function]()
    except (ValueError, TypeError, IndexError, KeyError, AttributeError, RuntimeError):
        pass
    else:  # it was a good one
        assert junk is None or isinstance(junk, (bool, int, float, list, torch.Tensor, np.ndarray))
    assert len(buffer) == 20
    assert statistics.count == 0
    if function != 2:
        assert torch.equal(sampler.priorities(torch.arange(20)), before)
    assert buffer.sample()["observation"].isfinite().all()


# -- an environment that goes bad ------------------------------------------------------------------


class GoesBad(gymnasium.Env):
    """Returns observations or rewards of another form after ten steps."""

    observation_space = gymnasium.spaces.Box(-9, 9, (3,))
    action_space = gymnasium.spaces.Box(-1, 1, (2,))

    def __init__(self, bad: str) -> None:
        self.bad, self.steps = bad, 0
        self.random = np.random.default_rng(0)

    def reset(self, *, seed=None, options=None):
        return self.random.normal(size=3), {}

    def step(self, action):
        self.steps += 1
        observation, reward = self.random.normal(size=3), 1.0
        if self.steps > 10:
            observation = {
                "wide": np.zeros(4),
                "narrow": np.zeros(1),
                "flat": np.zeros((1, 3)),
                "nan": np.full(3, np.nan),
                "huge": np.full(3, 1e300),
            }.get(self.bad, observation)
            reward = {"reward": np.zeros(2), "no reward": None}.get(self.bad, reward)
        return observation, reward, False, False, {}


@pytest.mark.parametrize("kind", ["nmer", "uniform", "ct", "noisy"])
@pytest.mark.parametrize("bad", ["wide", "narrow", "flat", "reward", "no reward", "nan", "huge"])
def test_an_environment_that_goes_bad_in_the_middle(kind, bad):
    buffer = make(kind)
    stream = seeding.Stream(0, torch.device("cpu"))
    collector = collect.FrameCollector(
        [GoesBad(bad)], None, seed=0, random_frames=99, stream=stream, device=torch.device("cpu")
    )
    for _ in range(10):
        store(buffer, collector.step(), None)
    if bad in ("nan", "huge"):
        for _ in range(5):
            store(buffer, collector.step(), None)
        assert len(buffer) == 15
    else:
        with pytest.raises((ValueError, TypeError)):
            store(buffer, collector.step(), None)
        assert len(buffer) == 10
    rows = buffer.storage[:]
    assert rows["observation"][:10].isfinite().all()
    batch = buffer.sample()
    good = batch["index"].reshape(32, -1).amax(1) < 10
    assert good.any()
    assert all(batch[key][good].isfinite().all() for key in MIX_KEYS)
