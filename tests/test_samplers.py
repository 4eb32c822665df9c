import pytest
import torch
from helpers import assert_neighbors, make_transitions, stored_points
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from tensordict import TensorDict
from torchrl.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    ReplayBuffer,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
    TensorStorage,
)
from torchrl.data.replay_buffers import HERReplayBuffer

from nmer_torchrl import NeighborPairSampler, PairMixup, RandomPairSampler, TemporalPairSampler
from nmer_torchrl.neighbors import TorchSearch
from nmer_torchrl.samplers import SpreadSampler

SAMPLERS = [NeighborPairSampler, RandomPairSampler, SpreadSampler, TemporalPairSampler]

TINY = 1e-4  # see test_functional


def make_buffer(sampler=None, *, capacity=100, storage=LazyTensorStorage, batch_size=32, **options):
    return TensorDictReplayBuffer(
        storage=storage(capacity),
        sampler=sampler or NeighborPairSampler(k=5),
        transform=PairMixup(0.75),
        batch_size=batch_size,
        **options,
    )


def draw(buffer, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns anchors and partners of a large batch."""
    anchor, partner = buffer.sampler.sample(buffer.storage, n)[0].unbind(1)
    return anchor, partner


def assert_neighbors_of_all(buffer, k=5) -> None:
    index = torch.arange(len(buffer))
    neighbors = buffer.sampler.neighbors(buffer.storage, index, k)
    assert_neighbors(stored_points(buffer.storage), index, neighbors)


def test_batches_carry_pairs_and_weights_that_anyone_can_check():
    buffer = make_buffer()
    buffer.extend(make_transitions(80, terminated=0.1))
    batch = buffer.sample()
    stored = buffer.storage[:]
    anchor, partner = batch["index"].unbind(1)
    weight = batch["mixup_weight"]
    for key in ("observation", "action", ("next", "reward"), ("next", "observation")):
        expected = weight * stored[key][anchor] + (1 - weight) * stored[key][partner]
        torch.testing.assert_close(batch[key], expected)
    assert torch.equal(batch["identity"], stored["identity"][anchor])
    ended = stored["next", "terminated"][batch["index"]].any(1)
    assert (batch["mixup_weight"][ended] == 1).all()
    assert (batch["mixup_weight"][~ended] < 1).all()


def test_partners_are_among_the_nearest():
    buffer = make_buffer()
    buffer.extend(make_transitions(100))
    anchor, partner = draw(buffer, 500)
    neighbors = buffer.sampler.neighbors(buffer.storage, anchor)
    assert (neighbors == partner.unsqueeze(1)).any(1).all()


def test_anchors_and_choice_of_neighbor_are_uniform():
    sampler = NeighborPairSampler(k=4)
    buffer = make_buffer(sampler, generator=torch.Generator().manual_seed(0))
    buffer.extend(make_transitions(20))
    anchor, partner = draw(buffer, 40_000)
    assert stats.chisquare(torch.bincount(anchor).numpy()).pvalue > TINY
    neighbors = sampler.neighbors(buffer.storage, anchor)
    rank = (neighbors == partner.unsqueeze(1)).int().argmax(1)
    counts = torch.bincount(anchor * 4 + rank, minlength=80)
    assert stats.chisquare(counts.numpy()).pvalue > TINY


def test_statistics_are_those_of_what_is_stored_now():
    buffer = make_buffer(capacity=50)
    wide = make_transitions(50, seed=1)
    wide["observation"] *= torch.tensor([1.0, 100.0, 0.01])
    buffer.extend(wide)
    assert_neighbors_of_all(buffer)
    buffer.extend(make_transitions(50, seed=2))  # nothing of the wide rows is left
    assert_neighbors_of_all(buffer)


@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage])
def test_every_kind_of_write_is_seen(storage):
    buffer = make_buffer(capacity=40, storage=storage)
    buffer.extend(make_transitions(10, seed=1))
    assert_neighbors_of_all(buffer)
    for row in make_transitions(5, seed=2):
        buffer.add(row)
    assert_neighbors_of_all(buffer)
    buffer.extend(make_transitions(30, seed=3))  # wraps around
    assert_neighbors_of_all(buffer)
    buffer.extend(make_transitions(40, seed=4))
    assert_neighbors_of_all(buffer)
    buffer.extend(make_transitions(95, seed=5))  # more than the capacity
    assert_neighbors_of_all(buffer)
    buffer.storage[torch.tensor([3, 7])] = make_transitions(2, seed=6)
    assert_neighbors_of_all(buffer)
    buffer[5] = buffer[8]
    assert_neighbors_of_all(buffer)
    buffer.set_at_("observation", torch.zeros(3), 9)
    assert_neighbors_of_all(buffer)
    buffer.update_(TensorDict(action=torch.rand(40, 2), batch_size=[40]))
    assert_neighbors_of_all(buffer)
    buffer.mark_update(torch.tensor([4]))
    assert_neighbors_of_all(buffer)
    buffer.empty()
    with pytest.raises(RuntimeError, match="empty storage; extend the buffer first"):
        buffer.sample()
    buffer.extend(make_transitions(12, seed=7))
    assert_neighbors_of_all(buffer)
    assert (buffer.sample()["index"] < 12).all()


def test_many_announcements_between_two_samples(monkeypatch):
    monkeypatch.setattr("nmer_torchrl.tracking.rows._MANY", 40)  # gathered every 40
    buffer = make_buffer(capacity=60)
    buffer.extend(make_transitions(10))
    assert_neighbors_of_all(buffer)
    for row in make_transitions(150, seed=1):
        buffer.add(row)
    assert len(buffer.sampler.unit.rows._announced) < 40
    assert_neighbors_of_all(buffer)


def test_announced_rows_alone_are_read_again(monkeypatch):
    read = []
    from nmer_torchrl.tracking import rows

    original = rows.read_points
    monkeypatch.setattr(
        rows,
        "read_points",
        lambda data, i, *keys: read.append(len(data["action"][i])) or original(data, i, *keys),
    )
    buffer = make_buffer()
    buffer.extend(make_transitions(80))
    buffer.sample()
    buffer.sample()
    buffer.extend(make_transitions(3, seed=1))
    buffer.add(make_transitions(1, seed=2)[0])
    buffer.sample()
    buffer[2] = buffer[3]
    buffer.sample()
    assert read == [80, 4, 84]


def test_storages_filled_before_and_exchanged():
    rows = make_transitions(60)
    buffer = TensorDictReplayBuffer(
        storage=TensorStorage(rows), sampler=NeighborPairSampler(k=5), batch_size=8
    )
    assert_neighbors_of_all(buffer)
    other = LazyTensorStorage(30)
    other.set(range(20), make_transitions(20, observation=7, seed=4))
    buffer.set_storage(other)
    assert_neighbors_of_all(buffer)


def test_sampler_that_comes_later():
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(50), batch_size=8)
    buffer.extend(make_transitions(30))
    buffer.set_sampler(NeighborPairSampler(k=5))
    assert_neighbors_of_all(buffer)


def test_shorter_storage_after_loading_drops_the_rest():
    buffer, short = make_buffer(capacity=30), make_buffer(capacity=30)
    buffer.extend(make_transitions(30, seed=1))
    buffer.sample()
    short.extend(make_transitions(8, seed=2))
    buffer.storage.load_state_dict(short.storage.state_dict())
    assert_neighbors_of_all(buffer)
    assert (buffer.sampler.neighbors(buffer.storage, torch.arange(8), 20) < 8).all()


@settings(max_examples=40)
@given(data=st.data())
def test_after_any_sequence_of_writes_neighbors_are_those_of_what_is_stored(data):
    buffer = make_buffer(capacity=30)
    for seed in range(data.draw(st.integers(1, 8))):
        write = data.draw(st.sampled_from(["extend", "add", "setitem", "empty", "look"]))
        if write == "extend" or not len(buffer):
            buffer.extend(make_transitions(data.draw(st.integers(1, 40)), seed=seed))
        elif write == "add":
            buffer.add(make_transitions(1, seed=seed)[0])
        elif write == "setitem":
            index = torch.tensor(
                data.draw(st.lists(st.integers(0, len(buffer) - 1), min_size=1, unique=True))
            )
            buffer[index] = make_transitions(len(index), seed=seed)
        elif write == "empty":
            buffer.empty()
            continue
        else:
            assert_neighbors_of_all(buffer)
    if len(buffer):
        assert_neighbors_of_all(buffer)


def test_fewer_rows_than_k_and_a_single_row():
    buffer = make_buffer(NeighborPairSampler(k=10))
    buffer.extend(make_transitions(1))
    batch = buffer.sample()
    assert (batch["index"] == 0).all()
    assert torch.equal(batch["observation"], buffer.storage[:]["observation"].expand(32, -1))
    buffer.extend(make_transitions(3, seed=1))
    neighbors = buffer.sampler.neighbors(buffer.storage, torch.arange(4))
    assert neighbors.shape == (4, 10)
    assert ((neighbors >= 0).sum(1) == 3).all()
    index = buffer.sample()["index"]
    assert (index[:, 0] != index[:, 1]).all()


def test_duplicates_are_partners_but_never_the_position_itself():
    buffer = make_buffer()
    buffer.extend(make_transitions(4)[torch.arange(40) % 4])
    anchor, partner = draw(buffer, 400)
    assert (anchor != partner).all()
    assert (anchor % 4 == partner % 4).all()


def test_keys_split_over_entries_and_beyond_one_dimension():
    def rows(n):
        return TensorDict(
            robot=TensorDict(q=torch.randn(n, 2, 3), v=torch.randn(n), batch_size=[n]),
            torque=torch.randn(n, 2, dtype=torch.float64),
            target=torch.randn(n, 1),
            batch_size=[n],
        )

    keys = [("robot", "q"), ("robot", "v"), "torque"]
    sampler = NeighborPairSampler(k=5, keys=keys, value_keys=["target"])
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(60), sampler=sampler, batch_size=4)
    buffer.extend(rows(50))
    buffer.extend(rows(20))
    points = torch.cat([buffer.storage[:][key].reshape(60, -1).double() for key in keys], 1)
    index = torch.arange(60)
    assert_neighbors(points, index, sampler.neighbors(buffer.storage, index))


@pytest.mark.parametrize("sampler", [NeighborPairSampler, RandomPairSampler])
@pytest.mark.parametrize("key", ["observation", "action", ("next", "reward")])
def test_rows_that_are_not_finite_are_kept_but_are_no_partners(sampler, key):
    buffer = make_buffer(sampler())
    rows = make_transitions(30)
    rows[key][11, 0] = torch.nan
    rows[key][25, 0] = torch.inf
    buffer.extend(rows)
    if sampler is NeighborPairSampler:
        with pytest.warns(UserWarning, match="position 11 has a non-finite entry"):
            buffer.sample()
    anchor, partner = draw(buffer, 3_000)
    assert anchor.unique().numel() == 30
    assert not torch.isin(partner[(anchor != 11) & (anchor != 25)], torch.tensor([11, 25])).any()
    if sampler is NeighborPairSampler:
        there = torch.tensor([i for i in range(30) if i not in (11, 25)])
        points = stored_points(buffer.storage)
        neighbors = buffer.sampler.neighbors(buffer.storage, there)
        local = {position: i for i, position in enumerate(there.tolist())}
        renumbered = neighbors.clone().apply_(lambda position: local[position])
        assert_neighbors(points[there], torch.arange(28), renumbered)


def test_the_warning_comes_once():
    buffer = make_buffer()
    rows = make_transitions(30)
    rows["action"][3] = torch.nan
    buffer.extend(rows)
    with pytest.warns(UserWarning, match="This warning is shown once"):
        buffer.sample()
    buffer.extend(rows)
    buffer.sample()  # a second warning would be an error


def test_only_rows_that_are_not_finite():
    buffer = make_buffer()
    rows = make_transitions(5)
    rows["observation"][:] = torch.nan
    buffer.extend(rows)
    with pytest.warns(UserWarning, match="non-finite"):
        batch = buffer.sample()
    assert torch.equal(batch["index"][:, 0], batch["index"][:, 1])
    assert (batch["mixup_weight"] == 1).all()


def test_random_partners_are_any_other_row():
    buffer = make_buffer(RandomPairSampler(), generator=torch.Generator().manual_seed(0))
    buffer.extend(make_transitions(12))
    anchor, partner = draw(buffer, 30_000)
    counts = torch.bincount(anchor * 12 + partner, minlength=144).reshape(12, 12)
    assert (counts.diagonal() == 0).all()
    others = counts[~torch.eye(12, dtype=torch.bool)]
    assert stats.chisquare(others.numpy()).pvalue > TINY


def test_random_partners_stay_uniform_around_unusable_rows():
    buffer = make_buffer(RandomPairSampler(), generator=torch.Generator().manual_seed(0))
    rows = make_transitions(6)
    rows["action"][2] = torch.nan
    buffer.extend(rows)
    anchor, partner = draw(buffer, 30_000)
    counts = torch.bincount(anchor * 6 + partner, minlength=36).reshape(6, 6)
    assert counts[:, 2].sum() == counts[2, 2] == counts[2].sum() > 0
    assert stats.chisquare(counts[0, [1, 3, 4, 5]].numpy()).pvalue > TINY
    buffer[2] = buffer[3]
    assert (draw(buffer, 1_000)[1] == 2).any()


def test_random_partner_of_a_single_row_is_itself():
    buffer = make_buffer(RandomPairSampler())
    buffer.extend(make_transitions(1))
    assert (buffer.sample()["index"] == 0).all()


def test_a_search_of_ones_own():
    class Slow:
        """Computes the definition point by point."""

        def __init__(self):
            self.clear()

        def write(self, index, points):
            self.points.update(zip(index.tolist(), points, strict=True))

        def query(self, index, k, scale):
            out = torch.full((len(index), k), -1)
            for row, i in enumerate(index.tolist()):
                others = [j for j, p in self.points.items() if j != i and p.isfinite().all()]
                others.sort(key=lambda j: float(((self.points[i] - self.points[j]) * scale).norm()))
                out[row, : len(others[:k])] = torch.tensor(others[:k], dtype=torch.int64)
            return out

        def clear(self):
            self.points = {}

    buffer = make_buffer(NeighborPairSampler(k=5, search=Slow()), capacity=30)
    buffer.extend(make_transitions(20, seed=1))
    assert_neighbors_of_all(buffer)
    buffer.extend(make_transitions(20, seed=2))
    assert_neighbors_of_all(buffer)
    buffer.empty()
    buffer.extend(make_transitions(9, seed=3))
    assert_neighbors_of_all(buffer)


@pytest.mark.parametrize("k", [0, -3, 2.5, True])
def test_bad_k_is_named(k):
    with pytest.raises(ValueError, match=f"k={k}.*at least 1"):
        NeighborPairSampler(k=k)
    buffer = make_buffer()
    buffer.extend(make_transitions(5))
    with pytest.raises(ValueError, match=f"k={k}.*at least 1"):
        buffer.sampler.neighbors(buffer.storage, torch.arange(5), k)


@pytest.mark.parametrize("index", [[0.0, 1.0], [[0, 1]], [True, False], 3])
def test_what_is_no_vector_of_positions_is_refused(index):
    buffer = make_buffer()
    buffer.extend(make_transitions(5))
    with pytest.raises(ValueError, match="Positions are a vector of integers"):
        buffer.sampler.neighbors(buffer.storage, torch.tensor(index))


def test_a_search_that_served_before_starts_afresh_and_serves_one_sampler_only():
    search = TorchSearch()
    search.write(torch.arange(500), torch.randn(500, 7))
    first = make_buffer(NeighborPairSampler(k=5, search=search))
    first.extend(make_transitions(20, seed=1))
    assert_neighbors_of_all(first)
    second = make_buffer(NeighborPairSampler(k=5, search=search))
    second.extend(make_transitions(30, seed=2))
    assert_neighbors_of_all(second)
    with pytest.raises(RuntimeError, match="give each sampler its own search"):
        first.sample()
    assert_neighbors_of_all(second)


def test_rows_that_a_writer_declines_and_replaces():
    buffer = make_buffer(capacity=20, writer=TensorDictMaxValueWriter(rank_key="rank"))
    generator = torch.Generator().manual_seed(0)
    for seed in range(12):
        rows = make_transitions(8, seed=seed)
        rows["rank"] = torch.rand((8, 1), generator=generator)
        buffer.extend(rows)
        assert_neighbors_of_all(buffer)


def test_rows_that_come_into_sight_unannounced():
    storage = LazyTensorStorage(40)
    first = TensorDictReplayBuffer(storage=storage, batch_size=8)
    first.extend(make_transitions(40))
    first.empty()  # the rows stay, out of sight
    first.extend(make_transitions(10, seed=1))
    second = TensorDictReplayBuffer(
        storage=storage,
        sampler=NeighborPairSampler(k=5),
        transform=lambda pairs: pairs[:, 0],  # unlike a fold of ours, it refuses no write
        batch_size=8,
    )
    second.sample()
    second.extend(make_transitions(4, seed=2))  # its own writer starts at 0
    assert len(storage) == 14
    assert_neighbors_of_all(second)


def test_rows_in_batches_of_several_dimensions_are_refused():
    buffer = make_buffer()
    with pytest.raises(ValueError, match=r"shape \(5, 2\).*data.reshape\(-1\)"):
        buffer.extend(make_transitions(10).reshape(5, 2))
    assert len(buffer) == 0


def test_bad_keys_are_named():
    with pytest.raises(ValueError, match="`keys` is empty"):
        NeighborPairSampler(keys=[])
    buffer = make_buffer(NeighborPairSampler(keys=["obs"]))
    buffer.extend(make_transitions(5))
    with pytest.raises(KeyError, match=r"'obs'.*'observation'"):
        buffer.sample()
    buffer.set_sampler(NeighborPairSampler(keys=["observation", "identity"]))
    with pytest.raises(ValueError, match=r"'identity' is torch.int64;.*leave it out of `keys`"):
        buffer.sample()
    buffer.set_sampler(NeighborPairSampler(k=3))
    assert len(buffer.sample()) == 32


def test_images_are_refused():
    rows = make_transitions(5)
    rows["observation"] = torch.randint(255, (5, 8, 8), dtype=torch.uint8)
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(10),
        sampler=NeighborPairSampler(),
        transform=lambda pairs: pairs[:, 0],
        batch_size=2,
    )
    buffer.extend(rows)
    with pytest.raises(ValueError, match=r"'observation' is torch.uint8"):
        buffer.sample()


def test_positions_that_are_not_stored_are_refused():
    buffer = make_buffer()
    buffer.extend(make_transitions(5))
    for position in (5, -1):
        with pytest.raises(IndexError, match=f"Position {position} .* 0 to 4"):
            buffer.sampler.neighbors(buffer.storage, torch.tensor([0, position]))


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_storages_without_rows_of_tensors_are_refused(sampler):
    buffer = make_buffer(sampler(), storage=ListStorage)
    with pytest.raises(TypeError, match="ListStorage; use LazyTensorStorage"):
        buffer.extend(make_transitions(5))
    bare = ReplayBuffer(
        storage=LazyTensorStorage(10),
        sampler=sampler(),
        transform=lambda pairs: pairs,
        batch_size=2,
    )
    bare.extend(torch.randn(5, 3))
    with pytest.raises(TypeError, match="extend the buffer with a TensorDict"):
        bare.sample()


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_storages_of_several_dimensions_are_refused(sampler):
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(40, ndim=2), sampler=sampler(), batch_size=2
    )
    with pytest.raises(ValueError, match=r"ndim=2; leave `ndim` out"):
        buffer.extend(make_transitions(8).reshape(2, 4))


def test_hindsight_buffers_are_refused():
    buffer = HERReplayBuffer(
        storage=LazyTensorStorage(40),
        sampler=NeighborPairSampler(),
        batch_size=4,
        goal_key="observation",
        achieved_goal_key="observation",
        reward_fn=lambda td: td["next", "reward"],
    )
    with pytest.raises(TypeError, match=r"HERReplayBuffer.*use a TensorDictReplayBuffer"):
        buffer.extend(make_transitions(8))


def test_width_that_changes_is_refused_before_anything_is_stored():
    buffer = make_buffer()
    buffer.extend(make_transitions(5))
    for write in (buffer.extend, lambda rows: buffer.add(rows[0])):
        with pytest.raises(ValueError, match=r"'observation' has shape \(4,\).*before have \(3,\)"):
            write(make_transitions(2, observation=4))
    rows = make_transitions(2)
    del rows["action"]
    with pytest.raises(KeyError, match="no entry 'action'"):
        buffer.extend(rows)
    assert len(buffer) == 5
    buffer.extend(make_transitions(2, seed=1))
    assert len(buffer) == 7
    assert_neighbors_of_all(buffer)


def test_width_that_differs_from_a_storage_filled_before_is_refused():
    storage = LazyTensorStorage(40)
    TensorDictReplayBuffer(storage=storage, batch_size=8).extend(make_transitions(10))
    buffer = make_buffer(storage=lambda capacity: storage, capacity=40)
    buffer.sample()
    with pytest.raises(ValueError, match=r"'observation' has shape \(4,\).*before have \(3,\)"):
        buffer.extend(make_transitions(2, observation=4))
    assert len(buffer) == 10


def test_repr_says_what_matters():
    assert "k=7" in repr(NeighborPairSampler(k=7, search=TorchSearch()))
