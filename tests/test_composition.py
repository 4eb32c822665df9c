"""Buffers of pairs together with other parts of TorchRL, each with the real thing."""

from dataclasses import dataclass

import gymnasium
import numpy as np
import pytest
import torch
from helpers import MIX_KEYS
from tensordict import TensorDict
from torch import Tensor
from torchrl.data import (
    TensorDictReplayBuffer,
)
from torchrl.envs.transforms import Compose, MultiStepTransform

from nmer_torchrl import (
    NeighborPairSampler,
    PairMixup,
    PairStorage,
    make_replay_buffer,
)

KINDS = ["uniform", "mixup", "nmer"]
PAIR_KINDS = KINDS[1:]


def make(kind="nmer", *, capacity=100, batch_size=16, seed=0, **options):
    generator = torch.Generator().manual_seed(seed)
    return make_replay_buffer(
        kind, capacity=capacity, batch_size=batch_size, generator=generator, **options
    )


def assert_mixed(batch: TensorDict, stored: TensorDict, *, some: bool = True) -> None:
    """The batch is `w * anchor + (1 - w) * partner`, and the anchor in all that is not mixed."""
    anchor, partner = stored[batch["index"][:, 0]], stored[batch["index"][:, 1]]
    weight = batch["mixup_weight"]
    for key in MIX_KEYS:
        expected = weight * anchor[key] + (1 - weight) * partner[key]
        torch.testing.assert_close(batch[key], expected.to(batch[key].dtype))
    for key in set(anchor.keys(True, True)) - {*MIX_KEYS, "index"}:
        assert torch.equal(batch[key], anchor[key])
    if some:
        assert (weight < 1).any()


def assert_same_batch(first: TensorDict, second: TensorDict) -> None:
    assert (first == second).all(), (first["index"], second["index"])


# -- episodes of a real task -------------------------------------------------------------------


@dataclass
class Episode:
    """What the environment said: `[T + 1, ...]` observations and `[T, ...]` of the others."""

    observations: np.ndarray
    actions: np.ndarray
    rewards: list[float]
    terminated: list[bool]
    truncated: list[bool]

    def __len__(self) -> int:
        return len(self.rewards)


def play(env_id: str, episodes: int, max_steps: int) -> list[Episode]:
    env = gymnasium.make(env_id, max_episode_steps=max_steps)
    env.action_space.seed(0)
    played = []
    for seed in range(episodes):
        observations, rest = [env.reset(seed=seed)[0]], []
        while not rest or not (rest[-1][2] or rest[-1][3]):
            action = env.action_space.sample()
            observation, reward, terminated, truncated, _ = env.step(action)
            observations.append(observation)
            rest.append((action, reward, terminated, truncated))
        actions, *others = (list(column) for column in zip(*rest, strict=True))
        played.append(Episode(np.stack(observations), np.stack(actions), *others))
    env.close()
    return played


@pytest.fixture(scope="module")
def episodes() -> list[Episode]:
    """Some end by a fall, the others by the limit of 5 steps."""
    played = play("InvertedDoublePendulum-v5", 50, max_steps=5)
    assert 10 < sum(episode.terminated[-1] for episode in played) < 40
    return played


def column(values, dtype=torch.float32) -> Tensor:
    return torch.as_tensor(np.asarray(values)).to(dtype).unsqueeze(-1)


def as_rows(episode: Episode) -> TensorDict:
    terminated, truncated = (
        column(flags, torch.bool) for flags in (episode.terminated, episode.truncated)
    )
    observations = torch.as_tensor(episode.observations).float()
    return TensorDict(
        observation=observations[:-1],
        action=torch.as_tensor(episode.actions),
        next=TensorDict(
            observation=observations[1:],
            reward=column(episode.rewards),
            terminated=terminated,
            truncated=truncated,
            done=terminated | truncated,
            batch_size=[len(episode)],
        ),
        batch_size=[len(episode)],
    )


# -- n-step returns ----------------------------------------------------------------------------


GAMMA = 0.9


def n_step_reference(episodes: list[Episode], n: int) -> TensorDict:
    """Row by row: the discounted sum, where it leads to, how far that is, and whether it ends."""
    rows = []
    for episode in episodes:
        for start in range(len(episode)):
            stop = min(start + n, len(episode))
            total = sum(GAMMA**i * episode.rewards[start + i] for i in range(stop - start))
            rows.append(
                (
                    episode.observations[start],
                    episode.observations[stop],
                    total,
                    stop - start,
                    episode.terminated[stop - 1],
                )
            )
    observation, target, reward, steps, terminal = (
        np.stack(values) for values in zip(*rows, strict=True)
    )
    return TensorDict(
        observation=torch.as_tensor(observation).float(),
        target=torch.as_tensor(target).float(),
        reward=column(reward),
        steps=torch.as_tensor(steps),
        terminal=torch.as_tensor(terminal),
        batch_size=[len(rows)],
    )


def n_step_buffer(order: str = "appended", n: int = 3, done_keys=("done", "truncated"), **options):
    ahead = MultiStepTransform(n_steps=n, gamma=GAMMA, done_keys=done_keys and list(done_keys))
    if order == "appended":
        buffer = make(capacity=1_000, **options)
        buffer.append_transform(ahead)
        return buffer
    return TensorDictReplayBuffer(
        storage=PairStorage(1_000),
        sampler=NeighborPairSampler(k=10),
        transform=Compose(ahead, PairMixup(0.75)),
        **options,
    )


@pytest.mark.parametrize("chunk", [1, 2, 50])
@pytest.mark.parametrize("order", ["appended", "before"])
def test_n_step_rows_are_those_of_the_slow_reference(episodes, order, chunk):
    buffer = n_step_buffer(order, 3, batch_size=16)
    for rows in torch.cat([as_rows(episode) for episode in episodes]).split(chunk):
        buffer.extend(rows)
    expected = n_step_reference(episodes, 3)[:-3]  # the last ones wait for what follows
    stored = buffer.storage[:]
    assert len(buffer) == len(expected)
    assert torch.equal(stored["observation"], expected["observation"])
    assert torch.equal(stored["next", "observation"], expected["target"])
    assert torch.equal(stored["steps_to_next_obs"], expected["steps"])
    torch.testing.assert_close(stored["next", "reward"], expected["reward"])


@pytest.mark.parametrize("order", ["appended", "before"])
@pytest.mark.parametrize("n", [2, 3])
def test_n_step_targets_mix_where_equally_far_and_not_terminal(episodes, n, order):
    buffer = n_step_buffer(order, n, batch_size=4_000)
    for episode in episodes:
        buffer.extend(as_rows(episode))
    batch = buffer.sample()
    assert_mixed(batch, buffer.storage[:])
    pairs = n_step_reference(episodes, n)[batch["index"]]
    steps, terminal = pairs["steps"], pairs["terminal"].any(1)
    equal = steps[:, 0] == steps[:, 1]
    # Of the last row of an episode, TorchRL says that it is terminal also where it is not.
    last = steps[:, 0] == 1
    mixed = (batch["mixup_weight"] < 1).squeeze(1)
    assert torch.equal(mixed, equal & ~terminal & ~last)
    if n == 3:
        for ended_on_the_way in (False, True):  # all the cases occur
            among = equal & ((steps[:, 0] < n) == ended_on_the_way)
            assert (among & terminal & ~last).any()
            assert (among & mixed).any()
        assert (~equal & ~terminal).any()


@pytest.mark.parametrize("order", ["appended", "before"])
def test_n_step_rows_that_do_not_tell_a_terminal_target_are_refused(episodes, order):
    remedy = r"\('next', 'terminated'\).*first.*done_keys=\['done', 'truncated'\]\)"
    buffer = n_step_buffer(order, done_keys=None)
    for rows in (as_rows(episodes[0]), as_rows(episodes[0])[:1]):
        with pytest.raises(ValueError, match=remedy):
            buffer.extend(rows)
    assert len(buffer) == 0


def test_one_step_by_an_n_step_transform_is_refused(episodes):
    buffer = n_step_buffer(n=1)
    with pytest.raises(ValueError, match=r"n_steps=1.*none would be mixed; leave"):
        buffer.extend(as_rows(episodes[0]))


def test_n_step_rows_go_on_after_loading(episodes, tmp_path):
    buffer, loaded = n_step_buffer(batch_size=64), n_step_buffer(batch_size=64, seed=1)
    for episode in episodes:
        buffer.extend(as_rows(episode))
    buffer.dumps(tmp_path / "saved")
    loaded.loads(tmp_path / "saved")
    batch = loaded.sample()
    assert_same_batch(buffer.sample(), batch)
    assert_mixed(batch, buffer.storage[:])
