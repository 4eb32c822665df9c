"""Successors, compared with the true episodes and with the bare definition."""

import copy
import pickle

import pytest
import torch
from helpers import make_transitions
from hypothesis import given, settings
from hypothesis import strategies as st
from pretend_cuda import some_cuda
from tensordict import TensorDict
from torchrl.collectors import Collector
from torchrl.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
    TensorStorage,
)
from torchrl.envs import GymEnv, SerialEnv

from nmer_torchrl import (
    PairMixup,
    PairStorage,
    SuccessorPairs,
    TemporalPairSampler,
    make_replay_buffer,
)
from nmer_torchrl.pairs import successor

MINIMAL = ("observation", "action", ("next", "observation"), ("next", "reward"))
RECIPE = (*MINIMAL, ("next", "terminated"))


class Worlds:
    """Holds environments in which every state is new, and the transitions that were made."""

    def __init__(self, environments: int, seed: int = 0, end: float = 0.2):
        self.generator = torch.Generator().manual_seed(seed)
        self.states = [self.normal() for _ in range(environments)]
        self.episodes = list(range(environments))
        self.steps = [0] * environments
        self.end = end

    def normal(self):
        return torch.randn(3, generator=self.generator)

    def step(self, environment: int):
        """Returns a transition and its name: episode, step, and whether the episode continued."""
        state, following = self.states[environment], self.normal()
        chance = float(torch.rand((), generator=self.generator))
        terminated, truncated = chance < self.end / 2, self.end / 2 <= chance < self.end
        ended = terminated or truncated
        name = (self.episodes[environment], self.steps[environment], not ended)
        row = TensorDict(
            observation=state,
            action=torch.rand(2, generator=self.generator),
            next=TensorDict(
                observation=following,
                reward=torch.rand(1, generator=self.generator),
                terminated=torch.tensor([terminated]),
                truncated=torch.tensor([truncated]),
                done=torch.tensor([ended]),
            ),
            collector=TensorDict(traj_ids=torch.tensor(self.episodes[environment])),
        )
        self.steps[environment] += 1
        self.states[environment] = following
        if ended:
            self.states[environment] = self.normal()
            self.episodes[environment] = max(self.episodes) + 1
            self.steps[environment] = 0
        return row, name

    def rows(self, n: int, turns: int = 1):
        """Returns rows of the environments, in turns of this many steps."""
        environments = [(i // turns) % len(self.states) for i in range(n)]
        rows, names = zip(*[self.step(e) for e in environments], strict=True)
        return torch.stack(list(rows)), list(names)


class Reference:
    """Keeps a ring of names."""

    def __init__(self, capacity: int):
        self.capacity = capacity
        self.empty()

    def empty(self):
        self.names: dict[int, tuple | None] = {}
        self.cursor = 0

    def extend(self, names):
        for name in names:
            self.names[self.cursor] = name
            self.cursor = (self.cursor + 1) % self.capacity

    def successors(self):
        where = {name[:2]: i for i, name in self.names.items() if name is not None}
        return [
            -1 if name is None or not name[2] else where.get((name[0], name[1] + 1), -1)
            for _, name in sorted(self.names.items())
        ]


def make_buffer(capacity=30, storage=LazyTensorStorage, device="cpu", **options):
    return TensorDictReplayBuffer(
        storage=storage(capacity, device=device),
        sampler=TemporalPairSampler(),
        transform=PairMixup(0.75),
        batch_size=32,
        **options,
    )


def successors(buffer) -> list[int]:
    return buffer.sampler.successors(buffer.storage, torch.arange(len(buffer))).tolist()


@pytest.mark.parametrize("entries", [RECIPE, None])
@settings(max_examples=40)
@given(data=st.data())
def test_successors_are_those_of_the_true_episodes(entries, data):
    worlds = Worlds(data.draw(st.integers(1, 3)), seed=data.draw(st.integers(0, 99)))
    strangers = Worlds(1, seed=1_000)
    buffer, reference = make_buffer(), Reference(30)

    def chosen(rows):
        return rows if entries is None else rows.select(*entries)

    for _ in range(data.draw(st.integers(1, 12))):
        write = data.draw(st.sampled_from(["extend", "extend", "add", "set", "empty", "look"]))
        if write == "extend" or not len(buffer):
            n, turns = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 5))
            rows, names = worlds.rows(n, turns)
            buffer.extend(chosen(rows))
            reference.extend(names)
        elif write == "add":
            rows, names = worlds.rows(1)
            buffer.add(chosen(rows)[0])
            reference.extend(names)
        elif write == "set":  # unannounced, and of an episode of which no other row is stored
            at = data.draw(st.integers(0, len(buffer) - 1))
            buffer[at] = chosen(strangers.rows(1)[0])[0]
            strangers.states[0] = strangers.normal()
            reference.names[at] = None
        elif write == "empty":
            buffer.empty()
            reference.empty()
        else:
            assert successors(buffer) == reference.successors()
    if len(buffer):
        assert successors(buffer) == reference.successors()


def by_definition(rows, order) -> list[int]:
    """Computes successors by the docstring of `SuccessorPairs`, row by row."""
    found = [-1] * len(order)
    starts, ends = rows["observation"].tolist(), rows["next", "observation"].tolist()
    goes_on = (~rows["next", "terminated"]).squeeze(-1).tolist()
    for rank, i in enumerate(order):
        for later in range(rank + 1, len(order)):
            j = order[later]
            if goes_on[i] and starts[j] == ends[i]:
                between = order[rank + 1 : later]
                if not any(goes_on[c] and ends[c] == ends[i] for c in between):
                    found[i] = j
                break
    return found


@settings(max_examples=60)
@given(data=st.data())
def test_rows_in_a_handful_of_states_follow_the_definition(data):
    check_a_handful_of_states("cpu", data)


@settings(max_examples=30)
@given(data=st.data())
def test_rows_in_a_handful_of_states_on_a_device_follow_the_definition(data):
    with some_cuda(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(successor, "_FEW", 3)  # more than 3 rows go by the dictionary
        check_a_handful_of_states("cuda:0", data)


def check_a_handful_of_states(device, data):
    def make():
        return make_buffer(12, PairStorage, device)  # which loads rows to its device

    buffer, cursor = make(), 0
    states = st.sampled_from([-1.0, 0.0, -0.0, 2.0])
    for _ in range(data.draw(st.integers(1, 8))):
        write = data.draw(st.sampled_from(["extend", "extend", "set", "copy", "load"]))
        sizes = st.integers(1, 15) if data.draw(st.booleans()) else st.integers(1, 3)
        n = data.draw(sizes) if write == "extend" or not len(buffer) else 1
        rows = make_transitions(n, observation=1, terminated=0.2, seed=n)
        for key in ("observation", ("next", "observation")):
            rows[key] = torch.tensor([[data.draw(states)] for _ in range(n)])
        if write == "extend" or not len(buffer):
            del rows["next", "done"]
            buffer.extend(rows)
            cursor = (cursor + n) % 12
        elif write == "set":
            buffer.set_at_("observation", rows["observation"][0], cursor % len(buffer))
        elif write == "copy":
            buffer = pickle.loads(pickle.dumps(buffer))
        else:
            state, buffer = buffer.state_dict(), make()
            buffer.load_state_dict(state)
        newest = (cursor - 1) % 12
        order = [(newest + 1 + age) % len(buffer) for age in range(len(buffer))]
        assert successors(buffer) == by_definition(buffer.storage[:].cpu(), order)


def test_on_a_device_few_rows_are_found_without_waiting_for_it(cuda):
    worlds, buffer, reference = Worlds(3), make_buffer(30, PairStorage, "cuda:0"), Reference(30)
    rows, names = worlds.rows(20)
    buffer.extend(rows.to("cuda:0"))
    reference.extend(names)
    buffer.sampler.synchronize(buffer.storage)
    for _ in range(50):
        rows, names = worlds.rows(1)
        row = rows[0].to("cuda:0")
        if cuda is not None:
            cuda.clear()
        buffer.add(row)
        buffer.sampler.synchronize(buffer.storage)
        if cuda is not None:
            assert not cuda.reads
        reference.extend(names)
        assert successors(buffer) == reference.successors()


def test_batches_mix_consecutive_transitions():
    buffer = make_buffer(200)
    rows, _ = Worlds(2).rows(150, turns=20)
    buffer.extend(rows.select(*RECIPE))
    batch = buffer.sample()
    anchor, partner = batch["index"].unbind(1)
    following = anchor != partner
    assert 8 < following.sum() < 32
    stored = buffer.storage[:]
    ends = stored["next", "observation"][anchor[following]]
    assert torch.equal(ends, stored["observation"][partner[following]])
    weight = batch["mixup_weight"]
    for key in MINIMAL:
        expected = weight * stored[key][anchor] + (1 - weight) * stored[key][partner]
        torch.testing.assert_close(batch[key], expected)
    ended = stored["next", "terminated"][batch["index"]].any(1)
    assert ended.any()
    assert (weight[ended] == 1).all()


def test_an_overwritten_successor_leaves_the_row_to_itself():
    buffer = make_buffer(30)
    rows, _ = Worlds(1, end=0.0).rows(10)
    buffer.extend(rows)
    assert successors(buffer) == [1, 2, 3, 4, 5, 6, 7, 8, 9, -1]
    buffer[4] = Worlds(1, seed=5).rows(1)[0][0]
    assert successors(buffer) == [1, 2, 3, -1, -1, 6, 7, 8, 9, -1]
    buffer[4] = rows[4]
    assert successors(buffer) == [1, 2, 3, 4, 5, 6, 7, 8, 9, -1]


def test_the_newest_row_is_not_followed_by_the_oldest():
    """States form a circle, so that contents alone would close it."""
    ring = torch.arange(6.0).unsqueeze(1).expand(6, 3)
    rows = make_transitions(6)
    rows["next", "done"][:] = False
    rows["observation"], rows["next", "observation"] = ring.clone(), ring.roll(-1, 0)
    buffer = make_buffer(6)
    buffer.extend(rows)
    assert successors(buffer) == [1, 2, 3, 4, 5, -1]
    buffer.extend(rows[:2])
    assert successors(buffer) == [1, -1, 3, 4, 5, 0]


def test_a_reset_to_where_the_episode_was_cut_needs_a_mark():
    rows, _ = Worlds(1, end=0.0).rows(6)
    rows["observation"][3] = rows["next", "observation"][2]  # a new episode from the same state
    bare = make_buffer()
    bare.extend(rows.select(*RECIPE))
    assert successors(bare)[2] == 3  # nothing tells the episodes apart
    for mark in ("done", "truncated"):
        marked = rows.clone()
        marked["next", mark][2] = True
        buffer = make_buffer()
        buffer.extend(marked.select(*RECIPE, ("next", mark)))
        assert successors(buffer) == [1, 2, -1, 4, 5, -1]
    named = rows.clone()
    named["collector", "traj_ids"][3:] = 7
    buffer = make_buffer()
    buffer.extend(named.select(*RECIPE, ("collector", "traj_ids")))
    assert successors(buffer) == [1, 2, -1, 4, 5, -1]


def test_equal_states_in_two_environments_are_told_apart_by_their_trajectories():
    rows, _ = Worlds(1, end=0.0).rows(4)
    twice = torch.stack([rows, rows], 1).reshape(-1).clone()
    twice["collector", "traj_ids"] = torch.tensor([0, 1] * 4)
    buffer = make_buffer()
    buffer.extend(twice)
    assert successors(buffer) == [2, 3, 4, 5, 6, 7, -1, -1]


def test_rows_that_are_not_finite_follow_no_one():
    for key in MINIMAL:
        buffer = make_buffer()
        rows, _ = Worlds(1, end=0.0).rows(8)
        rows[key][4, 0] = torch.nan
        buffer.extend(rows)
        assert successors(buffer) == [1, 2, 3, -1, -1, 6, 7, -1]


@pytest.mark.parametrize("entries", [RECIPE, None])
def test_fingerprints_that_collide_do_not_make_a_pair(entries, monkeypatch):
    monkeypatch.setattr(successor, "fingerprint", lambda rows: torch.zeros(len(rows)).long())
    rows, names = Worlds(2).rows(25)
    if entries is not None:
        rows = rows.select(*entries)
    buffer, reference = make_buffer(), Reference(30)
    for row, name in zip(rows, names, strict=True):
        buffer.add(row)
        reference.extend([name])
        found = successors(buffer)
        assert all(j in (-1, true) for j, true in zip(found, reference.successors(), strict=True))


def test_fingerprints_that_collide_do_not_join_trajectories(monkeypatch):
    monkeypatch.setattr(successor, "fingerprint", lambda rows: torch.zeros(len(rows)).long())
    rows, _ = Worlds(1, end=0.0).rows(6)
    rows["collector", "traj_ids"][3:] = 7
    buffer = make_buffer()
    buffer.extend(rows)
    assert successors(buffer)[2] == -1


def test_writes_that_continue_the_ring_match_the_new_rows_alone(monkeypatch):
    matched = []
    original = SuccessorPairs._new_rows
    monkeypatch.setattr(
        SuccessorPairs,
        "_new_rows",
        lambda self, n: matched.append(found := original(self, n)) or found,
    )
    worlds, buffer, reference = Worlds(3), make_buffer(), Reference(30)
    for n in (20, 3, 1, 15, 1, 29):
        rows, names = worlds.rows(n)
        buffer.extend(rows)
        reference.extend(names)
        assert successors(buffer) == reference.successors()
    assert [None if order is None else len(order) for order in matched] == [None, 3, 1, 15, 1, 29]


@pytest.mark.parametrize("positions", [[1, 2], [0, 2, 1], [4, 5, 0], [5, 4]])
def test_a_writer_that_leaves_the_ring_is_followed_by_position(positions):
    """The last written row is then the newest, and the others are ordered by position."""
    sampler, storage = TemporalPairSampler(), LazyTensorStorage(6)
    rows, _ = Worlds(1, end=0.0).rows(12)

    def write(index, new):
        index = torch.tensor(index)
        storage.set(index, new)
        sampler.mark_update(index, storage=storage)
        sampler.extend(index)
        sampler.sample(storage, 4)

    write(list(range(6)), rows[:6])
    new = rows[6 : 6 + len(positions)].clone()
    new["next", "observation"] = rows["observation"][[(p + 1) % 6 for p in positions]]
    write(positions, new)
    stored = storage.get(slice(0, 6))
    order = [(positions[-1] + 1 + age) % 6 for age in range(6)]
    assert sampler.successors(storage, torch.arange(6)).tolist() == by_definition(stored, order)


def test_many_rows_between_two_looks():
    worlds, buffer, reference = Worlds(2), make_buffer(50), Reference(50)
    for n in [1] * 70 + [3] * 40:
        rows, names = worlds.rows(n)
        buffer.extend(rows)
        reference.extend(names)
    assert successors(buffer) == reference.successors()


@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage])
def test_a_restored_buffer_draws_the_same(storage, tmp_path):
    buffer = make_buffer(storage=storage, generator=torch.Generator().manual_seed(0))
    worlds = Worlds(2)
    buffer.extend(worlds.rows(44)[0])
    buffer.sample()
    buffer.dumps(tmp_path / "buffer")
    state = copy.deepcopy(buffer.state_dict())
    loaded = make_buffer(storage=storage, generator=torch.Generator())
    loaded.loads(tmp_path / "buffer")
    restored = make_buffer(storage=storage, generator=torch.Generator())
    restored.extend(Worlds(1, seed=8).rows(3)[0])
    restored.sample()
    restored.load_state_dict(state)
    rows = worlds.rows(5)[0]
    buffers = [buffer, loaded, restored, copy.deepcopy(buffer)]
    for _ in range(2):
        batches = [each.sample()["index"] for each in buffers]
        assert all(torch.equal(batch, batches[0]) for batch in batches[:3])
        assert all(successors(each) == successors(buffer) for each in buffers)
        for each in buffers:
            each.extend(rows)


def test_storages_filled_before_and_exchanged_and_samplers_that_come_later():
    rows, names = Worlds(2).rows(20)
    reference = Reference(20)
    reference.extend(names)
    buffer = TensorDictReplayBuffer(
        storage=TensorStorage(rows), sampler=TemporalPairSampler(), batch_size=4
    )
    assert successors(buffer) == reference.successors()
    other, names = Worlds(1, seed=3).rows(15)
    reference = Reference(40)
    reference.extend(names)
    storage = LazyTensorStorage(40)
    storage.set(range(15), other)
    buffer.set_storage(storage)
    assert successors(buffer) == reference.successors()
    buffer.set_sampler(TemporalPairSampler())
    assert successors(buffer) == reference.successors()
    wrapped = make_buffer(15)
    wrapped.extend(Worlds(1).rows(19)[0])
    wrapped.sample()
    wrapped.set_storage(storage)  # what was written last elsewhere says nothing about this one
    assert successors(wrapped) == reference.successors()


def test_a_writer_that_picks_its_positions_makes_no_false_pairs():
    worlds, names = Worlds(1, end=0.05), {}
    buffer = make_buffer(20, writer=TensorDictMaxValueWriter(rank_key="rank"))
    for _ in range(15):
        rows, found = worlds.rows(8)
        rows["rank"] = torch.rand(8, 1)
        names.update({float(row["action"][0]): name for row, name in zip(rows, found, strict=True)})
        buffer.extend(rows)
        stored = [names[float(a)] for a in buffer.storage[:]["action"][:, 0]]
        for i, j in enumerate(successors(buffer)):
            assert j == -1 or stored[j][:2] == (stored[i][0], stored[i][1] + 1)


def test_what_a_collector_of_several_environments_writes():
    environment = SerialEnv(2, lambda: GymEnv("Pendulum-v1"))
    collector = Collector(environment, None, frames_per_batch=20, total_frames=60)
    buffer = make_buffer(100)
    for data in collector:
        buffer.extend(data.reshape(-1))
    collector.shutdown()
    expected = [i + 1 if i % 10 < 9 else i + 11 for i in range(40)]
    expected += [i + 1 if i % 10 < 9 else -1 for i in range(40, 60)]
    assert successors(buffer) == expected


def test_keys_may_be_nested_and_several():
    worlds, _ = Worlds(1, end=0.0).rows(6)
    rows = TensorDict(
        robot=TensorDict(q=worlds["observation"].double(), v=torch.arange(6.0), batch_size=[6]),
        torque=worlds["action"],
        next=TensorDict(
            robot=TensorDict(
                q=worlds["next", "observation"].double(), v=torch.arange(1, 7.0), batch_size=[6]
            ),
            batch_size=[6],
        ),
        batch_size=[6],
    )
    rows["next", "robot", "v"][2] = 0.5
    sampler = TemporalPairSampler(
        keys=[("robot", "q"), ("robot", "v"), "torque"],
        value_keys=[("next", "robot", "v"), ("next", "robot", "q")],
    )
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(9), sampler=sampler, batch_size=4)
    buffer.extend(rows)
    assert successors(buffer) == [1, 2, -1, 4, 5, -1]
    assert "('robot', 'q')" in repr(sampler)


@pytest.mark.parametrize("kind", ["ct", "tuned_ct"])
@pytest.mark.parametrize("key", [("next", "agent", "terminated"), ("next", "end")])
def test_end_flags_beside_the_terminal_flag_end_episodes(kind, key):
    """Each reset leads to the state in which the episode was cut."""
    states = torch.arange(3.0).repeat(3).unsqueeze(1)
    cut = torch.zeros(9, 1, dtype=torch.bool)
    cut[2::3] = True
    following = TensorDict(observation=(states + 1) % 3, reward=torch.zeros(9, 1), batch_size=[9])
    rows = TensorDict(observation=states, action=torch.randn(9, 1), next=following, batch_size=[9])
    nested = len(key) == 3
    rows[key] = torch.zeros_like(cut) if nested else cut
    if nested:
        rows["next", "agent", "truncated"] = cut
    buffer = make_replay_buffer(kind, capacity=9, batch_size=4, terminated_key=key)
    buffer.extend(rows)
    assert successors(buffer) == [1, 2, -1, 4, 5, -1, 7, 8, -1]


def test_bad_input_is_named():
    with pytest.raises(ValueError, match=r"None of the keys \('action',\) is an observation"):
        TemporalPairSampler(keys=["action"])
    buffer = make_buffer()
    buffer.extend(Worlds(1).rows(5)[0])
    for position in (5, -1):
        with pytest.raises(IndexError, match=f"Position {position} .* 0 to 4"):
            buffer.sampler.successors(buffer.storage, torch.tensor([position]))
    with pytest.raises(ValueError, match="Positions are a vector of integers"):
        buffer.sampler.successors(buffer.storage, torch.tensor(2))
    odd = make_buffer()
    rows = Worlds(1).rows(5)[0]
    rows["next", "observation"] = torch.rand(5, 4)
    odd.extend(rows)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"'observation' has shape \(3,\).*\(4,\)"):
            odd.sample()


def test_pickling_leaves_out_what_the_storage_has():
    buffer = make_buffer(5_000)
    buffer.extend(Worlds(1).rows(2_000)[0])
    buffer.sample()
    assert len(pickle.dumps(buffer.sampler)) < 2_000
