"""After very many updates, statistics equal a recomputation in float64."""

import pytest
import torch
from soak import soak

from nmer_torchrl.tracking.covariance import RunningCovariance
from nmer_torchrl.tracking.standardize import RunningStandardizer

UPDATES = soak(1_000_000)  # of rows, of three numbers each
CHUNK, RING, D = 5_000, 20_000, 3
MEAN, SPREAD = 1e6, torch.tensor([1.0, 0.5, 2.0], dtype=torch.float64)


def new_rows(generator: torch.Generator, n: int = CHUNK) -> torch.Tensor:
    """Draws rows around a million with a spread of about one; the first two are correlated."""
    rows = torch.randn((n, D), generator=generator, dtype=torch.float64)
    rows[:, 1] = 0.6 * rows[:, 0] + 0.8 * rows[:, 1]
    return rows * SPREAD + MEAN


def assert_statistics(statistics: RunningStandardizer, count, mean, std) -> None:
    assert statistics.count == count
    torch.testing.assert_close(statistics.mean - MEAN, mean - MEAN, rtol=0, atol=1e-6)
    torch.testing.assert_close(statistics.std, std, rtol=1e-6, atol=0)
    torch.testing.assert_close(statistics.scale, 1 / std, rtol=1e-6, atol=0)


def test_growth_equals_a_recomputation():
    """Compares with float64 sums relative to the known mean, which lose nothing here."""
    generator, statistics = torch.Generator().manual_seed(0), RunningStandardizer(D)
    first, second = torch.zeros(2, D, dtype=torch.float64)
    for _ in range(UPDATES // CHUNK):
        rows = new_rows(generator)
        statistics.update(rows)
        first += (rows - MEAN).sum(0)
        second += (rows - MEAN).square().sum(0)
    count = UPDATES // CHUNK * CHUNK
    offset = first / count
    assert_statistics(statistics, count, MEAN + offset, (second / count - offset**2).sqrt())


@pytest.mark.parametrize("make", [RunningStandardizer, RunningCovariance])
def test_a_ring_equals_a_recomputation(make):
    generator, statistics = torch.Generator().manual_seed(1), make(D)
    ring = torch.empty(0, D, dtype=torch.float64)
    for _ in range(UPDATES // CHUNK):
        rows, gone = new_rows(generator), ring[:CHUNK] if len(ring) == RING else ring[:0]
        statistics.replace(rows, gone)
        ring = torch.cat([ring[len(gone) :], rows])
    moments = statistics if make is RunningStandardizer else statistics.moments
    assert_statistics(moments, len(ring), ring.mean(0), ring.std(0, correction=0))
    if make is RunningCovariance:
        if statistics.doubt > 1e-6:  # as those who use it do
            statistics.recompute(ring)
        expected = torch.corrcoef(ring.T)
        torch.testing.assert_close(statistics.correlation(), expected, rtol=0, atol=1e-6)


def test_single_rows_of_float32_over_many_turns_of_a_ring():
    """Adds and removes one row at a time; float32 resolves a million to a sixteenth."""
    generator, statistics = torch.Generator().manual_seed(2), RunningStandardizer(D)
    rows = new_rows(generator, 1_000).float()
    statistics.update(rows)
    turns = soak(4)
    for _ in range(turns):
        new = new_rows(generator, 1_000).float()
        for i in range(len(rows)):
            statistics.update(new[i : i + 1], removed=rows[i : i + 1])
        rows = new
    wide = rows.double()
    assert_statistics(statistics, len(rows), wide.mean(0), wide.std(0, correction=0))
