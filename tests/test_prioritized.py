"""Priorities of single rows (`per`) and of mixed pairs (`per_nmer`)."""

import copy
import re
import threading

import numpy as np
import pytest
import torch
from helpers import assert_neighbors, make_transitions, stored_points
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import importance, probabilities, reference_update
from scipy import stats
from tensordict import TensorDict
from torchrl.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    TensorDictReplayBuffer,
    TensorStorage,
)
from torchrl.data.replay_buffers.scheduler import LinearScheduler, StepScheduler

from nmer_torchrl import (
    NeighborPairs,
    NeighborPairSampler,
    PairMixup,
    PrioritizedNeighborPairSampler,
    make_replay_buffer,
)
from nmer_torchrl.buffers import PairPrioritizedReplayBuffer
from nmer_torchrl.samplers import CheckedPrioritizedSampler
from nmer_torchrl.tracking import rows

KINDS = ["per", "per_nmer"]
TINY = 1e-4  # see test_functional


def make(kind="per_nmer", *, capacity=100, batch_size=16, seed=0, **options):
    generator = torch.Generator().manual_seed(seed)
    return make_replay_buffer(
        kind, capacity=capacity, batch_size=batch_size, generator=generator, **options
    )


def priorities(buffer) -> torch.Tensor:
    return buffer.sampler.priorities(torch.arange(len(buffer.storage)))


def set_priorities(buffer, values) -> None:
    buffer.update_priority(torch.arange(len(values)), torch.as_tensor(values))


def give_errors(buffer, seed=0) -> None:
    """Draws a batch and reports its errors, as in training."""
    batch = buffer.sample()
    batch["td_error"] = torch.rand(len(batch), generator=torch.Generator().manual_seed(seed)) * 5
    buffer.update_tensordict_priority(batch)


def assert_same_batch(first, second) -> None:
    assert (first == second).all(), (first["index"], second["index"])


def pair_batch(pairs, weights, errors) -> TensorDict:
    return TensorDict(
        index=torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2),
        mixup_weight=torch.tensor(weights, dtype=torch.float32).reshape(-1, 1),
        td_error=torch.tensor(errors, dtype=torch.float32),
        batch_size=[len(pairs)],
    )


@pytest.fixture(scope="module")
def ten_rows():
    buffer = make(capacity=10)
    buffer.extend(make_transitions(10))
    return buffer


NUMBER = st.floats(0, 1e4, width=32)
PAIR = st.tuples(st.integers(0, 9), st.integers(0, 9), st.floats(0, 1, width=32), NUMBER)


@settings(max_examples=200)
@given(
    old=st.lists(NUMBER, min_size=10, max_size=10),
    batch=st.lists(PAIR, min_size=1, max_size=12),
    alpha=st.sampled_from([0.3, 0.6, 1.0, 1.7]),
)
def test_both_members_get_their_share_of_the_error(ten_rows, old, batch, alpha):
    ten_rows.sampler.alpha = alpha
    set_priorities(ten_rows, old)
    pairs = [(anchor, partner) for anchor, partner, _, _ in batch]
    weights, errors = [w for _, _, w, _ in batch], [p for _, _, _, p in batch]
    ten_rows.update_tensordict_priority(pair_batch(pairs, weights, errors))
    expected = torch.tensor(reference_update(old, pairs, weights, errors), dtype=torch.float64)
    torch.testing.assert_close(priorities(ten_rows), expected, rtol=2e-5, atol=1e-9)


def test_shares_of_one_pair_by_hand(ten_rows):
    set_priorities(ten_rows, [1.0] * 10)
    ten_rows.update_tensordict_priority(pair_batch([(2, 7)], [0.75], [9.0]))
    expected = [1.0] * 10
    expected[2], expected[7] = 7.0, 3.0  # 0.75 * 9 + 0.25 * 1 and 0.25 * 9 + 0.75 * 1
    assert priorities(ten_rows).tolist() == pytest.approx(expected, rel=1e-5)


def test_what_was_not_mixed_leaves_the_partner_as_it_is(ten_rows):
    set_priorities(ten_rows, [1.0] * 10)
    ten_rows.update_tensordict_priority(pair_batch([(2, 7), (4, 4)], [1.0, 0.3], [9.0, 5.0]))
    expected = [1.0] * 10
    expected[2], expected[4] = 9.0, 5.0
    assert priorities(ten_rows).tolist() == pytest.approx(expected, rel=1e-5)


def test_a_position_that_occurs_several_times_gets_the_mean_in_any_order(ten_rows):
    pairs, weights, errors = [(0, 1), (0, 2), (3, 0)], [0.5, 1.0, 0.25], [3.0, 6.0, 8.0]
    seen = []
    for order in ([0, 1, 2], [2, 0, 1], [1, 2, 0]):
        set_priorities(ten_rows, [1.0] * 10)
        ten_rows.update_tensordict_priority(pair_batch(pairs, weights, errors)[order])
        seen.append(priorities(ten_rows))
    # 0.5 * 3 + 0.5 * 1, then 6, then 0.75 * 8 + 0.25 * 1
    assert seen[0][0].item() == pytest.approx((2.0 + 6.0 + 6.25) / 3, rel=1e-5)
    assert seen[0][2].item() == pytest.approx(1.0, rel=1e-5)  # with the pair that was not mixed
    assert torch.equal(seen[0], seen[1])
    assert torch.equal(seen[0], seen[2])


def test_priorities_are_raised_to_alpha_once():
    buffer = make(capacity=4, priority_alpha=0.5)
    buffer.extend(make_transitions(4))
    set_priorities(buffer, [4.0, 1.0, 1.0, 1.0])
    # The anchor goes from 4 to 0.5 * 16 + 0.5 * 4 = 10, the partner to 8.5.
    buffer.update_tensordict_priority(pair_batch([(0, 1)], [0.5], [16.0]))
    anchor = buffer.sampler.sample(buffer.storage, 50_000)[0][:, 0]
    expected = torch.tensor(probabilities([10.0, 8.5, 1.0, 1.0], alpha=0.5)) * 50_000
    counts = torch.bincount(anchor, minlength=4).double()
    assert stats.chisquare(counts, expected.double() * 50_000 / expected.sum()).pvalue > TINY


def test_real_batches_move_priorities_by_their_own_weights():
    buffer = make(capacity=50)
    buffer.extend(make_transitions(50, terminated=0.2))
    for seed in range(5):
        batch = buffer.sample()
        old = priorities(buffer).tolist()
        errors = torch.rand(16, 1, generator=torch.Generator().manual_seed(seed))
        batch["td_error"] = errors  # [B, 1], as some losses write it
        buffer.update_tensordict_priority(batch)
        expected = reference_update(
            old,
            batch["index"].tolist(),
            batch["mixup_weight"].squeeze(1).tolist(),
            errors.squeeze(1).tolist(),
        )
        assert priorities(buffer).tolist() == pytest.approx(expected, rel=1e-5, abs=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_anchors_are_drawn_by_priority(kind):
    buffer = make(kind)
    buffer.extend(make_transitions(20))
    values = np.linspace(0, 4, 20) ** 2
    set_priorities(buffer, values)
    index, _ = buffer.sampler.sample(buffer.storage, 40_000)
    anchor = index if kind == "per" else index[:, 0]
    expected = np.array(probabilities(values)) * 40_000
    counts = torch.bincount(anchor, minlength=20).numpy()
    usual = expected > 5
    assert (
        stats.chisquare(
            np.append(counts[usual], counts[~usual].sum()),
            np.append(expected[usual], expected[~usual].sum()),
        ).pvalue
        > TINY
    )


def test_partners_are_uniform_among_the_neighbors():
    buffer = make(k=4)
    buffer.extend(make_transitions(20))
    set_priorities(buffer, torch.linspace(0.1, 3, 20))
    anchor, partner = buffer.sampler.sample(buffer.storage, 40_000)[0].unbind(1)
    neighbors = buffer.sampler.neighbors(buffer.storage, anchor)
    assert_neighbors(stored_points(buffer.storage), anchor[:50], neighbors[:50])
    assert (neighbors == partner.unsqueeze(1)).any(1).all()
    rank = (neighbors == partner.unsqueeze(1)).int().argmax(1)
    table = torch.bincount(anchor * 4 + rank, minlength=80).reshape(20, 4)
    assert table.sum(1).min() > 100
    assert stats.chisquare(table, axis=1).pvalue.min() > TINY / 20


@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
def test_importance_weights_are_those_of_the_formula(beta):
    values = torch.linspace(0.0, 5.0, 30) ** 2
    plain = make("per", capacity=30, priority_beta=beta)
    mixed = make("per_nmer", capacity=30, priority_beta=beta)
    for buffer in (plain, mixed):
        buffer.extend(make_transitions(30, terminated=0.2))
        set_priorities(buffer, values)
    expected = importance(values, beta=beta)
    batch = plain.sample()
    torch.testing.assert_close(batch["priority_weight"], expected[batch["index"]])

    index, info = mixed.sampler.sample(mixed.storage, 200)
    torch.testing.assert_close(info["priority_weight"], expected[index])

    batch, info = mixed.sample(return_info=True)
    anchor, partner = expected[batch["index"]].unbind(1)
    weight = batch["mixup_weight"].squeeze(1)
    assert (weight == 1).any()
    torch.testing.assert_close(batch["priority_weight"], weight * anchor + (1 - weight) * partner)
    assert torch.equal(info["priority_weight"], batch["priority_weight"])


def test_without_its_info_a_batch_has_no_weights():
    buffer = make()
    buffer.extend(make_transitions(30))
    with pytest.warns(UserWarning, match="include_info"):
        batch, info = buffer.sample(return_info=True, include_info=False)
    assert batch.get("priority_weight", None) is None
    assert info["priority_weight"].shape == (16,)


def test_without_a_fold_both_weights_are_given():
    buffer = PairPrioritizedReplayBuffer(
        storage=LazyTensorStorage(30),
        sampler=PrioritizedNeighborPairSampler(30),
        transform=lambda pairs: pairs,
        batch_size=8,
    )
    buffer.extend(make_transitions(30))
    batch = buffer.sample()
    assert batch["priority_weight"].shape == (8, 2)
    batch["td_error"] = torch.rand(8, 2)
    with pytest.raises(KeyError, match=r"'mixup_weight'.*such as PairMixup"):
        buffer.update_tensordict_priority(batch)


@pytest.mark.parametrize("kind", KINDS)
def test_new_rows_have_the_largest_priority_also_where_they_overwrite(kind):
    buffer = make(kind, capacity=20)
    buffer.extend(make_transitions(12))
    assert priorities(buffer).tolist() == pytest.approx([1.0] * 12, rel=1e-5)
    set_priorities(buffer, [0.1] * 11 + [5.0])
    buffer.extend(make_transitions(6, seed=1))
    assert priorities(buffer).tolist() == pytest.approx([0.1] * 11 + [5.0] * 7, rel=1e-5)
    set_priorities(buffer, [0.2] * 18)
    buffer.extend(make_transitions(7, seed=2))  # wraps around
    assert priorities(buffer).tolist() == pytest.approx(
        [5.0] * 5 + [0.2] * 13 + [5.0] * 2, rel=1e-5
    )
    if kind == "per_nmer":
        index = torch.arange(20)
        neighbors = buffer.sampler.neighbors(buffer.storage, index)
        assert_neighbors(stored_points(buffer.storage), index, neighbors)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_may_come_with_their_errors(kind):
    buffer = make(kind, capacity=10)
    rows = make_transitions(6)
    rows["td_error"] = torch.arange(6.0)
    buffer.extend(rows[:4])
    buffer.add(rows[5])
    buffer.add(rows.exclude("td_error")[0].set("td_error", torch.tensor(2.0)))
    assert priorities(buffer).tolist() == pytest.approx([0, 1, 2, 3, 5, 2], abs=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_added_one_by_one_are_new_rows(kind):
    buffer = make(kind, capacity=10)
    buffer.extend(make_transitions(4))
    set_priorities(buffer, [3.0, 0.5, 0.5, 0.5])
    for row in make_transitions(2, seed=1):
        buffer.add(row)
    assert priorities(buffer).tolist() == pytest.approx([3.0, 0.5, 0.5, 0.5, 3.0, 3.0], rel=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_by_single_positions_take_errors_without_a_pair(kind):
    buffer = make(kind, capacity=10)
    rows = make_transitions(3)
    rows["index"] = buffer.extend(rows)
    rows["td_error"] = torch.tensor([4.0, 2.0, 0.5])
    buffer.update_tensordict_priority(rows)
    assert priorities(buffer).tolist() == pytest.approx([4.0, 2.0, 0.5], rel=1e-5)


def make_sampler(kind, capacity):
    make = {"per": CheckedPrioritizedSampler, "per_nmer": PrioritizedNeighborPairSampler}
    return make[kind](capacity)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_no_one_announced_are_new_rows(kind):
    rows = make_transitions(40)
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(40), batch_size=8)
    buffer.extend(rows[:20])
    buffer.set_sampler(make_sampler(kind, 40))
    index, info = buffer.sampler.sample(buffer.storage, 2_000)
    assert index.unique().numel() == 20
    assert info["priority_weight"].isfinite().all()
    buffer.storage.set(range(20, 30), rows[20:30])  # past the buffer
    index, info = buffer.sampler.sample(buffer.storage, 2_000)
    assert index.unique().numel() == 30
    assert info["priority_weight"].isfinite().all()
    buffer = TensorDictReplayBuffer(
        storage=TensorStorage(rows), sampler=make_sampler(kind, 40), batch_size=8
    )
    assert buffer.sampler.sample(buffer.storage, 2_000)[0].unique().numel() == 40


@settings(max_examples=30)
@given(data=st.data())
def test_after_any_sequence_of_writes_all_rows_have_neighbors_and_a_priority(data):
    buffer = make(capacity=30, k=5)
    for seed in range(data.draw(st.integers(1, 8))):
        write = data.draw(st.sampled_from(["extend", "add", "setitem", "errors", "empty"]))
        if write == "extend" or not len(buffer):
            buffer.extend(make_transitions(data.draw(st.integers(1, 40)), seed=seed))
        elif write == "add":
            buffer.add(make_transitions(1, seed=seed)[0])
        elif write == "setitem":
            buffer[0] = make_transitions(1, seed=seed)[0]
        elif write == "errors":
            give_errors(buffer, seed)
        else:
            buffer.empty()
    if len(buffer):
        index, info = buffer.sampler.sample(buffer.storage, 100)
        expected = importance(priorities(buffer))[index]
        torch.testing.assert_close(info["priority_weight"], expected, rtol=1e-4, atol=1e-5)
        index = torch.arange(len(buffer))
        neighbors = buffer.sampler.neighbors(buffer.storage, index)
        assert_neighbors(stored_points(buffer.storage), index, neighbors)


def test_announced_rows_alone_are_read_again(monkeypatch):
    read = []
    original = rows.read_points
    monkeypatch.setattr(
        rows,
        "read_points",
        lambda data, i, *keys: read.append(len(data["action"][i])) or original(data, i, *keys),
    )
    buffer = make()
    buffer.extend(make_transitions(80))
    give_errors(buffer)
    buffer.extend(make_transitions(3, seed=1))
    buffer.add(make_transitions(1, seed=2)[0])
    give_errors(buffer)
    assert read == [80, 4]


@pytest.mark.parametrize("kind", KINDS)
def test_beta_is_annealed_by_a_scheduler(kind):
    buffer = make(kind, capacity=20)
    buffer.extend(make_transitions(20))
    values = torch.linspace(0.1, 4, 20)
    set_priorities(buffer, values)
    scheduler = LinearScheduler(buffer, "beta", final_value=1.0, num_steps=4)
    for beta in (0.4, 0.55, 0.7, 0.85, 1.0, 1.0):
        assert float(buffer.sampler.beta) == pytest.approx(beta)
        index, info = buffer.sampler.sample(buffer.storage, 50)
        torch.testing.assert_close(info["priority_weight"], importance(values, beta=beta)[index])
        scheduler.step()


@pytest.mark.parametrize("kind", KINDS)
def test_alpha_that_is_annealed_keeps_the_priorities(kind):
    buffer = make(kind, capacity=20)
    buffer.extend(make_transitions(20))
    values = torch.linspace(0.1, 4, 20)
    set_priorities(buffer, values)
    scheduler = StepScheduler(buffer, "alpha", gamma=0.1, mode="additive")
    for alpha in (0.7, 0.8):
        scheduler.step()
        assert priorities(buffer).tolist() == pytest.approx(values.tolist(), rel=1e-5)
        index, info = buffer.sampler.sample(buffer.storage, 50)
        torch.testing.assert_close(info["priority_weight"], importance(values, alpha=alpha)[index])


def test_without_an_exponent_anchors_are_uniform_and_errors_count_in_full():
    buffer = make(capacity=20, priority_alpha=0)
    buffer.extend(make_transitions(20))
    buffer.update_tensordict_priority(pair_batch([(0, 1)], [0.5], [7.0]))
    assert float(buffer.sampler.default_priority) == 7.0
    assert priorities(buffer).isnan().all()
    index, info = buffer.sampler.sample(buffer.storage, 20_000)
    assert stats.chisquare(torch.bincount(index[:, 0]).numpy()).pvalue > TINY
    assert (info["priority_weight"] == 1).all()


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_seed_gives_the_same_batches(kind):
    batches = []
    for other in range(2):
        buffer = make(kind, seed=3)
        torch.manual_seed(other)  # the global generators have no part in it
        np.random.seed(other)
        buffer.extend(make_transitions(50))
        give_errors(buffer)
        batches.append([buffer.sample() for _ in range(3)])
    for first, second in zip(*batches, strict=True):
        assert_same_batch(first, second)
    assert not torch.equal(batches[0][0]["index"], batches[0][1]["index"])


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_generator_torchs_global_seed_decides(kind):
    batches = []
    for other in range(2):
        torch.manual_seed(1)
        np.random.seed(other)
        buffer = make_replay_buffer(kind, capacity=50, batch_size=8)
        buffer.extend(make_transitions(50))
        batches.append([buffer.sample() for _ in range(2)])
    assert_same_batch(batches[0][0], batches[1][0])
    assert_same_batch(batches[0][1], batches[1][1])
    assert not torch.equal(batches[0][0]["index"], batches[0][1]["index"])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage])
def test_a_saved_state_goes_on_with_the_same_batches(kind, storage, tmp_path):
    def new(seed):
        return make(kind, seed=seed, storage=storage(40), capacity=40)

    buffer = new(1)
    buffer.extend(make_transitions(35))
    for seed in range(4):
        give_errors(buffer, seed)
    LinearScheduler(buffer, "beta", final_value=1.0, num_steps=2).step()
    torch.save(buffer.state_dict(), tmp_path / "state.pt")
    other = new(2)
    other.extend(make_transitions(3, seed=9))
    give_errors(other, 9)
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    for seed in range(4):
        assert_same_batch(buffer.sample(), other.sample())
        for one in (buffer, other):
            give_errors(one, seed)
            one.extend(make_transitions(4, seed=seed))
    assert torch.equal(priorities(buffer), priorities(other))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("used", [False, True])
def test_a_dump_goes_on_with_the_same_batches(kind, used, tmp_path):
    buffer, other = make(kind, seed=1, capacity=40), make(kind, seed=2, capacity=40)
    buffer.extend(make_transitions(35))
    give_errors(buffer)
    buffer.dumps(tmp_path / "buffer")
    if used:
        other.extend(make_transitions(38, seed=9))
        give_errors(other, 9)
    other.loads(tmp_path / "buffer")
    for seed in range(3):
        assert_same_batch(buffer.sample(), other.sample())
        for one in (buffer, other):
            give_errors(one, seed)
            one.extend(make_transitions(4, seed=seed))


@pytest.mark.parametrize("kind", KINDS)
def test_priorities_go_along_to_another_device(kind, monkeypatch):
    buffer, again = make(kind), make(kind)
    buffer.extend(make_transitions(3))
    set_priorities(buffer, [2.0, 21.0, 50.0])
    again.load_state_dict(buffer.state_dict())
    # As on CUDA: TorchRL learns of the rows' device at the first use, and makes its trees anew.
    other = torch.device("cpu:0")
    monkeypatch.setattr(
        PrioritizedSampler, "_tree_device_from_storage", lambda self, storage: other
    )
    again.sample()
    assert again.sampler.device == other
    torch.testing.assert_close(priorities(again), priorities(buffer))
    again.extend(make_transitions(1))
    assert priorities(again).tolist() == pytest.approx([2.0, 21.0, 50.0, 50.0], rel=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_of_a_larger_capacity_is_refused(kind):
    sampler = make(kind, capacity=40).sampler
    with pytest.raises(ValueError, match=r"40 rows.*max_capacity=30; make it at least 40"):
        make(kind, capacity=30).sampler.load_state_dict(sampler.state_dict())


@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_keeps_its_own_priorities(kind):
    buffer = make(kind, capacity=20)
    buffer.extend(make_transitions(20))
    give_errors(buffer)
    before = priorities(buffer)
    twin = copy.deepcopy(buffer)
    assert torch.equal(priorities(twin), before)
    set_priorities(twin, [9.0] * 20)
    assert torch.equal(priorities(buffer), before)
    assert torch.isfinite(twin.sample()["priority_weight"]).all()


@pytest.mark.parametrize("kind", KINDS)
def test_prefetching_one_batch_changes_no_batch(kind):
    plain, ahead = make(kind, seed=5), make(kind, seed=5, prefetch=1)
    for buffer in (plain, ahead):
        buffer.extend(make_transitions(60))
        set_priorities(buffer, torch.linspace(0, 3, 60))
    for _ in range(5):
        assert_same_batch(plain.sample(), ahead.sample())


@pytest.mark.parametrize("kind", KINDS)
def test_errors_of_prefetched_batches_reach_their_rows(kind):
    buffer = make(kind, prefetch=3, capacity=200)
    buffer.extend(make_transitions(200))
    for seed in range(10):
        batch = buffer.sample()
        index = batch["index"] if kind == "per" else batch["index"][:, 0]
        before = priorities(buffer)
        batch["td_error"] = torch.full((16,), 0.25 + seed)
        if kind == "per_nmer":
            batch["mixup_weight"] = torch.ones(16, 1)
        buffer.update_tensordict_priority(batch)
        expected = before.index_fill(0, index, 0.25 + seed)
        torch.testing.assert_close(priorities(buffer), expected, rtol=1e-5, atol=1e-9)


def test_errors_while_a_thread_writes_and_others_prefetch():
    buffer = make(prefetch=2, capacity=64)
    buffer.extend(make_transitions(64))
    stop = threading.Event()

    def write():
        seed = 0
        while not stop.is_set():
            seed += 1
            buffer.extend(make_transitions(7, seed=seed))

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for seed in range(100):
            give_errors(buffer, seed)
    finally:
        stop.set()
        writer.join()
    buffer.synchronize()
    set_priorities(buffer, [2.0] * 64)
    assert (buffer.sampler.sample(buffer.storage, 16)[1]["priority_weight"] == 1).all()
    index = torch.arange(64)
    neighbors = buffer.sampler.neighbors(buffer.storage, index)
    assert_neighbors(stored_points(buffer.storage), index, neighbors)


def test_errors_of_rows_that_are_gone_are_passed_over():
    buffer = make(capacity=30)
    buffer.extend(make_transitions(30))
    batch = pair_batch([(1, 20), (25, 0), (28, 29)], [0.5, 0.5, 0.5], [4.0, 4.0, 4.0])
    buffer.empty()
    buffer.update_tensordict_priority(batch)
    assert (buffer.sampler.priorities(torch.arange(30)) == 0).all()
    buffer.extend(make_transitions(3, seed=1))
    buffer.update_tensordict_priority(batch)
    expected = [2.5, 2.5, 1.0] + [0.0] * 27
    assert buffer.sampler.priorities(torch.arange(30)).tolist() == pytest.approx(expected, rel=1e-5)
    assert (buffer.sample()["index"] < 3).all()


@pytest.mark.parametrize("kind", KINDS)
def test_emptied_buffers_forget_their_priorities(kind):
    buffer = make(kind, capacity=30)
    buffer.extend(make_transitions(30))
    set_priorities(buffer, [50.0] * 30)
    buffer.empty()
    with pytest.raises(RuntimeError, match="empty storage"):
        buffer.sample()
    buffer.extend(make_transitions(4, seed=1))
    assert priorities(buffer).tolist() == pytest.approx([1.0] * 4, rel=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("error", [-0.5, float("nan"), float("inf"), 2.0**125])
def test_errors_that_are_no_priorities_are_refused_and_change_nothing(kind, error):
    buffer = make(kind, capacity=20)
    buffer.extend(make_transitions(20))
    give_errors(buffer)
    before = priorities(buffer)
    batch = buffer.sample()
    batch["td_error"] = torch.cat([torch.ones(15), torch.tensor([error])])
    with pytest.raises(ValueError, match=rf"but {re.escape(str(error))} was given; use"):
        buffer.update_tensordict_priority(batch)
    with pytest.raises(ValueError, match="the absolute TD error"):
        buffer.update_priority(torch.tensor([3]), error)
    assert torch.equal(priorities(buffer), before)
    assert float(buffer.sampler.default_priority) == pytest.approx(float(max(before.max(), 1.0)))


@pytest.mark.parametrize("kind", KINDS)
def test_errors_in_double_precision_are_taken(kind):
    buffer = make(kind, capacity=20)
    buffer.extend(make_transitions(20))
    batch = buffer.sample()
    batch["td_error"] = torch.full((16,), 3.0, dtype=torch.float64, requires_grad=True)
    buffer.update_tensordict_priority(batch)
    assert priorities(buffer).max().item() > 1.5


@pytest.mark.parametrize("alpha", [0.6, 3.0])
def test_the_largest_priorities_still_have_a_finite_sum(alpha):
    buffer = make("per", capacity=20, priority_alpha=alpha)
    buffer.extend(make_transitions(20))
    with pytest.raises(ValueError, match="from 0 to") as caught:
        buffer.update_priority(0, float("inf"))
    limit = float(str(caught.value).split("from 0 to ")[1].split(",")[0]) * 0.99
    set_priorities(buffer, [limit] * 20)
    assert buffer.sample()["index"].unique().numel() > 5


def batch_without(key):
    return pair_batch([(0, 1)], [0.5], [1.0]).exclude(key)


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        (batch_without("index"), r"'index'.*pass a batch that `sample\(\)` returned"),
        (batch_without("mixup_weight"), "'mixup_weight'.*such as PairMixup"),
        (batch_without("td_error"), "'td_error'.*write one TD error for each row"),
    ],
)
def test_a_batch_that_lacks_an_entry_is_refused(ten_rows, batch, words):
    with pytest.raises(KeyError, match=words):
        ten_rows.update_tensordict_priority(batch)


@pytest.mark.parametrize(
    ("key", "entry", "words"),
    [
        ("td_error", torch.rand(2, 3), r"'td_error' has shape \(2, 3\).*write one TD error"),
        ("mixup_weight", torch.rand(2, 2), r"'mixup_weight' has shape \(2, 2\)"),
        ("index", torch.zeros(2, 3, dtype=torch.int64), r"'index' has shape \(2, 3\)"),
        ("mixup_weight", torch.tensor([0.5, 1.5]), "outside of 0 to 1"),
        ("mixup_weight", torch.tensor([0.5, torch.nan]), "outside of 0 to 1"),
    ],
)
def test_entries_that_do_not_fit_are_refused(ten_rows, key, entry, words):
    set_priorities(ten_rows, [1.0] * 10)
    batch = pair_batch([(0, 1), (2, 3)], [0.5, 0.5], [5.0, 5.0]).set(key, entry)
    with pytest.raises(ValueError, match=words):
        ten_rows.update_tensordict_priority(batch)
    assert priorities(ten_rows).tolist() == pytest.approx([1.0] * 10, rel=1e-5)


@pytest.mark.parametrize("pair", [(0, 10), (-1, 3)])
def test_positions_beyond_the_capacity_are_refused(ten_rows, pair):
    with pytest.raises(IndexError, match=f"Positions {min(pair)} to {max(pair)}.*0 to 9"):
        ten_rows.update_tensordict_priority(pair_batch([pair], [0.5], [1.0]))
    with pytest.raises(IndexError, match=r"Position 12 .* 0 to 9"):
        ten_rows.update_priority(torch.tensor([1, 12]), torch.ones(2))


def test_pairs_as_single_positions_are_refused(ten_rows):
    with pytest.raises(ValueError, match=r"shape \(3, 2\).*update_tensordict_priority"):
        ten_rows.update_priority(torch.zeros(3, 2, dtype=torch.int64), torch.ones(3))


def test_priorities_of_pairs_need_the_sampler_that_keeps_them():
    buffer = PairPrioritizedReplayBuffer(
        storage=LazyTensorStorage(20),
        sampler=NeighborPairSampler(),
        transform=PairMixup(),
        batch_size=4,
    )
    buffer.extend(make_transitions(20))
    batch = buffer.sample().set("td_error", torch.rand(4))
    with pytest.raises(TypeError, match=r"NeighborPairSampler.*PrioritizedNeighborPairSampler"):
        buffer.update_tensordict_priority(batch)


@pytest.mark.parametrize("kind", KINDS)
def test_a_sampler_smaller_than_the_storage_is_refused(kind):
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(40), sampler=make_sampler(kind, 10), batch_size=4
    )
    with pytest.raises(ValueError, match=r"room for 40 rows.*max_capacity=10; make it at least 40"):
        buffer.extend(make_transitions(20))


def test_storages_from_which_pairs_cannot_be_drawn_are_refused():
    with pytest.raises(TypeError, match="ListStorage"):
        make("per_nmer", storage=ListStorage(100))
    with pytest.raises(ValueError, match="ndim=2"):
        make("per_nmer", storage=LazyTensorStorage(100, ndim=2))
    buffer = TensorDictReplayBuffer(
        storage=ListStorage(20), sampler=PrioritizedNeighborPairSampler(20), batch_size=4
    )
    with pytest.raises(TypeError, match="ListStorage; use LazyTensorStorage"):
        buffer.extend(make_transitions(5))


def test_rows_of_any_storage_have_priorities():
    buffer = make("per", storage=ListStorage(100))
    buffer.extend(make_transitions(30))
    give_errors(buffer)
    square = make("per", storage=LazyTensorStorage(100, ndim=2))
    square.extend(make_transitions(40).reshape(5, 8))
    batch = square.sample()
    batch["td_error"] = torch.zeros(16)
    square.update_tensordict_priority(batch)
    zero = torch.tensor([row * 5 + column for row, column in batch["index"].tolist()])
    assert (square.sampler.priorities(zero) < 1e-5).all()
    assert square.sampler.priorities(torch.arange(40)).sum() > 20


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ({"priority_alpha": -0.1}, r"alpha=-0.1 .*at least 0 \(the default is 0.6\)"),
        ({"priority_alpha": float("nan")}, "alpha=nan"),
        ({"priority_beta": -1}, r"beta=-1 .*at least 0 \(the default is 0.4\)"),
        ({"priority_eps": 0.0}, "eps=0.0.*above 0"),
        ({"priority_eps": 1e-30, "priority_alpha": 2.0}, "eps=1e-30 and alpha=2.0"),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_bad_parameters_are_named(kind, option, words):
    with pytest.raises(ValueError, match=words):
        make(kind, **option)


@pytest.mark.parametrize("capacity", [0, 2.5, True])
def test_bad_capacities_are_named(capacity):
    with pytest.raises(ValueError, match=f"max_capacity={capacity}.*at least 1"):
        PrioritizedNeighborPairSampler(capacity)


@pytest.mark.parametrize(
    ("kind", "option"),
    [
        ("uniform", {"priority_alpha": 0.6}),
        ("nmer", {"priority_beta": 0.4}),
        ("mixup", {"priority_eps": 1e-6}),
        ("per", {"k": 10}),
        ("per", {"alpha": 0.6}),
    ],
)
def test_an_argument_without_use_is_refused(kind, option):
    (name,) = option
    with pytest.raises(ValueError, match=f"'{kind}' does not accept {name}="):
        make(kind, **option)


def test_the_kinds_are_their_parts():
    per, per_nmer = make("per"), make("per_nmer", k=7, priority_beta=0.5)
    assert type(per) is TensorDictReplayBuffer
    assert isinstance(per.sampler, CheckedPrioritizedSampler)
    assert "alpha=0.6, beta=0.4, eps=1e-06" in repr(per.sampler)
    assert isinstance(per_nmer, PairPrioritizedReplayBuffer)
    assert isinstance(per_nmer.sampler, PrioritizedSampler)
    assert isinstance(per_nmer.sampler.unit, NeighborPairs)
    assert "k=7, alpha=0.6, beta=0.5" in repr(per_nmer.sampler)
