import pytest
import torch
from helpers import make_transitions
from tensordict import NonTensorStack, TensorDict, tensorclass
from torchrl.data import LazyTensorStorage

from nmer_torchrl import PairStorage, make_replay_buffer


def both(rows: TensorDict) -> tuple[PairStorage, LazyTensorStorage]:
    storages = PairStorage(50), LazyTensorStorage(50)
    for storage in storages:
        storage.set(torch.arange(len(rows)), rows)
    return storages


@pytest.mark.parametrize("count", [20, 50])
def test_pairs_are_read_as_a_plain_storage_reads_them(count):
    pairs, plain = both(make_transitions(count))
    index = torch.randint(count, (30, 2))
    batch = pairs.get(index)
    assert batch.batch_size == torch.Size([30, 2])
    assert batch["next"].batch_size == torch.Size([30, 2])
    assert set(batch.keys(True, True)) == set(plain.get(index).keys(True, True))
    assert (batch == plain.get(index)).all()


@pytest.mark.parametrize(
    "index",
    [3, slice(2, 9), torch.tensor([4, 1]), torch.tensor([-1, 2]), torch.zeros(0, 2).long()],
)
def test_other_positions_are_read_as_ever(index):
    pairs, plain = both(make_transitions(20))
    assert pairs.get(index).batch_size == plain.get(index).batch_size
    assert (pairs.get(index) == plain.get(index)).all()


def test_what_is_no_tensor_and_what_has_more_dimensions():
    @tensorclass
    class Robot:
        joints: torch.Tensor

    rows = TensorDict(
        image=torch.randn(20, 3, 4, 4),
        flag=torch.rand(20) < 0.5,
        robot=Robot(joints=torch.randn(20, 2), batch_size=[20]),
        name=NonTensorStack(*(f"row {i}" for i in range(20))),
        batch_size=[20],
    )
    pairs, plain = both(rows)
    index = torch.randint(20, (5, 2))
    got, expected = pairs.get(index), plain.get(index)
    for key in ("image", "flag", ("robot", "joints")):
        assert torch.equal(got[key], expected[key])
    assert got["name"] == expected["name"]


def test_a_storage_of_bare_tensors_and_an_empty_one():
    storage = PairStorage(50)
    with pytest.raises(RuntimeError, match="non-initialized"):
        storage.get(torch.zeros(4, 2).long())
    storage.set(torch.arange(5), torch.arange(5.0))
    assert storage.get(torch.tensor([[0, 4]])).tolist() == [[0.0, 4.0]]


def test_pair_buffers_use_it_and_sample_what_a_plain_storage_gives():
    batches = []
    for storage in (None, LazyTensorStorage(100)):
        generator = torch.Generator().manual_seed(0)
        buffer = make_replay_buffer(
            "nmer", capacity=100, batch_size=16, storage=storage, generator=generator
        )
        buffer.extend(make_transitions(80))
        batches.append(buffer.sample())
    assert isinstance(make_replay_buffer("mixup", capacity=5, batch_size=1).storage, PairStorage)
    assert (batches[0] == batches[1]).all()


def make_row(seed: int) -> TensorDict:
    torch.manual_seed(seed)
    after = TensorDict(reward=torch.randn(1), done=torch.rand(1) < 0.5)
    return TensorDict(observation=torch.randn(3), next=after)


def test_single_rows_are_written_and_batches_read_as_by_torchrl():
    pair, plain = PairStorage(4), LazyTensorStorage(4)
    for storage in (pair, plain):
        for position in (0, 1, 2, 3, 1):  # the last overwrites a row
            storage.set(position, make_row(len(storage) + position))
    index = torch.tensor([3, 1, 1, 0])
    for found, wanted in ((pair.get(index), plain.get(index)), (pair[:], plain[:])):
        assert found.batch_size == wanted.batch_size
        assert (found == wanted).all()
    assert len(pair) == len(plain) == 4
    assert pair._last_cursor == plain._last_cursor == 1
    assert pair._mutation_revision == plain._mutation_revision


@pytest.mark.parametrize(
    "change",
    [
        lambda row: row.set("more", torch.zeros(2)),  # an entry that was not there
        lambda row: row.exclude("observation"),
        lambda row: row.set("observation", torch.ones(1)),  # which is repeated
        lambda row: row.set("next", row["next"].exclude("done")),
        lambda row: row.set("observation", torch.arange(3)),  # another dtype
    ],
)
def test_unusual_single_rows_are_written_as_by_torchrl(change):
    pair, plain = PairStorage(4), LazyTensorStorage(4)
    outcomes = []
    for storage in (pair, plain):
        storage.set(0, make_row(0))
        storage.set(1, make_row(1))
        try:
            storage.set(1, change(make_row(2)))
            outcomes.append(storage.get(torch.arange(2)))
        except Exception as error:
            outcomes.append(type(error))
    first, second = outcomes
    assert (first == second).all() if isinstance(first, TensorDict) else first is second


def test_a_storage_of_two_dimensions_loads_its_state():
    rows = TensorDict(x=torch.arange(20.0).view(4, 5), batch_size=[4, 5])
    storage, other = (PairStorage(100, ndim=2) for _ in range(2))
    storage.set(torch.arange(4), rows)
    other.load_state_dict(storage.state_dict())
    assert torch.equal(other.get(slice(None))["x"], rows["x"])


def test_a_tuple_of_more_rows_than_there_is_room_for_is_stored_as_by_torchrl():
    values = (torch.arange(7), torch.arange(7.0))
    cursor = torch.arange(7) % 3
    storages = PairStorage(3), LazyTensorStorage(3)
    for storage in storages:
        storage.set(cursor, values)
    for ours, theirs in zip(*(storage.get(slice(None)) for storage in storages), strict=True):
        assert torch.equal(ours, theirs)


def test_positions_that_were_never_written_are_refused_as_by_torchrl():
    for storage in both(make_transitions(20)):  # of 50
        with pytest.raises(IndexError):
            storage.get(torch.tensor([3, 20]))
