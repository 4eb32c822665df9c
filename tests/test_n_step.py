"""n-step rows of several environments, compared with a slow reference."""

import copy
import pickle
from collections import Counter

import pytest
import torch
from helpers import MIX_KEYS, make_transitions
from tensordict import TensorDict
from torchrl.collectors import Collector
from torchrl.data import TensorDictReplayBuffer
from torchrl.envs import DoubleToFloat, SerialEnv, StepCounter, TransformedEnv
from torchrl.envs.libs.gym import GymEnv
from torchrl.envs.transforms import Compose, MultiStepTransform

from nmer_torchrl import NeighborPairSampler, PairMixup, PairStorage, make_replay_buffer
from nmer_torchrl.transforms import FlattenRows

GAMMA = 0.9


def make_streams(envs: int, steps: int, *, ends: float = 0.15, seed: int = 0) -> TensorDict:
    """Builds rows `[envs, steps]` of episodes that end by a fall or a limit, with (env, t)."""
    generator = torch.Generator().manual_seed(seed)
    shape = [envs, steps]
    observation = torch.randn(envs, steps + 1, 3, generator=generator)
    draw = torch.rand(*shape, 1, generator=generator)
    terminated, truncated = draw < ends / 2, (draw >= ends / 2) & (draw < ends)
    done = terminated | truncated
    led_to = observation[:, 1:]
    last = torch.randn(led_to.shape, generator=generator)  # no row starts where an episode ends
    return TensorDict(
        observation=observation[:, :-1],
        action=torch.randn(*shape, 2, generator=generator),
        identity=torch.stack(torch.meshgrid(*map(torch.arange, shape), indexing="ij"), -1),
        next=TensorDict(
            observation=torch.where(done, last, led_to),
            reward=torch.randn(*shape, 1, generator=generator),
            terminated=terminated,
            truncated=truncated,
            done=done,
            batch_size=shape,
        ),
        batch_size=shape,
    )


def reference(rows: TensorDict, n: int) -> dict[tuple[int, int], dict]:
    """Computes each row of `[envs, steps]` that has n successors, by (env, t), step by step."""
    following = rows["next"]
    made = {}
    for env in range(rows.shape[0]):
        for t in range(rows.shape[1] - n):
            total, steps = 0.0, 0
            while steps < n:
                total += GAMMA**steps * following["reward"][env, t + steps].item()
                steps += 1
                if following["done"][env, t + steps - 1]:
                    break
            made[env, t] = {
                "observation": rows["observation"][env, t],
                "action": rows["action"][env, t],
                "target": following["observation"][env, t + steps - 1],
                "reward": total,
                "steps": steps,
                "terminated": bool(following["terminated"][env, t + steps - 1]),
                "gamma": GAMMA**steps,
            }
    return made


def assert_stored(buffer: TensorDictReplayBuffer, rows: TensorDict, n: int) -> None:
    """Checks that the buffer holds exactly the reference's rows."""
    expected, stored = reference(rows, n), buffer.storage[: len(buffer)]
    assert Counter(map(tuple, stored["identity"].tolist())) == Counter(expected.keys())
    for row in stored:
        truth = expected[tuple(row["identity"].tolist())]
        assert torch.equal(row["observation"], truth["observation"])
        assert torch.equal(row["action"], truth["action"])
        assert torch.equal(row["next", "observation"], truth["target"])
        assert row["next", "reward"].item() == pytest.approx(truth["reward"], rel=1e-5, abs=1e-6)
        assert row["steps_to_next_obs"].item() == truth["steps"]
        assert row["next", "terminated"].item() == truth["terminated"]
        assert row["gamma"].item() == pytest.approx(truth["gamma"])
        # TorchRL's flag is False for rows that are the last of their episode, however it ended.
        assert row["nonterminal"].item() == (truth["steps"] > 1)


def n_step(n: int = 3) -> MultiStepTransform:
    return MultiStepTransform(n_steps=n, gamma=GAMMA, done_keys=["done", "truncated"])


def make_buffer(kind: str = "nmer", n: int = 3, **options) -> TensorDictReplayBuffer:
    buffer = make_replay_buffer(kind, capacity=1_000, **{"batch_size": 16, **options})
    buffer.append_transform(FlattenRows())
    buffer.append_transform(n_step(n))
    return buffer


@pytest.mark.parametrize("chunk", [1, 2, 7, 40])
@pytest.mark.parametrize("n", [2, 3, 5])
def test_each_environment_has_its_own_n_step_returns(n, chunk):
    rows = make_streams(3, 40)
    buffer = make_buffer(n=n)
    for part in rows.split(chunk, 1):
        buffer.extend(part)
    assert_stored(buffer, rows, n)


@pytest.mark.parametrize("kind", ["uniform", "mixup", "neighborhood", "ct", "per_nmer"])
def test_every_kind_stores_the_same(kind):
    rows = make_streams(4, 20)
    buffer = make_buffer(kind)
    for part in rows.split(5, 1):
        buffer.extend(part)
    assert_stored(buffer, rows, 3)
    assert buffer.sample().shape == (16,)


def test_a_buffer_put_together_by_hand_does_the_same():
    rows = make_streams(2, 30)
    buffer = TensorDictReplayBuffer(
        storage=PairStorage(100),
        sampler=NeighborPairSampler(k=5),
        transform=Compose(PairMixup(0.75), FlattenRows(), n_step()),
        batch_size=16,
    )
    buffer.extend(rows)
    assert_stored(buffer, rows, 3)


def test_rows_of_different_environments_are_mixed_where_they_look_equally_far():
    buffer = make_buffer(batch_size=2_000)
    buffer.extend(make_streams(4, 60))
    stored, batch = buffer.storage[:], buffer.sample()
    anchor, partner = (stored[batch["index"][:, i]] for i in (0, 1))
    weight = batch["mixup_weight"]
    for key in MIX_KEYS:
        torch.testing.assert_close(batch[key], weight * anchor[key] + (1 - weight) * partner[key])
    mixed = weight[:, 0] < 1
    assert (anchor["identity"][mixed, 0] != partner["identity"][mixed, 0]).any()
    assert (anchor["steps_to_next_obs"] == partner["steps_to_next_obs"])[mixed].all()
    for end in (anchor, partner):
        assert not end["next", "terminated"][mixed].any()
    assert 0.2 < mixed.float().mean() < 0.9


def make_env() -> TransformedEnv:
    def make_one() -> TransformedEnv:
        return TransformedEnv(
            GymEnv("InvertedDoublePendulum-v5"), Compose(DoubleToFloat(), StepCounter(8))
        )

    return SerialEnv(3, make_one)


@pytest.mark.parametrize("frames", [3, 30])
def test_a_collector_writes_the_rows_of_its_environments(frames):
    buffer, seen = make_buffer("nmer", 3), []
    env = make_env()
    env.set_seed(0)

    def remember(batch: TensorDict) -> None:
        """Keeps a copy of the rows, with (env, t) added."""
        batch = batch.contiguous().clone()
        start = sum(part.shape[1] for part in seen)
        places = map(torch.arange, (0, start), (3, start + batch.shape[1]))
        batch["identity"] = torch.stack(torch.meshgrid(*places, indexing="ij"), -1)
        seen.append(batch)

    collector = Collector(
        env,
        frames_per_batch=frames,
        total_frames=120,
        replay_buffer=buffer,
        post_collect_hook=remember,
    )
    for _ in collector:
        pass
    collector.shutdown()
    rows = torch.cat(seen, 1)
    assert rows.shape == (3, 40)
    assert rows["next", "terminated"].any()
    assert rows["next", "truncated"].any()
    expected, stored = reference(rows, 3), buffer.storage[: len(buffer)]
    assert len(stored) == len(expected) == 3 * 37
    # No two rows start alike, so that a row is found by where it starts.
    starts = {tuple(truth["observation"].tolist()): truth for truth in expected.values()}
    assert len(starts) == len(expected)
    for row in stored:
        truth = starts.pop(tuple(row["observation"].tolist()))
        assert torch.equal(row["next", "observation"], truth["target"])
        assert row["next", "reward"].item() == pytest.approx(truth["reward"], rel=1e-5)
        assert row["steps_to_next_obs"].item() == truth["steps"]
        assert row["next", "terminated"].item() == truth["terminated"]
    assert buffer.sample().shape == (16,)


def test_a_collector_of_several_environments_needs_no_n_step_transform():
    buffer = make_replay_buffer("nmer", capacity=200, batch_size=8)
    buffer.append_transform(FlattenRows())
    collector = Collector(make_env(), frames_per_batch=30, total_frames=60, replay_buffer=buffer)
    for _ in collector:
        pass
    collector.shutdown()
    assert len(buffer) == 60
    assert buffer.sample().shape == (8,)


# -- wrong uses --------------------------------------------------------------------------------


def plain(kind: str = "nmer", n: int = 3) -> TensorDictReplayBuffer:
    """Builds a buffer without `FlattenRows`."""
    buffer = make_replay_buffer(kind, capacity=1_000, batch_size=16)
    buffer.append_transform(n_step(n))
    return buffer


@pytest.mark.parametrize("kind", ["nmer", "uniform"])
def test_rows_held_back_are_not_joined_to_those_after_empty(kind):
    rows = make_streams(1, 20)[0]
    buffer = plain(kind)
    buffer.extend(rows)
    buffer.empty()
    with pytest.raises(ValueError, match=r"was emptied.*Create a new buffer"):
        buffer.extend(rows)
    assert len(buffer) == 0


def test_a_fold_that_gets_rows_first_drops_what_was_held_back_before_empty():
    first, second = make_streams(1, 20)[0], make_streams(1, 20, seed=1)[0]
    buffer, fresh = (
        TensorDictReplayBuffer(
            storage=PairStorage(100),
            sampler=NeighborPairSampler(k=5),
            transform=Compose(n_step(), PairMixup(0.75)),
            batch_size=16,
        )
        for _ in range(2)
    )
    buffer.extend(first)
    buffer.empty()
    for each in (buffer, fresh):
        each.extend(second)
    assert (buffer.storage[:] == fresh.storage[:]).all()


@pytest.mark.parametrize("kind", ["nmer", "uniform"])
def test_rows_held_back_do_not_survive_another_state(kind):
    first, second = make_streams(1, 20)[0], make_streams(1, 20, seed=1)[0]
    buffer, other = plain(kind), plain(kind)
    buffer.extend(first)
    state = copy.deepcopy(buffer.state_dict())
    buffer.extend(first)
    buffer.load_state_dict(state)
    other.extend(second)
    before = len(buffer)
    buffer.extend(second)
    assert len(buffer) == before + len(other)
    new = buffer.storage[before:].exclude("index")  # the position
    assert (new == other.storage[:].exclude("index")).all()


def test_a_fold_serves_another_buffer_of_n_step_rows():
    rows, fold = make_streams(1, 20)[0], PairMixup(0.75)
    for _ in range(2):
        buffer = TensorDictReplayBuffer(
            storage=PairStorage(100),
            sampler=NeighborPairSampler(k=5),
            transform=Compose(fold, n_step()),
            batch_size=16,
        )
        buffer.extend(rows)
        assert len(buffer) > 0


def test_n_step_rows_are_not_assigned():
    rows = make_streams(1, 20)[0]
    buffer = plain()
    buffer.extend(rows)
    before = buffer.storage[:].clone()
    with pytest.raises(ValueError, match="Use `extend`"):
        buffer[:2] = rows[:2]
    assert (buffer.storage[:] == before).all()


def test_a_fold_refuses_rows_of_several_environments_and_says_how_they_are_stored():
    buffer = plain()
    remedy = r"shape \(2, 17\).*Compose\(fold, FlattenRows\(\), MultiStepTransform\(\.\.\.\)\)"
    with pytest.raises(ValueError, match=remedy):
        buffer.extend(make_streams(2, 20))
    assert len(buffer) == 0


@pytest.mark.parametrize("kind", ["uniform", "mixup", "nmer"])
@pytest.mark.parametrize("n", [2, 3])
def test_rows_of_several_environments_in_one_dimension_are_refused(kind, n):
    buffer = plain(kind, n)
    with pytest.raises(ValueError, match=r"do not follow each other in time.*\[envs, steps\]"):
        buffer.extend(make_streams(4, 12, ends=0.0).reshape(-1))
    assert len(buffer) == 0


@pytest.mark.parametrize("envs", [2, 3, 8])
def test_rows_of_several_environments_step_by_step_are_refused(envs):
    buffer = plain(n=5)
    steps = make_streams(envs, 20, ends=0.0).unbind(1)
    for number in range(20):  # until the first that would look ahead into another environment
        if (number + 1) * envs > 10:
            break
        buffer.extend(steps[number])
    with pytest.raises(ValueError, match="do not follow each other in time"):
        buffer.extend(steps[number])


def test_rows_whose_last_dimension_is_not_time_are_refused():
    buffer = make_buffer()
    with pytest.raises(ValueError, match="do not follow each other in time"):
        buffer.extend(make_streams(8, 20).transpose(0, 1).contiguous())


def test_flattening_before_the_n_step_transform_is_refused():
    buffer = make_replay_buffer("nmer", capacity=100, batch_size=8)
    buffer.append_transform(n_step())
    buffer.append_transform(FlattenRows())
    with pytest.raises(ValueError, match="append MultiStepTransform after FlattenRows"):
        buffer.extend(make_streams(2, 20))
    fold_first = TensorDictReplayBuffer(
        storage=PairStorage(100),
        sampler=NeighborPairSampler(k=5),
        transform=Compose(n_step(), PairMixup(0.75)),
        batch_size=8,
    )
    with pytest.raises(ValueError, match=r"shape \(2, 20\).*Compose\(fold, FlattenRows"):
        fold_first.extend(make_streams(2, 20))
    with pytest.raises(ValueError, match="do not follow each other in time"):
        fold_first.extend(make_streams(2, 20).reshape(-1))


def test_rollouts_that_are_cut_off_need_an_end():
    first, second = make_streams(2, 10, ends=0.0), make_streams(2, 10, ends=0.0, seed=1)
    buffer = make_buffer()
    buffer.extend(first)
    with pytest.raises(ValueError, match=r'set \("next", "done"\) of its last row to True'):
        buffer.extend(second)
    buffer, second["identity"][..., 1] = make_buffer(), torch.arange(10, 20)
    for part in (first, second):
        for flag in ("done", "truncated"):
            part["next", flag][:, -1] = True
        buffer.extend(part)
    assert_stored(buffer, torch.cat([first, second], 1), 3)


def test_random_rows_are_refused():
    rows = make_transitions(40)
    rows["next", "truncated"] = torch.zeros(40, 1, dtype=torch.bool)
    with pytest.raises(ValueError, match="do not follow each other in time"):
        plain().extend(rows)


# -- right uses that are not refused -----------------------------------------------------------


def test_the_rows_of_one_environment_are_in_order_however_they_come():
    rows = make_streams(1, 200)[0]
    rows["observation"][50], rows["next", "observation"][49] = torch.nan, torch.nan
    buffer, start = plain(n=4), 0
    for size in (1, 1, 2, 3, 30, 1, 1, 40, 121):
        buffer.extend(rows[start : start + size])
        start += size
    assert start == 200
    assert len(buffer) == 196


def test_the_number_of_steps_may_change_on_the_way():
    rows, buffer = make_streams(2, 60, ends=0.05), make_buffer(n=4)
    for number, part in enumerate(rows.split(6, 1)):
        buffer.transform[-1].n_steps = 2 if number > 4 else 4
        buffer.extend(part)
    assert len(buffer) == 2 * 58


def test_a_pickled_buffer_goes_on():
    rows, buffer = make_streams(2, 40), make_buffer()
    buffer.extend(rows[:, :20])
    again = pickle.loads(pickle.dumps(buffer))
    again.extend(rows[:, 20:])
    assert_stored(again, rows, 3)
    with pytest.raises(ValueError, match="do not follow each other in time"):
        again.extend(rows[:, :5])


def test_ends_may_be_those_of_the_last_step_too():
    """Without "done" in `done_keys`, each row has the flag of its last step."""
    rows = make_streams(2, 40)
    buffer = make_replay_buffer("nmer", capacity=100, batch_size=8)
    buffer.append_transform(FlattenRows())
    buffer.append_transform(MultiStepTransform(3, GAMMA, done_keys=["truncated"]))
    for part in rows.split(9, 1):
        buffer.extend(part)
    assert_stored(buffer, rows, 3)


def test_a_single_row_and_a_row_that_is_flat_pass_as_they_are():
    buffer = make_replay_buffer("nmer", capacity=10, batch_size=2)
    buffer.append_transform(FlattenRows())
    rows = make_transitions(4)
    buffer.add(rows[0])
    buffer.extend(rows[1:])
    assert torch.equal(buffer.storage[:]["observation"], rows["observation"])


def test_n_step_returns_are_stored_and_mixed():
    buffer = TensorDictReplayBuffer(
        storage=PairStorage(100), sampler=NeighborPairSampler(k=3), batch_size=50
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
