import pickle

import pytest
import torch
from helpers import MIX_KEYS, make_transitions
from tensordict import TensorDict, tensorclass
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.envs.transforms import MultiStepTransform

from nmer_torchrl import NeighborPairSampler, PairMixup, make_replay_buffer
from nmer_torchrl.methods import METHODS


def make_pairs(n: int = 64, **options) -> TensorDict:
    anchors, partners = (make_transitions(n, seed=seed, **options) for seed in (1, 2))
    return torch.stack([anchors, partners], 1)


def test_mixed_entries_are_the_convex_combination():
    pairs = make_pairs()
    batch = PairMixup(0.75)(pairs.clone())
    assert batch.batch_size == (64,)
    weight = batch["mixup_weight"]
    assert weight.shape == (64, 1)
    assert weight.unique().numel() == 64
    for key in MIX_KEYS:
        anchor, partner = pairs[key].unbind(1)
        torch.testing.assert_close(batch[key], weight * anchor + (1 - weight) * partner)


def test_other_entries_are_the_anchors():
    pairs = make_pairs(terminated=0.2)
    batch = PairMixup(0.75)(pairs.clone())
    for key in ("identity", ("next", "terminated"), ("next", "done")):
        assert torch.equal(batch[key], pairs[key][:, 0])
        assert batch[key].dtype == pairs[key].dtype


@pytest.mark.parametrize("which", ["anchor", "partner"])
def test_a_terminal_row_leaves_the_anchor_untouched(which):
    pairs = make_pairs()
    ended = pairs["next", "terminated"]
    ended[:32, 0 if which == "anchor" else 1] = True
    batch = PairMixup(0.75)(pairs.clone())
    for key in MIX_KEYS:
        assert torch.equal(batch[key][:32], pairs[key][:32, 0])
        assert not (batch[key][32:] == pairs[key][32:, 0]).all()
    assert (batch["mixup_weight"][:32] == 1).all()
    assert batch["next", "terminated"].dtype == torch.bool


def test_done_without_termination_is_mixed():
    pairs = make_pairs()
    pairs["next", "done"][:] = True
    assert (PairMixup(0.75)(pairs)["mixup_weight"] < 1).all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("key", MIX_KEYS)
def test_a_row_that_is_not_finite_is_never_mixed(bad, side, key):
    pairs = make_pairs()
    pairs[key][7, side, 0] = bad
    pairs["next", "terminated"][7, 0] = side == 1  # weight 1 times NaN must not leak either
    batch = PairMixup(0.75)(pairs.clone())
    assert batch["mixup_weight"][7] == 1
    for other in MIX_KEYS:
        assert torch.equal(batch[other][7].nan_to_num(), pairs[other][7, 0].nan_to_num())
        assert batch[other][torch.arange(64) != 7].isfinite().all()


def test_a_mix_that_would_overflow_is_not_made():
    pairs = make_pairs()
    pairs["observation"][3] = torch.tensor([3e38, -3e38]).unsqueeze(1)
    batch = PairMixup(0.75)(pairs.clone())
    assert batch["mixup_weight"][3] == 1
    assert torch.equal(batch["action"][3], pairs["action"][3, 0])


def test_a_row_paired_with_itself_stays_itself_whatever_the_weight():
    rows = make_transitions(50)
    batch = PairMixup(0.75)(torch.stack([rows, rows], 1))
    for key in MIX_KEYS:
        assert torch.equal(batch[key], rows[key])


def test_batches_without_pairs_pass_through():
    rows = make_transitions(10)
    fold = PairMixup(0.75)
    assert fold(rows) is rows
    triples = torch.stack([rows, rows, rows], 1)
    assert fold(triples) is triples
    assert fold(rows[0]).batch_size == ()


def test_leading_dimensions_are_kept():
    pairs = torch.stack([make_pairs(8), make_pairs(8)])
    batch = PairMixup(0.75)(pairs)
    assert batch.batch_size == (2, 8)
    assert batch["mixup_weight"].shape == (2, 8, 1)


def test_keys_may_be_nested_and_several_and_of_any_shape():
    x, y = torch.randn(16, 2, 4, 3), torch.randn(16, 2, dtype=torch.float64)
    pairs = TensorDict(
        agent=TensorDict(camera=x, batch_size=[16, 2]),
        y=y,
        end=torch.zeros(16, 2, dtype=torch.bool),
        batch_size=[16, 2],
    )
    batch = PairMixup(1.0, mix_keys=[("agent", "camera"), "y"], terminated_key="end")(pairs.clone())
    weight = batch["mixup_weight"]
    torch.testing.assert_close(
        batch["agent", "camera"], x[:, 1].lerp(x[:, 0], weight.reshape(16, 1, 1))
    )
    assert batch["y"].dtype == torch.float64
    torch.testing.assert_close(batch["y"], y[:, 1].lerp(y[:, 0], weight[:, 0].double()))


def test_entries_within_a_tensorclass_are_mixed():
    @tensorclass
    class Robot:
        joints: torch.Tensor
        serial: torch.Tensor

    joints, serial = torch.randn(16, 2, 4), torch.arange(32).reshape(16, 2)
    pairs = TensorDict(
        robot=Robot(joints=joints, serial=serial, batch_size=[16, 2]),
        end=torch.zeros(16, 2, dtype=torch.bool),
        batch_size=[16, 2],
    )
    batch = PairMixup(1.0, mix_keys=[("robot", "joints")], terminated_key="end")(pairs)
    assert isinstance(batch["robot"], Robot)
    mixed = joints[:, 1].lerp(joints[:, 0], batch["mixup_weight"])
    torch.testing.assert_close(batch["robot"].joints, mixed)
    assert torch.equal(batch["robot"].serial, serial[:, 0])


def test_weights_come_from_the_generator_that_is_set():
    pairs = make_pairs()
    fold = PairMixup(0.75, generator=torch.Generator().manual_seed(5))
    first = fold(pairs.clone())["mixup_weight"]
    torch.manual_seed(99)
    fold.generator = torch.Generator().manual_seed(5)
    assert torch.equal(fold(pairs.clone())["mixup_weight"], first)
    assert not torch.equal(fold(pairs.clone())["mixup_weight"], first)


def test_state_and_pickle_carry_the_generator():
    pairs = make_pairs()
    fold = PairMixup(0.75, generator=torch.Generator().manual_seed(5))
    fold(pairs.clone())
    state = fold.state_dict()
    twin = pickle.loads(pickle.dumps(fold))
    expected = fold(pairs.clone())["mixup_weight"]
    assert torch.equal(twin(pairs.clone())["mixup_weight"], expected)
    other = PairMixup(0.75, generator=torch.Generator())
    other.load_state_dict(state)
    assert torch.equal(other(pairs.clone())["mixup_weight"], expected)
    PairMixup(0.75).load_state_dict(state)  # no generator of its own: nothing to restore


def test_targets_of_different_lookahead_are_not_mixed():
    pairs = make_pairs()
    steps = torch.full((64, 2, 1), 3)
    steps[:10, 1] = 2
    nonterminal = torch.ones(64, 2, 1, dtype=torch.bool)
    nonterminal[10:20, 0] = False
    pairs["steps_to_next_obs"], pairs["nonterminal"] = steps, nonterminal
    weight = PairMixup(0.75)(pairs)["mixup_weight"]
    assert (weight[:20] == 1).all()
    assert (weight[20:] < 1).all()


def test_n_step_returns_are_stored_and_mixed():
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(100), sampler=NeighborPairSampler(k=3), batch_size=50
    )
    buffer.append_transform(MultiStepTransform(3, 0.9, done_keys=["done", "truncated"]))
    buffer.append_transform(PairMixup(0.75))
    rows = make_transitions(40)
    rows["observation"][1:] = rows["next", "observation"][:-1]
    rows["next", "done"][:] = False
    rows["next", "done"][19] = rows["next", "done"][39] = True
    for chunk in rows.split(20):
        buffer.extend(chunk)
    batch = buffer.sample()
    mixed = (batch["mixup_weight"] < 1).squeeze()
    assert mixed.any()
    index = batch["index"][mixed]
    steps = buffer.storage[:]["steps_to_next_obs"]
    assert torch.equal(steps[index[:, 0]], steps[index[:, 1]])


@pytest.mark.parametrize("alpha", [0, -1.0, float("nan"), float("inf")])
def test_bad_alpha_is_named(alpha):
    with pytest.raises(ValueError, match=rf"alpha={alpha}.*above 0"):
        PairMixup(alpha)


def test_missing_keys_are_named_with_those_there_are():
    pairs = make_pairs()
    with pytest.raises(KeyError, match=r"'obs'.*'action'.*'observation'"):
        PairMixup(mix_keys=["obs"])(pairs.clone())
    with pytest.raises(KeyError, match=r"'ended'.*'terminated'"):
        PairMixup(terminated_key="ended")(pairs.clone())


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool])
def test_entries_that_are_not_continuous_are_refused(dtype):
    pairs = make_pairs()
    pairs["action"] = pairs["action"].to(dtype)
    with pytest.raises(ValueError, match=rf"'action' is {dtype}, that is, a discrete action"):
        PairMixup()(pairs)


def test_a_nested_key_in_place_of_a_sequence_of_keys_is_refused():
    with pytest.raises(ValueError, match=r"'next' is not a tensor.*\[\('next', ...\)\]"):
        PairMixup(mix_keys=("next", "reward"))(make_pairs())
    with pytest.raises(ValueError, match="`mix_keys` is empty"):
        PairMixup(mix_keys=[])


@pytest.mark.parametrize("keys", [[3], [["next", 1]], [("a", 1)]])
def test_what_is_no_key_is_refused(keys):
    with pytest.raises(TypeError, match="not a key"):
        PairMixup(mix_keys=keys)


def with_entry(key, change):
    rows = make_transitions(3, seed=5)
    rows[key] = change(rows[key])
    return rows


def without(key):
    rows = make_transitions(3, seed=5)
    del rows[key]
    return rows


@pytest.mark.parametrize("kind", METHODS)
@pytest.mark.parametrize("restored", [False, True])
def test_rows_that_do_not_fit_leave_the_buffer_as_it_was(kind, restored):
    buffer = make_replay_buffer(kind, capacity=20, batch_size=8)
    buffer.extend(make_transitions(10))
    if restored:
        state = buffer.state_dict()
        buffer = make_replay_buffer(kind, capacity=20, batch_size=8)
        buffer.load_state_dict(state)
    before, cursor = buffer.storage[:].clone(), buffer.writer.state_dict()
    reward, ended = ("next", "reward"), ("next", "terminated")
    for rows, words in (
        (with_entry("observation", lambda x: x[:, :1]), r"'observation' has shape \(1,\)"),
        (with_entry("observation", lambda x: x.double()), "'observation' is torch.float64"),
        (with_entry(reward, lambda x: x.squeeze(1)), r"'reward'\) has shape \(\)"),
        (with_entry(ended, lambda x: x.expand(3, 2)), r"'terminated'\) has shape \(2,\)"),
        (with_entry(ended, lambda x: x.float()), r"'terminated'\) is torch.float32"),
        (with_entry("identity", lambda x: x.unsqueeze(1)), r"'identity' has shape \(1,\)"),
        (without("identity"), "no entry 'identity'"),
        (make_transitions(3).reshape(3, 1), r"batch of shape \(3, 1\)"),
    ):
        with pytest.raises((ValueError, KeyError), match=words):
            buffer.extend(rows)
        if rows.ndim == 1:
            with pytest.raises((ValueError, KeyError), match=words):
                buffer.add(rows[0])
            with pytest.raises((ValueError, KeyError), match=words):
                buffer[torch.arange(3)] = rows
        assert buffer.writer.state_dict() == cursor
        assert (buffer.storage[:] == before).all()
    rows = make_transitions(3, seed=6)
    rows["more"] = torch.ones(3)  # may come later, and go again
    buffer.extend(rows)
    buffer.extend(make_transitions(3, seed=7))
    assert len(buffer) == 16
    assert buffer.sample()["identity"].shape == (8,)
