"""Canaries: each private name of TorchRL that we use still means what we think it means."""

import ast
import copy
import pickle
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from helpers import make_transitions
from torchrl.data import (
    LazyTensorStorage,
    PrioritizedSampler,
    ReplayBuffer,
    TensorDictReplayBuffer,
)
from torchrl.data.replay_buffers import HERReplayBuffer, RandomSampler
from torchrl.envs.transforms import Compose, DoubleToFloat, RewardSum, StepCounter

from nmer_torchrl import _compat


def test_revision_grows_by_one_with_each_write():
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(20), batch_size=2)
    seen = [_compat.revision(buffer.storage)]
    for write in (
        lambda: buffer.extend(make_transitions(5)),
        lambda: buffer.add(make_transitions(1)[0]),
        lambda: buffer.extend(make_transitions(25)),
        lambda: buffer.__setitem__(3, buffer[4]),
        lambda: buffer.set_at_("action", torch.zeros(2), 1),
        lambda: buffer.empty(),
    ):
        write()
        seen.append(_compat.revision(buffer.storage))
    assert [b - a for a, b in pairwise(seen)] == [1] * 6
    state = buffer.storage.state_dict()
    buffer.storage.load_state_dict(state)
    assert _compat.revision(buffer.storage) > seen[-1]


def test_the_lock_of_the_revision_is_one_that_processes_share_and_reentrant():
    storage = LazyTensorStorage(20)
    with _compat.revision_lock(storage), _compat.revision_lock(storage):
        storage.set(torch.arange(5), make_transitions(5))
        with ThreadPoolExecutor(1) as another:
            assert not another.submit(_compat.revision_lock(storage).acquire, False).result()
    with _compat.revision_lock(LazyTensorStorage(20, compilable=True)):
        pass


def test_entries_are_the_stored_tensors():
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(20), batch_size=2)
    rows = make_transitions(5)
    buffer.extend(rows)
    entries = _compat.entries(buffer.storage)
    assert entries.batch_size == (20,)
    assert torch.equal(entries["observation"][:5], rows["observation"])
    bare = ReplayBuffer(storage=LazyTensorStorage(5), batch_size=2)
    bare.extend(torch.randn(3, 2))
    assert _compat.entries(bare.storage) is None


def test_hindsight_buffers_are_recognized_by_their_storage():
    def make(cls, **options):
        return cls(storage=LazyTensorStorage(5), batch_size=2, **options).storage

    assert not _compat.relabels_goals(make(TensorDictReplayBuffer))
    assert _compat.relabels_goals(
        make(
            HERReplayBuffer,
            goal_key="a",
            achieved_goal_key="b",
            reward_fn=lambda td: td["r"],
        )
    )


def test_buffers_hand_their_generator_to_the_sampler():
    generator = torch.Generator()
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(5), sampler=RandomSampler(), generator=generator, batch_size=2
    )
    assert _compat.generator(buffer.sampler) is generator
    assert _compat.generator(RandomSampler()) is None


def test_writes_are_announced_and_then_confirmed():
    calls = []

    class Recorder(RandomSampler):
        def mark_update(self, index, *, storage=None):
            calls.append(("mark_update", torch.as_tensor(index).tolist(), storage is not None))

        def extend(self, index):
            calls.append(("extend", index.tolist()))

        def add(self, index):
            calls.append(("add", int(index)))

    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(4), sampler=Recorder(), batch_size=2)
    buffer.extend(make_transitions(3))
    buffer.extend(make_transitions(2))
    buffer.add(make_transitions(1)[0])
    assert calls == [
        ("mark_update", [0, 1, 2], True),
        ("extend", [0, 1, 2]),
        ("mark_update", [3, 0], True),
        ("extend", [3, 0]),
        ("mark_update", 1, True),
        ("add", 1),
    ]


def make_prioritized(generator=None):
    sampler = PrioritizedSampler(8, alpha=0.5, beta=1.0, eps=0.25)
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(8), sampler=sampler, batch_size=4, generator=generator
    )
    buffer.extend(torch.arange(5))
    buffer.update_priority(torch.arange(5), torch.tensor([0.0, 2.0, 6.0, 12.0, 2.0]))
    return buffer


def test_priorities_are_kept_with_eps_and_raised_to_alpha():
    sampler = make_prioritized().sampler
    assert _compat.priority_eps(sampler) == 0.25
    powers = _compat.priority_powers(sampler, torch.tensor([[0, 1], [2, 3], [4, 7]]))
    expected = torch.tensor([[0.5, 1.5], [2.5, 3.5], [1.5, 0.0]])
    torch.testing.assert_close(powers, expected)
    assert _compat.priority_powers(sampler, torch.tensor([3])).tolist() == [3.5]
    assert _compat.priority_powers(sampler, torch.empty(0, dtype=torch.int64)).tolist() == []
    _compat.set_priority_eps(sampler, 4.0)
    sampler.update_priority(0, 5.0)
    assert _compat.priority_powers(sampler, torch.tensor([0])).item() == 3.0


def test_priorities_follow_the_rows_to_another_device(monkeypatch):
    sampler = make_prioritized().sampler
    powers = _compat.priority_powers(sampler, torch.arange(8))
    _compat.follow_device(sampler, None)
    assert sampler.device == torch.device("cpu")
    other = torch.device("cpu:0")
    monkeypatch.setattr(sampler, "_tree_device_from_storage", lambda storage: other)
    _compat.follow_device(sampler, None)
    assert sampler.device == other
    assert torch.equal(_compat.priority_powers(sampler, torch.arange(8)), powers)
    assert float(sampler.default_priority) == 12.0


def test_priorities_that_are_set_replace_all_others():
    buffer = make_prioritized()
    powers = torch.tensor([0.0, 0.0, 3.0, 1.0, 0.0, 0.0, 0.0, 0.0])
    _compat.set_priority_powers(buffer.sampler, powers, torch.tensor(9.0))
    assert torch.equal(_compat.priority_powers(buffer.sampler, torch.arange(8)), powers)
    assert float(buffer.sampler.default_priority) == 9.0
    index, info = buffer.sampler.sample(buffer.storage, 200)
    assert set(index.tolist()) == {2, 3}
    # The weights are relative to the smallest: the tree of minima has them, too.
    torch.testing.assert_close(info["priority_weight"], torch.where(index == 3, 1.0, 1 / 3))
    _compat.set_priority_powers(buffer.sampler, torch.zeros(8), torch.tensor(1.0))
    with pytest.raises(RuntimeError, match="non-positive p_sum"):
        buffer.sampler.sample(buffer.storage, 2)


def test_draws_by_priority_come_from_the_generator_or_torchs_own():
    def draw(buffer):
        return _compat.draw_by_priority(buffer.sampler, buffer.storage, 50)[0]

    given = make_prioritized(torch.Generator().manual_seed(3))
    first = draw(given)
    given.set_rng(torch.Generator().manual_seed(3))
    assert torch.equal(first, given.sampler.sample(given.storage, 50)[0])
    seeded = []
    for _ in range(2):
        torch.manual_seed(4)
        buffer = make_prioritized()
        seeded.append(draw(buffer))
        assert _compat.generator(buffer.sampler) is None
    assert torch.equal(*seeded)


def test_private_names_of_torchrl_are_touched_nowhere_else():
    package = Path(_compat.__file__).parent
    own = {"_compat"}  # names that our own classes define
    for path in package.rglob("*.py"):
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                own.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                own.add(node.attr)
    allowed = own | {"_standard_gamma", "_asdict"}
    for path in package.rglob("*.py"):
        if path.name == "_compat.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr.startswith("_"):
                private = not node.attr.startswith("__") and node.attr not in allowed
                assert not private, f"{path.name}:{node.lineno} touches {node.attr}"


def test_tensordicts_made_without_checks_are_whole():
    inner = _compat.make_tensordict({"b": torch.ones(3, 1)}, torch.Size([3]), None)
    made = _compat.make_tensordict({"a": torch.zeros(3), "n": inner}, torch.Size([3]), None)
    assert made.batch_size == (3,)
    assert torch.equal(made["n", "b"], torch.ones(3, 1))
    assert made.set("c", torch.ones(3)).exclude("a")[1]["c"] == 1


def test_a_transform_finds_those_beside_it():
    inner = Compose(StepCounter())
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(5), batch_size=2, transform=Compose(inner, RewardSum())
    )
    buffer.append_transform(DoubleToFloat())
    for held in (buffer, copy.deepcopy(buffer), pickle.loads(pickle.dumps(buffer))):
        counter, sums, floats = held.transform[0][0], held.transform[1], held.transform[2]
        for transform in (counter, sums, floats):
            beside = list(_compat.transforms_beside(transform))
            assert all(any(one is other for one in beside) for other in (counter, sums, floats))
    alone = StepCounter()
    assert list(_compat.transforms_beside(alone)) == [alone]
