"""Limits on the distance of partners."""

import copy
import math
import pickle

import pytest
import torch
from helpers import MIX_KEYS, make_transitions, oracle_scale, stored_points
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

from nmer_torchrl import (
    Mahalanobis,
    NeighborPairSampler,
    PairMixup,
    PrioritizedNeighborPairSampler,
    make_replay_buffer,
)
from nmer_torchrl.buffers import PairPrioritizedReplayBuffer
from nmer_torchrl.pairs import NeighborPairs, QuantileCap
from nmer_torchrl.pairs.cap import Cap
from nmer_torchrl.samplers import NeighborhoodSampler
from nmer_torchrl.transforms import GaussianProcessMixup, MeanMixup, NeighborhoodMixup

SAMPLERS = {
    NeighborPairSampler: PairMixup,
    NeighborhoodSampler: NeighborhoodMixup,
}


def make(kind, max_distance, fold=None, *, metric=None, seed=0):
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(200),
        sampler=kind(4, search="torch", metric=metric, max_distance=max_distance),
        transform=(SAMPLERS[kind] if fold is None else fold)(),
        batch_size=50,
        generator=torch.Generator().manual_seed(seed),
    )
    buffer.extend(make_transitions(200))
    return buffer


@pytest.mark.parametrize("metric", [None, Mahalanobis()])
@pytest.mark.parametrize("kind", SAMPLERS)
@pytest.mark.parametrize("limit", [1e-9, 1.2, 1e9])
def test_an_anchor_stands_in_for_partners_that_are_too_far(kind, metric, limit):
    free, capped = (make(kind, cap, metric=metric) for cap in (None, limit))
    index, found = free.sample()["index"], capped.sample()["index"]
    distances = free.sampler.distances(free.storage[:][index])
    if metric is None:
        points = stored_points(free.storage)
        z = points * oracle_scale(points)
        torch.testing.assert_close(distances, (z[index[:, 1:]] - z[index[:, :1]]).norm(dim=-1))
    near = distances <= limit
    assert (near.any(), near.all()) == (limit > 1, limit > 2)
    assert torch.equal(found[:, 1:], torch.where(near, index[:, 1:], index[:, :1]))


@pytest.mark.parametrize(
    ("kind", "fold"),
    [
        (NeighborPairSampler, PairMixup),
        (NeighborPairSampler, MeanMixup),
        (NeighborhoodSampler, NeighborhoodMixup),
        (NeighborhoodSampler, GaussianProcessMixup),
    ],
)
def test_anchors_without_a_partner_are_not_changed_by_a_fold(kind, fold):
    buffer = make(kind, 1e-9, fold)
    batch = buffer.sample()
    index = batch["index"]
    assert (index == index[:, :1]).all()
    stored = buffer.storage[:][index[:, 0]]
    for key in MIX_KEYS:
        # A Gaussian process predicts the outcome of the anchor from copies of it, and rounds.
        slack = 1e-5 if fold is GaussianProcessMixup else 0.0
        torch.testing.assert_close(batch[key], stored[key], rtol=slack, atol=slack)


def test_the_quantile_is_that_of_the_last_pairs():
    cap, seen = Cap(QuantileCap(0.7, window=300)), torch.empty(0, dtype=torch.float64)
    assert cap.limit == math.inf
    for shape in [(50,)] * 5 + [(20, 4)] * 5:
        distances = torch.rand(shape, dtype=torch.float64)
        near = cap.near(distances)
        seen = torch.cat([seen, distances.flatten()])[-300:]
        limit = seen.sort().values[math.ceil(0.7 * len(seen)) - 1]
        assert cap.limit == limit
        assert torch.equal(near, distances <= limit)


@pytest.mark.parametrize("kind", SAMPLERS)
def test_what_a_quantile_has_seen_is_saved_with_the_buffer(kind):
    first, other = (make(kind, QuantileCap(0.8, window=120), seed=seed) for seed in (1, 2))
    for _ in range(3):
        first.sample()
    other.load_state_dict(copy.deepcopy(first.state_dict()))
    twin = pickle.loads(pickle.dumps(first))
    for _ in range(3):
        expected = first.sample()["index"]
        assert torch.equal(other.sample()["index"], expected)
        assert torch.equal(twin.sample()["index"], expected)


@pytest.mark.parametrize("kind", SAMPLERS)
def test_an_emptied_buffer_has_seen_no_distance(kind):
    first, fresh = (make(kind, QuantileCap(0.8)) for _ in range(2))
    for _ in range(3):
        first.sample()
    first.empty()
    assert first.sampler.unit.cap.limit == math.inf
    fresh.empty()
    for buffer in (first, fresh):
        buffer.set_rng(torch.Generator().manual_seed(5))
        buffer.extend(make_transitions(30, seed=3))
    assert torch.equal(first.sample()["index"], fresh.sample()["index"])


def test_a_cap_goes_with_its_sampler():
    buffer = make(NeighborPairSampler, 1e-9)
    buffer.sample()
    buffer.set_sampler(NeighborPairSampler(4))
    anchor, partner = buffer.sample()["index"].unbind(-1)
    assert (anchor != partner).all()


def test_priorities_take_pairs_that_are_too_far_as_unmixed():
    sampler = PrioritizedNeighborPairSampler(100, 4, search="torch", max_distance=1e-9)
    buffer = PairPrioritizedReplayBuffer(
        storage=LazyTensorStorage(100), sampler=sampler, transform=PairMixup(), batch_size=20
    )
    buffer.extend(make_transitions(100))
    batch = buffer.sample()
    batch["td_error"] = torch.full((20,), 3.0)
    buffer.update_tensordict_priority(batch)
    priority = sampler.priorities(torch.arange(100))
    changed = (priority - 3.0).abs() < 1e-3
    assert torch.equal(changed.nonzero().squeeze(1), batch["index"][:, 0].unique())


@pytest.mark.parametrize("cap", [1.2, {"quantile": 0.8}])
@pytest.mark.parametrize("search", ["torch", "graph"])
def test_a_cap_adds_no_wait_for_a_device(cap, search, cuda):
    if cuda is None:
        pytest.skip("counts waits on the pretended device")
    counted = []
    for limit in (None, cap):
        buffer = make_replay_buffer(
            "nmer",
            capacity=40,
            batch_size=16,
            device="cuda:0",
            search=search,
            max_distance=limit,
            generator=torch.Generator("cuda:0").manual_seed(0),
        )
        buffer.extend(make_transitions(38).to("cuda:0"))
        for _ in range(3):
            buffer.sample()
        cuda.clear()
        batch = buffer.sample()
        counted.append(dict(cuda))
    assert counted[1] == counted[0]
    anchor, partner = batch["index"].cpu().unbind(-1)
    assert 0 < (anchor == partner).sum() < 16


@pytest.mark.parametrize(
    ("make_one", "words"),
    [
        (lambda: NeighborPairs(max_distance=0.0), "max_distance=0.0.*above 0"),
        (lambda: NeighborPairSampler(max_distance=math.inf), "max_distance=inf"),
        (lambda: QuantileCap(0.0), "quantile=0.0.*above 0 and at most 1"),
        (lambda: QuantileCap(0.5, window=0), "window=0.*at least 1"),
    ],
)
def test_bad_limits_are_named(make_one, words):
    with pytest.raises(ValueError, match=words):
        make_one()
