"""What the graph promises beyond the contract that `test_searches.py` holds it to."""

from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import (
    assert_neighbors,
    distances_to,
    make_transitions,
    oracle_distances,
    stored_points,
)
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from soak import soak

from nmer_torchrl import make_replay_buffer
from nmer_torchrl.neighbors import NeighborGraph
from nmer_torchrl.neighbors.graph.scaled_points import halve
from nmer_torchrl.tracking.standardize import RunningStandardizer

STREAMS = Path(__file__).parent / "data"


def recall(points, index, neighbors, scale=None) -> float:
    """Share of the answers that are as near as the definition's k-th neighbor."""
    k = neighbors.shape[1]
    limit = oracle_distances(points, index, k, scale)[:, -1:]
    # Lists are in order of float32 distances, which tie where float64 does not.
    found = distances_to(points, index, neighbors, scale) <= limit * (1 + 1e-6)
    return float((found | limit.isinf()).double().mean())


def walk(n: int, d: int = 6, seed: int = 0) -> torch.Tensor:
    """Points of a slow random walk: neighbors in time are neighbors in space."""
    steps = torch.randn((n, d), generator=torch.Generator().manual_seed(seed))
    return steps.cumsum(0) * 0.05 + 0.3 * steps


class Writes(RuleBasedStateMachine):
    """Any sequence of writes to a buffer, each followed by a look at all its neighbors."""

    exact = True
    capacity = 300

    def __init__(self):
        super().__init__()
        self.buffer = self.make()
        self.seed = 0
        self.scores = []

    def make(self):
        graph = NeighborGraph(k=5, exact=self.exact)
        return make_replay_buffer("nmer", capacity=self.capacity, batch_size=16, k=5, search=graph)

    def rows(self, n: int):
        self.seed += 1
        return make_transitions(n, seed=self.seed)

    @rule(n=st.integers(1, 400))
    def extend(self, n):
        self.buffer.extend(self.rows(n))

    @rule(n=st.integers(1, 5))
    def add(self, n):
        for row in self.rows(n):
            self.buffer.add(row)

    @rule(n=st.integers(1, 60), spread=st.sampled_from([1e-2, 1.0, 1e2]))
    def extend_with_another_spread(self, n, spread):
        rows = self.rows(n)
        rows["observation"][:, 0] *= spread
        self.buffer.extend(rows)

    @rule(n=st.integers(1, 50))
    def extend_with_duplicates(self, n):
        self.buffer.extend(self.rows(1)[torch.zeros(n, dtype=torch.int64)])

    @precondition(lambda self: len(self.buffer))
    @rule(data=st.data())
    def overwrite(self, data):
        last = len(self.buffer) - 1
        index = data.draw(st.lists(st.integers(0, last), min_size=1, max_size=20, unique=True))
        self.buffer[torch.tensor(index)] = self.rows(len(index))

    @rule()
    def empty(self):
        self.buffer.empty()

    @precondition(lambda self: len(self.buffer))
    @rule()
    def save_and_load(self):
        state = self.buffer.state_dict()
        self.buffer = self.make()
        self.buffer.load_state_dict(state)

    @invariant()
    def neighbors_are_right(self):
        n = len(self.buffer)
        if not n:
            return
        index = torch.arange(n)
        neighbors = self.buffer.sampler.neighbors(self.buffer.storage, index)
        points = stored_points(self.buffer.storage)
        if self.exact:
            assert_neighbors(points, index, neighbors, rtol=1e-9)
        else:
            self.scores.append(recall(points, index, neighbors))

    def teardown(self):
        if self.scores:
            assert sum(self.scores) / len(self.scores) >= 0.995, self.scores


class WritesByDefault(Writes):
    exact = False


TestWritesProven = Writes.TestCase
TestWritesProven.settings = settings(max_examples=soak(40), stateful_step_count=20)
TestWritesByDefault = WritesByDefault.TestCase
TestWritesByDefault.settings = settings(max_examples=soak(40), stateful_step_count=20)


@pytest.mark.parametrize("name", ["halfcheetah", "hopper"])
@pytest.mark.parametrize("ring", [None, 2_000])
def test_recall_through_a_real_training_stream(name, ring):
    points = torch.from_numpy(np.load(STREAMS / f"{name}.npz")["points"])[: soak(3_600)]
    capacity = ring or len(points)
    graph, stats = NeighborGraph(k=10), RunningStandardizer(points.shape[1])
    stored = torch.zeros(capacity, points.shape[1])
    generator = torch.Generator().manual_seed(0)
    scores = []
    for start in range(0, len(points), 5):
        new, where = points[start : start + 5], torch.arange(start, start + 5) % capacity
        stats.update(new, removed=stored[where] if start >= capacity else None)
        stored[where] = new
        graph.write(where, new)
        count = min(start + 5, capacity)
        graph.query(torch.randint(count, (20,), generator=generator), 10, stats.scale)
        if start % 400 == 395:
            index = torch.randint(count, (400,), generator=generator)
            neighbors = graph.query(index, 10, stats.scale)
            scores.append(recall(stored[:count], index, neighbors, stats.scale))
    assert len(scores) == len(points) // 400
    assert min(scores) >= 0.995, scores


def test_exact_equals_brute_force_through_drift_and_arrivals():
    points = walk(1_500)
    points[700:, 2] *= 30  # the spread of a dimension grows at once
    graph, stats = NeighborGraph(k=10, exact=True), RunningStandardizer(6)
    for start in range(0, 1_500, 50):
        chunk = points[start : start + 50]
        stats.update(chunk)
        graph.write(torch.arange(start, start + 50), chunk)
        index = torch.randint(start + 50, (100,))
        neighbors = graph.query(index, 10, stats.scale)
        assert_neighbors(points[: start + 50], index, neighbors, stats.scale, rtol=1e-9)


def test_a_spread_that_grows_a_hundredfold_is_followed():
    points = walk(2_000)
    graph = NeighborGraph(k=10)
    graph.write(torch.arange(2_000), points)
    index = torch.arange(2_000)
    graph.query(index, 10, 1 / points.double().std(0))
    points[1_900:, 0] *= 100
    graph.write(torch.arange(1_900, 2_000), points[1_900:])
    scale = 1 / points.double().std(0)
    neighbors = graph.query(index, 10, scale)
    assert recall(points, index, neighbors, scale) >= 0.999
    assert graph.stats()["rescored"] == 1


def test_a_common_factor_of_the_scale_costs_nothing():
    points = walk(1_000)
    graph = NeighborGraph(k=10)
    graph.write(torch.arange(1_000), points)
    scale = 1 / points.double().std(0)
    first = graph.query(torch.arange(1_000), 10, scale)
    assert torch.equal(graph.query(torch.arange(1_000), 10, 7 * scale), first)
    assert graph.stats()["rescored"] == 0


def test_small_drift_reorders_lists_without_making_them_anew():
    points = walk(1_000)
    graph = NeighborGraph(k=10)
    graph.write(torch.arange(1_000), points)
    scale = 1 / points.double().std(0)
    graph.query(torch.arange(1_000), 10, scale)
    built = graph.stats()["built"]
    drifted = scale * torch.tensor([1.0, 1.02, 0.99, 1.0, 1.01, 1.0], dtype=torch.float64)
    neighbors = graph.query(torch.arange(1_000), 10, drifted)
    assert recall(points, torch.arange(1_000), neighbors, drifted) >= 0.999
    stats = graph.stats()
    assert stats["rescored"] == 1
    assert stats["built"] - built < 100


@pytest.mark.parametrize("jump", [0.005, 0.05, 0.5])
def test_lists_that_a_jump_of_the_scale_puts_into_doubt_are_made_anew(jump):
    points, index = walk(2_000), torch.arange(2_000)
    graph, generator = NeighborGraph(k=10), torch.Generator().manual_seed(0)
    graph.write(index, points)
    scale = 1 / points.double().std(0)
    graph.query(index, 10, scale)
    for number in range(1, 6):
        scale = scale * (jump * torch.randn(6, generator=generator, dtype=torch.float64)).exp()
        assert_neighbors(points, index, graph.query(index, 10, scale), scale)
        assert graph.stats()["rescored"] == number
        assert graph.stats()["certified"] == 1.0
    assert (graph.stats()["built"] > 2_000) == (jump > 0.01)  # little drift is within the slack


def estimated_tail() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Points whose estimated distance exceeds the true one, and two scales that bring that about.

    The list of row 0 holds the rows 1 to 7, then row 8 at the distance 1 along the first dimension.
    Under the second scale that distance is 0.985, while most distances, along the second dimension,
    have grown, so that the estimate is 1.015. Row 400 comes between the two, at 1.
    """
    drift = 0.015
    scales = torch.tensor([[0.0, 0.0], [-drift, drift]], dtype=torch.float64).exp()
    points = torch.zeros(600, 2)
    points[1:8, 1] = 0.01 * torch.arange(1, 8)
    points[8, 0], points[9, 0] = 1.0, 2.0
    points[10:, 1] = 1_000 + 0.5 * torch.arange(590)
    points[400, 1] = 1 / scales[1, 1]
    return points, *scales


@pytest.mark.parametrize("overwritten", [False, True])
def test_a_point_that_finds_no_room_is_not_taken_to_be_farther_than_it_is(overwritten):
    points, before, after = estimated_tail()
    graph = NeighborGraph(k=1, candidates=8, exact=True)
    graph.write(torch.arange(400), points[:400])
    for scale in (before, after):
        graph.query(torch.arange(400), 1, scale)
    assert graph.stats()["rescored"] == 1
    assert torch.equal(graph._ordered_under, before)  # the end of the list was not measured again
    graph.write(torch.arange(400, 600), points[400:])
    graph.query(torch.tensor([399]), 1, after)
    assert graph._lists.positions[0].tolist() == [1, 2, 3, 4, 5, 6, 7, 400]
    if overwritten:  # what is nearer goes away, so that the first neighbor is the one in question
        points[1:8, 1] = -3_000.0
        graph.write(torch.arange(1, 8), points[1:8])
    index = torch.tensor([0])
    neighbors = graph.query(index, 1 if overwritten else 8, after)
    assert neighbors[0, -1] == 8
    assert_neighbors(points, index, neighbors, after, rtol=1e-9)


def assert_certificates(graph: NeighborGraph, step: int = 1) -> None:
    """No point outside of a list (every `step`-th is looked at) is nearer than its reach."""
    points, index = graph.table.rows()[0].double(), graph._lists.listed.nonzero().squeeze(1)[::step]
    scaled = points * graph._scaled.scale
    mode = "donot_use_mm_for_euclid_dist"
    distances = torch.cdist(scaled[index], scaled, compute_mode=mode).square()
    distances.scatter_(1, index.unsqueeze(1), torch.inf)
    listed = graph._lists.positions[index].long()
    distances.scatter_(1, torch.where(listed < 0, index.unsqueeze(1), listed), torch.inf)
    distances[:, graph._waits[: len(points)] | ~graph.table.rows()[1]] = torch.inf
    assert (distances.amin(1) >= graph._lists.reach[index] * graph._scaled.safety()).all()


@pytest.mark.parametrize("d", [2, 40])
def test_certificates_hold_while_the_scale_drifts_and_points_come_and_go(d):
    generator = torch.Generator().manual_seed(d)
    graph = NeighborGraph(k=2, candidates=12, exact=True)
    scale = torch.ones(d, dtype=torch.float64)
    points = torch.randn((600, d), generator=generator)
    graph.write(torch.arange(600), points)
    graph.query(torch.arange(600), 2, scale)
    for turn in range(20):
        where = torch.randperm(600, generator=generator)[:128]
        graph.write(where, torch.randn((128, d), generator=generator))
        scale = scale.clone()
        scale[turn % d] *= 1 + 0.01 * d**0.5 * (-1) ** (turn // d)
        graph.query(where[:1], 2, scale)
        assert_certificates(graph)
        graph.query(torch.arange(600), 2, scale)
        assert_certificates(graph)
    assert graph.stats()["rescored"] == 20


def test_lists_that_are_not_asked_for_are_not_made_anew():
    points = walk(2_000)
    graph = NeighborGraph(k=10)
    graph.write(torch.arange(2_000), points)
    scale = 1 / points.double().std(0)
    graph.query(torch.arange(2_000), 10, scale)
    wide = torch.tensor([1.0, 3.0, 0.5, 1.0, 1.2, 1.0], dtype=torch.float64)
    graph.query(torch.arange(10), 10, scale * wide)
    assert graph.stats()["lists"] < 1_000
    assert np.isnan(NeighborGraph().stats()["certified"])


def test_lists_are_made_when_they_are_asked_for():
    graph = NeighborGraph(k=10)
    graph.write(torch.arange(50_000), torch.randn(50_000, 4))
    assert graph.stats()["lists"] == 0
    graph.query(torch.tensor([3]), 10, torch.ones(4, dtype=torch.float64))
    assert 0 < graph.stats()["lists"] < 1_000


def test_arrivals_are_answered_before_and_after_their_block():
    points = torch.cat([walk(1_000), walk(1_000)[500:800] + 1e-4])
    graph = NeighborGraph(k=10)
    scale = 1 / points.double().std(0)
    graph.write(torch.arange(1_000), points[:1_000])
    graph.query(torch.arange(1_000), 10, scale)
    waiting = set()
    for i in range(1_000, 1_300):
        graph.write(torch.tensor([i]), points[i : i + 1])
        neighbors = graph.query(torch.tensor([i - 500, i]), 10, scale)
        assert i in neighbors[0]
        assert i - 500 in neighbors[1]
        waiting.add(graph.stats()["waiting"] > 0)
    assert waiting == {True, False}
    index = torch.arange(1_300)
    assert recall(points, index, graph.query(index, 10, scale), scale) == 1.0


def test_overwritten_points_are_gone_at_once():
    points = walk(600)
    graph = NeighborGraph(k=10)
    scale = 1 / points.double().std(0)
    graph.write(torch.arange(600), points)
    graph.query(torch.arange(600), 10, scale)
    generator = torch.Generator().manual_seed(0)
    for i in range(400):
        where = torch.randint(600, (1,), generator=generator)
        points[where] = torch.randn((1, 6), generator=generator) * 3
        graph.write(where, points[where])
        if i % 20 == 0:
            index = torch.arange(600)
            assert recall(points, index, graph.query(index, 10, scale), scale) == 1.0


def test_more_than_the_lists_hold_is_answered_by_brute_force():
    points = walk(300)
    graph = NeighborGraph(k=2)
    graph.write(torch.arange(300), points)
    scale = torch.ones(6, dtype=torch.float64)
    neighbors = graph.query(torch.arange(300), 50, scale)
    assert_neighbors(points, torch.arange(300), neighbors, scale)


def test_far_from_the_origin():
    points = (walk(2_000).double() + 1e4).float()
    graph = NeighborGraph(k=10)
    graph.write(torch.arange(2_000), points)
    scale = 1 / points.double().std(0)
    index = torch.arange(2_000)
    assert recall(points, index, graph.query(index, 10, scale), scale) >= 0.999
    graph.write(torch.arange(200), points[:200] + 0.5)
    points[:200] += 0.5
    assert recall(points, index, graph.query(index, 10, scale), scale) >= 0.999


def test_memory_beyond_the_keys_at_any_size():
    graph = NeighborGraph(k=10)
    for start in range(0, 6_000, 50):
        graph.write(torch.arange(start, start + 50), torch.randn(50, 3))
        graph.query(torch.arange(20), 10, torch.ones(3))
        size = start + 50
        if size >= 1_024:
            parts = (graph, graph._scaled, graph._lists)
            tensors = [t for part in parts for t in vars(part).values() if torch.is_tensor(t)]
            constant = sum(t.nbytes for t in tensors if len(t) < 1_024)
            total = sum(t.nbytes for t in tensors) - constant + graph.table.valid.nbytes
            assert total / size <= 300
            assert constant <= 2**14


def test_saved_lists_are_taken_up_and_not_made_anew(tmp_path):
    def make(seed):
        generator = torch.Generator().manual_seed(seed)
        return make_replay_buffer(
            "nmer", capacity=1_000, batch_size=32, search="graph", generator=generator
        )

    buffer = make(1)
    buffer.extend(make_transitions(900))
    for _ in range(40):
        buffer.sample()
    buffer.extend(make_transitions(50, seed=1))
    torch.save(buffer.state_dict(), tmp_path / "state.pt")
    other = make(2)
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    for seed in range(5):
        first, second = buffer.sample(), other.sample()
        assert (first == second).all()
        buffer.extend(make_transitions(30, seed=seed))
        other.extend(make_transitions(30, seed=seed))
    lists = [b.sampler.unit.search.stats() for b in (buffer, other)]
    assert lists[0] == lists[1]


def test_a_state_of_other_points_is_not_taken_up():
    graph, other = NeighborGraph(k=3), NeighborGraph(k=3)
    scale = torch.ones(6, dtype=torch.float64)
    graph.write(torch.arange(200), walk(200))
    graph.query(torch.arange(200), 3, scale)
    points = walk(200, seed=1)
    other.write(torch.arange(200), points)
    other.load_state_dict(graph.state_dict())
    neighbors = other.query(torch.arange(200), 3, scale)
    assert_neighbors(points, torch.arange(200), neighbors, scale)
    longer = NeighborGraph(k=10)
    longer.write(torch.arange(200), walk(200))
    longer.load_state_dict(graph.state_dict())
    assert longer.stats()["lists"] == 0


def test_round_numbers_of_float64_are_told_apart():
    """Their low bits are zero, so that a plain sum of products maps many to the same number."""
    powers = 2.0 ** torch.arange(16, dtype=torch.float64)
    points, scale = torch.cartesian_prod(powers, powers, powers), torch.ones(3).double()
    graph = NeighborGraph(k=3)
    graph.write(torch.arange(4_096), points)
    assert len(graph.state_dict()["points"].unique()) == 4_096
    graph.query(torch.arange(100), 3, scale)
    other, moved = NeighborGraph(k=3), points.clone()
    moved[1_000:2_000] = points[2_000:3_000]
    other.write(torch.arange(4_096), moved)
    other.load_state_dict(graph.state_dict())
    assert other.stats()["waiting"] == 1_000


def test_too_few_candidates_are_refused():
    with pytest.raises(ValueError, match="candidates=5 is less than k=10; give at least k"):
        NeighborGraph(k=10, candidates=5)


def test_fewer_points_than_a_list_holds_among_empty_positions():
    points = torch.full((215, 3), torch.nan)
    points[:20] = torch.randn(20, 3)
    for exact in (False, True):
        graph = NeighborGraph(k=10, exact=exact)
        scale = torch.ones(3, dtype=torch.float64)
        graph.write(torch.arange(200), points[:200])
        graph.query(torch.arange(20), 10, scale)
        points[200:] = torch.randn(15, 3) + 5
        graph.write(torch.arange(200, 215), points[200:])
        index = torch.cat([torch.arange(20), torch.arange(200, 215)])
        assert_neighbors(points, index, graph.query(index, 10, scale), scale)


def test_lists_longer_than_the_buffer():
    points = walk(260)
    for exact in (False, True):
        graph = NeighborGraph(k=50, exact=exact)
        scale = torch.ones(6, dtype=torch.float64)
        for start, stop in ((0, 140), (140, 200), (200, 260)):
            graph.write(torch.arange(start, stop), points[start:stop])
            index = torch.arange(stop)
            assert_neighbors(points[:stop], index, graph.query(index, 50, scale), scale)


def test_constant_dimensions_do_not_hide_drift():
    points = torch.zeros(1_000, 352)
    points[:, :2] = torch.randn(1_000, 2)
    graph = NeighborGraph(k=10)
    graph.write(torch.arange(1_000), points)
    scale = torch.ones(352, dtype=torch.float64)
    scale[:2] = 1 / points[:, :2].double().std(0)
    graph.query(torch.arange(1_000), 10, scale)
    scale = scale.clone()
    scale[0] *= 2.5
    index = torch.arange(300)
    assert recall(points, index, graph.query(index, 10, scale), scale) >= 0.999


def test_lists_whose_entries_were_overwritten_are_made_whole():
    generator = torch.Generator().manual_seed(0)
    points = torch.randn((400, 3), generator=generator)
    graph = NeighborGraph(k=10)
    graph.write(torch.arange(400), points)
    graph.query(torch.arange(400), 10, torch.ones(3, dtype=torch.float64))
    for turn in range(30):  # drift makes lists anew while some of their entries wait
        where = torch.randperm(400, generator=generator)[:100]
        points[where] = torch.randn((100, 3), generator=generator)
        graph.write(where, points[where])
        scale = torch.tensor([1.0, 1.0, 1.0 + 0.5 * (turn % 3)], dtype=torch.float64)
        index = torch.arange(400)
        neighbors = graph.query(index, 10, scale)
        assert (neighbors >= 0).all()
        assert recall(points, index, neighbors, scale) >= 0.999


def test_a_block_of_arrivals_that_are_not_finite():
    points = walk(1_000)
    graph = NeighborGraph(k=10)
    scale = torch.ones(6, dtype=torch.float64)
    graph.write(torch.arange(1_000), points)
    graph.query(torch.arange(1_000), 10, scale)
    points[:200] = torch.nan
    graph.write(torch.arange(200), points[:200])
    index = torch.arange(1_000)
    assert_neighbors(points, index, graph.query(index, 10, scale), scale)


@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
def test_arrivals_are_offered_whatever_the_precision_and_beside_an_outlier(precision):
    points = walk(3_000)
    points[1_500] = 3e3
    graph = NeighborGraph(k=10)
    scale = torch.ones(6, dtype=torch.float64)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        for start, stop in ((0, 2_000), (2_000, 2_500), (2_500, 3_000)):
            graph.write(torch.arange(start, stop), points[start:stop])
            index = torch.arange(stop)
            neighbors = graph.query(index, 10, scale)
            assert recall(points[:stop], index, neighbors, scale) == 1.0
    finally:
        torch.set_float32_matmul_precision(before)


def test_more_overwritten_at_once_than_a_list_can_spare():
    """Clusters whose members are overwritten, all but a few, by points that are far away."""
    generator = torch.Generator().manual_seed(0)
    centers = 10 * torch.randn((20, 1, 3), generator=generator)
    points = (centers + 0.1 * torch.randn((20, 40, 3), generator=generator)).reshape(-1, 3)
    graph = NeighborGraph(k=10)
    scale = torch.ones(3, dtype=torch.float64)
    graph.write(torch.arange(800), points)
    graph.query(torch.arange(800), 10, scale)
    gone = torch.arange(31)
    points[gone] = 500 + torch.randn((31, 3), generator=generator)
    graph.write(gone, points[gone])
    index = torch.arange(31, 40)
    assert graph.stats()["waiting"] == 31
    assert recall(points, index, graph.query(index, 10, scale), scale) == 1.0


def test_positions_emptied_meanwhile_bound_no_list():
    points = walk(6_000)
    graph = NeighborGraph(k=10)
    scale = torch.ones(6, dtype=torch.float64)
    graph.write(torch.arange(3_000), points[:3_000])
    graph.query(torch.arange(3_000), 10, scale)
    points[1_000:2_990] = torch.nan
    graph.write(torch.arange(1_000, 2_990), points[1_000:2_990])
    graph.write(torch.arange(3_000, 6_000), points[3_000:])
    index = torch.cat([torch.arange(1_000), torch.arange(2_990, 6_000)])
    found = graph.query(index, 10, scale)
    assert recall(points, index[::4], found[::4], scale) == 1.0


def test_more_than_lists_are_kept_right_for_is_answered_by_brute_force():
    points = walk(900)
    graph = NeighborGraph(k=4, candidates=16)
    scale = torch.ones(6, dtype=torch.float64)
    graph.write(torch.arange(900), points)
    graph.query(torch.arange(900), 4, scale)
    points[:60] += 50
    for i in range(60):
        graph.write(torch.tensor([i]), points[i : i + 1])
    index = torch.arange(900)
    assert recall(points, index, graph.query(index, 16, scale), scale) == 1.0


def test_a_scale_that_shrinks_or_grows_beyond_float32():
    points = walk(500)
    for factor in (1e-30, 1e30):
        graph = NeighborGraph(k=10)
        graph.write(torch.arange(500), points)
        scale = torch.ones(6, dtype=torch.float64)
        graph.query(torch.arange(500), 10, scale)
        graph.write(torch.arange(100), points[:100])
        index = torch.arange(500)
        far = (points.double() / factor).float()
        graph.write(index, far)
        assert recall(far, index, graph.query(index, 10, scale * factor), scale * factor) == 1.0


def test_empty_positions_do_not_count_as_zeros_in_the_drift():
    points = walk(400) + 1
    points[:, 0] = 3.0  # constant, but not zero
    points[::7] = torch.nan
    graph = NeighborGraph(k=10)
    graph.write(torch.arange(400), points)
    graph.query(torch.arange(400), 10, torch.ones(6, dtype=torch.float64))
    assert graph._scaled.varies.tolist() == [False] + 5 * [True]


def saved_graph(points, scale) -> dict:
    graph = NeighborGraph(k=10)
    graph.write(torch.arange(len(points)), points)
    graph.query(torch.arange(len(points)), 10, scale)
    return graph.state_dict()


def test_lists_are_taken_up_where_rows_were_written_after_saving():
    points, scale = walk(1_300), torch.ones(6, dtype=torch.float64)
    state = saved_graph(points[:1_000], scale)
    points[100:150] = walk(50, seed=3)
    graph = NeighborGraph(k=10)
    graph.write(torch.arange(1_300), points)
    graph.load_state_dict(state)
    assert graph.stats()["lists"] == 950
    assert graph.stats()["waiting"] == 350
    index = torch.arange(1_300)
    assert recall(points, index, graph.query(index, 10, scale), scale) == 1.0


def test_a_saved_buffer_that_is_extended_before_it_is_sampled_keeps_its_lists():
    buffer = make_replay_buffer("nmer", capacity=1_000, batch_size=32)
    buffer.extend(make_transitions(900))
    buffer.sampler.neighbors(buffer.storage, torch.arange(900))
    other = make_replay_buffer("nmer", capacity=1_000, batch_size=32)
    other.load_state_dict(buffer.state_dict())
    other.extend(make_transitions(150, seed=1))
    other.sample()
    stats = other.sampler.unit.search.stats()
    assert stats["built"] - buffer.sampler.unit.search.stats()["built"] < 150
    index = torch.arange(1_000)
    neighbors = other.sampler.neighbors(other.storage, index)
    assert recall(stored_points(other.storage), index, neighbors) >= 0.999


@pytest.mark.parametrize("harm", ["fewer rows", "another version", "other rows"])
def test_a_state_of_no_use_is_left_alone(harm):
    points, scale = walk(1_000), torch.ones(6, dtype=torch.float64)
    state = saved_graph(points, scale)
    if harm == "another version":
        del state["lists"]["reach"]
    points = {"fewer rows": points[:800], "other rows": points + 1e-3}.get(harm, points)
    graph = NeighborGraph(k=10)
    graph.write(torch.arange(len(points)), points)
    graph.load_state_dict(state)
    assert graph.stats()["lists"] == 0
    index = torch.arange(len(points))
    assert recall(points, index, graph.query(index, 10, scale), scale) == 1.0


def test_lists_of_a_table_filled_at_once_equal_brute_force():
    points = walk(6_000, 8)  # three groups
    points[4_000:4_200] = points[100]  # duplicates
    points[5_000] *= 1_000  # an outlier
    points[17] = torch.nan
    graph, scale = NeighborGraph(k=5), torch.rand(8, dtype=torch.float64) + 0.5
    graph.write(torch.arange(6_000), points)
    index = torch.arange(6_000)
    found = graph.query(index, 5, scale)
    assert graph.stats()["built"] == 5_999
    assert (found[17] == -1).all()
    assert not (found == index.unsqueeze(1)).any()
    asked = torch.cat([index[::7], index[4_000:4_050], index[5_000:5_001]])  # 17 is not among them
    assert recall(points, asked, found[asked], scale) == 1
    assert_certificates(graph, step=5)


def test_an_outlier_does_not_loosen_the_bounds_of_other_rows():
    points = walk(2_000, 8)
    points[1_000] *= 1_000
    graph, scale = NeighborGraph(k=5), torch.ones(8, dtype=torch.float64)
    graph.write(torch.arange(2_000), points)
    graph.query(torch.arange(10), 5, scale)
    rows = torch.arange(0, 2_000, 37)
    bound = graph._scaled.bound(rows, 17).double()
    true = oracle_distances(points, rows, 16, scale)[:, -1].square()  # the row itself is the 17th
    assert (bound >= true).all()
    assert (bound <= 3 * true + 0.01).all()


def test_groups_of_near_rows_hold_every_row_once():
    points = torch.randn(1_000, 3)
    groups = halve(points, torch.arange(1_000) + 7, 128)
    assert all(len(group) <= 128 for group in groups)
    assert torch.cat(groups).sort().values.equal(torch.arange(1_000) + 7)
    spread = sum(float(points[group - 7].var(0).sum()) for group in groups) / len(groups)
    assert spread < 0.5 * float(points.var(0).sum())
    assert len(halve(torch.ones(300, 2), torch.arange(300), 128)) == 4  # equal points, too


@pytest.mark.parametrize(("search", "lists"), [("graph", True), ("torch", False)])
def test_build_builds_every_list_once(search, lists):
    buffer = make_replay_buffer("nmer", capacity=3_000, batch_size=32, search=search)
    buffer.extend(make_transitions(3_000))
    seen = []
    buffer.sampler.build(buffer.storage, progress=lambda blocks: seen.extend(blocks) or blocks)
    assert sum(len(block) for block in seen) == (3_000 if lists else 0)
    if lists:
        assert buffer.sampler.unit.search.stats()["lists"] == 3_000
        buffer.sample()
        assert buffer.sampler.unit.search.stats()["built"] == 3_000
