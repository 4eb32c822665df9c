"""Gaussian processes, and the fold that predicts outcomes by them, against their equations."""

from types import SimpleNamespace

import pytest
import torch
from helpers import make_transitions
from oracles import slow_prediction
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

from nmer_torchrl import Mahalanobis, make_replay_buffer
from nmer_torchrl.gaussian_process import GaussianProcess
from nmer_torchrl.samplers import NeighborhoodSampler
from nmer_torchrl.transforms import GaussianProcessMixup

NEXT = ("next", "observation")
REWARD = ("next", "reward")


@pytest.mark.parametrize("name", ["lengthscale", "noise_variance", "max_variance"])
def test_bad_values_are_named(name):
    with pytest.raises(ValueError, match=rf"{name}=-1.0.*above 0"):
        GaussianProcess(**{name: -1.0})


@pytest.mark.parametrize("process", [GaussianProcess(), GaussianProcess(0.5, 0.1)])
def test_predictions_are_those_of_the_equations(process):
    generator = torch.Generator().manual_seed(0)
    points, outputs, query = (
        torch.randn(shape, generator=generator, dtype=torch.float64)
        for shape in ((7, 6, 3), (7, 6, 2), (7, 3))
    )
    points[2, 3] = points[2, 1]  # a duplicate
    points[3] = points[3, :1]  # nothing but duplicates
    mean, variance = process.predict(points, outputs, query)
    for i in range(7):
        expected = slow_prediction(process, points[i], outputs[i], query[i])
        torch.testing.assert_close(mean[i], expected[0], rtol=1e-6, atol=1e-8)
        torch.testing.assert_close(variance[i], expected[1].clamp_min(0), rtol=1e-6, atol=1e-8)
    assert ((variance >= 0) & (variance <= 1)).all()


def test_predictions_go_through_the_points_without_noise():
    x = torch.linspace(0, 1, 7, dtype=torch.float64).reshape(1, 7, 1).repeat(7, 1, 1)
    y = torch.sin(5 * x)
    mean, variance = GaussianProcess(1.0, 1e-10).predict(x, y, x[0])
    torch.testing.assert_close(mean, y[0], rtol=0, atol=1e-5)
    assert (variance < 1e-6).all()


def test_what_is_not_finite_has_no_prediction_and_spoils_no_other():
    points, outputs = torch.randn(3, 5, 2), torch.randn(3, 5, 1)
    points[1, 2, 0] = torch.nan
    outputs[2, 0] = torch.inf
    mean, variance = GaussianProcess().predict(points, outputs, torch.zeros(3, 2))
    assert mean[0].isfinite().all()
    assert not mean[1].isfinite().any()
    assert not mean[2].isfinite().any()
    assert variance[[0, 2]].isfinite().all()
    assert not variance[1].isfinite()


def make_buffer(sampler, fold):
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(200), sampler=sampler, transform=fold, batch_size=50
    )
    buffer.extend(make_transitions(200))
    return buffer


@pytest.mark.parametrize("metric", [None, Mahalanobis()])
def test_outcomes_are_predicted_at_the_mixed_input(metric):
    sampler = NeighborhoodSampler(4, search="torch", metric=metric)
    process = GaussianProcess(1.5, 1e-3)
    buffer = make_buffer(sampler, GaussianProcessMixup(process=process))
    batch = buffer.sample()
    hood = buffer.storage[:][batch["index"]]
    weight = batch["mixup_weight"].double().unsqueeze(-1)
    for key in ("observation", "action"):
        expected = (weight * hood[key].double()).sum(1)
        torch.testing.assert_close(batch[key].double(), expected, rtol=1e-5, atol=1e-5)
    points, query = sampler.embed(hood), sampler.embed(batch)
    change = hood[NEXT].double() - hood["observation"].double()
    outputs = torch.cat([hood[REWARD].double(), change], -1)
    for i in range(20):
        mean, _ = slow_prediction(process, points[i], outputs[i], query[i])
        torch.testing.assert_close(batch[REWARD][i].double(), mean[:1], rtol=1e-4, atol=1e-4)
        following = batch["observation"][i].double() + mean[1:]
        torch.testing.assert_close(batch[NEXT][i].double(), following, rtol=1e-4, atol=1e-3)


def curved(n, seed=0):
    """Builds rows with smooth, nonlinear outcomes."""
    rows = make_transitions(n, seed=seed, action=1)
    rows["observation"] = torch.rand(n, 3, generator=torch.Generator().manual_seed(seed)) * 4
    rows[NEXT] = outcome(rows["observation"], rows["action"])
    rows[REWARD] = rows[NEXT].square().sum(-1, keepdim=True)
    return rows


def outcome(state, action):
    return state + torch.sin(state.flip(-1)) + 0.5 * action.square()


def test_predictions_are_nearer_to_curved_outcomes_than_mixes_are():
    error = {}
    for kind in ("gp", "neighborhood"):
        buffer = make_replay_buffer(kind, capacity=2_000, batch_size=500, k=10, search="torch")
        buffer.extend(curved(2_000))
        batch = buffer.sample()
        expected = outcome(batch["observation"], batch["action"])
        error[kind] = float((batch[NEXT] - expected).norm(dim=-1).mean())
    assert error["gp"] < 0.5 * error["neighborhood"]


def test_rows_of_high_variance_stay_unmixed():
    sampler = NeighborhoodSampler(4, search="torch")
    process = GaussianProcess(0.5, 1e-3, max_variance=0.2)
    buffer = make_buffer(sampler, GaussianProcessMixup(process=process))
    index, _ = sampler.sample(buffer.storage, 300)
    hood = buffer.storage[:][index]
    geometry = SimpleNamespace(embed=sampler.embed)
    fold, every = (
        GaussianProcessMixup(
            geometry=geometry, process=p, generator=torch.Generator().manual_seed(1)
        )
        for p in (process, GaussianProcess(0.5, 1e-3))
    )
    batch, unchecked = fold(hood.clone()), every(hood.clone())
    points, query = sampler.embed(hood), sampler.embed(unchecked)
    _, variance = process.predict(points, torch.zeros(300, 5, 1), query)
    high = variance > 0.2
    assert 0 < high.sum() < 300
    assert torch.equal(batch["mixup_weight"][:, 0] == 1, high)
    for key in ("observation", NEXT, REWARD):
        assert torch.equal(batch[key][high], hood[key][high, 0])
    torch.testing.assert_close(batch[NEXT][~high], unchecked[NEXT][~high])


def test_keys_of_several_observations_and_shapes():
    def rows(n):
        return TensorDict(
            q=torch.randn(n, 2, 2),
            v=torch.randn(n, dtype=torch.float64),
            torque=torch.randn(n, 2),
            next=TensorDict(
                q=torch.randn(n, 2, 2),
                v=torch.randn(n, dtype=torch.float64),
                cost=torch.randn(n),
                terminated=torch.zeros(n, 1, dtype=torch.bool),
                batch_size=[n],
            ),
            batch_size=[n],
        )

    keys, values = ["q", "v", "torque"], [("next", "q"), ("next", "v"), ("next", "cost")]
    buffer = make_replay_buffer("gp", capacity=60, batch_size=16, k=3, keys=keys, value_keys=values)
    buffer.extend(rows(60))
    batch = buffer.sample()
    for key in (*keys, *values):
        assert batch[key].shape[1:] == buffer.storage[:][key].shape[1:]
        assert batch[key].dtype == buffer.storage[:][key].dtype
