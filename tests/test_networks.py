import torch
from torch import nn

from nmer_torchrl.networks import draw_seed, make_mlp


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
