"""After any sequence of operations, a buffer of any method and search is correct.

Beside the buffer goes a plain ring of the rows that it ought to hold. After each step the storage
equals that ring, neighbors and statistics are those of a float64 brute force over it, and every
row of a batch is what the definition of its kind makes of it.
"""

import copy
import io
import pickle
import tempfile
from pathlib import Path

import pytest
import torch
from definitions import NEAR, Stored, assert_equal, check_batch, nearest_first
from helpers import assert_neighbors, make_transitions
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from oracles import importance, reference_update
from soak import soak
from torchrl.data import LazyMemmapStorage

from nmer_torchrl import make_replay_buffer
from nmer_torchrl.methods import METHODS, option_names
from nmer_torchrl.neighbors import NeighborGraph

pytestmark = [
    pytest.mark.filterwarnings("ignore:The row at position"),
    # TorchRL's, of a dump after a load, and of a load into a new buffer: both turn out right.
    pytest.mark.filterwarnings("ignore:last_cursor is None"),
    pytest.mark.filterwarnings("ignore:Loading the storage on an uninitialized TensorDict"),
]

PRIORITIES = ("per", "per_nmer")
SEEDS = st.integers(0, 10_000)
NUMBERS = st.sampled_from([1.0, 1e-3, 1e3, 1e30, 1e-42, torch.nan, torch.inf])
some_rows = precondition(lambda self: len(self.ring))


class Ring:
    """Holds what a buffer of this capacity should hold, position by position."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.rows = capacity, None
        self.empty()

    def __len__(self) -> int:
        return self.length

    def empty(self) -> None:
        self.length = self.cursor = 0

    def extend(self, rows):
        """Writes rows; returns the written positions, each once."""
        positions = (self.cursor + torch.arange(len(rows))) % self.capacity
        self.cursor = (self.cursor + len(rows)) % self.capacity
        self.length = min(self.length + len(rows), self.capacity)
        self.write(positions[-self.capacity :], rows[-self.capacity :])
        return positions[-self.capacity :]

    def write(self, positions, rows) -> None:
        if self.rows is None:
            self.rows = rows[:1].expand(self.capacity).clone()
        self.rows[positions] = rows

    def stored(self) -> Stored:
        return Stored(self.rows[: self.length])


class AnySequence(RuleBasedStateMachine):
    kind = "nmer"
    searches = ("graph", "exact graph", "torch", "faiss")
    k = 4

    @initialize(capacity=st.sampled_from([12, 60, 300]), memmap=st.booleans(), data=st.data())
    def begin(self, capacity, memmap, data):
        self.ring, self.memmap, self.seed = Ring(capacity), memmap, 0
        self.search = data.draw(st.sampled_from(self.searches)) if self.kind in NEAR else None
        self.priorities, self.largest = [], 1.0
        self.scores = []
        self.buffer = self.make(seed=1)

    def make(self, seed):
        options = {}
        if self.kind in NEAR:
            has_k = "k" in option_names(METHODS[self.kind])
            options = {"k": self.k} if has_k else {}
            exact = NeighborGraph(self.k if has_k else 1, exact=True)
            options["search"] = exact if self.search == "exact graph" else self.search
        return make_replay_buffer(
            self.kind,
            capacity=self.ring.capacity,
            batch_size=24,
            generator=torch.Generator().manual_seed(seed),
            storage=LazyMemmapStorage(self.ring.capacity) if self.memmap else None,
            **options,
        )

    def new_rows(self, n, seed):
        """Draws rows, which sometimes follow each other in an episode."""
        rows = make_transitions(n, terminated=0.1, seed=seed)
        rows["observation"][1:] = rows["next", "observation"][:-1]
        return rows

    # -- writing -----------------------------------------------------------------------------------

    def extend_with(self, rows):
        self.buffer.extend(rows.clone())
        written = self.ring.extend(rows)
        self.note_new(written)

    def note_new(self, positions):
        self.priorities += [0.0] * (len(self.ring) - len(self.priorities))
        for position in positions.tolist():
            self.priorities[position] = self.largest

    @rule(share=st.floats(0.01, 1.3), seed=SEEDS)
    def extend(self, share, seed):
        self.extend_with(self.new_rows(max(1, int(share * self.ring.capacity)), seed))

    @rule(n=st.integers(1, 9), seed=SEEDS)
    def extend_by_few(self, n, seed):
        self.extend_with(self.new_rows(n, seed))

    @rule(n=st.integers(1, 3), seed=SEEDS)
    def add(self, n, seed):
        for row in self.new_rows(n, seed):
            self.buffer.add(row.clone())
            self.note_new(self.ring.extend(row.unsqueeze(0)))

    @rule(n=st.integers(2, 20), seed=SEEDS)
    def extend_with_duplicates(self, n, seed):
        self.extend_with(self.new_rows(1, seed)[torch.zeros(n, dtype=torch.int64)])

    @rule(n=st.integers(1, 9), seed=SEEDS, factor=NUMBERS, data=st.data())
    def extend_with_another_size(self, n, seed, factor, data):
        rows = self.new_rows(n, seed)
        key = data.draw(st.sampled_from(["observation", ("next", "reward")]))
        rows[key][data.draw(st.integers(0, n - 1))] *= factor
        self.extend_with(rows)

    @some_rows
    @rule(data=st.data(), seed=SEEDS)
    def overwrite(self, data, seed):
        last = len(self.ring) - 1
        index = data.draw(st.lists(st.integers(0, last), min_size=1, max_size=9, unique=True))
        rows = self.new_rows(len(index), seed)
        if len(index) == 1:
            self.buffer[index[0]] = rows[0]
        else:
            self.buffer[torch.tensor(index)] = rows
        self.ring.write(torch.tensor(index), rows)

    @some_rows
    @rule(data=st.data(), value=st.floats(-9, 9, width=32))
    def set_one_entry(self, data, value):
        position = data.draw(st.integers(0, len(self.ring) - 1))
        self.buffer.set_at_("observation", torch.full((3,), value), position)
        self.ring.rows["observation"][position] = value

    @rule()
    def empty(self):
        self.buffer.empty()
        self.ring.empty()
        self.priorities, self.largest = [], 1.0

    @some_rows
    @rule(data=st.data(), seed=SEEDS)
    def rows_that_do_not_fit_are_refused(self, data, seed):
        rows = self.new_rows(3, seed)
        key = data.draw(st.sampled_from(list(rows.keys(True, True))))
        bad = data.draw(st.sampled_from(["wide", "dtype", "missing", "two dimensions"]))
        if bad == "wide":
            rows[key] = torch.stack([rows[key], rows[key]], -1)
        elif bad == "dtype":
            rows[key] = rows[key].to(torch.float64)
        elif bad == "missing":
            del rows[key]
        else:
            rows = rows.reshape(3, 1)
        with pytest.raises((ValueError, KeyError)):
            self.buffer.extend(rows)

    # -- priorities --------------------------------------------------------------------------------

    @some_rows
    @rule(seed=SEEDS)
    def tell_errors(self, seed):
        batch = self.buffer.sample()
        errors = torch.rand(len(batch), generator=torch.Generator().manual_seed(seed)) * 5
        batch["td_error"], index = errors, batch["index"]
        if self.kind == "ero":
            self.buffer.update_priority(index, errors)
            self.buffer.sampler.finish_episode(float(errors.sum()), self.buffer.storage)
            return
        if self.kind not in PRIORITIES:
            with pytest.warns(UserWarning, match="not prioritized"):
                self.buffer.update_priority(index, errors)
        self.buffer.update_tensordict_priority(batch)
        if self.kind == "per":
            for position, error in zip(index.tolist(), errors.tolist(), strict=True):
                self.priorities[position] = error
                self.largest = max(self.largest, error)
        elif self.kind == "per_nmer":
            weights = batch["mixup_weight"].squeeze(1).tolist()
            told = self.priorities
            self.priorities = reference_update(told, index.tolist(), weights, errors.tolist())
            changed = {position for pair in index.tolist() for position in pair}
            self.largest = max(self.largest, *(self.priorities[i] for i in changed))

    @some_rows
    @precondition(lambda self: self.kind in (*PRIORITIES, "ero"))
    @rule(bad=st.sampled_from([torch.nan, torch.inf, -1.0]))
    def errors_that_are_none_are_refused(self, bad):
        if bad == -1.0 and self.kind == "ero":
            return  # which takes the absolute value
        with pytest.raises(ValueError, match=r"priority|not finite"):
            self.buffer.update_priority(torch.tensor([0]), torch.tensor([bad]))

    # -- saving ------------------------------------------------------------------------------------

    @some_rows
    @rule(safely=st.booleans())
    def save_and_load_a_state(self, safely):
        state = self.buffer.state_dict()
        if safely:
            file = io.BytesIO()
            torch.save(state, file)
            file.seek(0)
            state = torch.load(file, weights_only=True)
        other = self.make(seed=2)
        other.load_state_dict(copy.deepcopy(state))
        self.go_on_with(other)

    @some_rows
    @rule()
    def save_and_load_a_dump(self):
        with tempfile.TemporaryDirectory() as folder:
            self.buffer.dumps(Path(folder) / "buffer")
            other = self.make(seed=2)
            other.loads(Path(folder) / "buffer")
        self.go_on_with(other)

    def go_on_with(self, other):
        first, second = self.buffer.sample(), other.sample()
        for key in first.keys(True, True):
            assert_equal(first[key], second[key])
        self.buffer = other

    @some_rows
    @rule(how=st.sampled_from(["pickle", "deepcopy"]), seed=SEEDS)
    def go_on_with_a_copy(self, how, seed):
        def duplicate(buffer):
            return pickle.loads(pickle.dumps(buffer)) if how == "pickle" else copy.deepcopy(buffer)

        try:
            duplicate(self.buffer).extend(self.new_rows(2, seed))
        except TypeError as error:  # memory-mapped files are for dumps
            if not self.memmap or "cannot pickle 'mmap.mmap'" not in str(error):
                raise
            return
        self.check_rows(self.buffer)
        self.buffer = duplicate(self.buffer)

    # -- what holds after each step ----------------------------------------------------------------

    def check_rows(self, buffer):
        assert len(buffer) == len(self.ring)
        if len(self.ring):
            actual, expected = buffer.storage[:], self.ring.stored().rows
            for key in expected.keys(True, True):
                assert_equal(actual[key], expected[key])

    @invariant()
    def rows_are_those_that_were_written(self):
        self.check_rows(self.buffer)

    @invariant()
    def batches_are_by_their_definition(self):
        if not len(self.ring):
            with pytest.raises(RuntimeError, match="empty"):
                self.buffer.sample()
            return
        stored = self.ring.stored()
        newest = (self.ring.cursor - 1) % self.ring.capacity
        batch = self.buffer.sample()
        right = check_batch(self.kind, batch, stored, self.buffer, newest)
        if self.search == "graph":
            self.scores.append(right)
        else:
            assert right == 1.0
        if self.kind in PRIORITIES:
            self.check_priorities(batch)

    def check_priorities(self, batch):
        expected = torch.tensor(self.priorities, dtype=torch.float64)
        actual = self.buffer.sampler.priorities(torch.arange(len(self.ring)))
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
        weight = importance(self.priorities)[batch["index"]]
        if self.kind == "per_nmer":
            share = batch["mixup_weight"].squeeze(1)
            weight = share * weight[:, 0] + (1 - share) * weight[:, 1]
        torch.testing.assert_close(batch["priority_weight"], weight, rtol=2e-3, atol=1e-5)

    @invariant()
    def neighbors_and_statistics_are_those_of_brute_force(self):
        if self.kind not in NEAR or not len(self.ring):
            return
        stored, index = self.ring.stored(), torch.arange(len(self.ring))
        neighbors = self.buffer.sampler.neighbors(self.buffer.storage, index)
        if self.search == "graph":
            self.scores.append(nearest_first(stored, index, neighbors))
        else:
            assert_neighbors(stored.points, index, neighbors, stored.scale)
        statistics = self.buffer.sampler.unit.space.statistics
        finite = stored.points[stored.usable]
        assert statistics.count == len(finite)
        if len(finite):
            size = float(finite.abs().max())
            torch.testing.assert_close(statistics.mean, finite.mean(0), rtol=1e-9, atol=1e-9 * size)
            torch.testing.assert_close(statistics.scale, stored.scale, rtol=1e-6, atol=0)

    def teardown(self):
        scores = getattr(self, "scores", [])
        if scores:
            assert sum(scores) / len(scores) >= 0.995, scores


def case(name, *, examples, **attributes):
    machine = type(name, (AnySequence,), attributes).TestCase
    machine.settings = settings(max_examples=soak(examples), stateful_step_count=15)
    return machine


for _kind in METHODS:
    globals()[f"Test_{_kind}"] = case(_kind, kind=_kind, examples=8 if _kind == "nmer" else 5)

# KeOps compiles a formula for each number of neighbors and dimensions: these share one.
for _kind in [kind for kind in NEAR if "k" in option_names(METHODS[kind])]:
    _case = case(f"{_kind}_by_keops", kind=_kind, searches=("keops",), k=10, examples=2)
    globals()[f"Test_{_kind}_by_keops"] = pytest.mark.xdist_group("keops")(_case)
