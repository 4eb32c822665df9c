"""What a training loop reports to a buffer, for every method and for a user's own parts."""

import pytest
import torch
from helpers import make_transitions
from torchrl.data import (
    LazyTensorStorage,
    RandomSampler,
    ReplayBufferEnsemble,
    TensorDictReplayBuffer,
)
from torchrl.envs.transforms import Compose

from nmer_torchrl import NeighborPairs, PairMixup, loop, make_replay_buffer
from nmer_torchrl.methods import METHODS
from nmer_torchrl.transforms import TunedMixup

N = 40


@pytest.mark.parametrize("kind", METHODS)
def test_one_loop_serves_every_method(kind):
    buffer = make_replay_buffer(kind, capacity=N, batch_size=8)
    loop.synchronize(buffer)  # before there is a row
    for row in make_transitions(N):
        buffer.add(row)
        loop.synchronize(buffer)
    loop.finish_episode(buffer, 3.0)
    batch = buffer.sample()
    loop.report_errors(buffer, batch, torch.rand(8))
    assert buffer.sample().shape == (8,)


@pytest.mark.parametrize("kind", ["nmer", "per_nmer", "neighborhood", "mixup", "ct"])
def test_what_is_taken_up_now_leaves_nothing_for_the_draw(kind):
    buffer = make_replay_buffer(kind, capacity=N, batch_size=8)
    buffer.extend(make_transitions(N))
    loop.synchronize(buffer)
    assert list(buffer.sampler.unit.rows.changes(buffer.storage)) == []


def test_a_unit_beside_a_sampler_is_told():
    unit = NeighborPairs()
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(N), sample_unit=unit, transform=PairMixup(), batch_size=8
    )
    buffer.extend(make_transitions(N))
    loop.synchronize(buffer)
    assert list(unit.rows.changes(buffer.storage)) == []


def test_errors_move_priorities():
    for kind in ("per", "per_nmer"):
        buffer = make_replay_buffer(kind, capacity=N, batch_size=8)
        buffer.extend(make_transitions(N))
        batch = buffer.sample()
        loop.report_errors(buffer, batch, torch.full((8,), 7.0))
        index = batch["index"].reshape(8, -1)[:, 0]
        assert (buffer.sampler.priorities(index) > 1.5).any()


def test_an_ensemble_is_told_of_rows_and_refuses_what_concerns_one_member():
    learned, plain = (
        [make_replay_buffer(kind, capacity=N, batch_size=8) for _ in range(2)]
        for kind in ("per_nmer", "uniform")
    )
    for member in [*learned, *plain]:
        member.extend(make_transitions(N))
    ensemble, other = (
        ReplayBufferEnsemble(*members, num_buffer_sampled=2, batch_size=16)
        for members in (learned, plain)
    )
    assert loop.learns(ensemble)
    assert not loop.learns(other)
    loop.synchronize(ensemble)
    assert list(learned[0].sampler.unit.rows.changes(learned[0].storage)) == []
    with pytest.raises(TypeError, match="Call it for each member"):
        loop.report_errors(ensemble, ensemble.sample(), torch.ones(2, 8))
    loop.report_errors(other, other.sample(), torch.ones(2, 8))
    loop.finish_episode(other, 1.0)
    ero = [make_replay_buffer("ero", capacity=N, batch_size=8) for _ in range(2)]
    for member in ero:
        member.extend(make_transitions(N))
    returns = ReplayBufferEnsemble(*ero, num_buffer_sampled=2, batch_size=16)
    with pytest.raises(TypeError, match="Call it for each member"):
        loop.finish_episode(returns, 1.0)


def test_a_sampler_of_the_users_own_takes_part_by_public_methods():
    heard = []

    class Own(RandomSampler):
        learns = True

        def synchronize(self, storage):
            heard.append(len(storage))

        def finish_episode(self, episode_return, storage):
            heard.append(episode_return)

        def update_priority(self, index, priority, *, storage=None):
            heard.append((index.shape, priority.shape))

    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(N), sampler=Own(), batch_size=8)
    buffer.extend(make_transitions(N))
    loop.synchronize(buffer)
    loop.finish_episode(buffer, 2.5)
    loop.report_errors(buffer, buffer.sample(), torch.rand(8))
    assert heard == [N, 2.5, ((8,), (8,))]
    assert loop.learns(buffer)


def test_batches_are_drawn_one_by_one_where_updates_change_the_draw():
    alone = {
        kind for kind in METHODS if loop.learns(make_replay_buffer(kind, capacity=9, batch_size=3))
    }
    assert alone == {"per", "per_nmer", "tuned_ct"}
    nested = TensorDictReplayBuffer(
        storage=LazyTensorStorage(9), transform=Compose(Compose(TunedMixup())), batch_size=3
    )
    assert loop.learns(nested)
