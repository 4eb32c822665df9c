"""Compiles and captures updates where that saves time and the machine supports it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable
from functools import cache
from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor

from nmer_recipes.blocks import Batch
from nmer_recipes.errors import UsageError
from nmer_recipes.products import compile_options

_WORTH = 50_000  # updates from which compiling (about a minute) saves time
_WARM_UP = 3  # calls before a CUDA graph is captured; they compile and tune the function

Results = tuple[dict[str, Tensor], Tensor]  # losses by name, and the rows' TD errors


def stack(steps: Iterable[Results]) -> Results:
    """Stacks the results of gradient steps; a loss may be missing from some of them."""
    losses, errors = zip(*steps, strict=True)
    names = dict.fromkeys(name for step in losses for name in step)
    by_name = {name: torch.stack([s[name] for s in losses if name in s]) for name in names}
    return by_name, torch.stack(errors)


def make_steps(step: Callable[..., Results]) -> Callable[..., Results]:
    """Returns a function that takes a gradient step on each batch of a block `[K, B]`, in order.

    A step takes the agent's state, which it changes in place, its batch, its noise and its own
    value of each of the constants, which are tuples `[K]`.
    """

    def run(state: Any, block: Batch, noise: Tensor, *constants: tuple[Hashable, ...]) -> Results:
        rows = zip(block.unbind(), noise.unbind(), *constants, strict=True)
        return stack(step(state, *row) for row in rows)

    return run


def over_blocks(
    cfg: DictConfig, step: Callable[..., Results], get_state: Callable[[], Any]
) -> Callable[..., Results]:
    """Returns a function that takes a gradient step on each batch of a block `[K, B]`.

    If `cfg.compile` says so, the step is compiled. On CUDA, all steps of the block then run as one
    CUDA graph.

    Args:
        cfg: The run's config.
        step: Takes the agent's state, which it changes in place, a batch, its noise and constants.
        get_state: Returns that state, a tree of tensors.
    """
    steps = make_steps(maybe_compile(cfg, step))

    def update(block: Batch, noise: Tensor, *constants: tuple[Hashable, ...]) -> Results:
        return steps(get_state(), block, noise, *constants)

    return maybe_capture(cfg, update)


def maybe_compile(cfg: DictConfig, step: Callable[..., Results]) -> Callable[..., Results]:
    """Returns the gradient step, compiled if `cfg.compile` says so.

    Losses, gradients, optimizer and targets become one function without a graph break.
    """
    if not is_worth_it(cfg):
        return step
    # Each value of the constants, such as whether a step updates the actor, has its own graph.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
    options = compile_options(torch.device(cfg.device))
    return torch.compile(torch.no_grad()(step), fullgraph=True, dynamic=False, options=options)


def maybe_capture(cfg: DictConfig, update: Callable[..., Results]) -> Callable[..., Results]:
    """Returns the update of a block, run as a CUDA graph if its steps are compiled for CUDA."""
    on_cuda = torch.device(cfg.device).type == "cuda"
    return Captured(update) if on_cuda and is_worth_it(cfg) else update


def is_worth_it(cfg: DictConfig) -> bool:
    """Returns whether to compile: as `cfg.compile` says or, if it is `auto`, for long runs.

    With `auto`, the machine must be able to compile. TorchRL's losses are never compiled.
    """
    if cfg.get("losses") == "torchrl" or cfg.compile is False:
        return False
    frames = cfg.total_frames - cfg.get("random_frames", 0)
    if cfg.compile is not True and frames * cfg.get("replay_ratio", 1) < _WORTH:
        return False
    problem = why_not(cfg.device)
    if problem is not None and cfg.compile is True:
        raise UsageError(
            f"compile=true, but torch.compile does not work on this machine ({problem}); install "
            "a C++ compiler and Python's headers, or leave compile=true out."
        )
    return problem is None


class Captured:
    """Runs the update of a block on CUDA as one graph: one launch, no wait for the device.

    For each block size and each value of the constants, the first calls run the update directly.
    The next call records it on its own memory. Later calls copy their arguments there and replay
    the graph. Each replay overwrites the previous results. `tensordict.nn.CudaGraphModule` does the
    same, but waits for the device before a replay.
    """

    def __init__(self, update: Callable[..., Results]) -> None:
        self.update = update
        self.graphs: dict[Hashable, _Graph] = {}

    def __call__(self, block: Batch, noise: Tensor, *constants: Hashable) -> Results:
        """Runs the update."""
        key = (len(noise), *constants)
        with torch.cuda.device(noise.device):  # streams and graphs are those of the current device
            if key not in self.graphs:
                self.graphs[key] = _Graph(lambda b, n: self.update(b, n, *constants))
            return self.graphs[key](block, noise)


class _Graph:
    """One recorded update."""

    def __init__(self, update: Callable[[Batch, Tensor], Results]) -> None:
        self.update = update
        self.calls = 0
        self.aside = torch.cuda.Stream()
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, block: Batch, noise: Tensor) -> Results:
        self.calls += 1
        if self.calls <= _WARM_UP:
            return self._run_aside(block, noise)
        if self.graph is None:
            self.block, self.noise = block.clone(), noise.clone()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):  # records without computing
                self.results = self.update(self.block, self.noise)
        self.block.copy_(block)
        self.noise.copy_(noise)
        self.graph.replay()
        return self.results

    def _run_aside(self, block: Batch, noise: Tensor) -> Results:
        """Runs the update on another stream, as required before a capture."""
        here, aside = torch.cuda.current_stream(), self.aside
        aside.wait_stream(here)
        with torch.cuda.stream(aside):
            results = self.update(block, noise)
        here.wait_stream(aside)
        return results


@cache
def why_not(device: str) -> str | None:
    """Returns why torch.compile does not work on this machine, or None if it does."""
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # warns without CUDA
    try:
        torch.compile(lambda x: x.sin() + 1.0)(torch.ones(8, device=device))
    except Exception as error:  # any error of the compiler
        return str(error).strip().splitlines()[0]
    return None
