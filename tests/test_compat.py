"""Checks that each private name of TorchRL that we use still has the expected meaning."""

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from helpers import make_transitions
from private_names import find_private_names
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


# Methods that TorchRL asks the subclasses of its samplers and transforms to define.
HOOKS = {"_empty", "_inv_call"}
# Every other private name in use outside `_compat.py`. A name that is not used any more has to go.
PACKAGE = {
    # torch's, the only draws of these distributions that take a generator
    "functional.py": {"_standard_gamma"},
    "samplers/prioritized.py": {"_maybe_init_from_storage"},  # overridden to move priorities
}
RECIPES = {
    "benchmarks/baseline.py": {"_n_updates"},  # Stable-Baselines3's
    "benchmarks/counts.py": {"_schema"},  # of torch's operators
    "benchmarks/methods.py": {"_guard"},  # ours
    "benchmarks/plain.py": {"_foreach_lerp_"},  # torch's
    "benchmarks/search.py": {"_lists"},  # ours
    "benchmarks/soak.py": {"_lists", "_scaled"},  # ours
    "nmer_recipes/checkpoint.py": {"_rng"},  # of TorchRL's samplers, whose state names a device
    "nmer_recipes/compiling.py": {"_dynamo"},  # torch's, a setting of the compiler
    "nmer_recipes/envs.py": {"_elapsed_steps"},  # Gymnasium's
    "nmer_recipes/products.py": {"_linear_pointwise"},  # torch's, the only way to oneDNN's products
    "crossq.py": {"_foreach_copy_"},  # torch's
    "nmer_recipes/optim.py": {  # torch's
        "_foreach_add",
        "_foreach_add_",
        "_foreach_addcmul_",
        "_foreach_div",
        "_foreach_lerp_",
        "_foreach_mul",
        "_foreach_mul_",
        "_foreach_sqrt",
        "_foreach_sub_",
    },
}


@pytest.mark.parametrize(("folder", "listed"), [("nmer_torchrl", PACKAGE), ("recipes", RECIPES)])
def test_private_names_of_others_are_those_of_the_list(folder, listed):
    found = find_private_names(Path(__file__).parents[1] / folder)
    found.pop("_compat.py", None)
    used = {path: names - HOOKS for path, names in found.items() if names - HOOKS}
    assert used == listed


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("x = storage._storage", {"_storage"}),
        ("sampler._rng = None", {"_rng"}),
        ("x = getattr(storage, '_storage')", {"_storage"}),
        ("from tensordict.base import _is_leaf", {"_is_leaf"}),
        ("class A(RandomSampler):\n def f(self): return self._rng", {"_rng"}),
        ("class A(RandomSampler):\n def _empty(self): super()._empty()", {"_empty"}),
        ("class A(RandomSampler): pass\nclass B(A):\n def f(self): return self._rng", {"_rng"}),
        ("class M:\n def f(self): return self._rng\nclass A(M, RandomSampler): pass", {"_rng"}),
        ("class A(RandomSampler):\n def _own(self): return self._own()", set()),
        ("class A:\n def __init__(self): self._rng = self._storage = None", set()),
        ("x = storage.__dict__, storage.public", set()),
    ],
)
def test_a_private_name_is_found_however_it_is_used(tmp_path, line, found):
    source = f"from torchrl.data.replay_buffers import RandomSampler\n{line}\n"
    (tmp_path / "module.py").write_text(source)
    assert find_private_names(tmp_path) == ({"module.py": found} if found else {})


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
