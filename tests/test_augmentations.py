"""Transforms of single rows: their common contract, and each definition."""

import copy
import pickle

import pytest
import torch
from helpers import MIX_KEYS, make_transitions
from scipy import stats
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

from nmer_torchrl import GaussianNoise, StateMixup
from nmer_torchrl.samplers import SpreadSampler
from nmer_torchrl.tracking.spread import Spread
from nmer_torchrl.transforms import AmplitudeScaling

TINY = 1e-4  # see test_functional
NEXT = ("next", "observation")
OTHERS = ("identity", ("next", "terminated"), ("next", "done"))


def noise_of_one(keys=MIX_KEYS, **options):
    """Builds noise with a spread of 1 in all entries."""
    spread = Spread(keys=keys)
    spread.std = {key: torch.ones(()) for key in keys}
    return GaussianNoise(spread=spread, action_bounds=None, **options)


# How to make each, with these entries or its own; what it changes, and what it writes.
AUGMENTATIONS = {
    "StateMixup": (StateMixup, "observation_keys", ("observation",), "state_weight"),
    "AmplitudeScaling": (AmplitudeScaling, "observation_keys", ("observation", NEXT), "amplitude"),
    "GaussianNoise": (noise_of_one, "keys", MIX_KEYS, "observation"),
}
every = pytest.mark.parametrize(
    ("make", "argument", "changes", "writes"), AUGMENTATIONS.values(), ids=AUGMENTATIONS
)


# -- the contract ----------------------------------------------------------------------------------


@every
def test_some_entries_are_changed_and_what_was_read_is_left_alone(make, argument, changes, writes):
    rows = make_transitions(64)
    before = rows.clone()
    batch = make()(rows)
    assert (rows == before).all()
    for key in (*MIX_KEYS, *OTHERS):
        assert torch.equal(batch[key], before[key]) != (key in changes), key
    row = rows[0]
    assert make()(row) is row


@every
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_rows_that_are_not_finite_stay_as_they_are(make, argument, changes, writes, bad):
    for key in {*changes, NEXT}:
        rows = make_transitions(20)
        rows[key][4, 0] = bad
        batch = make()(rows)
        for other in (*MIX_KEYS, *OTHERS):
            torch.testing.assert_close(
                batch[other][4], rows[other][4], rtol=0, atol=0, equal_nan=True
            )
        assert writes == "observation" or batch[writes][4] == 1
        assert batch["observation"][torch.arange(20) != 4].isfinite().all()
        assert (batch["observation"] != rows["observation"]).any(-1).sum() >= 19


@every
def test_draws_come_from_the_generator_and_its_state_is_kept(make, argument, changes, writes):
    rows = make_transitions(64)
    first = make(generator=torch.Generator().manual_seed(5))
    first(rows)
    other = make(generator=torch.Generator())
    other.load_state_dict(first.state_dict())
    again = [other]
    if make is not noise_of_one:  # a copy of a spread reads the storage anew
        again.append(pickle.loads(pickle.dumps(first)))
    expected = first(rows)
    torch.manual_seed(99)
    for one in again:
        assert (one(rows) == expected).all()
        assert not torch.equal(one(rows)[writes], expected[writes])


@every
def test_entries_that_are_not_continuous_are_refused_when_stored(make, argument, changes, writes):
    with pytest.raises(ValueError, match=r"'identity' is torch.int64; leave it out"):
        make(**{argument: ["identity"]})._inv_call(make_transitions(4))
    with pytest.raises(ValueError, match="is empty"):
        make(**{argument: []})


# -- state mixup -----------------------------------------------------------------------------------


def test_state_mixup_moves_the_observation_towards_the_next():
    rows = make_transitions(64, terminated=0.3)
    before = rows.clone()
    batch = StateMixup(0.75)(rows)
    weight = batch["state_weight"]
    assert weight.shape == (64, 1)
    assert ((weight > 0) & (weight < 1)).all()  # terminal rows too
    w = weight.double()
    expected = w * before["observation"].double() + (1 - w) * before[NEXT].double()
    torch.testing.assert_close(batch["observation"].double(), expected, rtol=1e-5, atol=1e-5)
    for key in ("action", NEXT, ("next", "reward"), *OTHERS):
        assert torch.equal(batch[key], before[key])


def test_state_weights_follow_the_beta_distribution():
    weight = StateMixup(0.4, generator=torch.Generator().manual_seed(0))(make_transitions(5_000))
    sample = weight["state_weight"].squeeze(1).numpy()
    assert stats.kstest(sample, stats.beta(0.4, 0.4).cdf).pvalue > TINY


def test_state_mixup_of_nested_and_several_entries():
    rows = TensorDict(
        robot=TensorDict(q=torch.rand(8, 2, 3), batch_size=[8]),
        v=torch.rand(8),
        next=TensorDict(
            robot=TensorDict(q=torch.rand(8, 2, 3), batch_size=[8]), v=torch.rand(8), batch_size=[8]
        ),
        batch_size=[8],
    )
    batch = StateMixup(1.0, observation_keys=[("robot", "q"), "v"])(rows)
    weight = batch["state_weight"]
    torch.testing.assert_close(batch["v"], rows["next", "v"].lerp(rows["v"], weight[:, 0]))
    q = rows["next", "robot", "q"].lerp(rows["robot", "q"], weight.unsqueeze(-1))
    torch.testing.assert_close(batch["robot", "q"], q)
    assert torch.equal(batch["next", "robot", "q"], rows["next", "robot", "q"])


@pytest.mark.parametrize("alpha", [0, -1.0, float("nan"), float("inf")])
def test_bad_alpha_is_named(alpha):
    with pytest.raises(ValueError, match=rf"alpha={alpha}.*above 0"):
        StateMixup(alpha)


# -- amplitude scaling -----------------------------------------------------------------------------


def test_amplitude_scaling_is_one_factor_for_both_observations_of_a_row():
    rows = make_transitions(5_000)
    before = rows.clone()
    batch = AmplitudeScaling(0.6, 1.2, generator=torch.Generator().manual_seed(0))(rows)
    factor = batch["amplitude"]
    assert factor.shape == (5_000, 1)
    for key in ("observation", NEXT):
        expected = factor.double() * before[key].double()
        torch.testing.assert_close(batch[key].double(), expected, rtol=1e-6, atol=1e-6)
    for key in ("action", ("next", "reward"), *OTHERS):
        assert torch.equal(batch[key], before[key])
    sample = factor.squeeze(1).numpy()
    assert stats.kstest(sample, stats.uniform(0.6, 0.6).cdf).pvalue > TINY


@pytest.mark.parametrize("bounds", [(0.0, 1.0), (1.2, 0.6), (-1.0, 1.0), (0.5, float("inf"))])
def test_bad_amplitudes_are_named(bounds):
    with pytest.raises(
        ValueError, match=rf"min_factor={bounds[0]} and max_factor={bounds[1]}.*in order"
    ):
        AmplitudeScaling(*bounds)


# -- noise -----------------------------------------------------------------------------------------


def make_noise(sigma=0.1, *, rows=None, **options):
    """Builds a filled buffer with noise."""
    sampler = SpreadSampler()
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(options.pop("capacity", 200)),
        sampler=sampler,
        transform=GaussianNoise(sigma, spread=sampler.spread, **options),
        batch_size=100,
    )
    if rows is not None:
        buffer.extend(rows)
    return buffer


def noise_of(buffer, n: int) -> dict:
    """Returns what was added to each entry of many rows, in float64."""
    batch = buffer.sample(n)
    stored = buffer.storage[:][batch["index"]]
    return {key: batch[key].double() - stored[key].double() for key in MIX_KEYS}


def assert_noise_has_the_stored_spread(buffer, sigma=0.1) -> None:
    stored = buffer.storage[:]
    with pytest.warns(UserWarning, match="conflicting batch_sizes"):
        found = noise_of(buffer, 20_000)
    for key, noise in found.items():
        expected = sigma * stored[key].double().std(0, correction=0)
        scaled = noise / torch.where(expected > 0, expected, 1.0)
        # Four standard errors of a standard deviation and of a mean.
        assert ((noise.std(0, correction=0) / expected - 1).abs() < 4 / 200).all(), key
        assert (scaled.mean(0).abs() < 4 / 141).all(), key


def test_noise_has_the_spread_of_what_is_stored():
    rows = make_transitions(200)
    rows["observation"] *= torch.tensor([1.0, 100.0, 1e-3])
    assert_noise_has_the_stored_spread(make_noise(rows=rows, action_bounds=None))


def test_noise_is_drawn_for_each_number_anew():
    buffer = make_noise(rows=make_transitions(200), action_bounds=None)
    stored = buffer.storage[:]
    with pytest.warns(UserWarning, match="conflicting batch_sizes"):
        found = noise_of(buffer, 20_000)
    numbers = torch.cat(
        [noise / stored[key].double().std(0, correction=0) for key, noise in found.items()], 1
    )
    correlation = torch.corrcoef(numbers.T) - torch.eye(numbers.shape[1])
    assert (correlation.abs() < 4 / 141).all()
    assert stats.kstest(numbers[:, 0].numpy() / 0.1, "norm").pvalue > TINY


def test_the_spread_follows_every_kind_of_write():
    buffer = make_noise(capacity=50, action_bounds=None)
    for scale, n in ((1.0, 30), (50.0, 40), (0.1, 120)):
        rows = make_transitions(n, seed=n)
        rows["observation"] *= scale
        buffer.extend(rows)
        buffer.sample()
        assert_spread(buffer)
    buffer[3] = make_transitions(1, seed=7)[0]
    buffer.sample()
    assert_spread(buffer)
    buffer.set_at_("action", torch.full((2,), 9.0), 5)
    buffer.sample()
    assert_spread(buffer)
    short = make_noise(rows=make_transitions(8, seed=3), capacity=50, action_bounds=None)
    buffer.load_state_dict(short.state_dict())
    buffer.sample()
    assert_spread(buffer)
    buffer.empty()
    buffer.extend(make_transitions(12, seed=4))
    buffer.sample()
    assert_spread(buffer)
    other = LazyTensorStorage(30)
    other.set(range(20), make_transitions(20, observation=5, seed=5))
    buffer.set_storage(other)
    buffer.sample()
    assert_spread(buffer)
    assert_noise_has_the_stored_spread(buffer)


def assert_spread(buffer) -> None:
    stored = buffer.storage[:]
    for key, std in buffer.sampler.spread.std.items():
        expected = stored[key].double().std(0, correction=0)
        torch.testing.assert_close(std.double(), expected, rtol=1e-5, atol=1e-9)


def test_terminal_rows_get_no_noise():
    buffer = make_noise(rows=make_transitions(200, terminated=0.4))
    batch = buffer.sample()
    stored = buffer.storage[:][batch["index"]]
    ended = stored["next", "terminated"].squeeze(1)
    assert 0 < ended.sum() < 100
    for key in MIX_KEYS:
        assert torch.equal(batch[key][ended], stored[key][ended])
    assert (batch["observation"][~ended] != stored["observation"][~ended]).all()
    for key in OTHERS:
        assert torch.equal(batch[key], stored[key])


def test_actions_stay_in_their_bounds():
    rows = make_transitions(200)
    rows["action"][:100] = 1.0
    loose = make_noise(0.5, rows=rows, action_bounds=None).sample()["action"]
    assert (loose > 1).any()
    action = make_noise(0.5, rows=rows).sample()["action"]
    assert action.abs().max() == 1.0
    wide = make_noise(0.5, rows=rows, action_bounds=(-3.0, 1.25)).sample()["action"]
    assert 1.0 < wide.max() <= 1.25


def test_actions_outside_of_the_bounds_are_refused_before_anything_is_stored():
    rows = make_transitions(10)
    rows["action"][4, 1] = 1.75
    buffer = make_noise()
    with pytest.raises(ValueError, match=r"'action' holds 1.75.*\(-1.0, 1.0\); give the bounds"):
        buffer.extend(rows)
    assert len(buffer) == 0
    storage = LazyTensorStorage(10)
    storage.set(range(10), rows)  # filled before
    buffer.set_storage(storage)
    with pytest.raises(ValueError, match=r"'action' holds 1\.75"):
        buffer.sample()


def test_rows_that_are_not_finite_get_no_noise_and_do_not_count():
    rows = make_transitions(60)
    rows["observation"][11, 0] = torch.nan
    rows["next", "reward"][25] = torch.inf
    buffer = make_noise(rows=rows)
    batch = buffer.sample()
    stored = buffer.storage[:][batch["index"]]
    bad = (batch["index"] == 11) | (batch["index"] == 25)
    assert bad.any()
    for key in MIX_KEYS:
        torch.testing.assert_close(
            batch[key][bad], stored[key][bad], rtol=0, atol=0, equal_nan=True
        )
    there = [i for i in range(60) if i not in (11, 25)]
    for key, std in buffer.sampler.spread.std.items():
        expected = rows[key][there].double().std(0, correction=0)
        torch.testing.assert_close(std.double(), expected, rtol=1e-5, atol=1e-9)


def test_dimensions_that_do_not_vary_get_no_noise():
    rows = make_transitions(50)
    rows["observation"][:, 1] = 0.1
    batch = make_noise(rows=rows).sample()
    assert (batch["observation"][:, 1] == 0.1).all()
    assert batch["observation"][:, 0].unique().numel() > 50


def test_noise_without_its_sampler_says_so():
    noise = GaussianNoise(spread=SpreadSampler().spread)
    with pytest.raises(RuntimeError, match=r"no spread yet.*spread=sampler.spread"):
        noise(make_transitions(5))
    row = make_transitions(1)[0]
    assert noise(row) is row


@pytest.mark.parametrize("sigma", [-0.1, float("nan"), float("inf")])
def test_bad_sigma_is_named(sigma):
    with pytest.raises(ValueError, match=rf"sigma={sigma}.*at least 0"):
        GaussianNoise(sigma, spread=SpreadSampler().spread)


def test_bad_bounds_and_keys_of_noise_are_named():
    with pytest.raises(ValueError, match=r"action_bounds=\(1, -1\) are not in order"):
        GaussianNoise(spread=SpreadSampler().spread, action_bounds=(1, -1))
    spread = SpreadSampler(keys=["observation"]).spread
    with pytest.raises(ValueError, match=r"'action' is named in `action_keys`.*to None"):
        GaussianNoise(spread=spread)
    assert GaussianNoise(spread=spread, action_bounds=None).sigma == 0.1


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda b: pickle.loads(pickle.dumps(b))])
def test_a_copy_has_a_spread_of_its_own(duplicate):
    buffer = make_noise(rows=make_transitions(30))
    buffer.sample()
    twin = duplicate(buffer)
    assert twin.transform[0].spread is twin.sampler.spread
    rows = make_transitions(100, seed=1)
    rows["observation"] *= 9
    twin.extend(rows)
    twin.sample()
    assert_spread(twin)
    buffer.sample()
    assert_spread(buffer)
