"""How alpha is learned; `test_folds.py` tests the contract as a fold."""

import pickle

import pytest
import torch
from tensordict import TensorDict

from nmer_torchrl.generators import draw_seed
from nmer_torchrl.networks import make_mlp
from nmer_torchrl.transforms import TunedMixup

OPTIONS = {"keys": ["x"], "value_keys": ["y"], "terminated_key": "end"}


def make_pairs(n: int, seed: int, dynamics=lambda x: x.sum(-1, keepdim=True)) -> TensorDict:
    x = torch.randn((n, 2, 3), generator=torch.Generator().manual_seed(seed))
    end = torch.zeros(n, 2, 1, dtype=torch.bool)
    return TensorDict(x=x, y=dynamics(x), end=end, batch_size=[n, 2])


def make_fold(**options) -> TunedMixup:
    generator = torch.Generator().manual_seed(0)
    return TunedMixup(generator=generator, hidden=(32, 32), **OPTIONS, **options)


def assert_same_weights(one: torch.nn.Module, other: torch.nn.Module) -> None:
    for ours, theirs in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_steps_are_those_of_the_definition():
    fold, pairs = make_fold(alpha=0.5, lr=1e-2, tolerance=1e-4), make_pairs(40, seed=1)
    layers = make_mlp([3, 32, 32, 1], draw_seed(torch.Generator().manual_seed(0)))
    alpha = torch.nn.Parameter(torch.tensor(0.5))
    optimizers = [torch.optim.Adam(each, lr=1e-2) for each in (layers.parameters(), [alpha])]
    for _ in range(3):
        w = (batch := fold(pairs))["mixup_weight"]
        # The discriminator: one step of Adam on the sum of both members' errors.
        loss = sum((layers(pairs["x"][:, i]) - pairs["y"][:, i]).square().mean() for i in range(2))
        optimizers[0].zero_grad()
        loss.backward()
        optimizers[0].step()
        assert_same_weights(fold._learner.layers, layers)
        # Alpha: one step of Adam on log(alpha) * (distance from linear - tolerance).
        with torch.no_grad():
            first, second = layers(pairs["x"]).unbind(1)
            distance = (layers(batch["x"]) - (w * first + (1 - w) * second)).square().mean()
        alpha.grad = (distance - 1e-4) / alpha.detach()
        optimizers[1].step()
        assert fold.alpha == pytest.approx(alpha.item(), rel=1e-4)


@pytest.mark.parametrize(("linear", "rises"), [(True, True), (False, False)])
def test_alpha_rises_where_transitions_are_linear_and_falls_where_not(linear, rises):
    fold = make_fold(alpha=0.5, lr=1e-2, tolerance=0.02)
    dynamics = (lambda x: x) if linear else (lambda x: (3 * x).sin())
    for seed in range(100):
        fold(make_pairs(64, seed, dynamics))
    assert (fold.alpha > 0.6) if rises else (fold.alpha < 0.4)
    assert 0 < fold.alpha <= 1


def test_rows_that_are_not_finite_teach_nothing():
    alone, beside = make_fold(), make_fold()
    pairs = make_pairs(20, seed=3)
    spoiled = make_pairs(21, seed=4)
    spoiled[:20] = pairs
    spoiled["y"][20, 1] = torch.nan
    # The weights of the first 20 pairs differ with the batch, so compare the discriminators.
    alone(pairs), beside(spoiled)
    assert_same_weights(alone._learner.layers, beside._learner.layers)
    pairs["y"][:] = torch.nan
    alpha = alone.alpha
    assert alone(pairs)["mixup_weight"].eq(1).all()
    assert alone.alpha == alpha


@pytest.mark.parametrize("how", ["state", "pickle"])
def test_what_is_restored_goes_on_with_the_same_numbers(how):
    fold = make_fold(lr=1e-2)
    for seed in range(3):
        fold(make_pairs(16, seed))
    if how == "state":
        again = make_fold(lr=1e-2)
        again.load_state_dict(fold.state_dict())
    else:
        again = pickle.loads(pickle.dumps(fold))
        again.generator = torch.Generator().set_state(fold.generator.get_state())
    for seed in range(3, 6):
        pairs = make_pairs(16, seed)
        one, other = fold(pairs), again(pairs)
        assert torch.equal(one["x"], other["x"])
        assert fold.alpha == again.alpha


@pytest.mark.parametrize("shape", [(6,), (4, 3), (4, 2), (2, 2)])
def test_batches_and_entries_of_any_shape_are_learned_from(shape):
    x, y = torch.randn(*shape, 2, 3), torch.randn(*shape, 2)  # a reward may lack its dimension
    end = torch.zeros(*shape, 2, dtype=torch.bool)
    pairs = TensorDict(x=x, y=y, end=end, batch_size=[*shape, 2])
    fold = make_fold()
    assert fold(pairs).batch_size == shape
    assert fold._learner.layers[0].in_features == 3
    assert fold._learner.layers[-1].out_features == 1


def test_a_state_is_not_changed_by_what_goes_on_from_it():
    fold, first, second = (make_fold(lr=1e-2) for _ in range(3))
    fold(make_pairs(16, seed=0))
    state = fold.get_extra_state()
    for one in (first, second):
        one.set_extra_state(state)
        for seed in range(1, 4):
            one(make_pairs(16, seed))
    assert_same_weights(first._learner.layers, second._learner.layers)
    assert first.alpha == second.alpha


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"alpha": 1.5}, "alpha=1.5"),
        ({"tolerance": 0.0}, "tolerance=0.0"),
        ({"lr": float("nan")}, "lr=nan"),
    ],
)
def test_bad_values_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        make_fold(**options)


def test_a_state_with_other_hidden_layers_is_restored():
    fold, other = (TunedMixup(hidden=hidden, **OPTIONS) for hidden in ((32, 32), (16, 16, 16)))
    batch = make_pairs(40, seed=1)
    fold(batch.clone())
    other.set_extra_state(fold.get_extra_state())
    other(batch.clone())
    widths = [layer.out_features for layer in other._learner.layers[::2]]
    assert widths == [32, 32, 1]
