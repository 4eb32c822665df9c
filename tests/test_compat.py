"""Canaries: each private name of TorchRL that we use still means what we think it means."""

import ast
import copy
import pickle
from itertools import pairwise
from pathlib import Path

import torch
from helpers import make_transitions
from torchrl.data import LazyTensorStorage, ReplayBuffer, TensorDictReplayBuffer
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
