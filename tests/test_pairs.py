"""The contract of pairings: every unit, with every sampler of single rows and every fold.

A new pairing is added to `UNITS`.
"""

import inspect
import pickle
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from helpers import assert_neighbors, make_transitions, stored_points
from scipy import stats
from tensordict import TensorDict
from torchrl.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ReplayBuffer,
    ReplayBufferEnsemble,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from torchrl.data.replay_buffers import (
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    SamplerWithoutReplacement,
    SliceSampler,
    StalenessAwareSampler,
)
from torchrl.envs.transforms import Compose

from nmer_torchrl import (
    Neighborhoods,
    NeighborPairs,
    NeighborPairSampler,
    PairMixup,
    PairStorage,
    RandomPairs,
    RandomPairSampler,
    SuccessorPairs,
    TemporalPairSampler,
    loop,
    pairs,
)
from nmer_torchrl.pairs import Pairing
from nmer_torchrl.samplers import NeighborhoodSampler, PairSampler
from nmer_torchrl.tracking import StoredRows
from nmer_torchrl.transforms import (
    GaussianProcessMixup,
    NeighborhoodMixup,
)

N, B = 64, 32
TINY = 1e-4  # see test_functional


def episode(n: int = N, seed: int = 0) -> TensorDict:
    """Builds the rows of an episode: each starts where the previous one ended."""
    rows = make_transitions(n, seed=seed)
    rows["next", "observation"][:-1] = rows["observation"][1:]
    rows["next", "done"][:] = False
    return rows


def near(unit, storage, anchor, partner, newest) -> None:
    """Checks that partners are among the nearest neighbors."""
    found = unit.neighbors(storage, anchor)
    assert_neighbors(stored_points(storage), anchor, found)
    assert (partner.unsqueeze(2) == found.unsqueeze(1)).any(2).all()


def another(unit, storage, anchor, partner, newest) -> None:
    """Checks that partners are other rows than their anchors."""
    assert (partner != anchor.unsqueeze(1)).all()


def following(unit, storage, anchor, partner, newest) -> None:
    """Checks that partners are the next rows; the newest row has none."""
    expected = torch.where(anchor == newest, anchor, (anchor + 1) % len(storage))
    assert torch.equal(partner, expected.unsqueeze(1))


@dataclass(frozen=True)
class Unit:
    """Holds a pairing, and its definition: a check of partners `[B, m]` of anchors `[B]`."""

    make: Callable[[], Pairing]
    check: Callable[..., None]
    width: int = 2  # rows for each anchor, itself among them


UNITS = {
    "neighbors": Unit(lambda: NeighborPairs(k=4, search="torch"), near),
    "graph": Unit(lambda: NeighborPairs(k=4), near),
    "random": Unit(RandomPairs, another),
    "successors": Unit(SuccessorPairs, following),
    "neighborhoods": Unit(lambda: Neighborhoods(k=4), near, width=5),
}
DEFINITIONS = {type(unit.make()): unit for unit in UNITS.values()}
ANCHORS = {
    "random": RandomSampler,
    "without replacement": SamplerWithoutReplacement,
    "priorities": lambda: PrioritizedSampler(N, alpha=0.6, beta=0.4),
    "staleness": StalenessAwareSampler,
}


def fold(part: Pairing | PairSampler):
    return PairMixup(0.75) if part.draws == Pairing.draws else NeighborhoodMixup(0.75)


def make(unit, sampler=None, *, storage=None, buffer=TensorDictReplayBuffer, **options):
    options.setdefault("transform", fold(sampler if unit is None else unit))
    sampler = {} if sampler is None else {"sampler": sampler}
    return buffer(
        storage=LazyTensorStorage(N) if storage is None else storage,
        sample_unit=unit,
        batch_size=B,
        **sampler,
        **options,
    )


def check(unit, buffer, batch, newest: int = N - 1) -> None:
    """Checks that the batch follows from the definitions and the rows stored now."""
    stored, index = buffer.storage[:], batch["index"]
    definition = DEFINITIONS[type(unit)]
    assert index.shape == (len(batch), definition.width)
    weight = batch["mixup_weight"].double()
    weight = weight if definition.width > 2 else torch.cat([weight, 1 - weight], -1)
    for key in ("observation", "action", ("next", "observation"), ("next", "reward")):
        expected = torch.einsum("bm,bmd->bd", weight, stored[key][index].double())
        torch.testing.assert_close(batch[key].double(), expected, rtol=1e-5, atol=1e-5)
    definition.check(unit, buffer.storage, index[:, 0], index[:, 1:], newest)


@pytest.fixture(params=UNITS)
def unit(request) -> Pairing:
    torch.manual_seed(0)
    return UNITS[request.param].make()


def test_every_pairing_is_held_to_its_definition():
    for name, kind in inspect.getmembers(pairs, inspect.isclass):
        if issubclass(kind, Pairing) and not inspect.isabstract(kind):
            assert kind in DEFINITIONS, f"add {name} to UNITS in tests/test_pairs.py"


@pytest.mark.parametrize("anchors", ANCHORS)
def test_every_unit_goes_with_every_sampler_of_single_rows(unit, anchors):
    buffer = make(unit, ANCHORS[anchors]())
    rows = episode()
    rows["policy_version"] = torch.arange(-N, 0)  # which tells how stale they are
    buffer.extend(rows)
    for _ in range(3):
        check(unit, buffer, buffer.sample())


@pytest.mark.parametrize(
    "kind", [TensorDictReplayBuffer, TensorDictPrioritizedReplayBuffer], ids=lambda k: k.__name__
)
def test_priorities_of_anchors_follow_their_errors(unit, kind):
    if kind is TensorDictReplayBuffer:
        buffer = make(unit, PrioritizedSampler(N, alpha=1.0, beta=1.0))
    else:
        buffer = make(unit, buffer=kind, alpha=1.0, beta=1.0)
    buffer.extend(episode())
    batch = buffer.sample()
    assert batch["priority_weight"].shape == (B,)  # of the anchors
    batch["td_error"] = torch.zeros(B)
    buffer.update_tensordict_priority(batch)
    drawn = set(batch["index"][:, 0].tolist())
    again = torch.cat([buffer.sample()["index"][:, 0] for _ in range(5)])
    assert drawn.isdisjoint(again.tolist())  # of priority zero, though they may be partners


@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage, PairStorage])
def test_writes_of_every_kind_are_taken_up(unit, storage):
    buffer = make(unit, storage=storage(N))
    buffer.extend(episode(40))
    check(unit, buffer, buffer.sample(), newest=39)
    for row in episode(5, seed=1):
        buffer.add(row)
    buffer.sample()
    buffer.extend(episode(N, seed=2))  # wraps around
    assert len(buffer) == N
    newest = (40 + 5 + N - 1) % N
    check(unit, buffer, buffer.sample(), newest)
    buffer.empty()
    buffer.extend(episode(N, seed=3))
    check(unit, buffer, buffer.sample())


def test_announced_writes_are_read_alone(unit):
    """The storage announces writes to a unit; new rows do not make it read all rows."""
    buffer = make(unit)
    buffer.extend(episode(40))
    loop.synchronize(buffer)
    buffer.sample()
    buffer.extend(episode(3, seed=1))
    positions = [index.tolist() for index, _ in unit.rows.changes(buffer.storage)]
    assert positions == [[40, 41, 42]]


def test_writes_by_position_are_noticed():
    unit = NeighborPairs(k=4)
    buffer = make(unit)
    buffer.extend(episode())
    buffer.sample()
    buffer[10:20] = episode(10, seed=5)
    check(unit, buffer, buffer.sample())


def test_batches_are_drawn_ahead_and_copied(unit):
    buffer = make(unit, prefetch=2)
    buffer.extend(episode())
    for _ in range(4):
        check(unit, buffer, buffer.sample())
    copy = pickle.loads(pickle.dumps(make(UNITS["random"].make())))
    copy.extend(episode())
    assert copy.sample().shape == (B,)


def test_a_plain_replay_buffer_takes_a_unit(unit):
    buffer = make(unit, buffer=ReplayBuffer)
    buffer.extend(episode())
    batch, info = buffer.sample(return_info=True)
    assert batch.shape == info["index"].shape[:1] == (B,)


def test_a_generator_decides_about_partners():
    def draw(seed):
        unit = NeighborPairs(k=10)
        unit.generator = torch.Generator().manual_seed(seed)
        buffer = make(unit, generator=torch.Generator().manual_seed(0))
        buffer.extend(episode())
        return buffer.sample()["index"]

    first, same, other = draw(1), draw(1), draw(2)
    assert torch.equal(first, same)
    assert torch.equal(first[:, 0], other[:, 0])
    assert not torch.equal(first[:, 1], other[:, 1])


@pytest.mark.parametrize(
    ("sampler", "name"),
    [
        (lambda: NeighborPairSampler(k=4), "neighbors"),
        (RandomPairSampler, "random"),
        (TemporalPairSampler, "successors"),
        (lambda: NeighborhoodSampler(k=4), "neighborhoods"),
        (lambda: PairSampler(RandomPairs()), "random"),
    ],
)
def test_samplers_of_pairs_are_uniform_anchors_beside_a_unit(sampler, name):
    """With the same seed, both draw the same anchors and the same partners."""
    sampler = sampler()
    both = TensorDictReplayBuffer(
        storage=LazyTensorStorage(N),
        sampler=sampler,
        transform=fold(sampler),
        batch_size=B,
        generator=torch.Generator().manual_seed(3),
    )
    generator = torch.Generator().manual_seed(3)
    unit = UNITS[name].make()
    unit.generator = generator
    apart = make(unit, RandomSampler(), generator=generator)
    for buffer in (both, apart):
        buffer.extend(episode())
    for _ in range(3):
        assert torch.equal(both.sample()["index"], apart.sample()["index"])


# -- misuse ------------------------------------------------------------------------------------


def test_a_unit_without_a_fold_is_refused(unit):
    buffer = make(unit, transform=None)
    buffer.extend(episode())
    with pytest.raises(TypeError, match=rf"{type(unit).__name__} draws .*add a fold"):
        buffer.sample()
    buffer.append_transform(fold(unit))
    buffer.sample()


@pytest.mark.parametrize(
    "slices",
    [
        lambda: SliceSampler(slice_len=2, end_key=("next", "done")),
        lambda: PrioritizedSliceSampler(N, 0.6, 0.4, slice_len=2, end_key=("next", "done")),
    ],
    ids=["slices", "slices by priority"],
)
def test_slices_of_episodes_are_refused(unit, slices):
    buffer = make(unit, slices())
    buffer.extend(episode())
    with pytest.raises(TypeError, match=r"draws slices of episodes.*draws single rows"):
        buffer.sample()


def test_pairs_are_not_paired_again(unit):
    buffer = make(unit, NeighborPairSampler())
    buffer.extend(episode())
    with pytest.raises(
        TypeError, match=r"NeighborPairSampler already draws pairs.*remove one of the two"
    ):
        buffer.sample()


@pytest.mark.parametrize("unit", ["random", "successors"], indirect=True)
def test_two_folds_beside_a_unit_are_refused(unit):
    buffer = make(unit, transform=Compose(PairMixup(), PairMixup()))
    buffer.extend(episode())
    with pytest.raises(
        TypeError, match=rf"RandomSampler with {type(unit).__name__}; use a single fold"
    ):
        buffer.sample()


def test_neighborhoods_need_a_fold_of_their_own():
    buffer = make(Neighborhoods(k=4), transform=PairMixup())
    buffer.extend(episode())
    with pytest.raises(TypeError, match="RandomSampler with Neighborhoods; use NeighborhoodMixup"):
        buffer.sample()


def test_a_measure_is_that_of_the_unit_of_the_same_buffer():
    right = make(NeighborPairs(k=4), transform=GaussianProcessMixup())
    right.extend(episode())
    right.sample()
    wrong = make(RandomPairs(), transform=GaussianProcessMixup())
    wrong.extend(episode())
    with pytest.raises(TypeError, match="draws with RandomSampler with RandomPairs; use"):
        wrong.sample()


def test_a_sampler_of_pairs_draws_by_the_generator_of_its_unit():
    def draw(seed):
        unit = RandomPairs(generator=torch.Generator().manual_seed(seed))
        buffer = make(None, PairSampler(unit), generator=torch.Generator().manual_seed(0))
        buffer.extend(episode())
        return buffer.sample()["index"]

    assert torch.equal(draw(1), draw(1))
    assert not torch.equal(draw(1), draw(2))
    with pytest.raises(TypeError, match=r"NeighborPairSampler.*is not a Pairing"):
        PairSampler(NeighborPairSampler())


def test_a_unit_of_a_member_is_not_ignored_by_an_ensemble():
    """TorchRL's ensemble does not use its members' units, so the fold gets single rows."""
    members = [make(RandomPairs()) for _ in range(2)]
    for member in members:
        member.extend(episode())
    ensemble = ReplayBufferEnsemble(*members, sample_from_all=True, batch_size=B)
    with pytest.raises(TypeError, match="ReplayBufferEnsemble ignores the sample_unit of its"):
        ensemble.sample()


def test_a_storage_of_several_dimensions_is_refused(unit):
    buffer = make(unit, storage=LazyTensorStorage(N, ndim=2), transform=lambda batch: batch)
    buffer.extend(episode().reshape(2, -1))
    with pytest.raises(
        (TypeError, ValueError), match=r"one position for each anchor|one dimension"
    ):
        buffer.sample()


def test_a_unit_of_the_users_own_needs_public_names_alone():
    class WithTheOldest(Pairing):
        def __init__(self):
            super().__init__(StoredRows(["observation"], []))

        def synchronize(self, storage):
            for _ in self.rows.changes(storage):
                pass

        def partners(self, anchor, generator=None):
            return torch.zeros_like(anchor)

    buffer = make(WithTheOldest())
    buffer.extend(episode())
    assert (buffer.sample()["index"][:, 1] == 0).all()


def test_a_neighborhood_is_the_anchor_and_its_nearest():
    sampler = NeighborhoodSampler(5, search="torch")
    buffer = make(None, sampler, storage=LazyTensorStorage(200), transform=NeighborhoodMixup())
    buffer.extend(make_transitions(3))
    index, _ = sampler.sample(buffer.storage, 40)
    assert index.shape == (40, 6)
    assert (index[:, 3:] == index[:, :1]).all()  # two others, then the anchor in place of more
    buffer.extend(make_transitions(100, seed=1))
    index, _ = sampler.sample(buffer.storage, 40)
    assert torch.equal(index[:, 1:], sampler.neighbors(buffer.storage, index[:, 0]))


def test_anchors_of_neighborhoods_are_uniform():
    sampler = NeighborhoodSampler(2, search="torch")
    generator = torch.Generator().manual_seed(0)
    buffer = make(None, sampler, transform=NeighborhoodMixup(), generator=generator)
    buffer.extend(make_transitions(20))
    anchor = sampler.sample(buffer.storage, 20_000)[0][:, 0]
    assert stats.chisquare(torch.bincount(anchor).numpy()).pvalue > TINY
