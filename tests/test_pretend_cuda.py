"""The simulated device detects the faults that a real one would, and counts waits exactly."""

import copy
import io
import pickle

import numpy as np
import pytest
import torch
from pretend_cuda import Pretended, pretend_cuda
from torch import nn


@pytest.fixture
def waits():
    with pretend_cuda() as waits:
        yield waits


FAULTS = {
    "two devices in one operation": lambda x, host: x + host,
    "two devices in a product": lambda x, host: x @ host,
    "two devices joined": lambda x, host: torch.cat([x, host]),
    "numbers of two devices joined": lambda x, host: torch.stack([x.sum(), host.sum()]),
    "index_select with a CPU index": lambda x, host: x.index_select(0, host[0].long()),
    "gather with a CPU index": lambda x, host: x.gather(0, host.long()),
    "index_fill_ with a CPU index": lambda x, host: x.index_fill_(0, host[0].long(), 1.0),
    "a CPU tensor indexed from the device": lambda x, host: host[x[0].long()],
    "a result written into a CPU tensor": lambda x, host: host.add_(x.sum()),
    "a CPU row written by position": lambda x, host: x.index_put_((x[0].long(),), host),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_operations_on_two_devices_are_refused(waits, fault):
    x, host = torch.zeros(3, 3, device="cuda:0"), torch.zeros(3, 3)
    with pytest.raises(RuntimeError, match=r"device|indices"):
        FAULTS[fault](x, host)


def test_numpy_is_refused(waits):
    x = torch.zeros(3, device="cuda:0")
    with pytest.raises(TypeError, match="to numpy"):
        x.numpy()
    with pytest.raises(TypeError, match="to numpy"):
        np.asarray(x)


@pytest.mark.parametrize(("draws", "where"), [("cpu", "cuda:0"), ("cuda:0", "cpu")])
def test_a_generator_of_the_wrong_device_is_refused(waits, draws, where):
    generator = torch.Generator(draws).manual_seed(0)
    assert generator.device == torch.device(draws)
    torch.rand(3, generator=generator, device=draws)
    with pytest.raises(RuntimeError, match="device type for generator"):
        torch.rand(3, generator=generator, device=where)
    with pytest.raises(RuntimeError, match="device type for generator"):
        torch.zeros(3, device=where).uniform_(generator=generator)
    with pytest.raises(RuntimeError, match="device type for generator"):
        torch._standard_gamma(torch.ones(3, device=where), generator=generator)


def test_the_state_of_a_generator_of_the_other_device_is_refused(waits):
    states = [torch.Generator(device).get_state() for device in ("cpu", "cuda:0")]
    for device, state in zip(("cuda:0", "cpu"), states, strict=True):
        with pytest.raises(RuntimeError, match="size"):
            torch.Generator(device).set_state(state)
    torch.Generator("cuda:0").set_state(states[1])


def test_keops_refuses_two_devices(waits):
    from pykeops.torch import LazyTensor

    x, y = torch.rand(5, 1, 2, device="cuda:0"), torch.rand(1, 5, 2)
    with pytest.raises(ValueError, match="located on the same device"):
        ((LazyTensor(x) - LazyTensor(y)) ** 2).sum(-1).argKmin(1, dim=1)


def test_keops_answers_on_the_device(waits):
    from pykeops.torch import LazyTensor

    x = torch.rand(20, 2, device="cuda:0")
    squared = ((LazyTensor(x[:, None]) - LazyTensor(x[None])) ** 2).sum(-1)
    found = squared.argKmin(1, dim=1)
    assert found.device.type == "cuda"
    assert torch.equal(found.squeeze(1), torch.arange(20, device="cuda:0"))


READS = {
    "item": lambda x: x[0].item(),
    "float": lambda x: float(x[0]),
    "int": lambda x: int(x[0]),
    "bool": lambda x: bool((x > 0).any()),
    "cpu": lambda x: x.cpu(),
    "to": lambda x: x.to("cpu", torch.float64),
    "tolist": lambda x: x.tolist(),
    "into a CPU tensor": lambda x: torch.zeros(4).copy_(x),
    "nonzero": lambda x: x.nonzero(),
    "boolean index": lambda x: x[x > 0],
    "boolean index to write": lambda x: x.__setitem__(x > 0, torch.arange(4.0, device="cuda:0")),
    "masked_select": lambda x: x.masked_select(x > 0),
    "unique": lambda x: x.unique(),
    "unique_consecutive": lambda x: x.unique_consecutive(),
    "equal": lambda x: torch.equal(x, x),
    "repeat_interleave": lambda x: x.repeat_interleave(x.long()),
    "a tensor of it": lambda x: torch.tensor([x[0]]),
}


@pytest.mark.parametrize("read", READS)
def test_a_read_is_counted_once(waits, read):
    x = torch.ones(4, device="cuda:0")
    waits.clear()
    READS[read](x)
    assert (waits.reads, waits.total()) == (1, 1)


FREE = {
    "arithmetic": lambda x: (x * 2 + x.sum()).sqrt().clamp_max(3.0),
    "shapes": lambda x: (len(x), x.shape, x.numel(), x.dtype, x.device),
    "where": lambda x: torch.where(x > 0, x, 0.0),
    "masked_fill": lambda x: x.masked_fill(x > 0, 0.0),
    "index": lambda x: x[x.long()],
    "a number into a slice": lambda x: x[1:].fill_(2.0),
    "a number by boolean index": lambda x: x.__setitem__(x > 0, 2.0),
    "a number by index": lambda x: x.__setitem__(x.long(), 2.0),
    "made there": lambda x: torch.arange(4, device="cuda:0") + x.new_zeros(4),
    "random": lambda x: torch.randint(4, (4,), device="cuda:0"),
    "dtype": lambda x: x.double().to(torch.float16),
    "topk": lambda x: x.topk(2),
    "repeat_interleave": lambda x: x.repeat_interleave(x.long(), output_size=4),
    "an asynchronous upload": lambda x: torch.ones(4).to("cuda:0", non_blocking=True),
}


@pytest.mark.parametrize("free", FREE)
def test_what_waits_for_nothing_is_not_counted(waits, free):
    x = torch.ones(4, device="cuda:0")
    waits.clear()
    FREE[free](x)
    assert not waits


def test_waits_for_events_and_streams_are_counted(waits):
    first, second = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    with pytest.raises(RuntimeError, match="must be recorded"):
        first.elapsed_time(second)
    first.record()
    second.record(torch.cuda.current_stream())
    assert first.elapsed_time(second) == 0
    assert first.query()
    second.wait()  # has the stream wait, not the host
    assert not waits
    second.synchronize()
    torch.cuda.current_stream().synchronize()
    torch.cuda.synchronize()
    assert waits == {"synchronize": 3}
    assert not torch.cuda.is_current_stream_capturing()


def test_the_device_tells_of_its_memory(waits):
    free, total = torch.cuda.mem_get_info(torch.device("cuda:0"))
    assert 0 < free <= total


def test_memory_of_the_host_alone_can_be_pinned(waits):
    host = torch.empty(3, pin_memory=True)
    host.fill_(2.0)
    waits.clear()
    assert host.to("cuda:0", non_blocking=True).is_cuda
    assert not waits
    assert waits.sent == 1
    with pytest.raises(RuntimeError, match="can be pinned"):
        torch.zeros(3, pin_memory=True, device="cuda:0")


def test_an_empty_tensor_is_sent_without_waiting(waits):
    torch.empty(0).to("cuda:0")
    assert not waits
    assert not waits.sent


def test_uploads_are_no_reads(waits):
    x = torch.zeros(4).to("cuda:0")
    torch.tensor([1.0], device="cuda:0")
    x.copy_(torch.ones(4))
    x[torch.tensor([1])]
    assert waits == {"upload": 3, "cpu_index": 1}
    assert waits.reads == 0


def test_results_stay_on_the_device_and_views_share_memory(waits):
    x = torch.zeros(2, 3, device="cuda")
    x[0].add_(1.0)
    x.T[1, 1] = 5.0
    assert x.device == torch.device("cuda:0")
    assert x.is_cuda
    assert x.cpu().tolist() == [[1, 1, 1], [0, 5, 0]]
    for made in (x.new_tensor([1]), x.new_zeros(3), torch.zeros_like(x), x.double(), x[x > 0]):
        assert made.device.type == "cuda"
    for host in (x.new_zeros(3, device="cpu"), torch.ones_like(x, device="cpu"), x.cpu()):
        assert host.device.type == "cpu"


def test_a_network_learns_there(waits):
    network = nn.Linear(3, 1).to("cuda:0")
    assert all(isinstance(p, nn.Parameter) and p.is_cuda for p in network.parameters())
    optimizer = torch.optim.Adam(network.parameters(), lr=0.1, fused=True)
    inputs = torch.rand(32, 3, device="cuda:0")
    losses = []
    for _ in range(50):
        loss = (network(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    assert waits.reads == 0
    assert losses[-1] < 0.1 * losses[0]
    twin = copy.deepcopy(network)
    assert torch.equal(twin(inputs), network(inputs))
    assert all(isinstance(p, nn.Parameter) for p in twin.parameters())


def test_a_gradient_passes_a_copy_to_the_host(waits):
    x = torch.ones(3, device="cuda:0", requires_grad=True)
    (2 * x).cpu().sum().backward()
    assert x.grad.device.type == "cuda"
    assert x.grad.tolist() == [2, 2, 2]


@pytest.mark.parametrize("weights_only", [True, False])
def test_a_saved_tensor_goes_where_it_is_told(weights_only):
    def load(place=None):
        file = io.BytesIO(saved.getvalue())
        return torch.load(file, weights_only=weights_only, map_location=place)

    saved = io.BytesIO()
    with pretend_cuda():
        x = torch.arange(6.0, device="cuda:0")[2:]
        torch.save({"x": x, "host": torch.ones(3)}, saved)
        for place, device in ((None, "cuda"), ("cpu", "cpu"), ("cuda:0", "cuda")):
            loaded = load(place)["x"]
            assert loaded.device.type == device
            assert torch.equal(loaded.cpu(), x.cpu())
        assert not load()["host"].is_cuda
    assert type(load("cpu")["x"]) is torch.Tensor
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match="deserialize object on a CUDA device"):
            load()


def test_a_pickled_tensor_stays_on_the_device(waits):
    assert pickle.loads(pickle.dumps(torch.ones(3, device="cuda:0"))).is_cuda
    assert not pickle.loads(pickle.dumps(torch.ones(3))).is_cuda


def test_nothing_is_pretended_afterwards():
    before = torch.tensor, torch.Generator, torch.cuda.is_available()
    with pretend_cuda():
        assert torch.cuda.is_available()
    assert before == (torch.tensor, torch.Generator, torch.cuda.is_available())
    assert not isinstance(torch.zeros(3), Pretended)


def test_the_same_seed_draws_the_same_numbers_on_both():
    expected = torch.randn(4, generator=torch.Generator().manual_seed(3))
    with pretend_cuda():
        generator = torch.Generator("cuda:0").manual_seed(3)
        drawn = torch.randn(4, generator=generator, device="cuda:0").cpu()
    assert torch.equal(drawn, expected)
