"""Networks that are called by given weights, and the weights of an agent."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from typing import Any, NamedTuple

import torch
from omegaconf import DictConfig
from torch import Tensor, nn
from torch.nn.functional import dropout, layer_norm, linear, mse_loss, smooth_l1_loss
from torchrl.modules import MLP, BatchRenorm1d, ValueOperator
from torchrl.objectives import LossModule

# What critics minimize over the distances to their targets; the second by TorchRL's names.
DISTANCES = {"squared": mse_loss, "huber": smooth_l1_loss}
STOCK_DISTANCES = {"squared": "l2", "huber": "smooth_l1"}
# What networks hold that no gradient moves: of batch renormalization, and of `Standardize`.
STATISTICS = ("running_mean", "running_var", "num_batches_tracked", "fixed_mean", "fixed_scale")


def make_critic(
    cfg: DictConfig, observations: int, actions: int, device: torch.device
) -> ValueOperator:
    """Returns a critic: linear layers, each with dropout and layer normalization where set."""
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
    """Standardizes inputs `[..., n]` by a mean and a scale that do not change while it learns."""

    def __init__(self, width: int, device: torch.device) -> None:
        super().__init__()
        self.register_buffer("fixed_mean", torch.zeros(width, device=device))
        self.register_buffer("fixed_scale", torch.ones(width, device=device))

    def forward(self, inputs: Tensor) -> Tensor:
        """Returns the standardized inputs."""
        return (inputs - self.fixed_mean) * self.fixed_scale


class Functional:
    """Calls a network by the weights that it is given: weight and bias of each layer in turn.

    The layers are those that act: activations and heads are chosen where the network is made. All
    shapes are known beforehand and the host reads nothing, so that `torch.compile` and a CUDA graph
    can hold a call.

    Args:
        network: Linear layers, layer normalization, batch renormalization, dropout and functions
            without weights, in `nn.Sequential`.
    """

    def __init__(self, network: nn.Module) -> None:
        self.layers = _flatten(network)

    def __call__(
        self,
        weights: Sequence[Tensor],
        inputs: Tensor,
        statistics: Sequence[Tensor] = (),
        moved: list[Tensor] | None = None,
    ) -> Any:
        """Returns the output for inputs `[B, n]`.

        Args:
            weights: Of the layers that have some.
            inputs: To the first layer.
            statistics: The running mean, variance and number of batches of each batch
                renormalization, the mean and scale of each `Standardize`.
            moved: Where given, the call is one of training. Dropout is on, batches are normalized
                by their own mean and variance, and the running statistics that follow are appended
                to it.
        """
        given, running, output = iter(weights), iter(statistics), inputs
        for layer in self.layers:
            match layer:
                case nn.Linear():
                    output = linear(output, next(given), next(given))
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
                    output = dropout(output, layer.p, training=moved is not None)
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
        """Returns the values `[n, ...]` of n networks, whose weights are stacked, one by one."""
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
    """Returns the inputs `[B, n]` of a batch renormalization with mean 0 and variance 1.

    In training this is batch normalization; once `warmup_steps` batches were seen, it is corrected
    towards the running statistics, within bounds. `BatchRenorm1d` computes the same up to
    `2 * warmup_steps` batches, where it begins to correct by a multiple.

    Args:
        layer: Its settings are used, its own weights and statistics are not.
        inputs: To the layer.
        statistics: Running mean and variance `[n]`, and the number of batches.
        moved: As in `Functional`.
    """
    mean, variance, count = statistics
    spread = (variance + layer.eps).sqrt()
    if moved is None:
        return (inputs - mean) / spread
    # In half of the time of `torch.var_mean` or `batch_norm` on a CPU.
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


def unstack(weights: Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
    """Returns the weights of each of n networks, from weights `[n, ...]`."""
    return list(zip(*(weight.unbind() for weight in weights), strict=True))


def _flatten(network: nn.Module) -> list[nn.Module]:
    if not isinstance(network, nn.Sequential):
        return [network]
    return [layer for part in network for layer in _flatten(part)]


class Weights(NamedTuple):
    """The parameters of an agent: of each network the weight and bias of each layer in turn.

    Several critics are stacked, and so are the actors of an ensemble. What an agent does not have
    is empty: DDPG and TD3 have no `log_alpha`, SAC and its kin no `target_actor`, CrossQ no
    targets. Only CrossQ and TD3+BC have statistics, and only IQL has a value of states.
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
    """Returns what TorchRL calls the critics of a loss."""
    for name in ("qvalue", "value"):
        if getattr(agent, f"{name}_network_params", None) is not None:
            return name
    raise TypeError(
        f"{type(agent).__name__} has no parameters named qvalue_network_params; use a loss of "
        "TorchRL that has, such as TD3Loss or SACLoss."
    )


def find_weights(agent: LossModule) -> Weights:
    """Returns the parameters that a loss of TorchRL holds."""

    def find(name: str, *, statistics: bool = False) -> list[Tensor]:
        parameters = getattr(agent, f"{name}_network_params")
        entries = parameters.flatten_keys().items()
        return [x for key, x in entries if key.endswith(STATISTICS) == statistics]

    critics, parts = critics_name(agent), dict(agent.named_children())

    def find_target(name: str) -> list[Tensor]:  # without one, TorchRL answers with the network
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
