"""One suite that compares every metric, with every search, to its equation in float64.

A new metric is added to `METRICS`.
"""

import copy
import inspect
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from helpers import POINT_KEYS, make_transitions, stored_points
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

from nmer_torchrl import (
    Euclidean,
    FeatureSpace,
    Mahalanobis,
    NeighborPairSampler,
    PairMixup,
    PrioritizedNeighborPairSampler,
    ProductNorm,
    metrics,
)
from nmer_torchrl.buffers import PairPrioritizedReplayBuffer
from nmer_torchrl.metrics import Metric, mahalanobis
from nmer_torchrl.neighbors import FaissSearch, KeOpsSearch, NeighborGraph, TorchSearch
from nmer_torchrl.tracking.covariance import RunningCovariance


def z_scored(points: torch.Tensor) -> torch.Tensor:
    std = points.std(0, correction=0)
    return points / torch.where(std > 1e-8 * points.abs().amax(0), std, 1.0)


# -- the equations: all points `[n, d]` to all distances `[n, n]` ----------------------------------


def euclidean(points, weights=(1.0,) * 5):
    z = z_scored(points) * torch.tensor(weights, dtype=torch.float64)
    return (z.unsqueeze(1) - z).norm(dim=-1)


def whitened(points, shrinkage=0.01):
    z = z_scored(points)
    varies = (z.std(0, correction=0) > 0).double()
    centered = (z - z.mean(0)) * varies
    correlation = (1 - shrinkage) * (centered.T @ centered / len(z))
    correlation.fill_diagonal_(1.0)
    difference = z.unsqueeze(1) - z
    solved = torch.linalg.solve(correlation, difference.reshape(-1, z.shape[1]).T).T
    return (difference * solved.reshape(difference.shape)).sum(-1).clamp_min(0).sqrt()


def product(points):
    difference = z_scored(points).unsqueeze(1) - z_scored(points)
    return difference[..., :3].norm(dim=-1) * difference[..., 3:].norm(dim=-1)


def encode(rows):
    return torch.stack([rows["observation"].sum(-1), rows["action"].square().sum(-1)], -1)


def encoded(points, distances):
    rows = TensorDict(observation=points[:, :3], action=points[:, 3:], batch_size=[len(points)])
    return distances(encode(rows))


@dataclass(frozen=True)
class Case:
    """Holds a metric, its equation, and what it declares."""

    make: Callable[[], Metric]
    equation: Callable[[torch.Tensor], torch.Tensor]
    refuses: tuple[str, ...] = ()  # searches that do not serve it
    by_key: bool = False
    embeds: bool = True
    keops: bool = True  # False spares the time that KeOps compiles for a formula and a width


METRICS = {
    "euclidean": Case(Euclidean, euclidean),
    "weights": Case(
        partial(Euclidean, weights={"action": 0.25}),
        partial(euclidean, weights=(1.0, 1.0, 1.0, 0.25, 0.25)),
        by_key=True,
        keops=False,
    ),
    "mahalanobis": Case(Mahalanobis, whitened),
    "shrunk": Case(
        partial(Mahalanobis, shrinkage=0.3), partial(whitened, shrinkage=0.3), keops=False
    ),
    "product": Case(
        ProductNorm,
        product,
        refuses=("graph", "default graph", "faiss"),
        by_key=True,
        embeds=False,
    ),
    "feature": Case(
        partial(FeatureSpace, encode),
        partial(encoded, distances=partial(euclidean, weights=(1.0, 1.0))),
        by_key=True,
        keops=False,
    ),
    "whitened feature": Case(
        lambda: FeatureSpace(encode, Mahalanobis()),
        partial(encoded, distances=whitened),
        by_key=True,
        keops=False,
    ),
}
SEARCHES = {
    "graph": lambda: NeighborGraph(20, exact=True),
    "default graph": lambda: "graph",
    "torch": TorchSearch,
    "faiss": FaissSearch,
    "keops": KeOpsSearch,
}
# KeOps compiles into a cache that processes share: one process at a time.
CASES = [
    pytest.param(
        case,
        search,
        id=f"{name} by {search}",
        marks=[pytest.mark.xdist_group("keops")] if search == "keops" else [],
    )
    for name, case in METRICS.items()
    for search in SEARCHES
    if search not in case.refuses and (search != "keops" or case.keops)
]
every_case = pytest.mark.parametrize(("case", "search"), CASES)


@pytest.fixture(params=METRICS)
def case(request) -> Case:
    return METRICS[request.param]


def over(*names):
    """Restricts a test to these metrics."""
    return pytest.mark.parametrize("case", [METRICS[name] for name in names], ids=names)


def make_buffer(metric, search="torch", *, k=4, capacity=60, **options):
    sampler = NeighborPairSampler(k, search=search, metric=metric)
    return TensorDictReplayBuffer(
        storage=LazyTensorStorage(capacity),
        sampler=sampler,
        transform=PairMixup(0.75),
        batch_size=16,
        **options,
    )


def correlated(n, seed=0, spread=1.0):
    """Draws rows with correlated dimensions, so that whitening matters."""
    rows = make_transitions(n, seed=seed)
    rows["observation"][:, 1] = 3.0 * rows["observation"][:, 0] + 0.1 * rows["observation"][:, 1]
    rows["action"][:, 0] += 0.2 * rows["observation"][:, 2]
    rows["observation"] *= spread
    return rows


def assert_nearest(buffer, distances, k=4, recall=1.0):
    """Checks that the neighbors of each stored row have the distances of the definition."""
    points = stored_points(buffer.storage)
    n = len(points)
    expected = distances(points).fill_diagonal_(torch.inf)
    neighbors = buffer.sampler.neighbors(buffer.storage, torch.arange(n), k)
    found = expected.gather(1, neighbors.clamp_min(0)).masked_fill(neighbors < 0, torch.inf)
    best = expected.sort(1).values[:, :k]
    best = torch.nn.functional.pad(best, (0, k - best.shape[1]), value=torch.inf)
    if recall == 1:
        torch.testing.assert_close(found, best, rtol=1e-5, atol=1e-9)
    else:
        assert torch.isclose(found, best, rtol=1e-5, atol=1e-9).double().mean() >= recall
    for row in neighbors.tolist():
        there = [position for position in row if position >= 0]
        assert len(set(there)) == len(there)


def test_every_metric_is_held_to_its_equation():
    held = {type(each.make()) for each in METRICS.values()}
    for name, kind in inspect.getmembers(metrics, inspect.isclass):
        if issubclass(kind, Metric) and not inspect.isabstract(kind):
            assert kind in held, f"add {name} and its equation to METRICS in tests/test_metrics.py"


def test_a_search_that_does_not_serve_a_metric_is_refused(case):
    for search, make in SEARCHES.items():
        if search in case.refuses:
            with pytest.raises(ValueError, match="does not support ProductNorm"):
                case.make().check(make(), POINT_KEYS)
        else:
            case.make().check(make(), POINT_KEYS)


@every_case
def test_neighbors_are_those_of_the_equation(case, search):
    buffer = make_buffer(case.make(), SEARCHES[search](), capacity=400)
    buffer.extend(correlated(300))
    assert_nearest(buffer, case.equation)
    buffer.extend(correlated(200, seed=1, spread=2.0))  # wraps
    assert_nearest(buffer, case.equation)


@over("mahalanobis", "shrunk")
def test_a_graph_that_proves_nothing_is_all_but_exact_between_its_renewals(case):
    buffer = make_buffer(case.make(), "graph", capacity=500)
    buffer.extend(correlated(400))
    for seed in range(1, 8):
        buffer.extend(correlated(8, seed=seed))
        assert_nearest(buffer, case.equation, recall=0.998)


@every_case
@settings(max_examples=8)
@given(data=st.data())
def test_after_any_sequence_of_writes(case, search, data):
    recall = 0.95 if search == "default graph" else 1.0  # it proves nothing
    buffer = make_buffer(case.make(), SEARCHES[search](), capacity=30)
    for seed in range(data.draw(st.integers(1, 6))):
        write = data.draw(st.sampled_from(["extend", "add", "setitem", "look"]))
        spread = data.draw(st.sampled_from([1.0, 1.0, 1.05, 1e3]))
        if write == "extend" or len(buffer) < 2:
            count = data.draw(st.sampled_from([1, 8, 40]))
            buffer.extend(correlated(count, seed=seed, spread=spread))
        elif write == "add":
            buffer.add(correlated(1, seed=seed)[0])
        elif write == "setitem":
            index = torch.tensor(
                data.draw(st.lists(st.integers(0, len(buffer) - 1), min_size=1, unique=True))
            )
            buffer[index] = correlated(len(index), seed=seed, spread=spread)
        else:
            assert_nearest(buffer, case.equation, recall=recall)
    assert_nearest(buffer, case.equation, recall=recall)


def test_duplicates_and_dimensions_that_do_not_vary(case):
    rows = correlated(12)[torch.arange(36) % 12].clone()
    rows["observation"][:, 2] = 7.0
    buffer = make_buffer(case.make())
    buffer.extend(rows)
    assert_nearest(buffer, case.equation)


def test_rows_that_are_not_finite_have_no_part_in_it(case):
    rows = correlated(20)
    rows["observation"][3, 0] = torch.nan
    rows["next", "reward"][8] = torch.inf
    buffer = make_buffer(case.make())
    buffer.extend(rows)
    with pytest.warns(UserWarning, match="non-finite"):
        neighbors = buffer.sampler.neighbors(buffer.storage, torch.arange(20))
    assert (neighbors[[3, 8]] == -1).all()
    assert not torch.isin(neighbors, torch.tensor([3, 8])).any()
    buffer[torch.tensor([3, 8])] = correlated(2, seed=5)
    assert_nearest(buffer, case.equation)


@pytest.mark.parametrize("search", ["torch", "graph"])
def test_a_saved_sampler_goes_on_with_the_same_pairs(case, search, tmp_path):
    if search in case.refuses:
        pytest.skip("not served")

    def new():
        return make_buffer(case.make(), search, generator=torch.Generator().manual_seed(1))

    buffer = new()
    buffer.extend(correlated(40))
    buffer.sample()
    buffer.extend(correlated(25, seed=1))
    buffer.sample()
    buffer.dumps(tmp_path / "buffer")
    torch.save(buffer.state_dict(), tmp_path / "state.pt")
    loaded, restored = new(), new()
    loaded.loads(tmp_path / "buffer")
    restored.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    for other in (loaded, restored):
        assert_nearest(other, case.equation)
    expected = buffer.sampler.neighbors(buffer.storage, torch.arange(60))
    for other in (loaded, restored):
        assert torch.equal(other.sampler.neighbors(other.storage, torch.arange(60)), expected)


@over("euclidean", "mahalanobis")
def test_a_saved_graph_is_taken_up_with_its_lists(case):
    first, second = (make_buffer(case.make(), "graph", capacity=600) for _ in range(2))
    first.extend(correlated(500))
    first.sampler.neighbors(first.storage, torch.arange(500))
    first.extend(correlated(2, seed=1))
    second.load_state_dict(first.state_dict())
    nobody = torch.empty(0, dtype=torch.int64)
    second.sampler.neighbors(second.storage, nobody)
    assert second.sampler.unit.search.stats()["lists"] >= 500


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda b: pickle.loads(pickle.dumps(b))])
def test_a_copy_works_by_itself(case, duplicate):
    buffer = make_buffer(case.make(), capacity=2_000)
    buffer.extend(correlated(1_500))
    buffer.sample()
    assert len(pickle.dumps(buffer.sampler)) < 2_000
    twin = duplicate(buffer)
    twin.extend(correlated(20, seed=3))
    index = torch.arange(len(twin))[-20:]
    points = stored_points(twin.storage)
    neighbors = twin.sampler.neighbors(twin.storage, index)
    expected = case.equation(points)[index].scatter(1, index.unsqueeze(1), torch.inf)
    torch.testing.assert_close(
        expected.gather(1, neighbors), expected.sort(1).values[:, :4], rtol=1e-5, atol=1e-9
    )


def test_distances_of_a_batch_are_those_of_the_equation(case):
    buffer = make_buffer(case.make())
    buffer.extend(correlated(50))
    index, _ = buffer.sampler.sample(buffer.storage, 20)
    rows = buffer.storage[:]
    everything = case.equation(stored_points(buffer.storage))
    found = buffer.sampler.distances(rows[index])
    expected = everything[index[:, 0], index[:, 1]].unsqueeze(1)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)
    if not buffer.sampler.metric.embeds:
        with pytest.raises(ValueError, match="use Euclidean or Mahalanobis"):
            buffer.sampler.embed(rows)
    else:
        points = buffer.sampler.embed(rows[index])
        assert points.shape[:2] == (20, 2)
        apart = (points[:, 0] - points[:, 1]).norm(dim=-1, keepdim=True)
        torch.testing.assert_close(apart, expected, rtol=1e-6, atol=1e-9)


def test_a_metric_by_keys_does_not_measure_features(case):
    made = case.make()
    assert (made.by_key, made.embeds) == (case.by_key, case.embeds)
    if made.by_key:
        with pytest.raises(ValueError, match="features do not have"):
            FeatureSpace(encode, made)
    else:
        assert FeatureSpace(encode, made).metric is made


def test_distances_before_anything_was_drawn_are_refused():
    sampler = NeighborPairSampler()
    with pytest.raises(RuntimeError, match="sample from the buffer"):
        sampler.distances(correlated(4).reshape(2, 2))


# -- Mahalanobis -----------------------------------------------------------------------------------


def test_points_are_mapped_anew_only_when_the_whitening_has_drifted(monkeypatch):
    frozen = []
    original = mahalanobis.WhitenedSpace._freeze
    monkeypatch.setattr(
        mahalanobis.WhitenedSpace, "_freeze", lambda s, w: frozen.append(w) or original(s, w)
    )
    buffer = make_buffer(Mahalanobis(), capacity=600)
    buffer.extend(correlated(400))
    for seed in range(1, 6):
        buffer.extend(correlated(1, seed=seed))
        assert_nearest(buffer, whitened)
    assert len(frozen) == 1
    buffer.extend(correlated(195, seed=20, spread=3.0))
    assert_nearest(buffer, whitened)
    assert len(frozen) == 2


def test_answers_between_renewals_are_exact_though_few_are_proven(monkeypatch):
    monkeypatch.setattr(mahalanobis, "_DRIFT", 10.0)  # never renewed: all is left to the proof
    scanned = []
    original = mahalanobis.WhitenedSpace._scan
    monkeypatch.setattr(
        mahalanobis.WhitenedSpace,
        "_scan",
        lambda s, index, k: scanned.append(len(index)) or original(s, index, k),
    )
    monkeypatch.setattr(mahalanobis, "_WIDER", 2)
    buffer = make_buffer(Mahalanobis(), capacity=200)
    buffer.extend(correlated(100))
    assert_nearest(buffer, whitened)
    assert not scanned
    buffer.extend(make_transitions(100, seed=1))  # not correlated
    assert_nearest(buffer, whitened)
    assert sum(scanned) > 20


def test_whitening_does_not_care_for_linear_maps_of_the_rows():
    plain, mapped = (make_buffer(Mahalanobis(shrinkage=1e-5), capacity=200) for _ in range(2))
    rows = make_transitions(200).double()
    plain.extend(rows)
    turned = rows.clone()
    linear = torch.tensor([[1.0, 2.0, 0.0], [0.0, 1.0, -1.0], [3.0, 0.0, 1.0]]).double()
    turned["observation"] = rows["observation"] @ linear
    mapped.extend(turned)
    index = torch.arange(200)
    first, second = (b.sampler.neighbors(b.storage, index) for b in (plain, mapped))
    assert (first == second).float().mean() > 0.99


def test_full_shrinkage_is_the_euclidean_metric():
    buffer = make_buffer(Mahalanobis(shrinkage=1.0), capacity=200)
    buffer.extend(correlated(200))
    assert_nearest(buffer, euclidean)


@settings(max_examples=30)
@given(data=st.data())
def test_running_correlation_is_that_of_the_points_that_remain(data):
    stats, kept = RunningCovariance(3), torch.empty(0, 3)
    for seed in range(data.draw(st.integers(1, 5))):
        generator = torch.Generator().manual_seed(seed)
        size = data.draw(st.sampled_from([1e-3, 1.0, 1e6]))
        new = torch.randn(data.draw(st.integers(1, 20)), 3, generator=generator) * size
        new[:, 2] += new[:, 0]
        gone = data.draw(st.integers(0, len(kept)))
        stats.replace(new, kept[:gone])
        kept = torch.cat([kept[gone:], new])
    if stats.doubt > 1e-9:
        stats.recompute(kept)
    assert stats.doubt < 1e-9
    assert stats.count == len(kept)
    if len(kept) > 1:
        z = z_scored(kept.double())
        z = z - z.mean(0)
        torch.testing.assert_close(stats.correlation(), z.T @ z / len(z), rtol=0, atol=1e-7)


def test_wide_rows_that_are_gone_leave_nothing_behind():
    buffer = make_buffer(Mahalanobis(), capacity=40)
    buffer.extend(correlated(40, spread=1e7))
    buffer.sample()
    for seed in range(4):
        buffer.extend(correlated(10, seed=seed + 1, spread=1e-2))
    assert_nearest(buffer, whitened)


def test_a_lone_row_and_rows_that_are_all_the_same():
    buffer = make_buffer(Mahalanobis())
    buffer.extend(correlated(1))
    assert (buffer.sample()["index"] == 0).all()
    buffer.extend(correlated(1)[torch.zeros(8, dtype=torch.int64)])
    assert_nearest(buffer, whitened)


# -- features --------------------------------------------------------------------------------------


def test_refresh_puts_all_rows_through_a_function_that_has_changed():
    layer = torch.nn.Linear(3, 2)
    buffer = make_buffer(FeatureSpace(lambda rows: layer(rows["observation"])), "graph")

    def distances(points):
        return euclidean(layer(points[:, :3].float()).detach().double(), (1.0, 1.0))

    buffer.extend(correlated(50))
    assert_nearest(buffer, distances)
    with torch.no_grad():
        layer.weight.normal_(generator=torch.Generator().manual_seed(3))
    buffer.sampler.refresh()
    assert_nearest(buffer, distances)


def test_only_rows_that_were_written_go_through_the_function():
    seen = []
    buffer = make_buffer(FeatureSpace(lambda rows: seen.append(len(rows)) or encode(rows)))
    buffer.extend(correlated(50))
    buffer.sample()
    buffer.extend(correlated(3, seed=1))
    buffer.sample()
    buffer.sample()
    assert seen == [50, 3]


def test_features_need_no_gradient():
    buffer = make_buffer(FeatureSpace(torch.nn.Linear(3, 2).forward))
    buffer.sampler.unit.rows.feature = lambda rows: torch.nn.Linear(3, 2)(rows["observation"])
    buffer.extend(correlated(20))
    buffer.sample()
    assert not buffer.sampler.embed(buffer.storage[:]).requires_grad


# -- bad input -------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_bad_weights_are_named(bad):
    with pytest.raises(ValueError, match=rf"weights\['action'\]={bad}.*leave it out of `keys`"):
        Euclidean(weights={"action": bad})


def test_weights_of_other_entries_are_named():
    with pytest.raises(ValueError, match=r"'torque', but distances are measured in \('observ"):
        NeighborPairSampler(metric=Euclidean(weights={"torque": 2.0}))


@pytest.mark.parametrize("bad", [0.0, -0.1, 1.5, float("nan")])
def test_bad_shrinkage_is_named(bad):
    with pytest.raises(ValueError, match=rf"shrinkage={bad}.*from 1e-5.*to 1"):
        Mahalanobis(shrinkage=bad)


@pytest.mark.parametrize("search", ["graph", "faiss", NeighborGraph(), FaissSearch()])
def test_searches_that_do_not_serve_a_product_are_refused(search):
    with pytest.raises(ValueError, match=r'does not support ProductNorm.*use search="torch"'):
        NeighborPairSampler(search=search, metric=ProductNorm())


def test_the_nearest_row_by_the_product_may_be_far_in_state():
    rows = make_transitions(40)
    rows["observation"][:3], rows["action"][:3] = 0.0, 0.0
    rows["observation"][1], rows["action"][1] = 1e-3, 1e-3  # near to the first in both
    rows["observation"][2] = 3.0  # far from it, with the same action
    for metric, nearest in ((Euclidean(), 1), (ProductNorm(), 2)):
        buffer = make_buffer(metric, k=1)
        buffer.extend(rows)
        found = buffer.sampler.neighbors(buffer.storage, torch.tensor([0]), 1)
        assert found.item() == nearest


def test_a_product_needs_both_factors():
    for keys in (["observation"], ["action"]):
        with pytest.raises(ValueError, match="at least one other"):
            NeighborPairSampler(keys=keys, metric=ProductNorm())


def test_what_is_no_metric_is_refused():
    for bad in ("mahalanobis", Euclidean, 3):
        with pytest.raises(TypeError, match=r"not a metric; give an object such as Euclidean\(\)"):
            NeighborPairSampler(metric=bad)
    with pytest.raises(TypeError, match="not callable"):
        FeatureSpace(3)


@pytest.mark.parametrize(
    "feature",
    [
        lambda rows: rows["observation"][:, 0],
        lambda rows: rows["observation"][:1],
        lambda rows: rows["identity"].unsqueeze(1),
        lambda rows: rows,
    ],
)
def test_what_is_no_feature_is_named(feature):
    buffer = make_buffer(FeatureSpace(feature))
    buffer.extend(correlated(5))
    with pytest.raises(ValueError, match=r"for 5 rows, but it must return .* \(5, f\)"):
        buffer.sample()


def test_priorities_go_with_any_metric():
    sampler = PrioritizedNeighborPairSampler(50, 4, search="torch", metric=Mahalanobis())
    buffer = PairPrioritizedReplayBuffer(
        storage=LazyTensorStorage(50),
        sampler=sampler,
        transform=lambda pairs: pairs,
        batch_size=8,
    )
    buffer.extend(correlated(50))
    buffer.sample()
    assert_nearest(buffer, whitened)


def test_the_keys_of_the_oracle_are_the_samplers():
    assert NeighborPairSampler().unit.rows.keys == POINT_KEYS
