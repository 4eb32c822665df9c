import pytest
import torch
from torch import nn

from nmer_torchrl.generators import draw_seed
from nmer_torchrl.networks import CarefulAdam, make_mlp


def test_layers_are_initialized_as_those_of_torch():
    ours = make_mlp([50, 400, 3], seed=0)
    theirs = nn.Linear(50, 400)
    assert [type(layer) for layer in ours] == [nn.Linear, nn.ReLU, nn.Linear]
    for mine, torchs in ((ours[0].weight, theirs.weight), (ours[0].bias, theirs.bias)):
        assert mine.abs().max() <= 50**-0.5
        torch.testing.assert_close(mine.std(), torchs.std(), rtol=0.1, atol=0)


def test_a_seed_decides_and_the_global_generator_is_left_alone():
    state = torch.get_rng_state()
    one, same, other = (make_mlp([4, 8, 1], seed)[0].weight for seed in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert torch.equal(torch.get_rng_state(), state)
    seeds = {draw_seed(torch.Generator().manual_seed(i)) for i in (0, 0, 1)}
    assert len(seeds) == 2
    draw_seed(None)
    assert not torch.equal(torch.get_rng_state(), state)


def test_steps_are_those_of_torchs_adam():
    ours, theirs = (make_mlp([4, 8, 1], seed=0) for _ in range(2))
    careful = CarefulAdam(ours.parameters(), 1e-2)
    plain = torch.optim.Adam(theirs.parameters(), 1e-2)
    for _ in range(10):
        rows = torch.randn(16, 4)
        careful.step(ours(rows).square().mean())
        plain.zero_grad()
        theirs(rows).square().mean().backward()
        plain.step()
        for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, 1e30, "not now"])
def test_a_step_that_would_spoil_the_parameters_is_left_out(bad, first):
    layers = make_mlp([4, 8, 1], seed=0)
    optimizer, rows = CarefulAdam(layers.parameters(), 1e-2), torch.randn(16, 4)
    if not first:
        optimizer.step(layers(rows).square().mean())
    before = [each.detach().clone() for each in layers.parameters()], optimizer.state_dict()
    now = bad != "not now"
    loss = (layers(rows) * (bad if now else 1.0)).square().mean()
    optimizer.step(loss, torch.tensor(now))
    after = list(layers.parameters()), optimizer.state_dict()
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    optimizer.step(layers(rows).square().mean())
    assert all((a != b).any() for a, b in zip(layers.parameters(), before[0], strict=True))
    assert all(each.isfinite().all() for each in layers.parameters())
