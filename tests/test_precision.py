"""Losses in bfloat16 are close to those in float32; only matrix products use bfloat16."""

import contextlib
import functools

import pytest
import torch
import torch._inductor.config
from pretend_cuda import pretend_cuda
from recipe_helpers import ALGORITHMS, OFFLINE, train, train_and_kill
from torch.nn.functional import cosine_similarity
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from update_helpers import ACTIONS, CPU, OBSERVATIONS, make_agent, make_blocks

from nmer_recipes import compiling, networks, optim  # isort: skip

DELAYED = ("crossq", "redq", "td3", "td3_bc")  # their actor moves at some steps alone
PRODUCTS = {"addbmm", "addmm", "addmv", "baddbmm", "bmm", "mm", "mv"}
# Views, casts, and the sum over rows that is the gradient of a bias.
HARMLESS = {"_to_copy", "_unsafe_view", "detach", "expand", "t", "transpose", "view", "sum"}


@pytest.fixture(autouse=True)
def also_narrow(monkeypatch):
    """Computes narrow layers in bfloat16, too, because the tests' networks have no others."""
    monkeypatch.setattr(networks, "_WIDE", 1)


class Operations(TorchDispatchMode):
    """Lists each operation's name and the dtypes of the floating-point tensors that it takes."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        dtypes = {tensor.dtype for tensor in given if tensor.is_floating_point()}
        self.seen.append((func.overloadpacket.__name__, dtypes))
        return func(*args, **(kwargs or {}))

    def products(self):
        return [dtypes for name, dtypes in self.seen if name in PRODUCTS]

    def of_bf16(self):
        return {name for name, dtypes in self.seen if torch.bfloat16 in dtypes}


def make_small(algorithm, precision, *options, device=CPU):
    turns = ["policy_delay=1"] if algorithm in DELAYED else []
    turns += ["target_interval=1"] if algorithm == "td3_bc" else []
    made = [f"precision={precision}", "grad_clip=1", "actor_l2=0.1", *turns, *options]
    return make_agent(algorithm, *made, device=device)


def state_of(agent, optimizers):
    moments = [s for o in optimizers.values() for s in tree_leaves(list(o.state.values()))]
    return [*agent.parameters(), *agent.buffers(), *moments]


def take_step(algorithm, precision, *options):
    """Takes a step; returns results, gradients, changes of weights and targets, and all tensors."""
    agent, cfg, recipe = make_small(algorithm, precision, *options)
    update, optimizers = recipe.make_update(cfg, agent)
    state = state_of(agent, optimizers)
    before = [tensor.detach().clone() for tensor in state]
    (block,) = make_blocks(1)
    torch.manual_seed(1)
    with Operations() as operations:
        results = update(block, 0)
    moves = [(now.detach() - then).flatten() for now, then in zip(state, before, strict=True)]
    moments = [s["exp_avg"].flatten() for o in optimizers.values() for s in o.state.values()]
    return (
        results,
        torch.cat(moments),
        torch.cat(moves),
        [*state, *tree_leaves(results)],
        operations,
    )


CASES = [(algorithm, ()) for algorithm in (*ALGORITHMS, *OFFLINE)]
CASES += [("redq", ("num_critics=2", "dropout=0.2", "layer_norm=true"))]  # DroQ


@pytest.mark.parametrize(("algorithm", "options"), CASES)
def test_a_step_in_bf16_is_near_that_in_float32_and_not_the_same(algorithm, options):
    (losses, errors), gradients, moves, *_ = take_step(algorithm, "float32", *options)
    (others, near), *rest, _, _ = take_step(algorithm, "bf16", *options)
    assert losses.keys() == others.keys()
    for name, value in losses.items():
        torch.testing.assert_close(others[name], value, rtol=0.03, atol=0.003)
    torch.testing.assert_close(near, errors, rtol=0.03, atol=0.03)
    assert not torch.equal(near, errors)
    assert not torch.equal(rest[0], gradients)
    assert cosine_similarity(rest[0], gradients, 0) > 0.999
    # Adam's first step is the sign of a gradient: where it is almost 0, the direction may differ.
    assert cosine_similarity(rest[1], moves, 0) > 0.95


@pytest.mark.parametrize(("algorithm", "options"), CASES)
def test_only_matrix_products_are_in_bf16(algorithm, options):
    *_, tensors, operations = take_step(algorithm, "bf16", *options)
    products = operations.products()
    assert len(products) > 20  # forward and backward
    assert all(dtypes == {torch.bfloat16} for dtypes in products)
    assert operations.of_bf16() <= PRODUCTS | HARMLESS
    # Weights, targets, statistics, optimizer, losses and TD errors; counts are integers.
    assert {t.dtype for t in tensors if t.is_floating_point()} == {torch.float32}

    *_, operations = take_step(algorithm, "float32", *options)
    assert len(operations.products()) == len(products)
    assert not operations.of_bf16()


def test_narrow_layers_are_in_float32(monkeypatch):
    monkeypatch.undo()
    sizes = ((4, 64), (64, 64), (64, 63))  # one of the three is wide
    layers = torch.nn.Sequential(*(torch.nn.Linear(*size) for size in sizes))
    with Operations() as operations:
        networks.Functional(layers, "bf16")([*layers.parameters()], torch.randn(5, 4))
    dtypes = [{torch.float32}, {torch.bfloat16}, {torch.float32}]
    assert operations.products() == dtypes


@pytest.mark.parametrize("algorithm", [*ALGORITHMS, *OFFLINE])
def test_policies_act_in_float32(algorithm):
    _, cfg, recipe = make_small(algorithm, "bf16")
    actor, explorer, _ = recipe.make_agent(cfg, OBSERVATIONS, ACTIONS, CPU)
    observation = torch.randn(3, OBSERVATIONS)
    for policy in (actor, explorer):
        with torch.no_grad(), Operations() as operations:
            policy(observation=observation)
        assert operations.products()
        assert not operations.of_bf16()


@pytest.mark.filterwarnings("ignore:torch._dynamo.config:FutureWarning")  # tensordict reads it
@pytest.mark.parametrize("algorithm", ["td3", "sac", "crossq"])
def test_a_compiled_block_in_bf16_gives_the_numbers_of_its_steps(algorithm, monkeypatch):
    states = {}
    for compiled in (True, False):
        agent, cfg, recipe = make_small(algorithm, "bf16", "hidden=[8]")
        if compiled:
            compiler = functools.partial(torch.compile, backend="aot_eager")
            monkeypatch.setattr(torch, "compile", compiler)
            monkeypatch.setattr(compiling, "is_worth_it", lambda _: True)
        update, optimizers = recipe.make_update(cfg, agent)
        monkeypatch.undo()
        (block,) = make_blocks(2)
        torch.manual_seed(1)
        states[compiled] = (update(block, 0), state_of(agent, optimizers))
    torch.testing.assert_close(states[True], states[False], rtol=1e-3, atol=1e-4)


def test_generated_code_in_bf16_gives_the_numbers_of_the_layers(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    layers = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    weights, rows = list(layers.parameters()), torch.randn(16, 4)
    found = {}
    for precision in ("float32", "bf16"):
        network = networks.Functional(layers, precision)

        def step(weights, rows, network=network):
            def loss(weights):
                values = network(weights, rows)
                return values.square().mean(), values.detach()

            return optim.differentiate(loss, weights)

        found[precision] = step(weights, rows)
        if precision == "bf16":
            compiled = torch.compile(torch.no_grad()(step), fullgraph=True, dynamic=False)
            with torch._inductor.config.patch({"cpp.vec_isa_ok": True}):
                found["compiled"] = compiled(weights, rows)
    torch.testing.assert_close(found["compiled"], found["bf16"], rtol=0.01, atol=1e-3)
    assert not torch.equal(found["compiled"][1], found["float32"][1])


@pytest.mark.parametrize("algorithm", [*ALGORITHMS, *OFFLINE])
def test_an_update_in_bf16_on_cuda_is_that_of_the_cpu_without_waits(algorithm):
    found = []
    for place in ("cpu", "cuda:0"):
        with pretend_cuda() if place == "cuda:0" else contextlib.nullcontext() as waits:
            device = torch.device(place)
            agent, cfg, recipe = make_small(algorithm, "bf16", f"device={place}", device=device)
            update, _ = recipe.make_update(cfg, agent)
            (block,) = make_blocks(2, device=device)
            if waits is not None:
                waits.clear()
            values, _ = update(block, 0)
            assert not waits
            found.append({name: value.cpu() for name, value in values.items()})
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_a_killed_run_in_bf16_goes_on_number_for_number(tmp_path):
    options = ["replay=per_nmer", "random_frames=20", "device=cpu", "precision=bf16"]
    whole = train("td3", tmp_path / "whole", *options)
    train_and_kill("td3", tmp_path / "killed", *options)
    assert train("td3", tmp_path / "killed", *options, "resume=auto") == whole
    other = train("td3", tmp_path / "other", *options[:-1])
    assert other[-1]["train/loss_qvalue"] != whole[-1]["train/loss_qvalue"]


def test_a_run_in_bf16_trains_on_cuda(cuda, tmp_path):
    rows = train("td3", tmp_path / "run", "device=cuda:0", "precision=bf16", "random_frames=20")
    assert rows[-1]["train/updates"] == "28"
