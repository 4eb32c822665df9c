"""Buffers of pairs together with the real other parts of TorchRL."""

import gc
from dataclasses import dataclass
from importlib.metadata import version

import gymnasium
import numpy as np
import pytest
import torch
from helpers import MIX_KEYS, assert_neighbors, make_transitions, stored_points
from tensordict import TensorDict
from torch import Tensor
from torchrl.data import (
    LazyMemmapStorage,
    OfflineToOnlineReplayBuffer,
    ReplayBuffer,
    ReplayBufferEnsemble,
    TensorDictReplayBuffer,
    TensorStorage,
)
from torchrl.data.datasets import MinariExperienceReplay
from torchrl.envs.transforms import Compose, ExcludeTransform, MultiStepTransform

from nmer_torchrl import (
    NeighborPairSampler,
    PairMixup,
    PairStorage,
    RandomPairSampler,
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
    """Checks that mixed entries are `w * anchor + (1 - w) * partner`, and others the anchor's."""
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
    """Holds an episode: `[T + 1, ...]` observations, and `[T, ...]` of the other entries."""

    observations: np.ndarray
    actions: np.ndarray
    rewards: list[float]
    terminated: list[bool]
    truncated: list[bool]

    def __len__(self) -> int:
        return len(self.rewards)


def play(env_id: str, episodes: int, max_steps: int) -> list[Episode]:
    env = gymnasium.make(env_id, max_episode_steps=max_steps)
    played = play_in(env, episodes)
    env.close()
    return played


def play_in(env: gymnasium.Env, episodes: int) -> list[Episode]:
    """Returns episodes of random actions as the environment returned them."""
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
    return played


@pytest.fixture(scope="module")
def episodes() -> list[Episode]:
    """Provides episodes: some end by a fall, others by the limit of 5 steps."""
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
    """Computes for each row the discounted sum, what it leads to in how many steps, and its end."""
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
    with pytest.raises(ValueError, match=r"n_steps=1.*no row would be mixed; leave"):
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


# -- storages in files, and batches drawn ahead ------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("prefetch", [None, 1])
def test_a_memmap_storage_gives_the_batches_of_one_in_memory(kind, prefetch, tmp_path):
    files = LazyMemmapStorage(100, scratch_dir=tmp_path / "rows")
    in_files, in_memory = make(kind, storage=files, prefetch=prefetch), make(kind)
    for seed in range(4):  # the last one wraps around
        for buffer in (in_files, in_memory):
            buffer.extend(make_transitions(30, seed=seed, terminated=0.1))
        if not prefetch:  # else the next batch may be drawn before the next rows come
            assert_same_batch(in_files.sample(), in_memory.sample())
    for _ in range(3):
        assert_same_batch(in_files.sample(), in_memory.sample())
    assert (tmp_path / "rows" / "observation.memmap").exists()


@pytest.mark.parametrize("kind", KINDS)
def test_a_memmap_directory_is_opened_again_by_another_buffer(kind, tmp_path):
    def make_in(directory):
        storage = LazyMemmapStorage(100, scratch_dir=directory / "storage")
        return make(kind, storage=storage)

    buffer = make_in(tmp_path)
    rows = make_transitions(60)
    buffer.extend(rows)
    buffer.sample()
    buffer.dumps(tmp_path)  # the rows are there already, and are not copied
    expected = [buffer.sample() for _ in range(3)]
    del buffer
    again = make_in(tmp_path)
    again.loads(tmp_path)
    assert torch.equal(again[:]["observation"], rows["observation"])
    for batch in expected:
        assert_same_batch(again.sample(), batch)
    more = make_transitions(20, seed=1)
    assert again.extend(more).tolist() == list(range(60, 80))
    third = make_in(tmp_path)
    third.loads(tmp_path)  # what was written since the save is in the files, but does not count
    assert len(third) == 60
    if kind == "nmer":
        index = torch.arange(80)
        neighbors = again.sampler.neighbors(again.storage, index)
        assert_neighbors(stored_points(again.storage), index, neighbors)


@pytest.mark.parametrize("kind", PAIR_KINDS)
def test_a_dataset_in_files_is_sampled_where_it_is(kind, tmp_path):
    rows = make_transitions(70, terminated=0.1)
    rows.memmap(tmp_path / "dataset")
    storage = TensorStorage(TensorDict.load_memmap(tmp_path / "dataset"))
    buffer = make(kind, capacity=70, batch_size=300, storage=storage)
    batch = buffer.sample()
    assert_mixed(batch, rows)
    assert batch["index"].max() == 69
    if kind == "nmer":
        index = torch.arange(70)
        assert_neighbors(stored_points(storage), index, buffer.sampler.neighbors(storage, index))


@pytest.mark.parametrize("kind", PAIR_KINDS)
@pytest.mark.parametrize("prefetch", [1, 3])
def test_prefetching_from_files_goes_on_after_loading(kind, prefetch, tmp_path):
    def make_in(directory, seed):
        storage = LazyMemmapStorage(100, scratch_dir=tmp_path / directory)
        return make(kind, storage=storage, prefetch=prefetch, seed=seed)

    buffer = make_in("first", seed=0)
    buffer.extend(make_transitions(70, terminated=0.1))
    for _ in range(5):
        assert_mixed(buffer.sample(), buffer.storage[:], some=False)
    buffer.dumps(tmp_path / "saved")
    other = make_in("second", seed=1)
    other.extend(make_transitions(90, seed=5))
    other.sample()
    other.loads(tmp_path / "saved")
    assert len(other) == 70
    for _ in range(5):
        batch = other.sample()
        assert_mixed(batch, buffer.storage[:], some=False)
        if prefetch == 1:  # with more, threads may overtake each other
            assert_same_batch(batch, buffer.sample())
    other.extend(make_transitions(10, seed=2))
    assert torch.equal(other[70:80]["action"], make_transitions(10, seed=2)["action"])
    assert len(buffer) == 70


# -- ensembles ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kinds", [("nmer", "nmer"), ("nmer", "mixup")])
@pytest.mark.parametrize(
    "options", [{"sample_from_all": True}, {"p": [0.8, 0.2], "num_buffer_sampled": 8}]
)
def test_an_ensemble_of_pair_buffers_mixes_within_each(kinds, options):
    members = [make(kind, seed=seed) for seed, kind in enumerate(kinds)]
    for seed, member in enumerate(members):
        member.extend(make_transitions(40, seed=seed))
    ensemble = ReplayBufferEnsemble(*members, batch_size=160, **options)
    for _ in range(2):
        batch = ensemble.sample().reshape(-1)
        assert batch.batch_size == (160,)
        source = batch.pop("index")
        for member_id, member in enumerate(members):
            mine = source["buffer_ids"] == member_id
            assert mine.any()
            part = batch[mine].set("index", source["index"][mine])
            assert_mixed(part, member.storage[:])
        members[0].extend(make_transitions(80, seed=2))  # the ensemble sees what members take in


def test_an_ensemble_writes_to_its_members():
    members = [make(), make()]
    ensemble = ReplayBufferEnsemble(
        *members, sample_from_all=True, batch_size=16, routing_key="member"
    )
    rows = make_transitions(60)
    rows["member"] = torch.arange(60) % 2
    ensemble.extend(rows)
    for number, member in enumerate(members):
        assert torch.equal(member[:]["identity"], torch.arange(60)[number::2])
        index = torch.arange(30)
        neighbors = member.sampler.neighbors(member.storage, index)
        assert_neighbors(stored_points(member.storage), index, neighbors)


def test_the_generator_of_an_ensemble_decides_on_its_pairs():
    batches = []
    for seed in (0, 1):  # the members' own generators still draw their weights
        members = [make(seed=seed), make(seed=seed)]
        for member in members:
            member.extend(make_transitions(40))
        ensemble = ReplayBufferEnsemble(
            *members,
            sample_from_all=True,
            batch_size=16,
            generator=torch.Generator().manual_seed(3),
        )
        torch.manual_seed(seed)
        batches.append(ensemble.sample())
    assert torch.equal(batches[0]["index", "index"], batches[1]["index", "index"])
    assert not torch.equal(batches[0]["mixup_weight"], batches[1]["mixup_weight"])


def test_pairs_and_single_rows_do_not_go_into_one_ensemble():
    members = [make("nmer"), make("uniform")]
    for member in members:
        member.extend(make_transitions(40))
    ensemble = ReplayBufferEnsemble(*members, sample_from_all=True, batch_size=16)
    # TorchRL's own refusal; docs/composition.md says what to do instead.
    with pytest.raises(RuntimeError, match="must have the same dimension"):
        ensemble.sample()


def test_batches_of_pairs_and_of_single_rows_are_joined():
    pairs, rows = make("nmer"), make("uniform")
    pairs.extend(make_transitions(40))
    rows.extend(make_transitions(40, seed=1))
    mixed, plain = pairs.sample(), rows.sample()
    batch = torch.cat([mixed.exclude("index", "mixup_weight"), plain.exclude("index")])
    assert batch.batch_size == (32,)
    assert torch.equal(batch["identity"] >= 1_000, torch.arange(32) >= 16)
    assert_mixed(mixed, pairs.storage[:])
    assert torch.equal(batch["observation"][16:], rows.storage[:]["observation"][plain["index"]])


# -- offline to online -------------------------------------------------------------------------


def pair_buffer(rows: TensorDict | None = None, *more, sampler=None) -> ReplayBuffer:
    """Builds a plain buffer, without the entry `index` and with an open batch size."""
    buffer = ReplayBuffer(
        storage=PairStorage(200),
        sampler=sampler or NeighborPairSampler(k=5),
        transform=Compose(PairMixup(0.75), *more),
    )
    buffer.extend(rows)
    return buffer


def assert_mixed_with_a_neighbor(
    batch: TensorDict, buffer: ReplayBuffer, *, k: int, first: int = 0
) -> None:
    """Does the same as `assert_mixed`; the partner must be one of the anchor's k neighbors."""
    stored = buffer.storage[:]
    anchor = batch["identity"] - first
    assert torch.equal(stored["identity"][anchor], batch["identity"])
    candidates = stored[buffer.sampler.neighbors(buffer.storage, anchor, k)]
    weight = batch["mixup_weight"].unsqueeze(1)
    fits = torch.ones(candidates.shape, dtype=torch.bool)
    for key in MIX_KEYS:
        mixed = weight * stored[anchor][key].unsqueeze(1) + (1 - weight) * candidates[key]
        fits &= torch.isclose(mixed, batch[key].unsqueeze(1), rtol=1e-4, atol=1e-4).all(-1)
    assert fits.any(1).all()
    assert (weight < 1).any()


def test_offline_to_online_with_pairs_on_both_sides():
    both = OfflineToOnlineReplayBuffer(
        offline_dataset=pair_buffer(make_transitions(100)),
        online_storage=PairStorage(200),
        offline_fraction=0.25,
        batch_size=32,
    )
    both.online_buffer.set_sampler(NeighborPairSampler(k=5))
    both.online_buffer.append_transform(PairMixup(0.75))
    batch = both.sample()
    assert_mixed_with_a_neighbor(batch, both.offline_buffer, k=5)
    assert batch.batch_size == (32,)
    for start in range(0, 300, 50):
        both.extend(make_transitions(300, seed=1)[start : start + 50])
        if start < 200:  # then positions start again
            batch = both.sample()
            assert_mixed_with_a_neighbor(batch[:8], both.offline_buffer, k=5)
            assert_mixed_with_a_neighbor(batch[8:], both.online_buffer, k=5, first=1_000)
    storage, index = both.online_buffer.storage, torch.arange(200)
    neighbors = both.online_buffer.sampler.neighbors(storage, index)
    assert_neighbors(stored_points(storage), index, neighbors)
    both.anneal(1, 1)
    assert (both.sample()["identity"] >= 1_000).all()


@pytest.mark.parametrize("sampler", [NeighborPairSampler, RandomPairSampler])
def test_offline_to_online_with_pairs_on_the_offline_side_alone(sampler):
    offline = pair_buffer(
        make_transitions(100), ExcludeTransform("mixup_weight"), sampler=sampler()
    )
    both = OfflineToOnlineReplayBuffer(
        offline_dataset=offline, online_capacity=100, offline_fraction=0.5, batch_size=32
    )
    online = make_transitions(40, seed=1)
    both.extend(online)
    batch = both.sample()
    mixed, plain = batch[:16], batch[16:]
    anchor = offline.storage[:]["observation"][mixed["identity"]]
    assert (mixed["observation"] != anchor).any()
    assert torch.equal(plain["observation"], online["observation"][plain["identity"] - 1_000])


def test_offline_to_online_does_not_take_batches_with_an_index():
    offline = make(batch_size=8)
    offline.extend(make_transitions(50))
    both = OfflineToOnlineReplayBuffer(
        offline_dataset=offline, online_capacity=100, offline_fraction=0.5, batch_size=16
    )
    both.extend(make_transitions(30, seed=1))
    # TorchRL's own refusal, of any TensorDictReplayBuffer; docs/composition.md has the way to go.
    with pytest.raises(KeyError, match="incompatible"):
        both.sample()


def test_two_buffers_of_pairs_from_offline_to_online():
    offline, online = make(batch_size=24), make(batch_size=8, seed=1)
    offline.extend(make_transitions(100))
    online.extend(make_transitions(30, seed=1))
    parts = offline.sample(), online.sample()
    for part, buffer in zip(parts, (offline, online), strict=True):
        assert_mixed(part, buffer.storage[:])
    assert torch.cat(parts).batch_size == (32,)


# -- a Minari dataset --------------------------------------------------------------------------


DATASET = "double-pendulum/random-v0"
ABOUT = {  # without which Minari warns
    "algorithm_name": "random",
    "author": "nobody",
    "author_email": "nobody@example.org",
    "code_permalink": "https://example.org",
    "description": "for a test",
}


@pytest.fixture
def minari_dataset(episodes, tmp_path, monkeypatch):
    """Provides the episodes as a dataset that Minari wrote and loaded again."""
    minari = pytest.importorskip("minari")
    pytest.importorskip("h5py")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    write_minari(minari, DATASET, "InvertedDoublePendulum-v5", episodes)
    return minari.load_dataset(DATASET)


def write_minari(minari, name: str, env_id: str, episodes: list[Episode]) -> None:
    minari.create_dataset_from_buffers(
        name,
        [
            minari.data_collector.EpisodeBuffer(
                id=number,
                observations=list(episode.observations),
                actions=list(episode.actions),
                rewards=episode.rewards,
                terminations=episode.terminated,
                truncations=episode.truncated,
            )
            for number, episode in enumerate(episodes)
        ],
        env=env_id,
        eval_env=env_id,
        **ABOUT,
    )


def minari_rows(episode) -> TensorDict:
    """Returns the transitions of an episode that Minari loaded."""
    return as_rows(
        Episode(
            episode.observations,
            episode.actions,
            episode.rewards,
            episode.terminations,
            episode.truncations,
        )
    )


def assert_rows_of(rows: TensorDict, episodes: list[Episode]) -> None:
    """Checks each row against what the environment returned."""
    number = 0
    for episode in episodes:
        for step in range(len(episode)):
            row = rows[number]
            for key, value in (
                ("observation", episode.observations[step]),
                ("action", episode.actions[step]),
                (("next", "observation"), episode.observations[step + 1]),
                (("next", "reward"), [episode.rewards[step]]),
                (("next", "terminated"), [episode.terminated[step]]),
                (("next", "truncated"), [episode.truncated[step]]),
            ):
                said = torch.as_tensor(np.asarray(value)).to(row[key].dtype)
                assert torch.equal(row[key], said), (number, key)
            number += 1
    assert number == len(rows)


@pytest.mark.parametrize("kind", PAIR_KINDS)
def test_a_minari_dataset_becomes_a_buffer(kind, minari_dataset, episodes):
    buffer = make(kind, capacity=int(minari_dataset.total_steps), batch_size=500)
    for episode in minari_dataset.iterate_episodes():
        buffer.extend(minari_rows(episode))
    assert_rows_of(buffer.storage[:], episodes)
    batch = buffer.sample()
    assert_mixed(batch, buffer.storage[:])
    ended = buffer.storage[:]["next", "terminated"][batch["index"]].any(1)
    assert ended.any()
    assert (batch["mixup_weight"][ended] == 1).all()
    if kind == "nmer":
        index = torch.arange(len(buffer))
        neighbors = buffer.sampler.neighbors(buffer.storage, index)
        assert_neighbors(stored_points(buffer.storage), index, neighbors)


@pytest.mark.filterwarnings("ignore:Implicitly cleaning up:ResourceWarning")  # by its collector
def test_what_minari_collects_becomes_a_buffer(tmp_path, monkeypatch):
    minari = pytest.importorskip("minari")
    pytest.importorskip("jax")  # its collector uses it
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    env = minari.DataCollector(gymnasium.make("InvertedDoublePendulum-v5", max_episode_steps=5))
    played = play_in(env, 20)
    env.create_dataset(DATASET, eval_env="InvertedDoublePendulum-v5", **ABOUT)
    env.close()
    del env
    gc.collect()  # while the warning about its directory is ignored
    buffer = make("nmer", capacity=sum(len(episode) for episode in played))
    for episode in minari.load_dataset(DATASET).iterate_episodes():
        buffer.extend(minari_rows(episode))
    assert_rows_of(buffer.storage[:], played)
    assert_mixed(buffer.sample(), buffer.storage[:])


@pytest.mark.xfail(
    version("torchrl") == "0.14.1",
    reason="it fills tensors, and then returns empty files of their shape (memmap_like)",
    raises=AssertionError,
)
def test_torchrl_loads_a_minari_dataset(minari_dataset, episodes, tmp_path):
    dataset = load_by_torchrl(tmp_path)
    assert_rows_of(dataset.storage[:], episodes)


def load_by_torchrl(tmp_path, **options) -> MinariExperienceReplay:
    return MinariExperienceReplay(
        DATASET,
        batch_size=500,
        root=tmp_path / "torchrl",
        download=False,
        load_from_local_minari=True,
        **options,
    )


def test_a_dataset_of_torchrl_takes_a_pair_sampler(minari_dataset, episodes, tmp_path):
    dataset = load_by_torchrl(tmp_path, sampler=NeighborPairSampler(k=5), transform=PairMixup(0.75))
    # Until the test above passes, the rows are filled in by hand; the storage is that of TorchRL.
    rows = torch.cat([as_rows(episode) for episode in episodes])
    dataset.storage[:].update_(rows)
    dataset.sampler.load_state_dict({})
    batch = dataset.sample()
    assert batch["observation"].dtype == torch.float64  # as it was recorded
    assert_mixed(batch, dataset.storage[:])
    buffer = make(capacity=len(dataset), batch_size=500, storage=dataset.storage)
    assert_mixed(buffer.sample(), dataset.storage[:])
    with pytest.raises(RuntimeError, match="doesn't allow writing"):
        dataset.extend(dataset.storage[:5].clone())


def test_integer_rewards_of_a_dataset_are_refused(tmp_path, monkeypatch):
    minari = pytest.importorskip("minari")
    pytest.importorskip("h5py")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    name = "pendulum/random-v0"
    write_minari(minari, name, "InvertedPendulum-v5", play("InvertedPendulum-v5", 3, max_steps=5))
    (episode, *_) = minari.load_dataset(name).iterate_episodes()
    rows = minari_rows(episode)
    rows["next", "reward"] = torch.as_tensor(episode.rewards).unsqueeze(-1)
    assert rows["next", "reward"].dtype == torch.int64  # a reward of 1 for each step
    buffer = make()
    with pytest.raises(ValueError, match=r"'reward'\) is torch.int64.*floating-point"):
        buffer.extend(rows)
    buffer.extend(minari_rows(episode))
    assert len(buffer) == len(episode.rewards)
