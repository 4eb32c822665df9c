import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from nmer_torchrl.tracking.standardize import DOUBT, RunningStandardizer


def assert_same_statistics(stats: RunningStandardizer, points: torch.Tensor, rtol=1e-9) -> None:
    points = points.double()
    assert stats.count == len(points)
    std = points.std(0, correction=0)
    assert (std > 1e-8 * points.abs().amax(0)).all(), "the rule for constants is tested by itself"
    torch.testing.assert_close(stats.std, std, rtol=rtol, atol=0)
    torch.testing.assert_close(
        stats.mean, points.mean(0), rtol=rtol, atol=float(1e-12 * points.abs().max())
    )
    torch.testing.assert_close(stats.scale, 1 / std, rtol=rtol, atol=0)


@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=6),
    offset=st.sampled_from([0.0, 1.0, -1e3]),
    spread=st.sampled_from([1e-3, 1.0, 1e3]),
    seed=st.integers(0, 2**31),
)
def test_statistics_in_chunks_equal_statistics_at_once(sizes, offset, spread, seed):
    generator = torch.Generator().manual_seed(seed)
    n = sum(sizes) + 1
    points = torch.randn((n, 3), generator=generator, dtype=torch.float64) * spread + offset
    stats = RunningStandardizer(3)
    for chunk in points.split([*sizes, 1]):
        stats.update(chunk)
    assume((points.std(0, correction=0) > 1e-7 * points.abs().amax(0)).all())
    assert_same_statistics(stats, points)


@given(seed=st.integers(0, 2**31), keep=st.integers(2, 30))
def test_removal_leaves_the_statistics_of_the_rest(seed, keep):
    points = torch.randn((50, 2), generator=torch.Generator().manual_seed(seed))
    stats = RunningStandardizer(2)
    stats.update(points)
    stats.update(points[:0], removed=points[keep:])
    assert_same_statistics(stats, points[:keep])


def test_a_million_updates_equal_a_recomputation():
    generator = torch.Generator().manual_seed(0)
    ring = torch.zeros(1_000, 4)
    stats = RunningStandardizer(4)
    offset = torch.tensor([0.0, 1e3, -5.0, 1e5])
    spread = torch.tensor([1.0, 1e-1, 1e4, 3.0])
    for start in range(0, 1_000_000, 250):
        new = torch.randn((250, 4), generator=generator) * spread + offset
        where = torch.arange(start, start + 250) % len(ring)
        stats.update(new, removed=ring[where] if start >= len(ring) else None)
        ring[where] = new
    assert_same_statistics(stats, ring)


def test_single_rows_over_many_turns_of_a_ring_equal_a_recomputation():
    points = torch.randn((20_000, 3), generator=torch.Generator().manual_seed(1)) + 100.0
    stats = RunningStandardizer(3)
    stats.update(points[:500])
    for i in range(500, len(points)):
        stats.update(points[i : i + 1], removed=points[i - 500 : i - 499])
    assert_same_statistics(stats, points[-500:])


def test_wide_data_replaced_by_narrow_data_leaves_no_rounding():
    wide = torch.randn((1_000, 2), generator=torch.Generator().manual_seed(0)) * 1e5
    narrow = torch.randn((1_000, 2), generator=torch.Generator().manual_seed(1)) * 1e-1
    stats = RunningStandardizer(2)
    for old, new in zip(wide.split(10), narrow.split(10), strict=True):
        stats.update(old)
        stats.update(new)
    stats.update(narrow[:0], removed=wide)
    assert_same_statistics(stats, narrow)


def test_one_wide_point_among_few_narrow_ones_leaves_no_rounding():
    wide, narrow = torch.full((1, 1), 1234567.0), torch.tensor([[0.001], [0.803]])
    stats = RunningStandardizer(1)
    stats.update(narrow[:1])
    stats.update(wide)
    stats.update(narrow[1:], removed=wide)
    assert_same_statistics(stats, narrow)


@pytest.mark.parametrize("size", [1e6, 1e10, 1e14, 1e30])
def test_rounding_that_a_wide_point_has_left_is_told_and_mended(size):
    narrow = torch.randn((100, 2), generator=torch.Generator().manual_seed(0))
    wide = torch.tensor([[size, 1.0]])
    stats = RunningStandardizer(2)
    for points in (narrow[:50], wide, narrow[50:]):
        stats.update(points)
    assert stats.doubt < DOUBT  # while it is there it is what counts
    stats.update(wide[:0], removed=wide)
    assert (stats.doubt > DOUBT) == (size > 1e10)
    if stats.doubt > DOUBT:
        stats.recompute(narrow)
    assert_same_statistics(stats, narrow)
    assert stats.doubt < DOUBT


def test_mean_far_from_the_first_points_loses_nothing():
    stats = RunningStandardizer(1)
    stats.update(torch.zeros(1, 1, dtype=torch.float64))
    far = torch.randn((1_000, 1), dtype=torch.float64) + 1e7
    stats.update(far, removed=torch.zeros(1, 1, dtype=torch.float64))
    assert_same_statistics(stats, far)


def test_constant_dimension_has_scale_one():
    points = torch.randn(100, 2)
    points[:, 1] = 0.1
    stats = RunningStandardizer(2)
    stats.update(points)
    assert stats.std[1] == 0
    assert stats.scale[1] == 1
    stats.update(points[:0], removed=points[:60])
    assert stats.scale[1] == 1


def test_spread_below_a_hundred_millionth_of_the_magnitude_counts_as_constant():
    points = torch.full((10, 1), 1.0, dtype=torch.float64)
    points[0] += 1e-9
    stats = RunningStandardizer(1)
    stats.update(points)
    assert stats.scale.item() == 1.0


def test_a_constant_far_from_zero_is_weighed_by_the_least_spread_that_would_count():
    points = torch.full((100, 2), 1e30)
    points[0, 1] = torch.nextafter(points[0, 1], torch.tensor(torch.inf))
    stats = RunningStandardizer(2)
    stats.update(points)
    assert (stats.std == 0).all()
    torch.testing.assert_close(stats.scale, torch.full((2,), 1e-22, dtype=torch.float64))


def test_spread_that_float32_cannot_divide_by_counts_as_constant():
    points = torch.tensor([[-1e-44, -1e-31, -1e-29], [1e-44, 1e-31, 1e-29]])
    stats = RunningStandardizer(3)
    stats.update(points)
    torch.testing.assert_close(stats.scale, torch.tensor([1.0, 1.0, 1e29], dtype=torch.float64))


def test_what_counts_as_constant_does_not_depend_on_what_is_gone():
    narrow = torch.randn((50, 1), dtype=torch.float64) * 1e-3
    wide = torch.full((1, 1), 1e9, dtype=torch.float64)
    stats = RunningStandardizer(1)
    stats.update(torch.cat([wide, narrow]))
    stats.update(narrow[:0], removed=wide)
    assert_same_statistics(stats, narrow)


def test_numbers_that_are_not_finite_are_refused_and_leave_no_trace():
    points = torch.randn(20, 2)
    stats = RunningStandardizer(2)
    stats.update(points)
    for bad in (torch.nan, torch.inf):
        with pytest.raises(ValueError, match="non-finite"):
            stats.update(torch.cat([points, torch.full((1, 2), bad)]))
        with pytest.raises(ValueError, match="non-finite"):
            stats.update(points, removed=torch.full((1, 2), bad))
    assert_same_statistics(stats, points)


def test_nothing_stored_has_scale_one():
    stats = RunningStandardizer(2)
    assert stats.count == 0
    assert stats.scale.tolist() == [1.0, 1.0]
    stats.update(torch.randn(3, 2))
    stats.clear()
    assert stats.mean.tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: RunningStandardizer(0), "d=0"),
        (lambda: RunningStandardizer(2).update(torch.zeros(3, 4)), r"\[n, 2\].*\(3, 4\)"),
        (
            lambda: RunningStandardizer(1).update(torch.zeros(1, 1), removed=torch.zeros(2, 1)),
            "Cannot remove 2 points from a set of 1",
        ),
    ],
)
def test_bad_input_is_named(call, words):
    with pytest.raises(ValueError, match=words):
        call()
