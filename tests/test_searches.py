"""One suite that holds every search to the text of `NeighborSearch` and to what it declares."""

import copy
import fcntl
import os
import pickle
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import assert_neighbors
from hypothesis import given, settings
from hypothesis import strategies as st
from soak import soak

from nmer_torchrl.metrics import ProductNorm
from nmer_torchrl.neighbors import (
    DeviceSearch,
    FaissSearch,
    KeOpsSearch,
    NeighborGraph,
    NeighborSearch,
    PointTable,
    TorchSearch,
    check_search,
    keops,
    make_search,
)
from nmer_torchrl.neighbors.base import as_search
from nmer_torchrl.neighbors.exact import relative_error
from nmer_torchrl.tracking.standardize import RunningStandardizer

SEARCHES = [
    pytest.param(partial(NeighborGraph, exact=True), id="exact graph"),
    pytest.param(NeighborGraph, id="graph"),
    pytest.param(TorchSearch, id="torch"),
    pytest.param(FaissSearch, id="faiss"),
    pytest.param(lambda k=10: DeviceSearch(TorchSearch(), "cpu"), id="torch on a device"),
    # KeOps compiles for each k and width, some ten seconds: the tests share a few of both.
    pytest.param(KeOpsSearch, id="keops", marks=pytest.mark.xdist_group("keops")),
]
every_search = pytest.mark.parametrize("make", SEARCHES)
STREAM = Path(__file__).parent / "data" / "halfcheetah.npz"


def digits(make) -> float:
    """Share of a distance by which an answer may be farther than the definition's.

    A search that is not exact is held to the order of float32 distances.
    """
    return 1e-9 if make().exact else 1e-5


def filled(make, points: torch.Tensor):
    search = make()
    search.write(torch.arange(len(points)), points)
    return search


@every_search
def test_satisfies_the_protocol(make):
    assert isinstance(make(), NeighborSearch)
    assert as_search(search := make()) is search  # it declares what it can do


def test_only_the_graph_by_default_is_not_exact():
    assert [case.id for case in SEARCHES if not case.values[0]().exact] == ["graph"]


@every_search
def test_a_product_of_norms_is_served_or_refused(make):
    search, points = make(), torch.randn(200, 5)
    if not search.products:
        with pytest.raises(ValueError, match="does not support ProductNorm"):
            ProductNorm().check(search, ("observation", "action"))
        return
    ProductNorm().check(search, ("observation", "action"))
    search.write(torch.arange(200), points)
    scale = torch.tensor([[1.0, 2.0, 0.5, 0.0, 0.0], [0.0, 0.0, 0.0, 1.0, 3.0]]).double()
    norms = ((points.double().unsqueeze(1) - points).unsqueeze(-2) * scale).norm(dim=-1)
    expected = norms.prod(-1).fill_diagonal_(torch.inf)
    found = search.query(torch.arange(200), 4, scale)  # KeOps compiles it for test_metrics, too
    best = expected.sort(1).values[:, :4]
    torch.testing.assert_close(expected.gather(1, found), best, rtol=1e-5, atol=0)


@every_search
def test_what_fills_its_answers_pads_only_where_others_are_missing(make):
    search, points = make(), torch.randn(40, 5)
    assert search.fills
    points[::4] = torch.nan  # 30 are there
    search.write(torch.arange(40), points)
    for k in (1, 10):
        found = search.query(torch.arange(40), k, torch.ones(5, dtype=torch.float64))
        assert ((found >= 0).all(1) == points.isfinite().all(1)).all()


@every_search
def test_a_table_holds_the_points_as_they_were_written(make):
    search, points = make(), torch.randn(40, 5)
    points[3] = torch.nan
    search.write(torch.arange(40), points)
    if search.table is not None:
        torch.testing.assert_close(search.table.present(), points, rtol=0, atol=0, equal_nan=True)


@every_search
def test_a_saved_state_is_taken_up_or_ignored(make):
    points, scale, index = torch.randn(300, 5), torch.ones(5).double(), torch.arange(300)
    search, other = filled(make, points), filled(make, points)
    expected = search.query(index, 10, scale)
    for state in (search.state_dict(), {}, filled(NeighborGraph, torch.randn(9, 3)).state_dict()):
        other.load_state_dict(state)
        assert_neighbors(points, index, other.query(index, 10, scale), scale, rtol=digits(make))
    assert_neighbors(points, index, expected, scale, rtol=digits(make))


def test_an_object_with_three_methods_has_the_defaults():
    class Three:
        def write(self, index, points):
            self.written = index, points

        def query(self, index, k, scale):
            return index.new_zeros(len(index), k)

        def clear(self):
            self.written = None

    search = as_search(given := Three())
    assert (search.products, search.exact, search.fills, search.table) == (False, True, False, None)
    assert search.state_dict() == {}
    search.load_state_dict({"lists": 3})
    search.write(torch.arange(2), torch.ones(2, 1))
    assert given.written[0].tolist() == [0, 1]
    assert search.query(torch.arange(2), 3, torch.ones(1)).shape == (2, 3)
    search.clear()
    assert given.written is None


@every_search
@pytest.mark.parametrize(("n", "d"), [(500, 5), (3_000, 23)])
def test_equals_the_definition(make, n, d):
    points = torch.randn(n, d) * torch.logspace(-3, 3, d) + torch.linspace(-1e3, 1e3, d)
    scale = 1 / points.double().std(0)
    index = torch.randint(n, (300,))
    neighbors = filled(make, points).query(index, 10, scale)
    assert neighbors.shape == (300, 10)
    assert neighbors.dtype == torch.int64
    assert_neighbors(points, index, neighbors, scale, rtol=digits(make))


@pytest.mark.parametrize("make", [case for case in SEARCHES if case.id != "graph"])
def test_every_answer_along_a_training_stream_is_that_of_the_definition(make):
    points = torch.from_numpy(np.load(STREAM)["points"])[:2_000]
    search, stats, capacity = make(), RunningStandardizer(points.shape[1]), 800
    stored, generator = torch.zeros(capacity, points.shape[1]), torch.Generator().manual_seed(0)
    for number, new in enumerate(points.split(25)):
        where = torch.arange(25 * number, 25 * number + 25) % capacity
        stats.update(new, removed=stored[where] if 25 * number >= capacity else None)
        stored[where] = new
        search.write(where, new)
        count = min(25 * number + 25, capacity)
        index = torch.randint(count, (40,), generator=generator)
        neighbors = search.query(index, 10, stats.scale)
        assert_neighbors(stored[:count], index, neighbors, stats.scale, rtol=1e-9)


@every_search
def test_scale_comes_with_the_query(make):
    points = torch.randn(400, 5)
    search = filled(make, points)
    index = torch.arange(400)
    for seed in range(3):
        scale = torch.rand(5, generator=torch.Generator().manual_seed(seed)).double() + 0.01
        neighbors = search.query(index, 10, scale)
        assert_neighbors(points, index, neighbors, scale, rtol=digits(make))


@every_search
def test_duplicates_never_yield_the_position_itself(make):
    points = torch.randn(30, 5).repeat(11, 1)
    index = torch.arange(len(points))
    scale = torch.ones(5, dtype=torch.float64)
    neighbors = filled(make, points).query(index, 10, scale)
    assert_neighbors(points, index, neighbors, scale)
    assert (neighbors % 30 == (index % 30).unsqueeze(1)).all()


@every_search
def test_near_duplicates_far_from_the_origin_are_told_apart(make):
    # In float32 the squared norms alone would be off by more than these distances.
    points = torch.randn(200, 5, dtype=torch.float64) * 100
    points[:20] = 300 + torch.arange(20).double().unsqueeze(1) * 1e-3
    points = points.float()
    scale = torch.ones(5, dtype=torch.float64)
    index = torch.arange(20)
    assert_neighbors(points, index, filled(make, points).query(index, 10, scale), scale)


@every_search
def test_fewer_others_than_k_are_padded(make):
    scale = torch.ones(5, dtype=torch.float64)
    for n in range(1, 14):
        points = torch.randn(n, 5)
        neighbors = filled(make, points).query(torch.arange(n), 10, scale)
        assert_neighbors(points, torch.arange(n), neighbors, scale)
        assert ((neighbors >= 0).sum(1) == min(n - 1, 10)).all()


@every_search
def test_rewritten_and_emptied_positions(make):
    points = torch.randn(60, 5)
    search = filled(make, points)
    points[10:30] = torch.randn(20, 5)
    search.write(torch.arange(10, 30), points[10:30])
    points[5] = torch.nan
    points[40, 2] = torch.inf
    search.write(torch.tensor([40, 5]), points[[40, 5]])
    scale = torch.rand(5).double() + 0.5
    neighbors = search.query(torch.arange(60), 10, scale)
    assert not torch.isin(neighbors, torch.tensor([5, 40])).any()
    assert (neighbors[[5, 40]] == -1).all()
    there = torch.tensor([i for i in range(60) if i not in (5, 40)])
    assert_neighbors(points, there, neighbors[there], scale)
    search.write(torch.tensor([5]), torch.zeros(1, 5))
    assert (search.query(torch.tensor([5]), 10, scale) >= 0).all()


@every_search
def test_positions_may_come_in_any_order_and_leave_gaps(make):
    points = torch.full((50, 5), torch.nan)
    index = torch.randperm(50)[:20]
    points[index] = torch.randn(20, 5)
    search = make()
    for chunk in index.split(3):
        search.write(chunk, points[chunk])
    scale = torch.ones(5, dtype=torch.float64)
    assert_neighbors(points, index, search.query(index, 10, scale), scale)


@every_search
def test_clear_forgets_everything_also_the_width(make):
    search = filled(make, torch.randn(20, 5))
    search.clear()
    points = torch.randn(19, 23)
    index = torch.arange(19)
    search.write(index, points)
    scale = torch.ones(23, dtype=torch.float64)
    assert_neighbors(points, index, search.query(index, 10, scale), scale)


@every_search
def test_float64_points_keep_their_digits(make):
    points = torch.randn(100, 5, dtype=torch.float64) * 1e-7 + 1.0
    scale = 1 / points.std(0)
    neighbors = filled(make, points).query(torch.arange(100), 10, scale)
    assert_neighbors(points, torch.arange(100), neighbors, scale)


@every_search
def test_no_queries_no_rows(make):
    search = filled(make, torch.randn(20, 5))
    assert search.query(torch.arange(0), 3, torch.ones(5)).shape == (0, 3)


@every_search
def test_other_width_is_refused(make):
    search = filled(make, torch.randn(20, 5))
    with pytest.raises(ValueError, match="4 dimensions, but those stored before have 5"):
        search.write(torch.arange(2), torch.randn(2, 4))


@every_search
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))])
def test_a_copy_is_empty_and_works(make, duplicate):
    search = duplicate(filled(make, torch.randn(5_000, 5)))
    assert len(pickle.dumps(search)) < 1_000
    points = torch.randn(30, 5)
    search.write(torch.arange(30), points)
    scale = torch.ones(5, dtype=torch.float64)
    assert_neighbors(points, torch.arange(30), search.query(torch.arange(30), 10, scale), scale)


@every_search
@settings(max_examples=soak(25))
@given(data=st.data())
def test_any_sequence_of_writes_equals_the_definition(make, data):
    search = make()
    points = torch.full((40, 5), torch.nan)
    for _ in range(data.draw(st.integers(1, 6))):
        index = data.draw(st.lists(st.integers(0, 39), min_size=1, max_size=40, unique=True))
        grid = data.draw(st.booleans())  # a coarse grid makes ties and duplicates
        new = torch.randn(len(index), 5, generator=torch.Generator().manual_seed(sum(index)))
        new = new.round() if grid else new
        if data.draw(st.booleans()):
            new[0, 0] = torch.nan
        points[index] = new
        search.write(torch.tensor(index), new)
        there = points.isfinite().all(-1).nonzero().squeeze(1)
        k = data.draw(st.sampled_from([1, 10]))
        scale = torch.tensor([1.0, 0.1, 10.0, 1.0, 2.0], dtype=torch.float64)
        neighbors = search.query(there, k, scale)
        assert_neighbors(points, there, neighbors, scale, rtol=digits(make))


def test_blocks_of_points_give_the_same_as_one(monkeypatch):
    points = torch.randn(1_000, 5)
    scale = torch.ones(5, dtype=torch.float64)
    monkeypatch.setattr("nmer_torchrl.neighbors.torch.BLOCK", 4_096)
    neighbors = filled(TorchSearch, points).query(torch.arange(1_000), 10, scale)
    assert_neighbors(points, torch.arange(1_000), neighbors, scale)


@pytest.mark.parametrize("precision", ["high", "medium"])
def test_coarse_matrix_products_cost_time_not_exactness(precision):
    points = torch.randn(500, 5) + 3
    scale = torch.ones(5, dtype=torch.float64)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        neighbors = filled(TorchSearch, points).query(torch.arange(500), 10, scale)
    finally:
        torch.set_float32_matmul_precision(before)
    assert_neighbors(points, torch.arange(500), neighbors, scale)


@pytest.mark.parametrize("precision", ["tf32", "ieee"])
def test_precision_may_be_set_by_backend(precision):
    """PyTorch then refuses the older question for it, once both ways have been used."""
    torch.backends.cuda.matmul.fp32_precision = precision
    try:
        coarse = relative_error(5) > 1e-4
        assert coarse == (precision == "tf32")
        points, scale = torch.randn(300, 5) + 3, torch.ones(5, dtype=torch.float64)
        for make in (TorchSearch, NeighborGraph):
            neighbors = filled(make, points).query(torch.arange(300), 10, scale)
            assert_neighbors(points, torch.arange(300), neighbors, scale)
    finally:
        torch.backends.cuda.matmul.fp32_precision = "none"
        torch.set_float32_matmul_precision("highest")


def test_overflow_in_float32_is_searched_again():
    points = torch.tensor([[0.0], [1e30], [-1e30], [3e30]])
    scale = torch.ones(1, dtype=torch.float64)
    for make in (TorchSearch, FaissSearch):
        neighbors = filled(make, points).query(torch.arange(4), 3, scale)
        assert_neighbors(points, torch.arange(4), neighbors, scale)


def test_memory_beyond_the_points_is_bounded(monkeypatch):
    sizes = []
    addmm = torch.addmm
    monkeypatch.setattr(
        torch, "addmm", lambda *a, **kw: sizes.append(a[0].numel()) or addmm(*a, **kw)
    )
    filled(TorchSearch, torch.randn(200_000, 3)).query(torch.arange(600), 5, torch.ones(3))
    assert max(sizes) <= 2**24


@pytest.mark.xdist_group("keops")
def test_keops_refuses_more_points_than_it_can_number(monkeypatch):
    monkeypatch.setattr("nmer_torchrl.neighbors.keops._LARGEST", 10)
    with pytest.raises(ValueError, match=r"at most 10 points, but 11 .*search=\"torch\""):
        filled(KeOpsSearch, torch.randn(11, 5)).query(torch.arange(2), 2, torch.ones(5))


@pytest.mark.parametrize(
    ("name", "package", "line"),
    [
        ("keops", "pykeops.torch", "pip install pykeops"),
        ("faiss", "faiss", "pip install faiss-cpu"),
    ],
)
def test_missing_package_gives_the_line_that_installs_it(monkeypatch, name, package, line):
    monkeypatch.setitem(__import__("sys").modules, package, None)
    with pytest.raises(ImportError, match=line):
        make_search(name, 10, torch.device("cpu"))


def test_auto_follows_the_device():
    assert isinstance(make_search("auto", 10, torch.device("cpu")), NeighborGraph)


@pytest.mark.xdist_group("keops")
def test_auto_is_keops_on_cuda():
    assert isinstance(make_search("auto", 10, torch.device("cuda")), KeOpsSearch)


def test_unknown_searches_are_named_with_the_known():
    with pytest.raises(ValueError, match=r"'annoy'.*auto.*graph.*keops.*torch.*faiss"):
        check_search("annoy")
    for bad in (3, object(), TorchSearch):
        with pytest.raises(TypeError, match="write, query and clear"):
            check_search(bad)


def test_table_reads_what_was_never_written_as_absent():
    table = PointTable()
    assert not len(table.read(torch.tensor([0, 7])))
    table.write(torch.tensor([3]), torch.ones(1, 2))
    read = table.read(torch.tensor([2, 3, 4_000]))  # of what is beyond, nothing is read
    assert read.isnan().any(-1).tolist() == [True, False]


KEOPS_SCRIPT = """
import torch
from nmer_torchrl.neighbors import KeOpsSearch

print("ready", flush=True)
search = KeOpsSearch()
search.write(torch.arange(9), torch.arange(9.0).unsqueeze(1))
print(search.query(torch.tensor([0, 8]), 1, torch.ones(1)).flatten().tolist())
"""


def test_processes_take_turns_at_the_cache_of_keops(tmp_path):
    variables = os.environ | {"KEOPS_CACHE_FOLDER": str(tmp_path), "OMP_NUM_THREADS": "1"}
    with (tmp_path / "nmer_torchrl.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # as another process does while it compiles
        with subprocess.Popen(
            [sys.executable, "-c", KEOPS_SCRIPT],
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            assert process.stdout.readline() == "ready\n"
            time.sleep(2.0)  # without the lock, KeOps makes its folder within half a second
            before = [path.name for path in tmp_path.iterdir()]
            fcntl.flock(lock, fcntl.LOCK_UN)
            output, errors = process.communicate(timeout=300)
    assert before == ["nmer_torchrl.lock"]
    # It goes on as soon as it may, and KeOps says nothing.
    assert (process.returncode, output, errors) == (0, "[1, 7]\n", "")
    assert len(list(tmp_path.rglob("*.so"))) == 1


def test_a_formula_is_compiled_under_the_lock_and_looked_up_without_it(tmp_path, monkeypatch):
    monkeypatch.setenv("KEOPS_CACHE_FOLDER", str(tmp_path))
    held = []

    def reduce(*variables):
        with (tmp_path / "nmer_torchrl.lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                held.append(False)
            except BlockingIOError:
                held.append(True)
        return torch.zeros(1, 1)

    (tmp_path / "nmer_torchrl.lock").touch()
    monkeypatch.setattr(keops, "_genred", lambda *_: reduce)
    keops._reduction.cache_clear()
    for dtype in (torch.float32, torch.float32, torch.float64):
        keops._reduction(1, 1, 1)(torch.zeros(1, 1, dtype=dtype))
    keops._reduction.cache_clear()
    assert held == [True, False, True]
