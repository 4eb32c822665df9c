"""Every interpolation against its equation in slow float64."""

import copy
import math
import pickle
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from helpers import MIX_KEYS, make_transitions
from hypothesis import given
from hypothesis import strategies as st
from oracles import slow_prediction
from scipy import stats
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

from nmer_torchrl import (
    Mahalanobis,
    NeighborPairSampler,
    PairMixup,
    make_replay_buffer,
)
from nmer_torchrl.functional import combine, sample_dirichlet
from nmer_torchrl.gaussian_process import GaussianProcess
from nmer_torchrl.samplers import NeighborhoodSampler
from nmer_torchrl.transforms import (
    DensityFraction,
    ExponentialFraction,
    Fraction,
    GaussianProcessMixup,
    LinearFraction,
    MeanMixup,
    NeighborhoodMixup,
)

TINY = 1e-4  # see test_functional
NEXT = ("next", "observation")
REWARD = ("next", "reward")


def make_rows(n: int = 64, width: int = 2, **options) -> TensorDict:
    """Anchors and their partners, `[n, width]`."""
    return torch.stack([make_transitions(n, seed=seed, **options) for seed in range(width)], 1)


def assert_anchors(batch, rows, which) -> None:
    """These rows are the anchors, to the bit, with weight 1."""
    for key in MIX_KEYS:
        assert torch.equal(batch[key][which], rows[key][which, 0])
    weight = batch["mixup_weight"][which]
    assert (weight[:, 0] == 1).all()
    assert (weight[:, 1:] == 0).all()


def make_buffer(sampler, fold, **options):
    return TensorDictReplayBuffer(
        storage=LazyTensorStorage(200),
        sampler=sampler,
        transform=fold,
        batch_size=50,
        **options,
    )


def make_fold(name, sampler=None, **options):
    sampler = sampler or NeighborhoodSampler(k=4, search="torch")
    return {
        "pair": lambda: PairMixup(0.75, **options),
        "mean": lambda: MeanMixup(**options),
        "neighborhood": lambda: NeighborhoodMixup(0.75, **options),
        "gp": lambda: GaussianProcessMixup(sampler, 0.75, **options),
    }[name]()


FOLDS = ["pair", "mean", "neighborhood", "gp"]


def draw(name, rows, **options):
    """A batch and the rows that it was made of, all of them stored."""
    pairs = name in ("pair", "mean")
    kind = NeighborPairSampler if pairs else NeighborhoodSampler
    sampler = kind(4, search="torch")
    buffer = make_buffer(sampler, make_fold(name, sampler, **options))
    buffer.extend(rows)
    batch = buffer.sample()
    return batch, buffer.storage[:][batch["index"]]


# -- mean --------------------------------------------------------------------------------


def test_mean_is_the_mean():
    rows = make_rows(terminated=0.1)
    batch = MeanMixup()(rows.clone())
    ended = rows["next", "terminated"].any(1).squeeze(1)
    assert_anchors(batch, rows, ended)
    for key in MIX_KEYS:
        torch.testing.assert_close(batch[key][~ended], rows[key][~ended].mean(1))
    assert (batch["mixup_weight"][~ended] == 0.5).all()


# -- rules that all folds share --------------------------------------------------------------------


@pytest.mark.parametrize("name", FOLDS)
def test_a_terminal_row_leaves_the_anchor_untouched(name):
    batch, rows = draw(name, make_transitions(150, terminated=0.1))
    ended = rows["next", "terminated"].any(1).squeeze(1)
    assert ended.any()
    assert not ended.all()
    assert_anchors(batch, rows, ended)
    assert (batch["mixup_weight"][~ended][:, 0] < 1).all()
    for key in ("identity", ("next", "terminated"), ("next", "done")):
        assert torch.equal(batch[key], rows[key][:, 0])


@pytest.mark.parametrize("name", FOLDS)
@pytest.mark.parametrize("key", ["observation", REWARD])
def test_a_nan_never_spreads(name, key):
    rows = make_transitions(100)
    rows[key][:10, 0] = torch.nan
    with pytest.warns(UserWarning, match="non-finite"):
        batch, stored = draw(name, rows)
    bad = ~torch.stack([stored[k].flatten(2).isfinite().all(-1)[:, 0] for k in MIX_KEYS]).all(0)
    for other in MIX_KEYS:
        assert batch[other][~bad].isfinite().all()
        assert torch.equal(batch[other][bad].nan_to_num(), stored[other][bad, 0].nan_to_num())
    assert (batch["mixup_weight"][bad][:, 0] == 1).all()


@pytest.mark.parametrize("name", FOLDS)
def test_rows_without_partners_pass_through(name):
    rows = make_transitions(10)
    fold = make_fold(name)
    assert fold(rows) is rows
    assert fold(rows[0]).batch_size == ()


@pytest.mark.parametrize("name", FOLDS)
def test_the_same_seed_gives_the_same_batches_also_from_a_saved_state(name):
    def new(seed):
        pairs = name in ("pair", "mean")
        sampler = (NeighborPairSampler if pairs else NeighborhoodSampler)(4, search="torch")
        gates = [Fraction(LinearFraction(1.0, 0.0, 400))]
        generator = torch.Generator().manual_seed(seed)
        fold = make_fold(name, sampler, gates=gates, generator=generator)
        buffer = make_buffer(sampler, fold, generator=torch.Generator().manual_seed(seed))
        buffer.extend(make_transitions(150, terminated=0.05))
        return buffer

    first, second = new(1), new(1)
    for _ in range(3):
        a, b = first.sample(), second.sample()
        assert (a == b).all()
    other = new(2)
    other.sample()
    other.load_state_dict(copy.deepcopy(first.state_dict()))
    twin = pickle.loads(pickle.dumps(first))
    for _ in range(3):
        expected = first.sample()
        assert (other.sample() == expected).all()
        assert (twin.sample() == expected).all()
    weight = first.sample()["mixup_weight"]
    assert (weight[:, 0] == 1).float().mean() > 0.5  # the schedule went on


# -- the fraction ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FOLDS)
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_that_share_of_rows_is_mixed(name, share):
    sampler = NeighborhoodSampler(4, search="torch")
    buffer = make_buffer(sampler, None)
    buffer.extend(make_transitions(200))
    width = 2 if name in ("pair", "mean") else 5
    index = sampler.sample(buffer.storage, 2_000)[0][:, :width]
    rows = buffer.storage[:][index]
    generator = torch.Generator().manual_seed(0)
    batch = make_fold(name, sampler, gates=[Fraction(share)], generator=generator)(rows.clone())
    mixed = batch["mixup_weight"][:, 0] < 1
    assert stats.binomtest(int(mixed.sum()), 2_000, share).pvalue > TINY
    assert_anchors(batch, rows, ~mixed)


def test_a_gate_changes_no_weight_of_those_it_lets_through():
    rows = make_rows(500)
    plain, gated = (
        PairMixup(0.75, gates=gates, generator=torch.Generator().manual_seed(0))(rows.clone())
        for gates in ((), [Fraction(0.5)])
    )
    mixed = gated["mixup_weight"] < 1
    assert torch.equal(gated["mixup_weight"][mixed], plain["mixup_weight"][mixed])


def test_gates_hold_back_what_any_of_them_does():
    def first(batch, generator):
        return torch.arange(len(batch)) < 8

    def second(batch, generator):
        return torch.arange(len(batch)) >= 4

    weight = PairMixup(0.75, gates=[first, second])(make_rows(16))["mixup_weight"].squeeze(1)
    assert ((weight < 1).nonzero().squeeze(1) == torch.arange(4, 8)).all()
    with pytest.raises(TypeError, match=r"`gates` holds 0\.5, which is not callable"):
        PairMixup(0.75, gates=[0.5])


@given(
    first=st.floats(0, 1), last=st.floats(0, 1), rows=st.integers(1, 10**6), drawn=st.integers(0)
)
def test_schedules_stay_between_their_ends(first, last, rows, drawn):
    low, high = min(first, last) - 1e-12, max(first, last) + 1e-12
    for schedule in (LinearFraction, ExponentialFraction):
        made = schedule(first, last, rows)
        assert made(0) == pytest.approx(first)
        assert low <= made(drawn) <= high
    assert LinearFraction(first, last, rows)(rows + drawn) == last
    assert ExponentialFraction(first, last, rows)(rows) == pytest.approx((first + last) / 2)


def test_the_clock_counts_rows_whatever_the_batches():
    schedule = LinearFraction(1.0, 0.0, rows=1_000)
    large, small = Fraction(schedule), Fraction(schedule)
    large(make_rows(500), None)
    for _ in range(5):
        small(make_rows(100), None)
    assert large.drawn == small.drawn == 500


def test_density_follows_what_is_stored():
    sampler = NeighborPairSampler(4, search="torch")
    schedule = DensityFraction(sampler, 0.0, 0.8, rows=100)
    buffer = make_buffer(sampler, PairMixup(0.75, gates=[Fraction(schedule)]))
    for count, share in ((25, 0.2), (25, 0.4), (50, 0.8), (50, 0.8)):
        buffer.extend(make_transitions(count, seed=count))
        buffer.sample()
        assert schedule(0) == pytest.approx(share)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Fraction(1.5), "share=1.5.*from 0 to 1"),
        (lambda: Fraction(math.nan), "share=nan"),
        (lambda: LinearFraction(2.0, 0.0, 10), "first=2.0.*from 0 to 1"),
        (lambda: LinearFraction(1.0, 0.0, 0), "rows=0.*at least 1"),
        (lambda: ExponentialFraction(1.0, -0.1, 10), "last=-0.1"),
        (lambda: ExponentialFraction(1.0, 0.0, 0), "half_life=0.*at least 1"),
        (lambda: DensityFraction(NeighborPairSampler(), 0.0, 1.0, -5), "rows=-5"),
        (lambda: GaussianProcess(lengthscale=0.0), "lengthscale=0.0.*above 0"),
        (lambda: GaussianProcess(noise_variance=-1.0), "noise_variance=-1.0.*above 0"),
        (lambda: GaussianProcess(max_variance=0.0), "max_variance=0.0.*above 0"),
        (lambda: NeighborhoodMixup(0.0), "alpha=0.0"),
    ],
)
def test_bad_values_are_named(make, words):
    with pytest.raises(ValueError, match=words):
        make()


# -- neighbourhoods --------------------------------------------------------------------------------


def test_a_neighborhood_is_the_anchor_and_its_nearest():
    sampler = NeighborhoodSampler(5, search="torch")
    buffer = make_buffer(sampler, None)
    buffer.extend(make_transitions(3))
    index, _ = sampler.sample(buffer.storage, 40)
    assert index.shape == (40, 6)
    assert (index[:, 3:] == index[:, :1]).all()  # two others, then the anchor in place of more
    buffer.extend(make_transitions(100, seed=1))
    index, _ = sampler.sample(buffer.storage, 40)
    assert torch.equal(index[:, 1:], sampler.neighbors(buffer.storage, index[:, 0]))


def test_anchors_of_neighborhoods_are_uniform():
    sampler = NeighborhoodSampler(2, search="torch")
    buffer = make_buffer(sampler, None, generator=torch.Generator().manual_seed(0))
    buffer.extend(make_transitions(20))
    anchor = sampler.sample(buffer.storage, 20_000)[0][:, 0]
    assert stats.chisquare(torch.bincount(anchor).numpy()).pvalue > TINY


def test_mixed_neighborhoods_are_the_weighted_sum():
    rows = make_rows(40, 5)
    batch = NeighborhoodMixup(0.75)(rows.clone())
    weight = batch["mixup_weight"]
    assert weight.shape == (40, 5)
    torch.testing.assert_close(weight.sum(1), torch.ones(40))
    for key in MIX_KEYS:
        expected = (weight.double().unsqueeze(-1) * rows[key].double()).sum(1)
        torch.testing.assert_close(batch[key].double(), expected, rtol=1e-5, atol=1e-5)


@given(alpha=st.floats(1e-2, 1e3), seed=st.integers(0, 100))
def test_a_mix_of_a_neighborhood_stays_within_its_bounds(alpha, seed):
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(20, 4, 3, generator=generator)
    weight = sample_dirichlet(alpha, (20, 4), generator=generator)
    assert (weight >= 0).all()
    torch.testing.assert_close(weight.sum(-1), torch.ones(20))
    mixed = combine(rows, weight)
    assert (mixed >= rows.amin(1) - 1e-5).all()
    assert (mixed <= rows.amax(1) + 1e-5).all()
    alone = torch.tensor([1.0, 0.0, 0.0, 0.0]).expand(20, 4)
    assert torch.equal(combine(rows, alone), rows[:, 0])


@pytest.mark.parametrize("alpha", [0.1, 0.75, 1.0, 20.0])
def test_weights_are_of_the_dirichlet_distribution(alpha):
    weight = sample_dirichlet(alpha, (5_000, 4), generator=torch.Generator().manual_seed(0))
    for column in weight.double().T:  # each by itself is of a Beta distribution
        assert stats.kstest(column.numpy(), stats.beta(alpha, 3 * alpha).cdf).pvalue > TINY


def test_one_neighbor_is_a_pair():
    weight = sample_dirichlet(0.75, (5_000, 2), generator=torch.Generator().manual_seed(0))
    assert stats.kstest(weight[:, 0].numpy(), stats.beta(0.75, 0.75).cdf).pvalue > TINY


def test_steps_of_another_number_keep_a_neighborhood_unmixed():
    rows = make_rows(10, 4)
    steps = torch.full((10, 4, 1), 3)
    steps[:5, 2] = 2
    rows["steps_to_next_obs"] = steps
    batch = NeighborhoodMixup(0.75)(rows.clone())
    assert_anchors(batch, rows, torch.arange(10) < 5)
    assert (batch["mixup_weight"][5:, 0] < 1).all()


# -- Gaussian processes ----------------------------------------------------------------------------


@pytest.mark.parametrize("process", [GaussianProcess(), GaussianProcess(0.5, 0.1)])
def test_predictions_are_those_of_the_equations(process):
    generator = torch.Generator().manual_seed(0)
    points, outputs, query = (
        torch.randn(shape, generator=generator, dtype=torch.float64)
        for shape in ((7, 6, 3), (7, 6, 2), (7, 3))
    )
    points[2, 3] = points[2, 1]  # a duplicate
    points[3] = points[3, :1]  # nothing but duplicates
    mean, variance = process.predict(points, outputs, query)
    for i in range(7):
        expected = slow_prediction(process, points[i], outputs[i], query[i])
        torch.testing.assert_close(mean[i], expected[0], rtol=1e-6, atol=1e-8)
        torch.testing.assert_close(variance[i], expected[1].clamp_min(0), rtol=1e-6, atol=1e-8)
    assert ((variance >= 0) & (variance <= 1)).all()


def test_predictions_go_through_the_points_without_noise():
    x = torch.linspace(0, 1, 7, dtype=torch.float64).reshape(1, 7, 1).repeat(7, 1, 1)
    y = torch.sin(5 * x)
    mean, variance = GaussianProcess(1.0, 1e-10).predict(x, y, x[0])
    torch.testing.assert_close(mean, y[0], rtol=0, atol=1e-5)
    assert (variance < 1e-6).all()


def test_what_is_not_finite_has_no_prediction_and_spoils_no_other():
    points, outputs = torch.randn(3, 5, 2), torch.randn(3, 5, 1)
    points[1, 2, 0] = torch.nan
    outputs[2, 0] = torch.inf
    mean, variance = GaussianProcess().predict(points, outputs, torch.zeros(3, 2))
    assert mean[0].isfinite().all()
    assert not mean[1].isfinite().any()
    assert not mean[2].isfinite().any()
    assert variance[[0, 2]].isfinite().all()
    assert not variance[1].isfinite()


@pytest.mark.parametrize("metric", [None, Mahalanobis()])
def test_outcomes_are_predicted_at_the_mixed_input(metric):
    sampler = NeighborhoodSampler(4, search="torch", metric=metric)
    process = GaussianProcess(1.5, 1e-3)
    buffer = make_buffer(sampler, GaussianProcessMixup(sampler, process=process))
    rows = make_transitions(100)
    buffer.extend(rows)
    batch = buffer.sample()
    hood = rows[batch["index"]]
    weight = batch["mixup_weight"].double().unsqueeze(-1)
    for key in ("observation", "action"):
        expected = (weight * hood[key].double()).sum(1)
        torch.testing.assert_close(batch[key].double(), expected, rtol=1e-5, atol=1e-5)
    points, query = sampler.embed(hood), sampler.embed(batch)
    change = hood[NEXT].double() - hood["observation"].double()
    outputs = torch.cat([hood[REWARD].double(), change], -1)
    for i in range(20):
        mean, _ = slow_prediction(process, points[i], outputs[i], query[i])
        torch.testing.assert_close(batch[REWARD][i].double(), mean[:1], rtol=1e-4, atol=1e-4)
        following = batch["observation"][i].double() + mean[1:]
        torch.testing.assert_close(batch[NEXT][i].double(), following, rtol=1e-4, atol=1e-3)


def curved(n, seed=0):
    """Rows whose outcomes are smooth, and not linear."""
    rows = make_transitions(n, seed=seed, action=1)
    rows["observation"] = torch.rand(n, 3, generator=torch.Generator().manual_seed(seed)) * 4
    rows[NEXT] = outcome(rows["observation"], rows["action"])
    rows[REWARD] = rows[NEXT].square().sum(-1, keepdim=True)
    return rows


def outcome(state, action):
    return state + torch.sin(state.flip(-1)) + 0.5 * action.square()


def test_predictions_are_nearer_to_curved_outcomes_than_mixes_are():
    error = {}
    for kind in ("gp", "neighborhood"):
        buffer = make_replay_buffer(kind, capacity=2_000, batch_size=500, k=10, search="torch")
        buffer.extend(curved(2_000))
        batch = buffer.sample()
        expected = outcome(batch["observation"], batch["action"])
        error[kind] = float((batch[NEXT] - expected).norm(dim=-1).mean())
    assert error["gp"] < 0.5 * error["neighborhood"]


def test_rows_of_high_variance_stay_unmixed():
    sampler = NeighborhoodSampler(4, search="torch")
    process = GaussianProcess(0.5, 1e-3, max_variance=0.2)
    buffer = make_buffer(sampler, GaussianProcessMixup(sampler, process=process))
    rows = make_transitions(200)
    buffer.extend(rows)
    index, _ = sampler.sample(buffer.storage, 300)
    hood = rows[index]
    fold, every = (
        GaussianProcessMixup(sampler, process=p, generator=torch.Generator().manual_seed(1))
        for p in (process, GaussianProcess(0.5, 1e-3))
    )
    batch, unchecked = fold(hood.clone()), every(hood.clone())
    points, query = sampler.embed(hood), sampler.embed(unchecked)
    _, variance = process.predict(points, torch.zeros(300, 5, 1), query)
    high = variance > 0.2
    assert 0 < high.sum() < 300
    assert torch.equal(batch["mixup_weight"][:, 0] == 1, high)
    assert_anchors(batch, hood, high)
    torch.testing.assert_close(batch[NEXT][~high], unchecked[NEXT][~high])


def test_keys_of_several_observations_and_shapes():
    def rows(n):
        return TensorDict(
            q=torch.randn(n, 2, 2),
            v=torch.randn(n, dtype=torch.float64),
            torque=torch.randn(n, 2),
            next=TensorDict(
                q=torch.randn(n, 2, 2),
                v=torch.randn(n, dtype=torch.float64),
                cost=torch.randn(n),
                terminated=torch.zeros(n, 1, dtype=torch.bool),
                batch_size=[n],
            ),
            batch_size=[n],
        )

    keys, values = ["q", "v", "torque"], [("next", "q"), ("next", "v"), ("next", "cost")]
    buffer = make_replay_buffer("gp", capacity=60, batch_size=16, k=3, keys=keys, value_keys=values)
    buffer.extend(rows(60))
    batch = buffer.sample()
    for key in (*keys, *values):
        assert batch[key].shape[1:] == buffer.storage[:][key].shape[1:]
        assert batch[key].dtype == buffer.storage[:][key].dtype


@pytest.mark.parametrize("kind", ["nmer", "per_nmer", "neighborhood", "gp"])
@pytest.mark.parametrize("metric", ["euclidean", "mahalanobis"])
def test_prefetching_one_batch_changes_no_batch(kind, metric):
    plain, ahead = (
        make_replay_buffer(
            kind,
            capacity=100,
            batch_size=16,
            metric=metric,
            fraction={"density": {"first": 0.2, "last": 0.9, "rows": 100}},
            max_distance={"quantile": 0.8},
            prefetch=prefetch,
            generator=torch.Generator().manual_seed(5),
        )
        for prefetch in (None, 1)
    )
    for buffer in (plain, ahead):
        buffer.extend(make_transitions(60))
    for _ in range(5):
        assert (plain.sample() == ahead.sample()).all()


def test_prefetching_threads_ask_a_gate_in_turn():
    class Count:
        seen = 0

        def __call__(self, batch, generator):
            before = self.seen
            time.sleep(0.002)  # long enough for another thread to come between
            self.seen = before + 1
            return torch.ones(batch.shape[:-1], dtype=torch.bool)

    fold, rows = PairMixup(gates=[Count()]), make_transitions(8).reshape(4, 2)
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda _: fold(rows), range(20)))
    assert fold.gates[0].seen == 20
