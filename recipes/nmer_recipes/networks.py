"""Calls networks with given weights, and collects an agent's weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import repeat
from typing import Any, NamedTuple

import torch
from omegaconf import DictConfig
from torch import Tensor, nn
from torch.nn.functional import dropout, layer_norm, linear, mse_loss, smooth_l1_loss
from torchrl.modules import MLP, BatchRenorm1d, ValueOperator
from torchrl.objectives import LossModule

# The critics' losses by name; `STOCK_DISTANCES` has TorchRL's names for them.
DISTANCES = {"squared": mse_loss, "huber": smooth_l1_loss}
STOCK_DISTANCES = {"squared": "l2", "huber": "smooth_l1"}
# Buffers that no gradient updates, of batch renormalization and `Standardize`.
STATISTICS = ("running_mean", "running_var", "num_batches_tracked", "fixed_mean", "fixed_scale")
_WIDE = 64  # inputs and outputs from which bfloat16 pays off
_SMALL = 0.1  # probability of dropout up to which drawing gaps between zeros is faster


def make_critic(
    cfg: DictConfig, observations: int, actions: int, device: torch.device
) -> ValueOperator:
    """Returns a critic: linear layers with dropout and layer normalization if configured."""
    cells = list(cfg.get("critic_hidden") or cfg.hidden)  # older runs do not name it
    layers: dict[str, Any] = {"num_cells": cells, "activation_class": nn.ReLU}
    if cfg.get("dropout"):
        layers["dropout"] = cfg.dropout
    if cfg.get("layer_norm"):
        layers["norm_class"] = nn.LayerNorm
        layers["norm_kwargs"] = [{"normalized_shape": width} for width in cells]
    network = MLP(in_features=observations + actions, out_features=1, device=device, **layers)
    return ValueOperator(network, in_keys=["observation", "action"]).eval()


class Standardize(nn.Module):
    """Standardizes inputs `[..., n]` by a mean and a scale that stay fixed during training."""

    def __init__(self, width: int, device: torch.device) -> None:
        super().__init__()
        self.register_buffer("fixed_mean", torch.zeros(width, device=device))
        self.register_buffer("fixed_scale", torch.ones(width, device=device))

    def forward(self, inputs: Tensor) -> Tensor:
        """Returns the standardized inputs."""
        return (inputs - self.fixed_mean) * self.fixed_scale


def linear_in_float32(inputs: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Returns a linear layer's output for inputs `[B, n]`."""
    if torch.compiler.is_compiling() and inputs.device.type == "cpu":
        # A product that already adds the bias first copies it to each row. Inductor turns a sum
        # into such a product, but not a difference, which it computes together with what follows.
        return torch.sub(linear(inputs, weight), bias, alpha=-1)
    return linear(inputs, weight, bias)


def linear_in_bf16(inputs: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Returns a linear layer's float32 output for inputs `[B, n]`, computed in bfloat16.

    Autograd casts the output's gradient to bfloat16 too, so its products are also in bfloat16.
    `torch.compile` fuses the casts. Narrow layers are computed in float32, since casting them takes
    longer than it saves.
    """
    if min(weight.shape) < _WIDE:
        return linear_in_float32(inputs, weight, bias)
    return linear(inputs.bfloat16(), weight.bfloat16()).float() + bias


LINEAR: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "float32": linear_in_float32,
    "bf16": linear_in_bf16,
}


class Functional:
    """Calls a network with given weights: the weight and bias of each layer in turn.

    The network's own activations and heads are used. All shapes are known in advance and the host
    reads no tensor, so `torch.compile` and a CUDA graph can contain a call.

    Args:
        network: Linear layers, layer normalization, batch renormalization, dropout and functions
            without weights, in `nn.Sequential`.
        precision: `float32`, or `bf16` to compute the matrix products of wide linear layers in
            bfloat16, and so those of their gradients. Weights, inputs and outputs of layers stay
            float32.
    """

    def __init__(self, network: nn.Module, precision: str = "float32") -> None:
        self.layers = _flatten(network)
        self.linear = LINEAR[precision]

    def __call__(
        self,
        weights: Sequence[Tensor],
        inputs: Tensor,
        statistics: Sequence[Tensor] = (),
        moved: list[Tensor] | None = None,
    ) -> Any:
        """Returns the output for inputs `[B, n]`.

        Args:
            weights: The weights of the layers that have any.
            inputs: The first layer's inputs.
            statistics: The running mean, variance and number of batches of each batch
                renormalization, and the mean and scale of each `Standardize`.
            moved: If given, the network is in training mode: dropout is active, batches are
                normalized by their own mean and variance, and the new running statistics are
                appended to this list.
        """
        given, running, output = iter(weights), iter(statistics), inputs
        for layer in self.layers:
            match layer:
                case nn.Linear():
                    output = self.linear(output, next(given), next(given))
                case nn.LayerNorm():
                    shape = layer.normalized_shape
                    output = layer_norm(output, shape, next(given), next(given), layer.eps)
                case BatchRenorm1d():
                    scale, shift = next(given), next(given)
                    of_layer = (next(running), next(running), next(running))
                    output = renormalize(layer, output, of_layer, moved) * scale + shift
                case Standardize():
                    output = (output - next(running)) * next(running)
                case nn.Dropout():
                    output = drop(output, layer.p) if moved is not None else output
                case _:
                    output = layer(output)
        return output

    def each(
        self,
        weights: Sequence[Tensor],
        *inputs: Tensor,
        statistics: Sequence[Tensor] = (),
        moved: list[Tensor] | None = None,
    ) -> Tensor:
        """Returns the values `[n, ...]` of n networks with stacked weights, called one by one."""
        joined = torch.cat(inputs, -1)
        networks = unstack(weights)
        running = unstack(statistics) if statistics else [()] * len(networks)
        parts = [None if moved is None else [] for _ in networks]
        values = list(map(self, networks, repeat(joined), running, parts))
        if moved is not None:
            moved += [torch.stack(part) for part in zip(*parts, strict=True)]
        return torch.stack(values)[..., 0]


def renormalize(
    layer: BatchRenorm1d,
    inputs: Tensor,
    statistics: tuple[Tensor, Tensor, Tensor],
    moved: list[Tensor] | None,
) -> Tensor:
    """Normalizes the inputs `[B, n]` of a batch renormalization to mean 0 and variance 1.

    In training this is batch normalization. After `warmup_steps` batches, it is corrected toward
    the running statistics, within bounds. `BatchRenorm1d` computes the same up to `2 *
    warmup_steps` batches, after which it corrects by a multiple.

    Args:
        layer: The layer whose settings are used; its own weights and statistics are not.
        inputs: The layer's inputs.
        statistics: Running mean and variance `[n]`, and the number of batches.
        moved: As in `Functional`.
    """
    mean, variance, count = statistics
    spread = (variance + layer.eps).sqrt()
    if moved is None:
        return (inputs - mean) / spread
    # Takes half the time of `torch.var_mean` or `batch_norm` on a CPU.
    own_mean = inputs.mean(0)
    centered = inputs - own_mean
    own_variance = centered.square().mean(0)
    own_spread = (own_variance + layer.eps).sqrt()
    with torch.no_grad():
        warm = count >= layer.warmup_steps
        ratio = (own_spread / spread).clamp(1 / layer.max_r, layer.max_r)
        shift = ((own_mean - mean) / spread).clamp(-layer.max_d, layer.max_d)
        ratio, shift = torch.where(warm, ratio, 1.0), torch.where(warm, shift, 0.0)
        unbiased = own_variance * (len(inputs) / (len(inputs) - 1))
        moved += [
            torch.lerp(mean, own_mean, layer.momentum),
            torch.lerp(variance, unbiased, layer.momentum),
            count + 1,
        ]
    return centered * (ratio / own_spread) + shift


def drop(inputs: Tensor, p: float) -> Tensor:
    """Returns inputs with each entry set to 0 with probability `p`, and others divided by `1 - p`.

    This is dropout. A CPU takes longer to draw a number for each entry than to multiply matrices.
    If `p` is small, the gaps between zeros are drawn instead, which are geometrically distributed.
    """
    if inputs.device.type != "cpu" or not 0 < p <= _SMALL:
        return dropout(inputs, p)
    size = inputs.numel()
    draws = math.ceil(size * p + 8 * math.sqrt(size * p) + 8)  # one in 10^15 calls needs more
    gaps = torch.rand(draws).neg().log1p().div(math.log1p(-p)).long() + 1
    zeros = (gaps.cumsum(0) - 1).clamp(max=size)
    kept = inputs.new_ones(size + 1).scatter(0, zeros, 0.0)[:size]
    return inputs * kept.view_as(inputs) / (1 - p)


def unstack(weights: Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
    """Splits weights `[n, ...]` into the weights of each of n networks."""
    return list(zip(*(weight.unbind() for weight in weights), strict=True))


def _flatten(network: nn.Module) -> list[nn.Module]:
    if not isinstance(network, nn.Sequential):
        return [network]
    return [layer for part in network for layer in _flatten(part)]


class Weights(NamedTuple):
    """The parameters of an agent: for each network, the weight and bias of each layer in turn.

    Several critics are stacked, and so are the actors of an ensemble. Parts that an agent lacks are
    empty: DDPG and TD3 have no `log_alpha`, SAC and related agents no `target_actor`, CrossQ no
    targets. Only CrossQ and TD3+BC have statistics, and only IQL has a state value.
    """

    actor: list[Tensor]
    critics: list[Tensor]
    log_alpha: list[Tensor]
    target_actor: list[Tensor]
    target_critics: list[Tensor]
    actor_statistics: Sequence[Tensor] = ()
    critic_statistics: Sequence[Tensor] = ()
    value: Sequence[Tensor] = ()


def critics_name(agent: LossModule) -> str:
    """Returns TorchRL's name for a loss's critics."""
    for name in ("qvalue", "value"):
        if getattr(agent, f"{name}_network_params", None) is not None:
            return name
    raise TypeError(
        f"{type(agent).__name__} has no parameters named qvalue_network_params; use a loss of "
        "TorchRL that has them, such as TD3Loss or SACLoss."
    )


def find_weights(agent: LossModule) -> Weights:
    """Returns the parameters that a TorchRL loss holds."""

    def find(name: str, *, statistics: bool = False) -> list[Tensor]:
        parameters = getattr(agent, f"{name}_network_params")
        entries = parameters.flatten_keys().items()
        return [x for key, x in entries if key.endswith(STATISTICS) == statistics]

    critics, parts = critics_name(agent), dict(agent.named_children())

    def find_target(name: str) -> list[Tensor]:  # without a target, TorchRL returns the network
        return find(f"target_{name}") if f"target_{name}_network_params" in parts else []

    return Weights(
        find("actor"),
        find(critics),
        [agent.log_alpha] if hasattr(agent, "log_alpha") else [],
        find_target("actor"),
        find_target(critics),
        find("actor", statistics=True),
        find(critics, statistics=True),
        find("value") if critics == "qvalue" and "value_network_params" in parts else [],
    )
