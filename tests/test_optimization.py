import copy

import pytest
import torch
from scipy import stats
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

from nmer_torchrl import make_replay_buffer
from nmer_torchrl.samplers import ReplayOptimizationSampler


def make_buffer(n: int = 200, capacity: int = 200, **options) -> TensorDictReplayBuffer:
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(capacity),
        sampler=ReplayOptimizationSampler(reward_key="reward", **options),
        batch_size=64,
        generator=torch.Generator().manual_seed(0),
    )
    if n:
        buffer.extend(make_rows(n))
    return buffer


def make_rows(n: int, seed: int = 0) -> TensorDict:
    reward = torch.randn((n, 1), generator=torch.Generator().manual_seed(seed))
    return TensorDict(reward=reward, x=torch.arange(n), batch_size=[n])


def kept(buffer: TensorDictReplayBuffer) -> torch.Tensor:
    return buffer.sampler._kept[: len(buffer)]


def test_all_rows_are_sampled_until_an_episode_has_ended():
    buffer = make_buffer(50, 50)
    index = torch.cat([buffer.sample()["index"] for _ in range(40)])
    counts = index.bincount(minlength=50)
    assert stats.chisquare(counts.numpy()).pvalue > 1e-3


def test_only_kept_rows_are_sampled_and_they_uniformly():
    buffer = make_buffer(60, 60)
    buffer.sampler.finish_episode(1.0, buffer.storage)
    pool = kept(buffer).nonzero().squeeze(1)
    assert 10 < len(pool) < 50
    index = torch.cat([buffer.sample()["index"] for _ in range(60)])
    counts = index.bincount(minlength=60)
    assert counts[~kept(buffer)].sum() == 0
    assert stats.chisquare(counts[pool].numpy()).pvalue > 1e-3


def test_new_rows_are_kept_also_where_they_overwrite():
    buffer = make_buffer(100, 100)
    buffer.sampler.finish_episode(1.0, buffer.storage)
    dropped = (~kept(buffer)).nonzero()[0].item()
    buffer.extend(make_rows(dropped + 1, seed=1))
    assert kept(buffer)[: dropped + 1].all()
    assert not kept(buffer).all()


def test_rows_that_nobody_announced_are_kept():
    storage = LazyTensorStorage(10)
    storage.set(torch.arange(10), make_rows(10))
    sampler = ReplayOptimizationSampler(reward_key="reward")
    buffer = TensorDictReplayBuffer(storage=storage, sampler=sampler, batch_size=8)
    assert buffer.sample()["x"].max() < 10
    assert sampler.kept(storage) == 10


def test_where_none_is_kept_all_are_sampled():
    buffer = make_buffer(20, 20)
    buffer.sampler.finish_episode(1.0, buffer.storage)
    kept(buffer).fill_(False)
    assert len(buffer.sample()["index"].unique()) > 10


@pytest.mark.parametrize("gain", [2.0, -2.0])
def test_the_step_is_that_of_reinforce(gain):
    """The gradient is minus gain * mean(I log p + (1 - I) log(1 - p))."""
    buffer = make_buffer(rows=200, episodes=1, lr=1e-3)
    sampler = buffer.sampler
    sampler.finish_episode(10.0, buffer.storage)
    policy, chosen = copy.deepcopy(sampler._policy), kept(buffer).double()
    features = sampler._features(buffer.storage)
    state = sampler._generator.get_state()
    rows = torch.randint(200, (200,), generator=torch.Generator().set_state(state))
    sampler.finish_episode(10.0 + gain, buffer.storage)

    p = policy.double()(features[rows].double()).sigmoid().squeeze(-1)
    objective = chosen[rows] * p.log() + (1 - chosen[rows]) * (1 - p).log()
    (-gain * objective.mean()).backward()
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-3)
    optimizer.step()
    for ours, theirs in zip(sampler._policy.parameters(), policy.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs.float(), atol=2e-5, rtol=0)


def test_rows_that_no_choice_has_kept_teach_nothing():
    """New rows are kept without a choice, which says nothing about the policy."""
    buffer = make_buffer(100, 200, rows=400, episodes=1, lr=1e-3)
    sampler = buffer.sampler
    sampler.finish_episode(1.0, buffer.storage)  # chooses among 100 rows
    buffer.extend(make_rows(100, seed=1))
    before, chosen = copy.deepcopy(sampler._policy), kept(buffer).double()
    features = sampler._features(buffer.storage)
    state = sampler._generator.get_state()
    rows = torch.randint(100, (400,), generator=torch.Generator().set_state(state))
    sampler.finish_episode(3.0, buffer.storage)
    p = before.double()(features[rows].double()).sigmoid().squeeze(-1)
    objective = chosen[rows] * p.log() + (1 - chosen[rows]) * (1 - p).log()
    (-2.0 * objective.mean()).backward()
    torch.optim.Adam(before.parameters(), lr=1e-3).step()
    for ours, theirs in zip(sampler._policy.parameters(), before.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs.float(), atol=2e-5, rtol=0)


def test_an_episode_without_a_choice_before_it_teaches_nothing():
    buffer = make_buffer(50, 50, episodes=1, lr=1e-2)
    sampler = buffer.sampler
    sampler.finish_episode(1.0, buffer.storage)
    buffer.extend(make_rows(50, seed=1))  # replaces all rows that were chosen
    before = copy.deepcopy(list(sampler._policy.parameters()))
    sampler.finish_episode(9.0, buffer.storage)
    torch.testing.assert_close(list(sampler._policy.parameters()), before, rtol=0, atol=0)


def test_it_learns_to_keep_what_raises_the_return():
    buffer = make_buffer(400, 400, lr=1e-2, episodes=1, rows=400)
    sampler, good = buffer.sampler, buffer[:]["reward"].squeeze(-1) > 0
    for _ in range(250):
        mask = kept(buffer)
        sampler.finish_episode(float(mask[good].sum() - mask[~good].sum()), buffer.storage)
    assert kept(buffer)[good].float().mean() > kept(buffer)[~good].float().mean() + 0.3


def test_features_are_reward_error_and_age():
    buffer = make_buffer(100, 150)
    buffer.extend(make_rows(50, seed=1))
    buffer.update_priority(torch.arange(150), torch.arange(150) / 10)
    reward, error, age = buffer.sampler._features(buffer.storage).T
    stored = buffer[:]["reward"].squeeze(-1)
    torch.testing.assert_close(reward, (stored - stored.mean()) / stored.std(correction=0))
    torch.testing.assert_close(error.std(correction=0), torch.tensor(1.0))
    assert (error.diff() > 0).all()
    assert age[0] == 1
    assert (age.diff() < 0).all()
    buffer.extend(make_rows(1, seed=2))  # new: the largest error that is known, and no age
    _, error, age = buffer.sampler._features(buffer.storage).T
    assert error[0] == error[1:].max()
    assert age[0] < 0.01
    for seed in range(20):  # however often the ring has turned, the oldest row has age 1
        buffer.extend(make_rows(150, seed))
    assert buffer.sampler._features(buffer.storage)[:, 2].max() == 1


def test_what_is_restored_goes_on_with_the_same_batches(tmp_path):
    buffer, again, loaded = make_buffer(), make_buffer(0), make_buffer(0)
    for value in (1.0, 3.0, 2.0):
        buffer.sampler.finish_episode(value, buffer.storage)
    buffer.sampler.dumps(tmp_path / "sampler")
    again.load_state_dict(buffer.state_dict())
    loaded.load_state_dict(buffer.state_dict())
    loaded.sampler.loads(tmp_path / "sampler")
    for _ in range(3):
        batches = [b.sample()["index"] for b in (buffer, again, loaded)]
        assert torch.equal(batches[0], batches[1])
        assert torch.equal(batches[0], batches[2])
        for b in (buffer, again, loaded):
            b.sampler.finish_episode(5.0, b.storage)
        assert torch.equal(kept(buffer), kept(again))
        assert torch.equal(kept(buffer), kept(loaded))


def test_a_state_is_not_changed_by_what_goes_on_from_it():
    buffer, first, second = make_buffer(), make_buffer(), make_buffer()
    for value in (1.0, 3.0, 2.0):
        buffer.sampler.finish_episode(value, buffer.storage)
    state = buffer.sampler.state_dict()
    first.sampler.load_state_dict(state)
    for value in (4.0, 5.0):
        first.sampler.finish_episode(value, first.storage)
    second.sampler.load_state_dict(state)
    for value in (4.0, 5.0):
        second.sampler.finish_episode(value, second.storage)
    assert torch.equal(kept(first), kept(second))
    first.sampler.load_state_dict(make_buffer().sampler.state_dict())  # of one that has not learnt
    assert first.sampler.state_dict().keys().isdisjoint({"policy", "optimizer"})
    assert first.sampler.kept(first.storage) == 200


def test_a_state_from_before_choices_were_noted_is_restored():
    buffer, again = make_buffer(), make_buffer(0)
    buffer.sampler.finish_episode(1.0, buffer.storage)
    state = buffer.state_dict()
    del state["_sampler"]["_judged"]
    again.load_state_dict(state)
    assert torch.equal(again.sample()["x"], buffer.sample()["x"])
    again.sampler.finish_episode(2.0, again.storage)


def test_a_copy_goes_on_by_itself():
    buffer = make_buffer()
    for value in (1.0, 3.0):
        buffer.sampler.finish_episode(value, buffer.storage)
    sampler = copy.deepcopy(buffer.sampler)
    before = sampler.state_dict()["policy"]
    buffer.sampler.finish_episode(7.0, buffer.storage)
    sampler.finish_episode(7.0, buffer.storage)
    assert torch.equal(sampler._kept, buffer.sampler._kept)
    assert not torch.equal(sampler.state_dict()["policy"]["0.weight"], before["0.weight"])


def test_torchs_own_generator_is_left_alone():
    buffer = make_buffer()
    state = torch.get_rng_state()
    buffer.sampler.finish_episode(1.0, buffer.storage)
    buffer.sampler.finish_episode(2.0, buffer.storage)
    assert torch.equal(torch.get_rng_state(), state)


def test_emptying_forgets_the_rows():
    buffer = make_buffer()
    buffer.sampler.finish_episode(1.0, buffer.storage)
    buffer.empty()
    buffer.sampler.finish_episode(2.0, buffer.storage)  # nothing there to choose from
    buffer.extend(make_rows(10))
    assert kept(buffer).all()


def test_bad_values_are_refused():
    with pytest.raises(ValueError, match="episodes=0"):
        ReplayOptimizationSampler(episodes=0)
    with pytest.raises(ValueError, match="rows=True"):
        ReplayOptimizationSampler(rows=True)
    with pytest.raises(ValueError, match="lr=0"):
        ReplayOptimizationSampler(lr=0)
    buffer = make_buffer()
    with pytest.raises(ValueError, match="not finite"):
        buffer.update_priority(torch.tensor([0]), torch.tensor([torch.nan]))
    with pytest.raises(ValueError, match="3 TD errors were given for 2 rows"):
        buffer.update_priority(torch.tensor([0, 1]), torch.ones(3))
    for position in (-1, 200):
        with pytest.raises(IndexError, match="at 0 to 199"):
            buffer.update_priority(torch.tensor([position]), torch.ones(1))
    with pytest.raises(ValueError, match="is nan"):
        buffer.sampler.finish_episode(float("nan"), buffer.storage)
    buffer.update_priority(torch.tensor([0, 1]), torch.ones(2, 1))
    buffer.update_priority(torch.empty(0, dtype=torch.int64), torch.empty(0))
    with pytest.raises(ValueError, match="name exactly one"):
        make_replay_buffer("ero", capacity=9, batch_size=2, value_keys=[("next", "observation")])


def test_errors_on_a_device_are_noted_without_waiting_and_checked_when_an_episode_ends(cuda):
    buffer, index = make_buffer(), torch.arange(150, device="cuda:0")
    errors = (torch.arange(150) / 10).to("cuda:0")
    expected = make_buffer()
    expected.update_priority(index.cpu(), errors.cpu())
    if cuda is not None:
        cuda.clear()
    buffer.update_priority(index, errors)
    assert cuda is None or not cuda.reads
    for one in (buffer, expected):
        one.sampler.finish_episode(1.0, one.storage)
    assert torch.equal(kept(buffer), kept(expected))
    buffer.update_priority(index + 100, errors)
    with pytest.raises(IndexError, match="rows are at 0 to 199"):
        buffer.sampler.finish_episode(1.0, buffer.storage)
    buffer.update_priority(index, errors / 0)
    with pytest.raises(ValueError, match="not finite"):
        buffer.sampler.finish_episode(1.0, buffer.storage)
