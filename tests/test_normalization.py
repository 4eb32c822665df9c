"""Normalized observations, in the environment and in the buffer, and their neighbors."""

import pytest
import torch
from helpers import MIX_KEYS, assert_neighbors, distances_to, make_transitions, stored_points
from tensordict import TensorDict
from torchrl.data import TensorDictReplayBuffer
from torchrl.envs import DoubleToFloat, TransformedEnv
from torchrl.envs.libs.gym import GymEnv
from torchrl.envs.transforms import Compose, ObservationNorm, VecNorm, VecNormV2

from nmer_torchrl import NeighborPairSampler, PairMixup, PairStorage, make_replay_buffer

OBSERVATIONS = ["observation", ("next", "observation")]
LOC, SCALE = torch.tensor([3.0, -200.0, 0.1]), torch.tensor([50.0, 0.02, 4.0])


def play_twice(norm) -> TensorDict:
    """Plays the same 60 steps of a pendulum twice: raw, and normalized by `normalized`."""
    env = TransformedEnv(GymEnv("Pendulum-v1"), Compose(DoubleToFloat(), norm))
    parts = []
    for _ in range(2):
        env.set_seed(0)
        torch.manual_seed(0)
        parts.append(env.rollout(60, break_when_any_done=False))
    env.close()
    first, second = parts
    assert torch.equal(first["observation"], second["observation"])
    return torch.cat(parts)


def store(rows: TensorDict, key: str) -> TensorDictReplayBuffer:
    """Stores the rows in a buffer whose observations are the entries of that name."""
    stored = rows.select("action", ("next", "reward"), ("next", "terminated"))
    for name in ("observation", ("next", "observation")):
        nested = (*name[:-1], key) if isinstance(name, tuple) else key
        stored[name] = rows[nested]
    buffer = make_replay_buffer("nmer", capacity=200, batch_size=64, k=5)
    buffer.extend(stored)
    return buffer


def neighbors(buffer: TensorDictReplayBuffer) -> tuple[torch.Tensor, torch.Tensor]:
    index = torch.arange(len(buffer))
    return index, buffer.sampler.neighbors(buffer.storage, index)


def make_norm(**options) -> ObservationNorm:
    options = {"in_keys": OBSERVATIONS, "standard_normal": True, **options}
    return ObservationNorm(LOC, SCALE, **options)


# -- on the environment ------------------------------------------------------------------------


def test_a_fixed_normalization_of_the_environment_leaves_neighbors_as_they_are():
    rows = play_twice(make_norm(in_keys=["observation"], out_keys=["normalized"]))
    raw, normalized = store(rows, "observation"), store(rows, "normalized")
    assert not torch.equal(raw.storage[:]["observation"], normalized.storage[:]["observation"])
    index, found = neighbors(normalized)
    points = stored_points(raw.storage)
    expected = distances_to(points, index, neighbors(raw)[1])
    torch.testing.assert_close(distances_to(points, index, found), expected, atol=1e-4, rtol=1e-3)


def test_a_running_normalization_of_the_environment_parts_equal_states_of_different_times():
    rows = play_twice(VecNormV2(in_keys=["observation"], out_keys=["normalized"], decay=0.99))
    raw, normalized = store(rows, "observation"), store(rows, "normalized")
    index, found = neighbors(normalized)
    assert_neighbors(stored_points(normalized.storage), index, found)  # of what is stored
    twin = (index + 60) % 120  # the same state and action, in the other half
    assert torch.equal(neighbors(raw)[1][:, 0], twin)
    points = stored_points(normalized.storage)
    apart = distances_to(points, index, twin.unsqueeze(1))
    assert (apart > 0.1).all()
    assert (found[:, 0] == twin).float().mean() < 0.75  # it is all of them in the raw buffer


def test_a_running_normalization_that_is_frozen_is_a_fixed_one():
    norm = VecNormV2(in_keys=["observation"], out_keys=["normalized"], decay=0.99)
    play_twice(norm)
    rows = play_twice(norm.frozen_copy())
    normalized = store(rows, "normalized")
    index, found = neighbors(normalized)
    assert torch.equal(found[:, 0], (index + 60) % 120)


# -- on the buffer -----------------------------------------------------------------------------


def make_buffer(*transforms) -> TensorDictReplayBuffer:
    return TensorDictReplayBuffer(
        storage=PairStorage(100),
        sampler=NeighborPairSampler(k=5),
        transform=Compose(*transforms),
        batch_size=300,
        generator=torch.Generator().manual_seed(0),
    )


def make_fold() -> PairMixup:
    return PairMixup(0.75, generator=torch.Generator().manual_seed(1))


def mix_of(stored: TensorDict, batch: TensorDict, key) -> torch.Tensor:
    anchor, partner = (stored[batch["index"][:, i]][key] for i in (0, 1))
    return batch["mixup_weight"] * anchor + (1 - batch["mixup_weight"]) * partner


def test_a_normalization_after_the_fold_gets_mixes_of_what_is_stored():
    rows = make_transitions(80, terminated=0.1)
    buffer = make_buffer(make_fold(), make_norm())
    buffer.extend(rows)
    batch, stored = buffer.sample(), buffer.storage[:]
    for key in MIX_KEYS:
        assert torch.equal(stored[key], rows[key])  # writes leave rows as they are
        mixed = mix_of(rows, batch, key)
        expected = (mixed - LOC) / SCALE if key in OBSERVATIONS else mixed
        torch.testing.assert_close(batch[key], expected, rtol=1e-4, atol=1e-4)
    assert (batch["mixup_weight"] < 1).any()
    index, found = neighbors(buffer)
    assert_neighbors(stored_points(buffer.storage), index, found)


def test_a_fixed_normalization_before_the_fold_gives_the_same_pairs_and_mixes():
    rows, batches = make_transitions(80), []
    for transforms in ((make_fold(), make_norm()), (make_norm(), make_fold())):
        buffer = make_buffer(*transforms)
        buffer.extend(rows)
        batches.append(buffer.sample())
    after, before = batches
    assert torch.equal(after["index"], before["index"])
    for key in MIX_KEYS:
        torch.testing.assert_close(after[key], before[key], rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("after", [True, False])
def test_noise_is_in_the_units_of_what_is_stored(after):
    buffer = make_replay_buffer("noisy", capacity=2_000, batch_size=2_000, sigma=0.1)
    rows = make_transitions(2_000)
    (buffer.append_transform if after else lambda t: buffer.insert_transform(0, t))(make_norm())
    buffer.extend(rows)
    batch = buffer.sample()
    raw = batch["observation"] * SCALE + LOC
    noise = (raw - rows["observation"][batch["index"]]).std(0) / rows["observation"].std(0)
    right = torch.isclose(noise, torch.tensor(0.1), rtol=0.2)
    assert right.all() == after


def test_an_inverse_normalization_decides_what_is_stored_and_neighbors_stay():
    rows = make_transitions(80)
    buffer = make_buffer(make_fold(), make_norm(in_keys_inv=OBSERVATIONS))
    buffer.extend(rows.clone())
    stored = buffer.storage[:]
    torch.testing.assert_close(stored["observation"], rows["observation"] * SCALE + LOC)
    raw = make_buffer(make_fold())
    raw.extend(rows)
    points = stored_points(raw.storage)
    index, found = neighbors(buffer)
    expected = distances_to(points, index, neighbors(raw)[1])
    torch.testing.assert_close(distances_to(points, index, found), expected, atol=1e-4, rtol=1e-3)
    batch = buffer.sample()  # and drawing turns it back
    mixed = mix_of(rows, batch, "observation")
    torch.testing.assert_close(batch["observation"], mixed, rtol=1e-4, atol=1e-3)


def test_a_running_normalization_is_not_for_buffers():
    """One of TorchRL's refuses it; the other scales the two observations differently."""
    buffer = make_buffer(make_fold(), VecNormV2(in_keys=OBSERVATIONS))
    rows = make_transitions(80)
    rows["next", "observation"] += 100
    buffer.extend(rows)
    with pytest.raises(NotImplementedError):
        buffer.sample()
    with pytest.warns(Warning, match="VecNorm"):
        norm = VecNorm(in_keys=OBSERVATIONS)
    buffer = make_buffer(make_fold(), norm)
    buffer.extend(rows)
    for _ in range(20):
        batch = buffer.sample()
    change = batch["next", "observation"].mean() - batch["observation"].mean()
    assert change.abs() < 1  # of the 100 / 10 standard deviations nothing is left
