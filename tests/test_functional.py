import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from nmer_torchrl.functional import (
    all_finite,
    choose_neighbor,
    choose_other,
    combine,
    fingerprint,
    mix,
    sample_beta,
    sample_dirichlet,
)

# With a fixed seed a test either always passes or never; a p-value this small says that the draw is
# not of the distribution rather than unlucky.
TINY = 1e-4

finite = st.floats(-1e6, 1e6, width=32)


@given(a=finite, b=finite, w=st.floats(0, 1, width=32))
def test_a_mix_stays_within_its_pair(a, b, w):
    mixed = mix(torch.tensor([a]), torch.tensor([b]), torch.tensor([w])).item()
    assert min(a, b) <= mixed <= max(a, b) or math.isclose(mixed, a, rel_tol=1e-6)


@given(a=finite, b=finite)
def test_weight_one_is_exactly_the_anchor_and_zero_the_partner(a, b):
    anchor, partner = torch.tensor([a]), torch.tensor([b])
    assert torch.equal(mix(anchor, partner, torch.ones(1)), anchor)
    assert torch.equal(mix(anchor, partner, torch.zeros(1)), partner)


def test_weights_broadcast_over_features():
    anchor, partner = torch.ones(4, 2, 3), torch.zeros(4, 2, 3)
    weight = torch.tensor([0.0, 0.25, 0.5, 1.0])
    assert torch.equal(mix(anchor, partner, weight.unsqueeze(1))[:, 1, 2], weight)


@pytest.mark.parametrize("alpha", [0.4, 0.75, 1.0, 3.0, 50.0])
def test_weights_follow_the_beta_distribution(alpha):
    weights = sample_beta(alpha, (20_000,), generator=torch.Generator().manual_seed(0))
    assert stats.kstest(weights.double().numpy(), stats.beta(alpha, alpha).cdf).pvalue > TINY


@pytest.mark.parametrize("alpha", [1e-3, 0.05, 0.75, 1e4, torch.tensor(1e-3), torch.tensor(0.75)])
def test_weights_have_the_moments_of_the_beta_distribution(alpha):
    weights = sample_beta(alpha, (20_000,), generator=torch.Generator().manual_seed(0)).double()
    variance = 1 / (4 * (2 * alpha + 1))
    assert abs(weights.mean() - 0.5) < 4 * (variance / 20_000) ** 0.5
    assert abs(weights.var() / variance - 1) < 0.06


def test_tiny_alpha_gives_coin_flips_and_no_nan():
    weights = sample_beta(1e-4, (10_000,), generator=torch.Generator().manual_seed(0))
    assert ((weights < 1e-3) | (weights > 1 - 1e-3)).float().mean() > 0.99
    assert abs(weights.mean() - 0.5) < 0.02


def test_weights_repeat_with_their_generator():
    first, second, other = (
        sample_beta(0.75, (5,), generator=torch.Generator().manual_seed(seed)) for seed in (3, 3, 4)
    )
    assert torch.equal(first, second)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("alpha", [1e-4, 0.4, 0.75, 1e6])
def test_weights_are_within_bounds_and_finite(alpha):
    weights = sample_beta(alpha, (200_000,), generator=torch.Generator().manual_seed(0))
    assert ((weights >= 0) & (weights <= 1)).all()


def test_neighbors_are_chosen_uniformly_among_those_there_are():
    neighbors = torch.tensor([[4, 5, 6, 7], [8, 9, -1, -1], [-1, -1, -1, -1]]).repeat(5_000, 1)
    anchor = torch.tensor([0, 1, 2]).repeat(5_000)
    chosen = choose_neighbor(anchor, neighbors, generator=torch.Generator().manual_seed(0))
    chosen = chosen.reshape(5_000, 3)
    for column, expected in ((0, [4, 5, 6, 7]), (1, [8, 9])):
        counts = torch.bincount(chosen[:, column], minlength=10)
        assert counts.sum() == counts[expected].sum()
        assert stats.chisquare(counts[expected].numpy()).pvalue > TINY
    assert (chosen[:, 2] == 2).all()


@given(count=st.integers(0, 5), seed=st.integers(0, 2**31))
def test_another_is_never_the_anchor(count, seed):
    anchor = torch.arange(-1, 7)
    other = choose_other(anchor, count, generator=torch.Generator().manual_seed(seed))
    assert ((other >= 0) & (other < count) & (other != anchor) | (other == -1)).all()
    choices = torch.tensor([count - (0 <= a < count) for a in anchor.tolist()])
    assert torch.equal(other == -1, choices == 0)


def test_any_other_is_as_likely():
    anchor = torch.full((20_000,), 2)
    other = choose_other(anchor, 5, generator=torch.Generator().manual_seed(0))
    counts = torch.bincount(other, minlength=5)
    assert counts[2] == 0
    assert stats.chisquare(counts[[0, 1, 3, 4]].numpy()).pvalue > TINY


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64])
def test_fingerprints_tell_rows_of_round_numbers_apart(dtype):
    rows = torch.cartesian_prod(*[torch.arange(-4, 8)] * 4).to(dtype)
    marks = fingerprint(rows)
    assert marks.unique().numel() == len(rows)
    assert torch.equal(fingerprint(rows[7:9].clone()), marks[7:9])
    assert torch.equal(fingerprint(-rows * 0), fingerprint(rows * 0))  # minus zero is zero


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


@pytest.mark.parametrize("shape", [(3, 0), (0, 2), (3, 2, 0), (0,)])
def test_what_has_no_numbers_is_finite(shape):
    found = all_finite(torch.zeros(shape), 1)
    assert (found.shape, found.dtype) == (torch.Size(shape[:1]), torch.bool)
    assert found.all()
