"""Networks that are called by given weights, and the weights of an agent."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, mse_loss, smooth_l1_loss
from torchrl.objectives import LossModule

# What critics minimize over the distances to their targets; the second by TorchRL's names.
DISTANCES = {"squared": mse_loss, "huber": smooth_l1_loss}
STOCK_DISTANCES = {"squared": "l2", "huber": "smooth_l1"}


class Functional:
    """Calls a network by the weights that it is given: weight and bias of each layer in turn.

    The layers are those that act: activations and heads are chosen where the network is made. All
    shapes are known beforehand and the host reads nothing, so that `torch.compile` and a CUDA graph
    can hold a call.

    Args:
        network: Linear layers and functions without weights, in `nn.Sequential`.
    """

    def __init__(self, network: nn.Module) -> None:
        self.layers = _flatten(network)

    def __call__(self, weights: list[Tensor], inputs: Tensor) -> Any:
        """Returns the output."""
        given, output = iter(weights), inputs
        for layer in self.layers:
            if isinstance(layer, nn.Linear):
                output = linear(output, next(given), next(given))
            else:
                output = layer(output)
        return output

    def each(self, weights: list[Tensor], *inputs: Tensor) -> Tensor:
        """Returns the values `[n, B]` of n networks, whose weights are stacked, one by one."""
        joined = torch.cat(inputs, -1)
        networks = zip(*(weight.unbind() for weight in weights), strict=True)
        return torch.stack([self(list(network), joined) for network in networks])[..., 0]


def _flatten(network: nn.Module) -> list[nn.Module]:
    if not isinstance(network, nn.Sequential):
        return [network]
    return [layer for part in network for layer in _flatten(part)]


class Weights(NamedTuple):
    """The parameters of an agent: of each network the weight and bias of each layer in turn.

    Critics are stacked. TD3 has no `log_alpha`, SAC no `target_actor`: these lists are empty.
    """

    actor: list[Tensor]
    critics: list[Tensor]
    log_alpha: list[Tensor]
    target_actor: list[Tensor]
    target_critics: list[Tensor]


def find_weights(agent: LossModule) -> Weights:
    """Returns the parameters that a loss of TorchRL holds."""

    def find(name: str) -> list[Tensor]:
        parameters = getattr(agent, f"{name}_network_params", None)
        return [] if parameters is None else list(parameters.flatten_keys().values())

    if not find("qvalue"):
        raise TypeError(
            f"{type(agent).__name__} has no parameters named qvalue_network_params; use a loss of "
            "TorchRL that has, such as TD3Loss or SACLoss."
        )
    has_alpha = hasattr(agent, "log_alpha")  # and then the actor has no target
    return Weights(
        find("actor"),
        find("qvalue"),
        [agent.log_alpha] if has_alpha else [],
        [] if has_alpha else find("target_actor"),
        find("target_qvalue"),
    )
