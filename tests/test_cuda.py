"""Buffers on CUDA: on a real device if there is one, else on a simulated one."""

import copy
import functools
import itertools
import pickle
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from helpers import assert_neighbors, make_transitions, oracle_scale, stored_points
from pretend_cuda import Pretended, pretend_cuda, some_cuda
from torchrl.data import LazyTensorStorage
from torchrl.data.replay_buffers.samplers import prioritized

from nmer_torchrl import FeatureSpace, _compat, loop, make_replay_buffer
from nmer_torchrl.functional import sample_beta
from nmer_torchrl.methods import METHODS, option_names, options
from nmer_torchrl.neighbors import DeviceSearch, NeighborGraph
from nmer_torchrl.pairs import QuantileCap
from nmer_torchrl.storages import move_state
from nmer_torchrl.tracking import standardize
from nmer_torchrl.tracking.standardize import RunningStandardizer

sys.path.append(str(Path(__file__).parents[1] / "recipes" / "benchmarks"))
import counts  # isort: skip

KINDS = {kind: option_names(method) for kind, method in METHODS.items()}
SEARCHES = ("graph", "keops", "torch", "faiss")
METRICS = {
    **{name: functools.partial(str, name) for name in options.METRICS},
    "euclidean": lambda: {"euclidean": {"weights": {"action": 0.5}}},
    "feature": lambda: FeatureSpace(_double),
}


def _double(rows):
    """Doubles the points, so that KeOps compiles one formula for all metrics."""
    return 2 * torch.cat([rows["observation"], rows["action"]], -1)


def refusal(kind, search, metric):
    """Returns the error for a search, a metric and a method; None if they fit together."""
    if metric == "product" and search in ("graph", "faiss"):
        return "does not support ProductNorm"
    if metric == "product" and kind == "gp":
        return "needs a metric with a Euclidean embedding"
    return None


EVERY = [
    (kind, search, metric)
    for kind in KINDS
    for search in (SEARCHES if "search" in KINDS[kind] else (None,))
    for metric in (METRICS if "metric" in KINDS[kind] else (None,))
]
CASES = [case for case in EVERY if refusal(*case) is None]
REFUSED = [case for case in EVERY if refusal(*case) is not None]


def make(kind, device, search=None, metric=None, *, seed=0, size=40, k=10):
    options = {} if search is None else {"search": search}
    if "k" in KINDS[kind]:
        options["k"] = k
    if metric is not None:
        options["metric"] = METRICS[metric]()
    return make_replay_buffer(
        kind,
        capacity=size,
        batch_size=16,
        device=device,
        generator=None if seed is None else torch.Generator(device).manual_seed(seed),
        **options,
    )


def draw(buffer, device):
    """Draws a batch, and reports errors to methods that need them."""
    batch = buffer.sample()
    for entry in batch.values(True, True):
        assert entry.device.type == device.split(":")[0]
    batch["td_error"] = batch["next", "reward"].reshape(len(batch), -1)[:, 0].abs()
    if hasattr(buffer.sampler, "priorities"):
        buffer.update_tensordict_priority(batch)
    elif hasattr(buffer.sampler, "finish_episode"):
        buffer.update_priority(batch["index"], batch["td_error"])
        buffer.sampler.finish_episode(1.0, buffer.storage)
    return batch.cpu()


def live(make_one, device, folder):
    """Uses a buffer in every way: all kinds of writes, draws between them, and saving."""
    buffer, batches = make_one(), []
    rows = [make_transitions(n, terminated=0.1, seed=n) for n in (8, 5, 2, 3)]
    rows[0]["observation"][7] = torch.nan
    for write in (
        lambda: buffer.extend(rows[0].to(device)),
        lambda: buffer.add(rows[2][0].to(device)),
        lambda: buffer.add(rows[2][1]),
        lambda: buffer.extend(rows[1]),  # wraps around
        lambda: buffer.__setitem__(5, buffer.storage[4]),
    ):
        write()
        batches.append(draw(buffer, device))
    again = make_one()
    again.load_state_dict(copy.deepcopy(buffer.state_dict()))
    sampler = pickle.loads(pickle.dumps(buffer.sampler))
    other = type(buffer)(
        storage=buffer.storage, sampler=sampler, transform=lambda rows: rows, batch_size=16
    )
    assert other.sample()["observation"].device.type == device.split(":")[0]
    for one in (buffer, again):
        one.extend(rows[3].to(device))
        batches.append(draw(one, device))
    # TorchRL cannot load the generator of a buffer on CUDA, which `dumps` saves.
    buffer.set_rng(None)
    buffer.dumps(folder)
    loaded = make_one(seed=None)
    loaded.loads(folder)
    batches.append(draw(loaded, device))
    return batches


@pytest.mark.filterwarnings("ignore:The row at position 7 has a non-finite entry")
@pytest.mark.parametrize(("kind", "search", "metric"), CASES)
def test_every_method_lives_on_cuda_as_on_the_cpu(kind, search, metric, tmp_path):
    def life(device):
        torch.manual_seed(0)
        # Of KeOps one formula for all methods, 1nn among them, since each takes long to compile.
        k = 1 if search == "keops" else 3
        make_one = functools.partial(make, kind, device, search, metric, size=12, k=k)
        return live(make_one, device, tmp_path / device)

    with some_cuda() as waits:
        there = life("cuda:0")
    if waits is None:  # the numbers of a real device are its own
        return
    # A dispatch mode has networks, such as ERO's, multiply matrices by another routine.
    with pretend_cuda() if kind in ("ero", "tuned_ct") else nullcontext():
        here = life("cpu")
    for a, b in zip(there, here, strict=True):
        for key in b.keys(True, True):
            torch.testing.assert_close(a[key], b[key], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("kind", "search", "metric"), REFUSED)
def test_what_does_not_go_together_is_refused_on_cuda(kind, search, metric, cuda):
    def live_on():
        buffer = make(kind, "cuda:0", search, metric, size=12, k=1)
        buffer.extend(make_transitions(8).to("cuda:0"))
        buffer.sample()

    with pytest.raises((ValueError, TypeError), match=refusal(kind, search, metric)):
        live_on()


@pytest.mark.parametrize("search", ["auto", "graph", "torch", "faiss"])
def test_neighbors_on_cuda_are_those_of_the_definition(search, cuda):
    buffer = make("nmer", "cuda:0", search)
    buffer.extend(make_transitions(38).to("cuda:0"))
    index = torch.arange(38)
    expected = stored_points(buffer.storage).cpu(), index
    for where in ("cuda:0", "cpu"):  # positions may be given on either
        neighbors = buffer.sampler.neighbors(buffer.storage, index.to(where))
        assert neighbors.device.type == where.split(":")[0]
        assert_neighbors(*expected, neighbors.cpu())


# -- counts ----------------------------------------------------------------------------------------

# Twelve of them draw the Beta weights.
OPERATIONS = {"uniform": 8, "graph": 34, "keops": 41, "torch": 60}
READS = {  # of a sample, an add, an extend, and of a row that a recipe stores
    "uniform": (0, 0, 1, 0),
    "graph": (0, 0, 1, 0),
    "keops": (1, 0, 1, 0),  # KeOps's own
    "torch": (1, 0, 1, 0),
}


@pytest.mark.parametrize(("kind", "search"), counts.CASES)
def test_a_sample_dispatches_few_operations(kind, search):
    assert counts.count_operations(kind, search) <= OPERATIONS[search or kind]


@pytest.mark.skipif(torch.cuda.is_available(), reason="counts waits on the pretended device")
@pytest.mark.parametrize(("kind", "search"), counts.CASES)
def test_the_host_waits_for_the_device_as_seldom_as_can_be(kind, search, cuda):
    reads = counts.count_reads(kind, search, cuda)
    assert (
        tuple(reads[name] for name in ("sample", "add", "extend", "store")) == READS[search or kind]
    )
    if search != "graph":  # which inserts rows, and makes lists for them
        assert reads["sample after writes"] == reads["sample after store"] == reads["sample"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="counts waits on the pretended device")
@pytest.mark.parametrize(
    "kind", ["mixup", "ct", "tuned_ct", "s4rl", "ras", "mixreg", "neighborhood", "gp"]
)
def test_other_folds_wait_for_nothing(kind, cuda):
    buffer = make(kind, "cuda:0", "graph" if "search" in KINDS[kind] else None)
    buffer.extend(make_transitions(38).to("cuda:0"))
    for _ in range(5):  # lists are made, and that none is missing shows
        buffer.sample()
    cuda.clear()
    buffer.sample()
    assert cuda.reads == 0


# -- priorities ------------------------------------------------------------------------------------


def cuda_trees():
    """Provides priority trees as in a TorchRL built for CUDA, which use device tensors."""

    def on_cuda(name):
        real = getattr(prioritized, name)

        class Tree:
            device = torch.device("cuda:0")

            def __init__(self, size, device):
                self.tree = real(size)

            def query(self, left, right):
                assert left.is_cuda
                assert right.is_cuda
                found = self.tree.query(int(left.inner), int(right.inner))
                return torch.full((), found, device="cuda:0")

            def scan_lower_bound(self, mass):
                return torch.as_tensor(self.tree.scan_lower_bound(mass.inner)).to("cuda:0")

            def __getitem__(self, index):
                return torch.as_tensor(self.tree[index.inner]).to("cuda:0")

            def __setitem__(self, index, value):
                self.tree[index.inner] = value.inner

        return Tree

    names = ("SumSegmentTreeFp32", "MinSegmentTreeFp32", "SumSegmentTreeFp64", "MinSegmentTreeFp64")
    return {f"Cuda{name}": on_cuda(name) for name in names}


@pytest.mark.skipif(torch.cuda.is_available(), reason="its trees are pretended")
@pytest.mark.parametrize("kind", ["per", "per_nmer"])
def test_priorities_are_on_cuda_where_they_can_be_with_the_same_batches(kind, cuda, monkeypatch):
    def life():
        buffer, batches = make(kind, "cuda:0", "torch" if kind == "per_nmer" else None), []
        for seed in range(4):
            buffer.extend(make_transitions(15, seed=seed).to("cuda:0"))
            batches.append(draw(buffer, "cuda:0"))
        return buffer.sampler, batches

    assert not _compat.has_cuda_trees()  # the wheels of the registry have none
    sampler, on_the_cpu = life()
    assert sampler.device.type == "cpu"
    for name, tree in cuda_trees().items():
        monkeypatch.setattr(prioritized, name, tree)
    sampler, on_cuda = life()
    assert sampler.device.type == "cuda"
    for a, b in zip(on_cuda, on_the_cpu, strict=True):
        for key in b.keys(True, True):
            torch.testing.assert_close(a[key], b[key], rtol=0, atol=0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="TorchRL may have trees for it")
def test_that_priorities_stay_on_the_cpu_is_said_once(cuda, caplog):
    caplog.set_level("INFO", logger="torchrl")  # the recipes' tests raise it
    _compat._say_trees_stay.cache_clear()
    for _ in range(2):
        buffer = make("per", "cuda:0")
        buffer.extend(make_transitions(15))
        buffer.sample()
    said = [record for record in caplog.records if "Priorities stay on the CPU" in record.message]
    assert len(said) == 1


# -- statistics and states -------------------------------------------------------------------------


def test_statistics_on_cuda_are_those_of_the_cpu_without_waiting(cuda):
    points = torch.randn(50, 3) * torch.tensor([1.0, 1e-3, 1e5]) + 7.0
    points[4], points[:, 1] = torch.nan, 0.5
    here = RunningStandardizer(3)
    there = RunningStandardizer(3, torch.device("cuda:0"))
    moved = points.to("cuda:0")
    if cuda is not None:
        cuda.clear()
    for stats, rows in ((here, points), (there, moved)):
        stats.replace(rows[:30], rows[:0])
        stats.replace(rows[30:], rows[:20])
    computed = there.mean, there.std, there.scale
    assert cuda is None or not cuda
    expected = here.mean, here.std, here.scale
    for a, b in zip(computed, expected, strict=True):
        assert a.device.type == "cuda"
        torch.testing.assert_close(a.cpu(), b, rtol=0 if cuda is not None else 1e-12, atol=0)
    assert there.count == here.count == 30


def test_rounding_that_wide_rows_leave_in_statistics_on_cuda_is_mended(cuda, monkeypatch):
    monkeypatch.setattr(standardize, "_LOOK", 4)
    buffer = make("nmer", "cuda:0", "torch")
    wide = make_transitions(40)
    wide["observation"] *= 1e15
    buffer.extend(wide)
    buffer.sample()
    for seed in range(8):
        buffer.extend(make_transitions(10, seed=seed))
        buffer.sample()
    scale = buffer.sampler.unit.space.statistics.scale.cpu()
    torch.testing.assert_close(scale, oracle_scale(stored_points(buffer.storage).cpu()))


@pytest.mark.filterwarnings("error")
def test_rows_that_are_not_finite_are_told_on_cuda_too(cuda, monkeypatch):
    monkeypatch.setattr(standardize, "_LOOK", 4)
    buffer = make("nmer", "cuda:0", "torch")
    buffer.extend(make_transitions(30))
    buffer.sample()
    bad = make_transitions(1)
    bad["observation"][:] = torch.nan
    buffer.extend(bad)
    for _ in range(3):
        buffer.add(make_transitions(1)[0])
        buffer.sampler.neighbors(buffer.storage, torch.empty(0, dtype=torch.int64))
    buffer.add(make_transitions(1)[0])
    with pytest.warns(UserWarning, match="row at position 30 has a non-finite entry"):
        buffer.sample()


@pytest.mark.parametrize(("first", "then"), [("cuda:0", "cpu"), ("cpu", "cuda:0")])
def test_rows_saved_on_one_device_are_loaded_on_the_other(first, then, cuda):
    buffer, other = (make("nmer", device, "graph", seed=None) for device in (first, then))
    buffer.extend(make_transitions(30))
    buffer.sample()
    other.load_state_dict(buffer.state_dict())
    batch = other.sample()
    assert batch["observation"].device.type == then.split(":")[0]
    other.extend(make_transitions(20, seed=1))
    index = torch.arange(40, device=then)
    neighbors = other.sampler.neighbors(other.storage, index)
    assert_neighbors(stored_points(other.storage).cpu(), index.cpu(), neighbors.cpu())


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("nmer", {"search": "graph"}),
        ("nmer", {"search": "graph", "metric": "mahalanobis"}),
        ("nmer", {"search": "torch", "max_distance": QuantileCap(0.9)}),
        ("ero", {}),
    ],
)
@pytest.mark.parametrize("by", ["state", "files"])
def test_states_of_a_sampler_on_cuda_are_loaded_on_either_device(kind, options, by, tmp_path):
    def new(device):
        return make_replay_buffer(kind, capacity=60, batch_size=16, device=device, **options)

    rows = make_transitions(60)
    with some_cuda():
        buffer = new("cuda:0")
        buffer.extend(rows.to("cuda:0"))
        draw(buffer, "cuda:0")
        if kind == "ero":
            buffer.sampler.finish_episode(1.0, buffer.storage)
        state = buffer.sampler.state_dict()
        buffer.sampler.dumps(tmp_path)
        again = new("cuda:0")  # also if all of the state is on the device
        again.extend(rows.to("cuda:0"))
        again.sampler.load_state_dict(move_state(state, torch.device("cuda:0")))
        again.sample()
        state = move_state(state, torch.device("cpu"))
    other = new("cpu")
    other.extend(rows)
    other.sampler.loads(tmp_path) if by == "files" else other.sampler.load_state_dict(state)
    assert other.sample()["observation"].isfinite().all()


def test_rows_on_the_device_are_stored_on_the_cpu(cuda):
    rows = make_transitions(9)
    buffer = make_replay_buffer("nmer", capacity=20, batch_size=4)
    buffer.extend(rows)
    buffer.extend(rows.to("cuda:0"))
    for key in ("observation", ("next", "reward")):
        assert torch.equal(buffer.storage[:][key], rows[key].repeat(2, 1))
    plain = make_replay_buffer("nmer", batch_size=4, storage=LazyTensorStorage(20))
    with pytest.raises(ValueError, match=r"rows are on cuda:0, but the storage is on the CPU"):
        plain.extend(rows.to("cuda:0"))
    assert len(plain) == 0


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
@pytest.mark.parametrize("kind", ["nmer", "uniform", "ct"])
def test_of_more_rows_than_there_is_room_for_the_last_are_stored_once(kind, device, cuda):
    """On a device, the order in which repeated positions are written is not defined."""
    rows = make_transitions(100).to(device)
    buffer = make_replay_buffer(kind, capacity=30, batch_size=8, device=device)
    buffer.extend(make_transitions(7, seed=1).to(device))
    positions = []
    put = buffer.storage.set

    def watch(cursor, data, **options):
        put(cursor, data, **options)
        positions.append(buffer.storage.written[1] if device != "cpu" else cursor)

    buffer.storage.set = watch
    buffer.extend(rows)
    stored = buffer.storage[:]
    assert len(buffer) == 30
    assert stored["identity"].sort().values.tolist() == list(range(70, 100))
    chosen = rows[stored["identity"]]
    for key in ("observation", "action", ("next", "reward")):
        assert torch.equal(stored[key], chosen[key])
    assert buffer.sample()["observation"].isfinite().all()


def test_lists_of_a_search_on_another_device_are_built(cuda):
    search = DeviceSearch(NeighborGraph(5), "cuda:0")
    buffer = make_replay_buffer("nmer", capacity=50, batch_size=8, search=search, k=5)
    buffer.extend(make_transitions(50))
    buffer.sampler.build(buffer.storage)
    assert search.search.stats()["lists"] == 50


def test_nothing_is_copied_to_the_cpu_in_the_background(cuda, monkeypatch):
    """Such a copy could be read before it has arrived."""
    if cuda is None:
        pytest.skip("watches the simulated device")
    move, found = Pretended.to, []

    def watch(self, *arguments, **options):
        result = move(self, *arguments, **options)
        background = options.get("non_blocking") or True in arguments
        if background and not isinstance(result, Pretended):
            caller = sys._getframe(1).f_code.co_filename
            found.extend([caller] if "nmer_torchrl" in caller else [])
        return result

    monkeypatch.setattr(Pretended, "to", watch)
    for kind, device in itertools.product(KINDS, ["cpu", "cuda:0"]):
        options = {"search": "torch"} if "search" in KINDS[kind] else {}
        buffer = make_replay_buffer(kind, capacity=60, batch_size=16, device=device, **options)
        buffer.extend(make_transitions(40).to(device))
        batch = buffer.sample()
        loop.report_errors(buffer, batch, torch.rand(16, device=device))
        if "search" in KINDS[kind]:
            index = torch.tensor([5, 6, 7])
            near = [
                buffer.sampler.neighbors(buffer.storage, index.to(d)) for d in ("cpu", "cuda:0")
            ]
            assert torch.equal(near[0], near[1].cpu())
    assert found == []


def test_weights_stay_within_their_bounds_if_a_root_is_rounded_less_exactly(cuda, monkeypatch):
    """CUDA's reciprocal root may be a unit in the last place too large."""
    if cuda is None:
        pytest.skip("changes the simulated device")
    root = torch.Tensor.rsqrt_
    monkeypatch.setattr(Pretended, "rsqrt_", lambda x: root(x).mul_(1 + 2e-7))
    weight = sample_beta(0.2, (20_000,), device=torch.device("cuda:0")).cpu()
    assert weight.min() >= 0
    assert weight.max() <= 1
