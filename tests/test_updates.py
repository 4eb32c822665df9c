"""The recipes' updates: correct, equal when compiled or recorded, without device waits."""

import contextlib
import functools
import importlib

import pytest
import torch
import torch._inductor.config
import torchrl.objectives
from pretend_cuda import pretend_cuda
from recipe_helpers import ALGORITHMS, STOCK, make_batch, make_config
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from update_helpers import ACTIONS, CPU, OBSERVATIONS, ROWS, make_agent, make_blocks

from nmer_recipes import compiling, networks, optim, training  # isort: skip
from nmer_recipes.blocks import Batch, as_block  # isort: skip
from nmer_recipes.compiling import Captured  # isort: skip


def state_of(agent, optimizers):
    """Returns every tensor that an update changes."""
    moments = [s for o in optimizers.values() for s in tree_leaves(list(o.state.values()))]
    return [*agent.parameters(), *agent.buffers(), *moments]


@pytest.mark.parametrize("algorithm", STOCK)
def test_losses_and_targets_are_those_of_torchrl_and_errors_are_averaged(algorithm):
    batch = make_batch(32, OBSERVATIONS, ACTIONS)
    batch["priority_weight"] = torch.rand(32)
    (block,) = as_block(batch, 32, CPU).unbind()
    found = {}
    for stock in (True, False):
        agent, cfg, recipe = make_agent(algorithm)
        target = torchrl.objectives.SoftUpdate(agent, tau=cfg.tau)
        with torch.no_grad():  # targets that differ from what they follow
            for parameter in agent.parameters():
                parameter += torch.randn_like(parameter) / 10
        weights = networks.find_weights(agent)
        target.step() if stock else optim.move_targets(weights, cfg.tau)
        losses = recipe.make_stock_losses(agent) if stock else recipe.make_losses(cfg, agent)
        torch.manual_seed(1)
        noise = None if stock else torch.stack([torch.randn(32, ACTIONS) for _ in range(2)])
        if algorithm == "sac":
            values, errors = losses(weights, block, noise)
        else:
            given = () if algorithm == "ddpg" else (None if stock else noise[0],)
            value, errors = losses[0](weights, block, *given)
            values = {"value": value, "policy": losses[1](weights, block)}
        learned = [value for value in values.values() if value.requires_grad]
        sum(learned).backward()
        gradients = {name: p.grad for name, p in agent.named_parameters()}
        assert any(gradient is not None for gradient in gradients.values())
        found[stock] = (values, gradients, dict(agent.named_buffers()))
        found[stock, "errors"] = errors
    assert len(learned) == (3 if algorithm == "sac" else 2)
    torch.testing.assert_close(found[True], found[False])
    if algorithm != "sac":
        torch.testing.assert_close(found[True, "errors"], found[False, "errors"])
    else:  # TorchRL has the larger of both
        assert (found[False, "errors"] <= found[True, "errors"]).all()
        assert (found[False, "errors"] < found[True, "errors"]).any()


@pytest.mark.parametrize(
    ("algorithm", "distance"), [(each, "squared") for each in STOCK] + [("sac", "huber")]
)
def test_a_step_by_the_losses_of_torchrl_is_the_same(algorithm, distance, monkeypatch):
    as_rows = Batch.as_rows

    def draw_again(batch):
        torch.manual_seed(1)  # the noise that the other step has
        return as_rows(batch)

    monkeypatch.setattr(Batch, "as_rows", draw_again)
    (block,), states = make_blocks(1), []
    for losses in ("direct", "torchrl"):
        options = ["policy_delay=1"] if algorithm == "td3" else []
        options += [f"losses={losses}", f"critic_loss={distance}"]
        agent, cfg, recipe = make_agent(algorithm, *options)
        update, optimizers = recipe.make_update(cfg, agent)
        torch.manual_seed(1)
        values, _ = update(block, 0)
        states.append((values, state_of(agent, optimizers)))
    torch.testing.assert_close(*states, rtol=1e-4, atol=1e-6)


def test_the_policy_of_sac_is_the_tanh_of_a_gaussian():
    sac, found = importlib.import_module("sac"), []
    torch.manual_seed(0)
    loc, scale = torch.randn(50, ACTIONS), torch.rand(50, ACTIONS) + 0.1
    for distribution in (sac.SquashedNormal, torchrl.modules.TanhNormal):
        parameters = [loc.clone().requires_grad_(), scale.clone().requires_grad_()]
        policy = distribution(*parameters)
        torch.manual_seed(1)
        action, log_prob = policy.rsample_and_log_prob()
        (log_prob.sum() + (action * loc).sum()).backward()
        gradients = [parameter.grad for parameter in parameters]
        found.append((action, log_prob, gradients))
        found[-1] += (distribution(20 * loc, scale).deterministic_sample,)  # some are at the bounds
    torch.testing.assert_close(*found)
    assert torch.equal(found[0][-1], found[1][-1])


def layers_of(network):
    """Yields the layers of a network, each with its `nn.Sequential` and its index there."""
    for number, layer in enumerate(network):
        if isinstance(layer, torch.nn.Sequential):
            yield from layers_of(layer)
        else:
            yield network, number, layer


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_learning_calls_the_networks_that_act(algorithm):
    agent, cfg, _ = make_agent(algorithm)
    torchrl.objectives.SoftUpdate(agent, tau=cfg.get("tau", 1)) if algorithm != "crossq" else None
    actor = agent.actor_network
    actor = actor if algorithm in ("ddpg", "sunrise", "td3") else actor[0]
    where = [found for found in layers_of(actor.module) if isinstance(found[2], torch.nn.ReLU)]
    assert len(where) == 2
    where[0][0][where[0][1]] = torch.nn.SiLU()  # chosen once, where the network is made
    seen, weights = torch.randn(5, OBSERVATIONS), networks.find_weights(agent)
    parameters, own = agent.actor_network_params, weights.actor
    if algorithm == "sunrise":
        parameters, own = parameters[3], [weight[3] for weight in own]
    with parameters.to_module(agent.actor_network):
        acts = actor.module(seen)
    called = networks.Functional(actor.module)(own, seen, weights.actor_statistics)
    torch.testing.assert_close(called, acts)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_targets_bootstrap_except_at_terminations(algorithm):
    (block,), errors = make_blocks(1), []
    assert block.terminated.any()
    assert not block.terminated.all()
    for gamma in (0, 0.99):
        agent, cfg, recipe = make_agent(algorithm, f"gamma={gamma}")
        update, _ = recipe.make_update(cfg, agent)
        torch.manual_seed(1)
        errors.append(update(block, 0)[1])
    assert torch.equal(errors[0] == errors[1], block.terminated)


@pytest.mark.parametrize(("delay", "interval", "l2", "limit"), [(2, 1, 0, "null"), (3, 2, 0.1, 1)])
def test_blocks_of_td3_make_the_steps_of_a_plain_loop(delay, interval, l2, limit):
    options = [f"policy_delay={delay}", f"target_interval={interval}", f"actor_l2={l2}"]
    options += [f"grad_clip={limit}", "lr=0.01"]
    blocks = make_blocks(1, 4, 1, 5)
    agent, cfg, recipe = make_agent("td3", *options)
    update, _ = recipe.make_update(cfg, agent)
    torch.manual_seed(1)
    done, found = 0, []
    for block in blocks:
        found.append(update(block, done)[0])
        done += len(block.reward)
    assert [len(each["loss_qvalue"]) for each in found] == [1, 4, 1, 5]
    assert sum(len(each.get("loss_actor", ())) for each in found) == 11 // delay

    # The same with torch's optimizers and TorchRL's targets, a batch at a time.
    other, _, _ = make_agent("td3", *options)
    target = torchrl.objectives.SoftUpdate(other, tau=cfg.tau)
    critic_loss, actor_loss = recipe.make_losses(cfg, other)
    held = networks.find_weights(other)
    actor, critics = held.actor, held.critics
    optimizers = [torch.optim.Adam(weights, lr=cfg.lr) for weights in (actor, critics)]
    torch.manual_seed(1)
    number = 0
    for block in blocks:
        noise = torch.randn_like(block.action)
        for i, batch in enumerate(block.unbind()):
            number += 1
            steps = [(critic_loss(held, batch, noise[i])[0], critics, optimizers[1])]
            if number % delay == 0:
                steps.append((None, actor, optimizers[0]))
            for total, weights, optimizer in steps:
                if total is None:
                    decay = sum(w.square().sum() for w in actor if w.ndim == 2) / 2
                    total = actor_loss(held, batch) + l2 * decay
                optimizer.zero_grad()
                total.backward(inputs=weights)
                if limit != "null" and weights is actor:
                    torch.nn.utils.clip_grad_norm_(weights, limit)
                elif limit != "null":
                    for each in zip(*(weight.grad for weight in weights), strict=True):
                        norm = torch.cat([gradient.flatten() for gradient in each]).norm()
                        for gradient in each:
                            gradient.mul_((limit / (norm + 1e-6)).clamp(max=1))
                optimizer.step()
            if number % interval == 0:
                target.step()
    torch.testing.assert_close(dict(agent.state_dict()), dict(other.state_dict()))


def test_gradients_of_sac_are_clipped_for_each_network_on_its_own():
    (block,) = make_blocks(1)
    agent, cfg, recipe = make_agent("sac", "grad_clip=0.01", "actor_l2=0")
    update, optimizers = recipe.make_update(cfg, agent)
    update(block, 0)
    moments = [state["exp_avg"] for state in optimizers["optimizer"].state.values()]
    actor = len(list(agent.actor_network_params.flatten_keys().values()))
    critics = zip(*moments[actor:-1], strict=True)  # stacked: the first entries are one critic's
    groups = (moments[:actor], *critics, moments[-1:])
    norms = [float(torch.nn.utils.get_total_norm(group)) / 0.1 for group in groups]
    assert norms == pytest.approx([0.01] * 4, rel=1e-3)


@pytest.mark.xdist_group("recipes_td3")
@pytest.mark.filterwarnings("ignore:torch._dynamo.config:FutureWarning")  # tensordict reads it
@pytest.mark.parametrize(
    ("algorithm", "steps", "options"),
    [
        ("td3", 4, ()),
        ("sac", 2, ()),
        ("crossq", 2, ("policy_delay=1",)),  # with running statistics
        ("redq", 2, ("policy_delay=1", "num_critics=2", "dropout=0.3", "layer_norm=true")),
    ],
)
def test_a_compiled_block_gives_the_numbers_of_its_steps(algorithm, steps, options, monkeypatch):
    states = {}
    for compiled in (True, False):
        small = ["grad_clip=1", "actor_l2=0.1", "hidden=[8]", *options]
        agent, cfg, recipe = make_agent(algorithm, *small)
        if compiled:
            # Traced as a whole, gradients and all; the test after this one generates code, too.
            compiler = functools.partial(torch.compile, backend="aot_eager")
            monkeypatch.setattr(torch, "compile", compiler)
            monkeypatch.setattr(compiling, "is_worth_it", lambda _: True)
        update, optimizers = recipe.make_update(cfg, agent)
        monkeypatch.undo()
        (block,) = make_blocks(steps)
        torch.manual_seed(1)
        states[compiled] = (update(block, 0), state_of(agent, optimizers))
    torch.testing.assert_close(states[True], states[False], rtol=1e-4, atol=1e-6)


@pytest.mark.xdist_group("recipes_td3")
def test_generated_code_gives_the_numbers_of_the_steps(tmp_path, monkeypatch):
    # A cache of its own: a run that is killed leaves half a file in the one that all share.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compiling, "why_not", lambda device: None)
    turns, found = (True, False, True), {}
    for compiled in (True, False):
        torch.manual_seed(0)
        weights = networks.Weights(
            [], [torch.randn(1, 2).requires_grad_()], [], [], [torch.ones(1, 2)]
        )
        optimizer = optim.Adam(weights.critics, lr=0.01)

        def step(state, batch, noise, turn, optimizer=optimizer):
            weights, moments = state

            def loss(critics):
                error = batch.observation @ critics[0].T - batch.reward.unsqueeze(1) - noise
                return error.square().mean(), error.detach().abs().mean(-1)

            gradients, errors = optim.differentiate(loss, weights.critics)
            optimizer.move(weights.critics, gradients, moments)
            if turn:
                optim.move_targets(weights, 0.1)
            return {"loss": errors.mean()}, errors

        cfg = make_config("td3", f"compile={compiled}", "device=cpu")
        run = compiling.over_blocks(cfg, step, lambda w=weights, o=optimizer: (w, o.moments))
        rows = [torch.randn(3, 4, 2) for _ in range(3)]
        block = Batch(*rows, torch.randn(3, 4), torch.zeros(3, 4, dtype=torch.bool))
        # That the compiler knows the processor's instructions shows when it compiles.
        with torch._inductor.config.patch({"cpp.vec_isa_ok": True}):
            results = run(block, torch.randn(3, 4, 1), turns)
        found[compiled] = (results, [*weights.critics, *weights.target_critics], optimizer.moments)
    torch.testing.assert_close(found[True], found[False], rtol=1e-5, atol=1e-6)


class Recording(TorchDispatchMode):
    """Imitates a CUDA graph on the CPU: records operations on fixed memory and runs them again.

    Recording changes nothing: what `kept` holds is put back at the end.
    """

    def __init__(self, kept):
        super().__init__()
        self.kept, self.operations, self.replays = kept, [], 0

    def __enter__(self):
        self.before = [tensor.detach().clone() for tensor in self.kept]
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        with torch.no_grad():
            for tensor, value in zip(self.kept, self.before, strict=True):
                tensor.copy_(value)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        results = func(*args, **(kwargs or {}))
        self.operations.append((func, args, kwargs or {}, results))
        return results

    @torch.no_grad()
    def replay(self):
        self.replays += 1
        for func, args, kwargs, results in self.operations:
            again = func(*args, **kwargs)
            for old, new in zip(tree_leaves(results), tree_leaves(again), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_recorded_update_gives_the_numbers_of_the_loop(algorithm, monkeypatch):
    class Stream:
        def wait_stream(self, _):
            pass

    states, recordings, devices = {}, [], []
    for recorded in (True, False):
        turns = ["policy_delay=3"] if algorithm == "redq" else []
        agent, cfg, recipe = make_agent(algorithm, "grad_clip=1", "actor_l2=0.1", *turns)
        if recorded:
            monkeypatch.setattr(compiling, "maybe_capture", lambda _, update: Captured(update))
        update, optimizers = recipe.make_update(cfg, agent)
        kept = state_of(agent, optimizers)

        def make_graph(kept=kept):
            recordings.append(Recording(kept))
            return recordings[-1]

        for name, fake in {
            "CUDAGraph": make_graph,
            "graph": lambda graph: graph,
            "Stream": Stream,
            "current_stream": Stream,
            "stream": lambda _: contextlib.nullcontext(),
            "device": lambda place: devices.append(place) or contextlib.nullcontext(),
        }.items():
            monkeypatch.setattr(torch.cuda, name, fake)
        results, done = [], 0
        for block in make_blocks(*[3] * 12):  # TD3's actor moves in the first or in the second
            values, errors = update(block, done)
            results.append(({k: v.clone() for k, v in values.items()}, errors.clone()))
            done += 3
        states[recorded] = (results, kept)
        monkeypatch.undo()
    assert set(devices) == {torch.device("cpu")}  # the agent's, not the current one
    assert sum(recording.replays for recording in recordings) == (6 if algorithm == "td3" else 9)
    torch.testing.assert_close(states[True], states[False])


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_an_update_never_waits_for_the_device(algorithm):
    expected = None
    for place in ("cpu", "cuda:0"):
        with pretend_cuda() if place == "cuda:0" else contextlib.nullcontext() as waits:
            device = torch.device(place)
            options = [f"device={place}", "compile=false", "grad_clip=1", "actor_l2=0.1"]
            agent, cfg, recipe = make_agent(algorithm, *options, device=device)
            update, _ = recipe.make_update(cfg, agent)
            done = 0
            for block in make_blocks(1, 3, device=device):
                if waits is not None:
                    waits.clear()
                values, _ = update(block, done)
                done += len(block.reward)
                assert not waits
            values = {name: value.cpu() for name, value in values.items()}
        expected = values if expected is None else expected
    torch.testing.assert_close(values, expected, rtol=0, atol=0)


def test_a_saved_optimizer_goes_on_number_for_number():
    states = []
    for stops in (False, True):
        agent, cfg, recipe = make_agent("sac")
        update, optimizers = recipe.make_update(cfg, agent)
        blocks = make_blocks(2, 2)
        torch.manual_seed(1)
        update(blocks[0], 0)
        if stops:
            saved = optimizers["optimizer"].state_dict()
            weights = agent.state_dict()
            agent, _, _ = make_agent("sac")
            torch.manual_seed(1)
            torch.randn(2, 2, ROWS, ACTIONS)
            update, optimizers = recipe.make_update(cfg, agent)
            agent.load_state_dict(weights)
            optimizers["optimizer"].load_state_dict(saved)
        update(blocks[1], 2)
        states.append(state_of(agent, optimizers))
    torch.testing.assert_close(*states, rtol=0, atol=0)


def test_training_flushes_denormal_numbers_and_nothing_else_does(monkeypatch):
    def keeps_denormals():
        return bool(torch.full((8,), 1e-39).mul(1.0).any())

    def look(_):
        seen.append(keeps_denormals())
        raise InterruptedError

    seen = []
    monkeypatch.setattr(training, "check_task", look)
    cfg = make_config("td3", "logger=none")
    with pytest.raises(InterruptedError):
        training.train(cfg, make_agent=None, make_update=None)
    assert seen == [False]
    assert keeps_denormals()
