"""The folds beyond PairMixup, each against its definition."""

import copy
import pickle

import pytest
import torch
from helpers import MIX_KEYS, make_transitions
from scipy import stats
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.modules import MLP, ValueOperator

from nmer_torchrl import GaussianNoise, NeighborPairSampler, StateMixup, make_replay_buffer
from nmer_torchrl.samplers import SpreadSampler
from nmer_torchrl.transforms import AmplitudeScaling, MixReg, RewardMean

TINY = 1e-4  # see test_functional
NEXT = ("next", "observation")
OTHERS = ("identity", ("next", "terminated"), ("next", "done"))


def make_pairs(n: int = 64, **options) -> TensorDict:
    anchors, partners = (make_transitions(n, seed=seed, **options) for seed in (1, 2))
    return torch.stack([anchors, partners], 1)


def make_noise(sigma=0.1, *, rows=None, **options):
    """A buffer with noise, filled."""
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
    """What was added to each entry of many rows, float64."""
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


# State mixup


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
    assert (rows == before).all()  # what was read is left alone


def test_state_state_weights_follow_the_beta_distribution():
    weight = StateMixup(0.4, generator=torch.Generator().manual_seed(0))(make_transitions(5_000))
    sample = weight["state_weight"].squeeze(1).numpy()
    assert stats.kstest(sample, stats.beta(0.4, 0.4).cdf).pvalue > TINY


@pytest.mark.parametrize("key", ["observation", NEXT])
def test_states_that_are_not_finite_are_not_mixed(key):
    rows = make_transitions(20)
    rows[key][3, 0], rows[key][7, 1] = torch.nan, torch.inf
    batch = StateMixup(0.75)(rows)
    for row in (3, 7):
        assert batch["state_weight"][row] == 1
        torch.testing.assert_close(
            batch["observation"][row], rows["observation"][row], equal_nan=True
        )
    assert (batch["state_weight"] < 1).sum() == 18


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


# Amplitude scaling


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
    assert (rows == before).all()


def test_amplitudes_of_rows_that_are_not_finite_are_one():
    rows = make_transitions(20)
    rows[NEXT][4, 0] = torch.nan
    batch = AmplitudeScaling()(rows)
    assert torch.equal(batch["observation"][4], rows["observation"][4])
    assert batch["amplitude"][4] == 1
    assert (batch["amplitude"] != 1).sum() == 19


@pytest.mark.parametrize("bounds", [(0.0, 1.0), (1.2, 0.6), (-1.0, 1.0), (0.5, float("inf"))])
def test_bad_amplitudes_are_named(bounds):
    with pytest.raises(
        ValueError, match=rf"min_factor={bounds[0]} and max_factor={bounds[1]}.*in order"
    ):
        AmplitudeScaling(*bounds)


# Mixreg


def test_mixreg_mixes_inputs_and_takes_the_supervision_of_one_member():
    pairs = make_pairs(terminated=0.3)
    batch = MixReg(0.75)(pairs.clone())
    weight, member = batch["mixup_weight"], batch["mixup_member"].squeeze(1)
    assert batch.batch_size == (64,)
    assert set(member.tolist()) == {0, 1}
    for key in ("observation", "action"):
        w, (anchor, partner) = weight.double(), pairs[key].double().unbind(1)
        expected = w * anchor + (1 - w) * partner
        torch.testing.assert_close(batch[key].double(), expected, rtol=1e-5, atol=1e-5)
    for key in (NEXT, ("next", "reward"), *OTHERS):
        assert torch.equal(batch[key], pairs[key][torch.arange(64), member])


def test_mixreg_takes_the_anchors_supervision_as_often_as_its_weight_says():
    batch = MixReg(1.0, generator=torch.Generator().manual_seed(0))(make_pairs(20_000))
    weight, anchors = batch["mixup_weight"].squeeze(1), 1.0 - batch["mixup_member"].squeeze(1)
    for part in range(5):
        inside = (weight * 5).long() == part
        error = (weight[inside].var() + 0.25) ** 0.5 / inside.sum() ** 0.5
        assert (anchors[inside].mean() - weight[inside].mean()).abs() < 4 * error


def test_mixreg_has_on_average_the_gradient_of_the_mixed_target():
    """A squared error on many folds of one pair against the loss that mixes the two targets."""
    torch.manual_seed(3)
    critic = ValueOperator(
        MLP(in_features=5, out_features=1, num_cells=[8]).double(),
        in_keys=["observation", "action"],
    )
    pair = make_pairs(1).double()

    def q(rows):
        return critic(rows.clone())["state_action_value"]

    targets = pair["next", "reward"] + 0.9 * pair[NEXT].sum(-1, keepdim=True).tanh()
    batch = MixReg(1.0, generator=torch.Generator().manual_seed(0))(pair.expand(40_000, 2).clone())
    weight = batch["mixup_weight"].double()
    drawn = batch["next", "reward"] + 0.9 * batch[NEXT].sum(-1, keepdim=True).tanh()
    mixed = weight * targets[:, 0] + (1 - weight) * targets[:, 1]
    parameters = list(critic.parameters())
    slope = torch.autograd.grad(((q(batch) - drawn) ** 2).mean(), parameters)
    expected = torch.autograd.grad(((q(batch) - mixed) ** 2).mean(), parameters)
    for found, right in zip(slope, expected, strict=True):
        assert (found - right).norm() < 0.05 * right.norm() + 0.02


def test_mixreg_keeps_the_anchor_where_a_mix_is_not_finite():
    pairs = make_pairs()
    pairs["action"][5, 1, 0] = torch.nan
    batch = MixReg()(pairs.clone())
    assert batch["mixup_weight"][5] == 1
    assert batch["mixup_member"][5] == 0
    for key in (*MIX_KEYS, *OTHERS):
        assert torch.equal(batch[key][5], pairs[key][5, 0])


def test_mixreg_passes_what_are_no_pairs_and_keeps_leading_dimensions():
    rows = make_transitions(10)
    assert MixReg()(rows) is rows
    batch = MixReg()(torch.stack([make_pairs(8), make_pairs(8)]))
    assert batch.batch_size == (2, 8)
    assert batch["mixup_member"].shape == (2, 8, 1)
    with pytest.raises(ValueError, match=r"shape \(5, 2\).*data.reshape\(-1\)"):
        MixReg()._inv_call(rows.reshape(5, 2))


# Averaged rewards


def test_reward_mean_changes_the_reward_alone():
    pairs = make_pairs(terminated=0.2)
    batch = RewardMean()(pairs.clone())
    anchor, partner = pairs["next", "reward"].double().unbind(1)
    ended = pairs["next", "terminated"].any(1)
    assert 0 < ended.sum() < 64
    expected = torch.where(ended, anchor, (anchor + partner) / 2)
    torch.testing.assert_close(batch["next", "reward"].double(), expected)
    assert torch.equal(batch["mixup_weight"], torch.where(ended, 1.0, 0.5))
    for key in ("observation", "action", NEXT, *OTHERS):
        assert torch.equal(batch[key], pairs[key][:, 0])


def test_interpolated_rewards_come_from_neighbors():
    buffer = make_replay_buffer("interpolated_rewards", capacity=100, batch_size=32, k=3)
    buffer.extend(make_transitions(80))
    assert isinstance(buffer.sampler, NeighborPairSampler)
    batch = buffer.sample()
    anchor, partner = batch["index"].unbind(1)
    neighbors = buffer.sampler.neighbors(buffer.storage, anchor)
    assert neighbors.shape == (32, 3)
    assert (neighbors == partner.unsqueeze(1)).any(1).all()
    stored = buffer.storage[:]
    reward = stored["next", "reward"]
    torch.testing.assert_close(batch["next", "reward"], (reward[anchor] + reward[partner]) / 2)
    assert torch.equal(batch["observation"], stored["observation"][anchor])


# Noise


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


# All


@pytest.mark.parametrize(
    "fold", [StateMixup, AmplitudeScaling, MixReg], ids=lambda fold: fold.__name__
)
def test_draws_come_from_the_generator_that_is_set_and_its_state_is_kept(fold):
    pairs = make_pairs()
    rows = pairs if fold is MixReg else pairs[:, 0]
    names = {StateMixup: "state_weight", AmplitudeScaling: "amplitude", MixReg: "mixup_weight"}
    written = names[fold]
    first = fold(generator=torch.Generator().manual_seed(5))
    first(rows)
    state = first.state_dict()
    expected = first(rows)
    other = fold(generator=torch.Generator())
    other.load_state_dict(state)
    torch.manual_seed(99)
    assert (other(rows) == expected).all()
    assert not torch.equal(other(rows)[written], expected[written])


@pytest.mark.parametrize("fold", [StateMixup, MixReg])
def test_bad_alpha_is_named(fold):
    with pytest.raises(ValueError, match=r"alpha=-1.*above 0"):
        fold(-1)


@pytest.mark.parametrize(
    ("fold", "name"),
    [
        (lambda: StateMixup(observation_keys=["identity"]), "identity"),
        (lambda: AmplitudeScaling(observation_keys=["identity"]), "identity"),
        (lambda: MixReg(mix_keys=["identity"]), "identity"),
        (lambda: RewardMean(reward_keys=["identity"]), "identity"),
    ],
)
def test_entries_that_are_not_continuous_are_refused_when_stored(fold, name):
    with pytest.raises(ValueError, match=f"'{name}' is torch.int64; leave it out"):
        fold()._inv_call(make_transitions(4))


def test_a_single_row_passes():
    row = make_transitions(1)[0]
    for fold in (StateMixup(), AmplitudeScaling(), MixReg(), RewardMean()):
        assert fold(row) is row
