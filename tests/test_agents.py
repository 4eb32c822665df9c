"""The agents besides SAC and TD3, compared with TorchRL's losses and with their papers."""

import importlib
import math

import pytest
import torch
from recipe_helpers import make_config, train, train_and_kill
from tensordict import TensorDict
from tensordict.nn import NormalParamExtractor
from torch import nn
from torchrl.modules import BatchRenorm1d
from torchrl.objectives import SoftUpdate
from update_helpers import ACTIONS, CPU, OBSERVATIONS, ROWS, make_agent, make_blocks

from nmer_recipes import config, networks  # isort: skip
from nmer_recipes.actors import SquashedNormal  # isort: skip
from nmer_recipes.networks import Functional, find_weights, make_critic  # isort: skip


def as_weights(layers):
    """Returns what `Functional` is called with: parameters and running statistics."""
    return list(layers.parameters()), [buffer.clone() for buffer in layers.buffers()]


@pytest.mark.parametrize(("batches", "same"), [(5, True), (6, False)])
def test_batch_renormalization_is_that_of_torchrl_until_its_correction_grows(batches, same):
    torch.manual_seed(0)
    layers = nn.Sequential(BatchRenorm1d(3, warmup_steps=3, momentum=0.2), nn.Linear(3, 2))
    nn.init.normal_(layers[0].weight)
    weights, statistics = as_weights(layers)
    called = Functional(layers)
    for number in range(batches + 1):
        inputs = torch.randn(16, 3) * (1 + number) + number
        moved = []
        ours = called(weights, inputs, statistics, moved)
        theirs = layers(inputs)
        gradients = [torch.autograd.grad(each.square().sum(), weights) for each in (ours, theirs)]
        statistics = moved
        if number < batches or same:
            torch.testing.assert_close(ours, theirs)
            torch.testing.assert_close(*gradients)
            torch.testing.assert_close(statistics, [*layers.buffers()])
    if not same:  # from twice the warm-up on, TorchRL multiplies the correction
        assert (ours - theirs).abs().max() > 0.1
    seen = torch.randn(4, 3)
    layers.eval()
    torch.testing.assert_close(called(weights, seen, list(layers.buffers())), layers(seen))
    torch.testing.assert_close(called(weights, seen[0], list(layers.buffers())), layers(seen)[0])


def test_normalization_corrects_towards_running_statistics_once_it_is_warm():
    layer = BatchRenorm1d(2, warmup_steps=10, eps=1e-3)
    running = [torch.tensor([1.0, -2.0]), torch.tensor([4.0, 0.25])]
    inputs = 100 + torch.randn(64, 2) * 50  # far from both: the correction is at its bounds
    for count, corrected in ((9, False), (10, True), (1000, True)):
        statistics, moved = (*running, torch.tensor(count)), []
        output = networks.renormalize(layer, inputs, statistics, moved)
        mean, spread = output.mean(0), output.std(0, correction=0)
        torch.testing.assert_close(mean, torch.full((2,), 5.0 * corrected), atol=1e-4, rtol=0)
        torch.testing.assert_close(spread, torch.full((2,), 3.0 if corrected else 1.0))
        torch.testing.assert_close(moved[0], 0.99 * running[0] + 0.01 * inputs.mean(0))
        torch.testing.assert_close(moved[1], 0.99 * running[1] + 0.01 * inputs.var(0))
        assert moved[2] == count + 1


def test_critics_have_the_layers_that_the_settings_name():
    cfg = make_config("redq", "critic_hidden=[8,6]", "dropout=0.25", "layer_norm=true")
    critic = make_critic(cfg, OBSERVATIONS, ACTIONS, CPU).module
    block = [nn.Linear, nn.Dropout, nn.LayerNorm, nn.ReLU]
    assert [type(layer) for layer in critic] == [*block, *block, nn.Linear]
    weights, inputs = list(critic.parameters()), torch.randn(32, OBSERVATIONS + ACTIONS)
    called, found = Functional(critic), {}
    for training in (True, False):
        critic.train(training)
        torch.manual_seed(1)
        expected = critic(inputs)
        torch.manual_seed(1)
        found[training] = called(weights, inputs, moved=[] if training else None)
        torch.testing.assert_close(found[training], expected)
    assert not torch.equal(found[True], found[False])  # dropout is on in training alone
    cfg = make_config("td3", "critic_hidden=[8,6]")
    critic = make_critic(cfg, OBSERVATIONS, ACTIONS, CPU).module
    assert [layer.out_features for layer in critic if isinstance(layer, nn.Linear)] == [8, 6, 1]
    assert not any(isinstance(layer, nn.LayerNorm | nn.Dropout) for layer in critic)


@pytest.mark.parametrize("p", [0.0001, 0.01, 0.1])
def test_dropout_of_few_units_is_independent_and_unbiased(p):
    """Compares with binomial counts: per call, whose spread shows dependence, and per entry."""
    torch.manual_seed(0)
    calls, shape = 3_000, (16, 128)
    size = math.prod(shape)
    found = torch.stack([networks.drop(torch.ones(shape), p).flatten() for _ in range(calls)])
    kept = torch.tensor(1.0) / (1 - p)
    assert set(found.unique().tolist()) == {0.0, kept.item()}
    dropped = found == 0
    counts = dropped.sum(1).double()
    spread = math.sqrt(size * p * (1 - p))
    assert abs(counts.mean() - size * p) < 4 * spread / math.sqrt(calls)
    assert abs(counts.var() / spread**2 - 1) < 0.2
    ends = dropped[:, [0, 1, -2, -1]].double().mean(0)  # the first and last gaps are not special
    assert (ends - p).abs().max() < 4 * math.sqrt(p / calls) + 2 / calls
    both = (dropped[:, 1:] & dropped[:, :-1]).double().mean()
    assert abs(both - p**2) < 0.1 * p**2 + 4 * p / math.sqrt(calls * size)


def test_dropout_of_few_units_passes_gradients_of_kept_units_alone():
    torch.manual_seed(0)
    inputs = torch.randn(64, 32, requires_grad=True)
    output = networks.drop(inputs, 0.05)
    (gradient,) = torch.autograd.grad(output.sum(), inputs)
    torch.testing.assert_close(gradient, torch.where(output == 0, 0.0, 1 / 0.95))
    torch.testing.assert_close(output, inputs * gradient)


@pytest.mark.parametrize("algorithm", ["ddpg", "redq", "sac", "sunrise", "td3"])
def test_layer_norm_and_wide_critics_are_options_of_every_agent_with_plain_critics(
    algorithm, tmp_path
):
    options = ["layer_norm=true", "critic_hidden=[12,10]", "actor_l2=0.1", "grad_clip=1"]
    rows = train(algorithm, tmp_path, *options, "replay=nmer")
    assert math.isfinite(float(rows[-1]["train/loss_qvalue"]))
    state = torch.load(tmp_path / "checkpoint.pt", weights_only=True)["agent"]
    shapes = {tuple(each.shape[-2:]) for name, each in state.items() if "value_network" in name}
    assert {(12, 5), (10, 12), (1, 10)} <= shapes


def test_redq_has_the_losses_of_torchrl():
    """Compares where both agree: a subset of several critics, and alpha within its bounds.

    Its loss of the critics is a mean where ours is a sum over them. Its loss of alpha also counts
    the next actions.
    """
    agent, cfg, recipe = make_agent("redq", "num_critics=4", "alpha_init=0.7")
    SoftUpdate(agent, tau=cfg.tau)
    with torch.no_grad():  # targets that differ from what they follow
        for parameter in agent.parameters():
            parameter += torch.randn_like(parameter) / 10
    weights, (block,) = find_weights(agent), make_blocks(1)
    (batch,) = block.unbind()
    torch.manual_seed(1)
    stock = agent(batch.as_rows())
    torch.manual_seed(1)
    drawn = torch.randperm(4)[:2]
    now, following = torch.randn(2, ROWS, ACTIONS)
    ranks = torch.zeros(4).index_fill(0, drawn, 1.0)
    critic_loss, actor_losses = recipe.make_losses(cfg, agent)
    loss, errors = critic_loss(weights, batch, following, ranks)
    found = actor_losses(weights, batch, now)
    torch.testing.assert_close(loss, 4 * stock["loss_qvalue"])
    torch.testing.assert_close(found["loss_actor"], stock["loss_actor"])
    torch.testing.assert_close(found["alpha"], stock["alpha"])
    assert errors.shape == (ROWS,)
    for ours, theirs, learned in (
        (loss, 4 * stock["loss_qvalue"], weights.critics),
        (found["loss_actor"], stock["loss_actor"], weights.actor),
    ):
        grown = [torch.autograd.grad(x, learned, retain_graph=True) for x in (ours, theirs)]
        torch.testing.assert_close(*grown)


def test_redq_draws_every_pair_of_targets_as_often():
    ranks = torch.randn(30_000, 5, generator=torch.Generator().manual_seed(0))
    drawn = ranks.topk(2).indices.sort().values
    pairs, counts = torch.unique(drawn, dim=0, return_counts=True)
    assert len(pairs) == 10
    assert (counts / 3_000 - 1).abs().max() < 0.1


def test_droq_bootstraps_from_both_critics_and_drops_units_of_targets():
    options = ["num_critics=2", "dropout=0.5", "layer_norm=true"]
    agent, cfg, recipe = make_agent("redq", *options)
    SoftUpdate(agent, tau=cfg.tau)
    weights, (block,) = find_weights(agent), make_blocks(1)
    (batch,), critic_loss = block.unbind(), recipe.make_losses(cfg, agent)[0]
    noise, ranks = torch.zeros(ROWS, ACTIONS), torch.randn(2)

    def errors(given):
        torch.manual_seed(1)
        return critic_loss(given, batch, noise, ranks)[1]

    for critic in range(2):  # much lower, it is the one that counts, whichever it is
        lower = [weight.clone() for weight in weights.target_critics]
        lower[-1][critic] -= 100.0
        changed = errors(weights._replace(target_critics=lower)) - errors(weights)
        assert torch.equal(changed.abs() > 50, ~batch.terminated)
    state = torch.get_rng_state()
    first = critic_loss(weights, batch, noise, ranks)[0]
    second = critic_loss(weights, batch, noise, ranks)[0]
    assert first != second
    torch.set_rng_state(state)
    assert critic_loss(weights, batch, noise, ranks)[0] == first


@pytest.mark.parametrize(
    ("algorithm", "options", "message"),
    [
        (
            "redq",
            ["num_critics=2", "num_target_critics=3"],
            "num_target_critics=3 of num_critics=2",
        ),
        ("crossq", ["batch_size=1"], "batch_size=1 is too small for batch normalization"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(algorithm, options, message):
    with pytest.raises(config.UsageError, match=message):
        make_agent(algorithm, *options)


@pytest.mark.parametrize(("ratio", "delay"), [(20, 20), (5, 5), (1, 1), (0.5, 1)])
def test_the_actor_of_redq_moves_once_a_frame(ratio, delay):
    assert make_config("redq", f"replay_ratio={ratio}").policy_delay == delay


def test_redq_learns_its_entropy_as_mbpo_does_where_that_is_known():
    assert make_config("redq", "env=HalfCheetah").target_entropy == -3
    assert make_config("redq", "env=Pendulum").target_entropy is None
    assert make_config("redq", "env=gym", "env.id=mine:Hopper-v0").target_entropy is None


def test_crossq_has_the_losses_of_torchrl_and_moves_the_same_statistics(monkeypatch):
    draw = SquashedNormal.rsample_and_log_prob
    monkeypatch.setattr(SquashedNormal, "sample_and_log_prob", draw, raising=False)
    agent, cfg, recipe = make_agent("crossq")
    with torch.no_grad():
        for parameter in agent.parameters():
            parameter += torch.randn_like(parameter) / 10
    (block,) = make_blocks(1)
    (batch,) = block.unbind()
    weights = find_weights(agent)
    critic_loss, actor_losses = recipe.make_losses(cfg, agent)
    torch.manual_seed(1)
    following = torch.randn(ROWS, ACTIONS)
    moved = []
    loss, errors = critic_loss(weights, batch, following, moved)
    gradients = torch.autograd.grad(loss, weights.critics)
    for network in (agent.actor_network, agent.qvalue_network):
        assert not network.training  # which is how they act
    agent.qvalue_network.train()  # and how TorchRL calls the critics to train them
    torch.manual_seed(1)
    stock, details = agent.qvalue_loss(batch.as_rows())
    torch.testing.assert_close(loss, stock)
    torch.testing.assert_close(gradients, torch.autograd.grad(stock, weights.critics))
    assert (errors <= details["td_error"]).all()  # TorchRL has the larger of both
    torch.testing.assert_close(moved, list(find_weights(agent).critic_statistics))

    agent.actor_network.train()
    torch.manual_seed(2)
    noise, moved = torch.randn(ROWS, ACTIONS), []
    found = actor_losses(find_weights(agent), batch, noise, moved)
    gradients = torch.autograd.grad(found["loss_actor"], weights.actor)
    torch.manual_seed(2)
    stock, details = agent.actor_loss(batch.as_rows())
    torch.testing.assert_close(found["loss_actor"], stock)
    torch.testing.assert_close(gradients, torch.autograd.grad(stock, weights.actor))
    torch.testing.assert_close(moved, list(find_weights(agent).actor_statistics))
    torch.testing.assert_close(found["entropy"], -details["log_prob"].mean())


def test_crossq_has_no_targets_and_normalizes_rows_and_what_follows_together():
    agent, cfg, recipe = make_agent("crossq")
    weights = find_weights(agent)
    assert not weights.target_critics
    assert len(weights.critic_statistics) == 9  # three of the inputs and of each layer
    update, optimizers = recipe.make_update(cfg, agent)
    assert all(each.param_groups[0]["betas"] == (0.5, 0.999) for each in optimizers.values())
    before = [statistic.clone() for statistic in weights.critic_statistics]
    (block,) = make_blocks(1)
    update(block, 0)
    inputs = torch.cat([block.observation, block.action], -1)[0]
    mean = weights.critic_statistics[0][0] / cfg.norm_momentum  # it was 0
    half = inputs[:, :OBSERVATIONS].mean(0), block.following[0].mean(0)
    torch.testing.assert_close(mean[:OBSERVATIONS], sum(half) / 2, rtol=1e-4, atol=1e-5)
    assert not any(
        torch.equal(*pair) for pair in zip(before, weights.critic_statistics, strict=True)
    )


def oracle_of_sunrise(cfg, ensemble, batch, noise):
    """Computes the losses by the paper's equations, in float64 and member by member.

    Row means are sums over `mask.sum() + 1`, which is the authors' code's.
    """
    weights = find_weights(ensemble)

    def network(stacked, number, inputs):
        layers = [weight[number].double() for weight in stacked]
        while len(layers) > 2:
            inputs = (inputs @ layers[0].T + layers[1]).clamp(min=0)
            layers = layers[2:]
        return inputs @ layers[0].T + layers[1]

    def act(number, observation, drawn):
        loc, scale = NormalParamExtractor()(network(weights.actor, number, observation))
        before = loc + scale * drawn
        log_prob = torch.distributions.Normal(loc, scale).log_prob(before)
        return before.tanh(), (log_prob - (1 - before.tanh() ** 2).log()).sum(-1)

    def value(stacked, number, observation, action):
        return network(stacked, number, torch.cat([observation, action], -1))[:, 0]

    rows = {name: entry.double() for name, entry in batch._asdict().items() if entry is not None}
    alpha = weights.log_alpha[0].double().exp()
    found = dict.fromkeys(("loss_qvalue", "loss_actor", "loss_alpha"), 0.0)
    for i in range(cfg.members):
        mask = rows["mask"][:, i]
        action, log_prob = act(i, rows["following"], noise[0, i].double())
        targets = [
            value(weights.target_critics, j, rows["following"], action)
            for j in range(2 * cfg.members)
        ]
        own = torch.minimum(targets[2 * i], targets[2 * i + 1]) - alpha[i] * log_prob
        goal = rows["reward"] + cfg.gamma * (1 - rows["terminated"]) * own
        spread = torch.stack(targets).std(0, correction=0)
        trust = 1 / (1 + (spread * cfg.backup_temperature).exp()) + 0.5
        for j in (2 * i, 2 * i + 1):
            error = value(weights.critics, j, rows["observation"], rows["action"]) - goal.detach()
            found["loss_qvalue"] += (trust * error**2 * mask).sum() / (mask.sum() + 1)
        action, log_prob = act(i, rows["observation"], noise[1, i].double())
        lowest = torch.minimum(
            *(value(weights.critics, j, rows["observation"], action) for j in (2 * i, 2 * i + 1))
        )
        found["loss_actor"] += ((alpha[i] * log_prob - lowest) * mask).sum() / (mask.sum() + 1)
        excess = log_prob - ACTIONS
        found["loss_alpha"] -= (alpha[i].log() * excess * mask).sum() / (mask.sum() + 1)
    return found


def test_sunrise_has_the_losses_of_its_paper():
    agent, cfg, recipe = make_agent("sunrise", "backup_temperature=5", "alpha_init=0.5")
    with torch.no_grad():
        for parameter in agent.parameters():
            parameter += torch.randn_like(parameter) / 10
    (block,) = make_blocks(1)
    (batch,) = block.unbind()
    weights, noise = find_weights(agent), torch.randn(2, 5, ROWS, ACTIONS)
    found, errors = recipe.make_losses(cfg, agent)(weights, batch, noise)
    expected = oracle_of_sunrise(cfg, agent, batch, noise)
    for name, value in expected.items():
        torch.testing.assert_close(found[name].double(), value, rtol=1e-4, atol=1e-5)
    learned = {"loss_qvalue": weights.critics, "loss_actor": weights.actor}
    for name, parameters in learned.items():
        theirs = torch.autograd.grad(expected[name], parameters, retain_graph=True)
        ours = torch.autograd.grad(found[name], parameters, retain_graph=True)
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)
    assert errors.shape == (ROWS,)


def test_a_member_of_sunrise_learns_from_its_own_rows_alone():
    agent, cfg, recipe = make_agent("sunrise")
    update, _ = recipe.make_update(cfg, agent)
    (block,) = make_blocks(1)
    mask = torch.zeros_like(block.mask)
    mask[..., 2] = True
    before = [weight.clone() for weight in find_weights(agent).critics]
    update(block._replace(mask=mask), 0)
    for old, new in zip(before, find_weights(agent).critics, strict=True):
        changed = (old != new).flatten(1).any(1)
        assert changed.tolist() == [False] * 4 + [True] * 2 + [False] * 4


@torch.no_grad()
@pytest.mark.parametrize("shape", [(), (3,)])
def test_sunrise_explores_by_the_highest_upper_bound(shape):
    recipe = importlib.import_module("sunrise")
    cfg = make_config("sunrise", "hidden=[8]", "ucb_bonus=2")
    torch.manual_seed(0)
    actor, explorer, ensemble = recipe.make_agent(cfg, OBSERVATIONS, ACTIONS, CPU)
    seen = torch.randn(*shape, OBSERVATIONS)
    torch.manual_seed(1)
    action = explorer(TensorDict(observation=seen, batch_size=shape))["action"]
    torch.manual_seed(1)
    weights, choices = find_weights(ensemble), []
    called = Functional(ensemble.actor_network.module), Functional(ensemble.qvalue_network.module)
    for i in range(5):
        loc, scale = called[0]([weight[i] for weight in weights.actor], seen)
        choice = (loc + scale * torch.randn(*shape, ACTIONS)).tanh()
        values = [
            called[1]([weight[j] for weight in weights.critics], torch.cat([seen, choice], -1))
            for j in range(10)
        ]
        values = torch.stack(values)[..., 0]
        choices.append((choice, values.mean(0) + 2 * values.std(0, correction=0)))
    for row in range(math.prod(shape)):
        at = (row,) if shape else ()
        best = max(choices, key=lambda found, at=at: float(found[1][at]))
        torch.testing.assert_close(action[at], best[0][at])
    means = [called[0]([weight[i] for weight in weights.actor], seen)[0].tanh() for i in range(5)]
    shown = actor(TensorDict(observation=seen, batch_size=shape))["action"]
    torch.testing.assert_close(shown, torch.stack(means).mean(0), atol=2e-6, rtol=0)


def test_masks_have_their_share_and_one_member_at_least():
    recipe, cfg = importlib.import_module("sunrise"), make_config("sunrise", "mask_share=0.3")
    torch.manual_seed(0)
    masks = []
    for _ in range(4_000):
        row = TensorDict(observation=torch.zeros(2))
        recipe.add_mask(cfg, row)
        masks.append(row["mask"])
    masks = torch.stack(masks)
    assert masks.any(1).all()
    alone = 0.7**5 / 5  # the chance that a member is the only one because no one was drawn
    torch.testing.assert_close(masks.float().mean(), torch.tensor(0.3 + alone), atol=0.01, rtol=0)


def test_rows_of_sunrise_carry_their_masks_through_every_replay(tmp_path):
    for method in ("uniform", "nmer", "per_nmer"):
        train("sunrise", tmp_path / method, f"replay={method}", "members=3")
        state = torch.load(tmp_path / method / "checkpoint.pt", weights_only=True)
        rows = state["buffer"]["_storage"]["_storage"]
        assert rows["mask"].shape == (48, 3)
        assert rows["mask"].any(1).all()
        assert not rows["mask"].all()


DROQ = ("num_critics=2", "dropout=0.2", "layer_norm=true")


@pytest.mark.parametrize(
    ("algorithm", "options"),
    [("crossq", ()), ("ddpg", ()), ("redq", ()), ("redq", DROQ), ("sunrise", ())],
)
def test_a_killed_run_goes_on_number_for_number(algorithm, options, tmp_path):
    options = [*options, "replay=per_nmer", "random_frames=20", "device=cpu"]
    whole = train(algorithm, tmp_path / "whole", *options)
    assert all(math.isfinite(float(row["train/loss_qvalue"])) for row in whole)
    train_and_kill(algorithm, tmp_path / "killed", *options)
    assert train(algorithm, tmp_path / "killed", *options, "resume=auto") == whole
