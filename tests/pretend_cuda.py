"""A simulated CUDA device: runs and checks code for `cuda:0` on a machine without one.

Within `pretend_cuda()`, tensors that are made on `cuda:0` or moved there say that they are there.
They compute on the CPU, refuse to meet CPU tensors where CUDA refuses, and count what makes the
host wait for the device:

    with pretend_cuda() as waits:
        buffer = make_replay_buffer("nmer", capacity=500, batch_size=32, device="cuda:0")
        buffer.extend(transitions)
        waits.clear()
        buffer.sample()
        assert waits.reads == 1

How it works: a wrapper subclass keeps the real tensor as `inner`. To C++ it is a CPU tensor, so
that no device guard asks for a driver; to Python its `device` is `cuda:0`. A dispatch mode sees
every operation, checks the devices, runs it on the inner tensors and wraps the results. Functions
that do not reach the dispatcher are patched by name. KeOps gets the inner tensors, and its answer
is wrapped. The same seed gives the same numbers as on the CPU: both devices draw from the same
global generator.

What it catches: tensors of two devices in one operation, a CPU index in `index_select` and the
like, `.numpy()`, a generator of the wrong device, a saved tensor that is loaded without
`map_location` where there is no device, and every wait in `Waits`.

What it cannot see:

- streams, asynchronous copies, races between them, CUDA graphs and `torch.compile`: there is one
  stream, its events are over at once, and nothing is ever captured;
- memory: how much is allocated, and when it runs out (16 GB are always free), or pinned;
- the arithmetic of CUDA kernels, which round and order sums differently;
- operations that exist on the CPU only, or for fewer dtypes on CUDA;
- waits within a library: KeOps's one wait for each reduction is counted, those of FAISS and of
  `torch.linalg` beyond the check of its errors are not;
- threads and processes other than the one that entered it: a prefetching buffer is not checked;
- the device as C++ sees it, which is the CPU: composite operations take the CPU's path;
- a file of CPU tensors that `torch.load` is told to put on the device: they stay on the CPU;
- a CPU tensor without dimensions, which CUDA takes in pointwise operations, in any other one.
"""

from __future__ import annotations

import collections
import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from tensordict import MemoryMappedTensor
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from nmer_torchrl.neighbors.keops import _import_pykeops

CUDA = torch.device("cuda:0")
CPU = torch.device("cpu")

MEMORY = 2**34  # bytes that the device says it has, and that stay free

_aten = torch.ops.aten
# Functions that make tensors, in pinned memory where they are told to.
_PINNING = ("empty", "zeros", "ones", "full", "rand", "randn", "arange")
# Operations whose result, or whose shape, the host has to read.
_READS = {
    _aten._local_scalar_dense.default: "item",
    _aten.is_nonzero.default: "item",
    _aten.equal.default: "equal",
    _aten.nonzero.default: "nonzero",
    _aten.masked_select.default: "masked_select",
    _aten._unique2.default: "unique",
    _aten.unique_dim.default: "unique",
    _aten.unique_consecutive.default: "unique",
    _aten.bincount.default: "bincount",
    _aten._linalg_check_errors.default: "linalg",
}
_INDEXING = {
    _aten.index.Tensor,
    _aten.index_put.default,
    _aten.index_put_.default,
    _aten._index_put_impl_.default,
}
_JOINS = {_aten.cat.default, _aten.stack.default}
_UPLOADS = ("upload", "cpu_index")


class Waits(collections.Counter):
    """Counts, by name, the operations that made the host wait for the device.

    `"upload"` counts copies from the host that block, and `"cpu_index"` operations with a CPU index
    in brackets, which copy it. All others are `reads`: numbers or shapes that the host had to know.
    Copies from the host that do not block wait for nothing; `sent` is how many there were.
    """

    sent = 0

    def clear(self) -> None:
        """Forgets all counts."""
        super().clear()
        self.sent = 0

    @property
    def reads(self) -> int:
        """Returns how many times the host waited for a result."""
        return sum(count for name, count in self.items() if name not in _UPLOADS)


_WAITS = Waits()


class Pretended(Tensor):
    """A tensor that claims to be on `cuda:0`; `inner` holds the data on the CPU."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Pretended:
        self = Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device="cpu",
        )
        self.inner = inner
        return self

    device = property(lambda self: CUDA)
    is_cuda = property(lambda self: True)
    is_cpu = property(lambda self: False)

    def __repr__(self, **_: Any) -> str:
        return f"cuda:0 {self.inner!r}"

    def cpu(self, *_: Any, **__: Any) -> Tensor:
        return self.to(CPU)

    def cuda(self, *_: Any, **__: Any) -> Tensor:
        return self

    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        device, dtype = kwargs.pop("device", None), kwargs.pop("dtype", None)
        for value in args:
            if isinstance(value, torch.dtype):
                dtype = value
            elif isinstance(value, Tensor):
                device, dtype = value.device, value.dtype
            elif isinstance(value, (str, torch.device)):
                device = value
        result = self if dtype in (None, self.dtype) else self.type(dtype)
        if device is None or _on_cuda(device):
            return result
        _WAITS["to_host"] += 1
        return _ToHost.apply(result)

    def tolist(self) -> Any:
        _WAITS["to_host"] += 1
        return self.inner.tolist()

    def numpy(self, *_: Any, **__: Any) -> Any:
        raise TypeError(
            "can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy the tensor "
            "to host memory first."
        )

    def __array__(self, *_: Any) -> Any:
        return self.numpy()

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) not in memo:
            copied = Pretended(self.inner.detach().clone()).requires_grad_(self.requires_grad)
            if isinstance(self, torch.nn.Parameter):
                copied = torch.nn.Parameter(copied, self.requires_grad)
            memo[id(self)] = copied
        return memo[id(self)]

    def __reduce_ex__(self, _: Any) -> tuple[Callable[..., Tensor], tuple[Tensor, bool]]:
        self.inner.untyped_storage().pretended = True
        return _load_pretended, (self.inner.detach(), self.requires_grad)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        with torch._C.DisableTorchFunctionSubclass():
            if name.startswith("new_") or name.endswith("_like"):
                # C++ would take the CPU for its default.
                device = kwargs.pop("device", None)
                made = func(*_map(_inner, args), **kwargs)
                return Pretended(made) if device is None or _on_cuda(device) else made
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class _ToHost(torch.autograd.Function):
    """Copies to the host, and passes gradients back."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.inner.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return Pretended(gradient)


def _load_pretended(inner: Tensor, requires_grad: bool) -> Tensor:
    """Rebuilds a saved tensor on the device that `torch.load` chose."""
    on_cuda = getattr(inner.untyped_storage(), "pretended", False)
    return (Pretended(inner) if on_cuda else inner).requires_grad_(requires_grad)


def _tag(storage: torch.UntypedStorage) -> str | None:
    """Returns the name that a file gives to the device of a tensor's memory."""
    return "cuda:0" if getattr(storage, "pretended", False) else None


def _restore(storage: torch.UntypedStorage, location: str) -> torch.UntypedStorage | None:
    """Moves memory to the simulated device; leaves other devices to torch."""
    if not _pretending or not location.startswith("cuda"):
        return None
    storage.pretended = True
    return storage


_pretending = False
torch.serialization.add_safe_globals([_load_pretended])
torch.serialization.register_package(1, _tag, _restore)  # before torch's own, from 10 on


class _EveryOperation(TorchDispatchMode):
    """Intercepts the operations that have no simulated tensor among their arguments."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def _on_cuda(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cuda"


def _inner(value: Any) -> Any:
    return value.inner if isinstance(value, Pretended) else value


def _map(function: Callable[[Any], Any], value: Any) -> Any:
    """Applies a function to the entries of sequences and dictionaries; much faster than pytree."""
    kind = type(value)
    if kind is tuple or kind is list:
        return kind([_map(function, item) for item in value])
    if kind is dict:
        return {name: _map(function, item) for name, item in value.items()}
    return function(value)


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (tuple, list)):
        return []
    return [tensor for item in value for tensor in _tensors(item)]


def _is_host(value: Any) -> bool:
    return isinstance(value, Tensor) and not isinstance(value, Pretended)


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Checks the devices of an operation, runs it on the inner tensors and wraps the results."""
    kwargs = dict(kwargs)
    leaves = _tensors((args, kwargs))
    pretended = [leaf for leaf in leaves if isinstance(leaf, Pretended)]
    if func is _aten._to_copy.default:
        return _copy(args[0], kwargs)
    if func is _aten.copy_.default:
        _note_copy(args[1], args[0], kwargs.get("non_blocking", args[2] if args[2:] else False))
        func(_inner(args[0]), _inner(args[1]), *args[2:], **kwargs)
        return args[0]
    if func is _aten._foreach_copy_.default:  # device by device where they differ
        for target, source in zip(args[0], args[1], strict=True):
            target.copy_(source, *args[2:], **kwargs)
        return None
    if pretended:
        _check(func, args, [leaf for leaf in leaves if _is_host(leaf)])
        _note_reads(func, args, kwargs)
    wrap = bool(pretended)
    if kwargs.get("device") is not None:
        # Of what is made like a pretended tensor, C++ takes the CPU for the device.
        wrap = _on_cuda(kwargs["device"]) or (wrap and isinstance(args[0], Pretended))
        kwargs["device"] = CPU
    for leaf in (*args, *kwargs.values()):
        if isinstance(leaf, torch._C.Generator):
            _check_generator(leaf, on_cuda=wrap)
    if pretended and torch.Tag.inplace_view in func.tags:
        raise NotImplementedError(f"{func} changes a shape in place, which is not pretended.")
    result = func(*_map(_inner, args), **_map(_inner, kwargs))
    known = {id(tensor.inner): tensor for tensor in pretended}  # operations in place return them

    def outer(value: Any) -> Any:
        if not _is_host(value):
            return value
        return known.get(id(value)) if id(value) in known else Pretended(value) if wrap else value

    return _map(outer, result)


def _copy(source: Tensor, kwargs: dict[str, Any]) -> Tensor:
    """Implements `Tensor.to` and similar methods."""
    device = kwargs.pop("device", None)
    blocking = not kwargs.pop("non_blocking", False)
    kwargs.pop("pin_memory", None)
    copied = _aten._to_copy.default(_inner(source), **kwargs)
    if isinstance(source, Pretended):
        return Pretended(copied)  # C++ names the CPU as the device of a change of dtype
    if not _on_cuda(device):
        return copied
    _note_upload(source, blocking)
    return Pretended(copied)


def _note_copy(source: Tensor, target: Tensor, non_blocking: bool) -> None:
    if isinstance(source, Pretended) and _is_host(target):
        _WAITS["to_host"] += 1
    elif _is_host(source) and isinstance(target, Pretended) and source.ndim:
        _note_upload(source, blocking=not non_blocking)


def _note_upload(source: Tensor, blocking: bool) -> None:
    if not source.numel():  # nothing is copied
        return
    if blocking:
        _WAITS["upload"] += 1
    else:
        _WAITS.sent += 1


def _check(func: Any, args: tuple[Any, ...], host: list[Tensor]) -> None:
    """Raises an error where CUDA would."""
    if func in _INDEXING:
        index = _tensors(args[1])
        if not isinstance(args[0], Pretended):
            raise RuntimeError(
                "indices should be either on cpu or on the same device as the indexed tensor (cpu)"
            )
        if any(_is_host(part) for part in index):  # CUDA takes these in brackets, by a copy
            _WAITS["cpu_index"] += 1
        host = [tensor for tensor in host if not any(tensor is part for part in index)]
    inplace = func._schema.name.endswith("_") and bool(args) and _is_host(args[0])
    if inplace or any(tensor.ndim or func in _JOINS for tensor in host):
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices, "
            f"cuda:0 and cpu, in {func}."
        )


def _note_reads(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if func in _READS:
        _WAITS[_READS[func]] += 1
    elif func in _INDEXING:
        if any(part.dtype == torch.bool for part in _tensors(args[1])):
            _WAITS["bool_index"] += 1
    elif func is _aten.repeat_interleave.Tensor and kwargs.get("output_size") is None:
        _WAITS["repeat_interleave"] += 1


class _Generator(torch.Generator):
    """A generator that stores the device that it was made for."""

    def __new__(cls, device: Any = "cpu") -> _Generator:
        self = super().__new__(cls, "cpu")
        self.made_for = torch.device(device)
        _GENERATORS[self._cdata] = self
        return self

    device = property(lambda self: CUDA if _on_cuda(self.made_for) else CPU)

    def get_state(self) -> Tensor:
        """Returns the state, whose size differs between devices."""
        state = super().get_state()
        return _as_cuda_state(state) if _on_cuda(self.made_for) else state

    def set_state(self, state: Tensor) -> _Generator:
        """Restores a state; raises an error for one of the other device."""
        super().set_state(_from_cuda_state(state) if _on_cuda(self.made_for) else state)
        return self

    def clone_state(self) -> _Generator:
        """Returns a copy for the same device."""
        other = _Generator(self.made_for)
        other.set_state(self.get_state())
        return other


def _as_cuda_state(state: Tensor) -> Tensor:
    return torch.cat([state, torch.zeros(1, dtype=torch.uint8)])


def _from_cuda_state(state: Tensor) -> Tensor:
    if len(state) % 2 == 0:
        raise RuntimeError("RNG state is wrong size")
    return state[:-1]


# By the address in C++, since operations are given another Python object for it.
_GENERATORS: weakref.WeakValueDictionary[int, _Generator] = weakref.WeakValueDictionary()


def _check_generator(generator: torch._C.Generator, *, on_cuda: bool) -> None:
    found = _GENERATORS.get(generator._cdata, generator).device.type
    wanted = "cuda" if on_cuda else "cpu"
    if found != wanted:
        raise RuntimeError(f"Expected a '{wanted}' device type for generator but found '{found}'")


def _tensor(data: Any, *, device: Any = None, **kwargs: Any) -> Tensor:
    if isinstance(data, Tensor):
        place = data.device if device is None else device
        return data.detach().clone().to(device=place, dtype=kwargs.get("dtype"))
    made = _REAL["tensor"](_map(_item, data), **kwargs)
    return made if device is None else made.to(device)


def _item(value: Any) -> Any:
    return value.item() if isinstance(value, Pretended) else value


def _as_tensor(data: Any, dtype: Any = None, device: Any = None) -> Tensor:
    if isinstance(data, Tensor):
        place = data.device if device is None else device
        return data.to(device=place, dtype=data.dtype if dtype is None else dtype)
    made = _REAL["as_tensor"](_map(_item, data), dtype=dtype)
    return made if device is None else made.to(device)


_REAL = {
    "tensor": torch.tensor,
    "as_tensor": torch.as_tensor,
    "memmap": MemoryMappedTensor.__new__,
}


def _make_memmap(cls: type, *args: Any, **kwargs: Any) -> Any:
    """Makes a tensor of a subclass from another one, which torch cannot under a dispatch mode."""
    with _disable_current_modes():
        return _REAL["memmap"](cls, *args, **kwargs)


class _TensorTypes(type(Tensor)):
    """Equals the types that KeOps accepts as tensors; KeOps compares types, not instances."""

    def __eq__(cls, other: object) -> bool:
        return other is Tensor or other is Pretended

    def __hash__(cls) -> int:
        return hash(Tensor)


class _AnyTensor(Tensor, metaclass=_TensorTypes):
    pass


def _keops_forward(real: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps KeOps's reduction so that it runs on the inner tensors."""

    def forward(params: Any, *args: Any) -> Any:
        pretended = [isinstance(arg, Pretended) for arg in args]
        if not any(pretended):
            return real(params, *args)
        if not all(pretended):
            raise ValueError("[KeOps] Input arrays must be all located on the same device.")
        _WAITS["keops"] += 1  # its launcher ends in cuCtxSynchronize
        result, info = real(params, *(arg.inner for arg in args))
        return Pretended(result), info

    return forward


class _Event:
    """An event on a device that has always finished; waiting for it is counted."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.recorded = False

    def record(self, *_: Any) -> None:
        self.recorded = True

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        _WAITS["synchronize"] += self.recorded

    def wait(self, *_: Any) -> None:
        """Makes a stream wait, not the host."""

    def elapsed_time(self, other: _Event) -> float:
        if not (self.recorded and other.recorded):
            raise RuntimeError("Both events must be recorded before calculating elapsed time.")
        return 0.0


class _Stream:
    """The only stream; waiting for it is counted."""

    device = CUDA

    def synchronize(self) -> None:
        _note_synchronize()

    def wait_stream(self, _: Any) -> None:
        pass

    def wait_event(self, _: Any) -> None:
        pass

    def record_event(self, event: _Event | None = None) -> _Event:
        event = event or _Event()
        event.record()
        return event


def _note_synchronize(*_: Any) -> None:
    _WAITS["synchronize"] += 1


def _without_pinning(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wraps a function that makes tensors for machines where host memory cannot be pinned."""

    def made(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Tensor:
        tensor: Tensor = make(*args, **kwargs)
        if pin_memory and isinstance(tensor, Pretended):
            raise RuntimeError("Only dense CPU tensors can be pinned")
        return tensor

    return made


def _patches() -> dict[str, Any]:
    _import_pykeops()  # without its messages
    from pykeops.torch.generic.generic_red import GenredAutograd_base

    return {
        "torch.cuda._lazy_init": lambda: None,
        "torch.cuda.is_available": lambda: True,
        "torch.cuda.is_initialized": lambda: True,
        "torch.cuda.device_count": lambda: 1,
        "torch.cuda.current_device": lambda: 0,
        "torch.cuda.get_rng_state": lambda *_: _as_cuda_state(torch.get_rng_state()),
        "torch.cuda.set_rng_state": lambda x, *_: torch.set_rng_state(_from_cuda_state(x)),
        "torch.cuda.manual_seed": lambda _: None,
        "torch.cuda.manual_seed_all": lambda _: None,
        "torch.cuda.synchronize": _note_synchronize,
        "torch.cuda.mem_get_info": lambda *_: (MEMORY, MEMORY),
        "torch.cuda.Event": _Event,
        "torch.cuda.current_stream": lambda *_: _Stream(),
        "torch.cuda.is_current_stream_capturing": lambda: False,
        "torch.optim.Optimizer._accelerator_graph_capture_health_check": lambda self: None,
        "torch.Tensor.pin_memory": lambda self, *_: self,
        "torch.Tensor.cuda": lambda self, *_, **__: self.to(CUDA),
        "tensordict.memmap.MemoryMappedTensor.__new__": _make_memmap,
        "torch.Generator": _Generator,
        "torch.tensor": _tensor,
        "torch.as_tensor": _as_tensor,
        **{f"torch.{name}": _without_pinning(getattr(torch, name)) for name in _PINNING},
        "pykeops.torch.generic.generic_red.GenredAutograd_base._forward": staticmethod(
            _keops_forward(GenredAutograd_base._forward)
        ),
        "pykeops.torch.utils.torchtools.arraytype": _AnyTensor,
    }


@contextlib.contextmanager
def pretend_cuda() -> Iterator[Waits]:
    """Simulates a CUDA device on this machine; yields the counts of waits, initially empty."""
    _WAITS.clear()
    overwrite = torch.__future__.get_overwrite_module_params_on_conversion()
    with contextlib.ExitStack() as stack:
        for name, value in _patches().items():
            stack.enter_context(mock.patch(name, value))
        stack.enter_context(mock.patch(f"{__name__}._pretending", True))
        # `Module.to` would write into parameters that stay where they are.
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        stack.callback(torch.__future__.set_overwrite_module_params_on_conversion, overwrite)
        stack.enter_context(_EveryOperation())
        yield _WAITS


@contextlib.contextmanager
def some_cuda() -> Iterator[Waits | None]:
    """Provides `cuda:0`: a real device, for which it yields None, or a simulated one."""
    if torch.cuda.is_available():
        yield None
    else:
        with pretend_cuda() as waits:
            yield waits
