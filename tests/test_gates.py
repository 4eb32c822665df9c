"""Gates and schedules, which choose the rows that are mixed."""

import copy
import math
import pickle
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from helpers import make_transitions
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.data.replay_buffers import ReplayBufferEnsemble

from nmer_torchrl import NeighborPairSampler, PairMixup, make_replay_buffer
from nmer_torchrl.transforms import DensityFraction, ExponentialFraction, Fraction, LinearFraction

TINY = 1e-4  # see test_functional


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_that_share_of_rows_is_mixed(share):
    rows = TensorDict(batch_size=[2_000, 2])
    mixed = Fraction(share)(rows, torch.Generator().manual_seed(0))
    assert stats.binomtest(int(mixed.sum()), 2_000, share).pvalue > TINY


def test_the_clock_counts_rows_whatever_the_batches():
    schedule = LinearFraction(1.0, 0.0, rows=1_000)
    large, small = Fraction(schedule), Fraction(schedule)
    large(TensorDict(batch_size=[500, 2]), None)
    for _ in range(5):
        small(TensorDict(batch_size=[50, 2, 2]), None)
    assert large.drawn == small.drawn == 500


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


def test_density_follows_what_is_stored():
    schedule, shares = DensityFraction(0.0, 0.8, rows=100), []

    def fraction(drawn):
        shares.append(schedule(drawn))
        return shares[-1]

    first, second = (
        TensorDictReplayBuffer(
            storage=LazyTensorStorage(200),
            sampler=NeighborPairSampler(4, search="torch"),
            transform=PairMixup(0.75, gates=[Fraction(fraction)]),
            batch_size=50,
        )
        for _ in range(2)
    )
    for count, share in ((25, 0.2), (25, 0.4), (50, 0.8), (50, 0.8)):
        first.extend(make_transitions(count, seed=count))
        first.sample()
        assert shares.pop() == pytest.approx(share)
    first.set_sampler(NeighborPairSampler(4))  # none has counted rows yet
    first.sample()
    assert shares.pop() == pytest.approx(0.8)
    first.empty()
    for buffer in (first, second):
        buffer.extend(make_transitions(25))
    ReplayBufferEnsemble(first, second, sample_from_all=True, batch_size=50).sample()
    assert shares == pytest.approx([0.4, 0.4])  # by the rows of both
    with pytest.raises(
        RuntimeError, match="rows of its buffer, but it was called outside of a buffer"
    ):
        schedule(0)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Fraction(1.5), "share=1.5.*at least 0 and at most 1"),
        (lambda: Fraction(math.nan), "share=nan"),
        (lambda: LinearFraction(2.0, 0.0, 10), "first=2.0.*at least 0 and at most 1"),
        (lambda: LinearFraction(1.0, 0.0, 0), "rows=0.*at least 1"),
        (lambda: ExponentialFraction(1.0, -0.1, 10), "last=-0.1"),
        (lambda: ExponentialFraction(1.0, 0.0, 0), "half_life=0.*at least 1"),
        (lambda: DensityFraction(0.0, 1.0, -5), "rows=-5"),
    ],
)
def test_bad_values_are_named(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def make(kind, seed=5, **options):
    buffer = make_replay_buffer(
        kind,
        capacity=100,
        batch_size=16,
        max_distance={"quantile": 0.8},
        generator=torch.Generator().manual_seed(seed),
        **options,
    )
    buffer.extend(make_transitions(60))
    return buffer


@pytest.mark.parametrize("kind", ["nmer", "per_nmer", "neighborhood", "gp"])
def test_schedules_and_caps_go_on_from_a_saved_buffer(kind):
    linear = {"linear": {"first": 1.0, "last": 0.0, "rows": 100}}
    first, other = make(kind, fraction=linear), make(kind, seed=6, fraction=linear)
    for _ in range(3):
        first.sample()
    other.load_state_dict(copy.deepcopy(first.state_dict()))
    twin = pickle.loads(pickle.dumps(first))
    for _ in range(3):
        expected = first.sample()
        assert (other.sample() == expected).all()
        assert (twin.sample() == expected).all()
    assert (first.sample()["mixup_weight"][:, 0] == 1).float().mean() > 0.5


@pytest.mark.parametrize("kind", ["nmer", "per_nmer", "neighborhood", "gp"])
@pytest.mark.parametrize("metric", ["euclidean", "mahalanobis"])
def test_prefetching_one_batch_changes_no_batch(kind, metric):
    density = {"density": {"first": 0.2, "last": 0.9, "rows": 100}}
    plain, ahead = (make(kind, metric=metric, fraction=density, prefetch=n) for n in (None, 1))
    for _ in range(5):
        assert (plain.sample() == ahead.sample()).all()


def test_prefetching_threads_ask_a_gate_in_turn():
    class Count:
        seen = 0

        def __call__(self, batch, generator):
            before = self.seen
            time.sleep(0.001)  # long enough for another thread to come between
            self.seen = before + 1
            return torch.ones(batch.shape[:-1], dtype=torch.bool)

    fold, rows = PairMixup(gates=[Count()]), make_transitions(8).reshape(4, 2)
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda _: fold(rows), range(20)))
    assert fold.gates[0].seen == 20
