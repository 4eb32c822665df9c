"""Builds policies: deterministic ones with added noise, and squashed Gaussians."""

from __future__ import annotations

import math

import torch
from omegaconf import DictConfig
from tensordict.nn import NormalParamExtractor, TensorDictModule
from torch import Tensor, nn
from torch.distributions import Distribution
from torch.nn.functional import softplus
from torchrl.data import Bounded
from torchrl.modules import MLP, ProbabilisticActor


def bounds(actions: int, device: torch.device) -> Bounded:
    """Returns the action space, [-1, 1] in each dimension."""
    return Bounded(-torch.ones(actions), torch.ones(actions), device=device)


def make_network(
    cfg: DictConfig, observations: int, outputs: int, head: nn.Module, device: torch.device
) -> nn.Sequential:
    """Returns a policy network: layers of `cfg.hidden` units, then the head."""
    layers = {"num_cells": list(cfg.hidden), "activation_class": nn.ReLU, "device": device}
    return nn.Sequential(MLP(in_features=observations, out_features=outputs, **layers), head)


class ExplorationNoise(nn.Module):
    """Adds Gaussian noise to actions and clamps them to [-1, 1]."""

    def __init__(self, sigma: float) -> None:
        super().__init__()
        self.sigma = sigma

    def forward(self, action: Tensor) -> Tensor:
        """Returns the noisy action."""
        return (action + self.sigma * torch.randn_like(action)).clamp(-1, 1)


def make_deterministic_actor(
    cfg: DictConfig, observations: int, actions: int, device: torch.device
) -> tuple[TensorDictModule, TensorDictModule]:
    """Returns a deterministic policy, and the same policy with Gaussian noise."""
    network = make_network(cfg, observations, actions, nn.Tanh(), device)
    keys = {"in_keys": ["observation"], "out_keys": ["action"]}
    noisy = nn.Sequential(network, ExplorationNoise(cfg.exploration_noise))
    return TensorDictModule(network, **keys), TensorDictModule(noisy, **keys)


class SquashedNormal(Distribution):
    """The distribution of the tanh of a Gaussian; actions are in [-1, 1]."""

    def __init__(self, loc: Tensor, scale: Tensor) -> None:
        super().__init__(loc.shape[:-1], loc.shape[-1:], validate_args=False)
        self.loc, self.scale = loc, scale

    def draw(self, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Returns actions and their log-probabilities `[B]` from standard normal noise."""
        raw = self.loc + self.scale * noise
        normal = -noise.square() / 2 - self.scale.log() - math.log(2 * math.pi) / 2
        slope = 2 * (math.log(2) - raw - softplus(-2 * raw))  # log of the derivative of tanh
        return raw.tanh(), (normal - slope).sum(-1)

    def rsample_and_log_prob(self, shape: tuple[int, ...] = ()) -> tuple[Tensor, Tensor]:
        """Draws noise and returns the same, under the name that TorchRL's losses call."""
        return self.draw(torch.randn(*shape, *self.loc.shape, device=self.loc.device))

    @property
    def deterministic_sample(self) -> Tensor:
        """The action without noise; like TorchRL's, it stays strictly within the bounds."""
        return self.loc.tanh().clamp(-1 + 1e-6, 1 - 1e-6)


class Explore(nn.Module):
    """Samples actions from the parameters of their distribution."""

    def forward(self, parameters: tuple[Tensor, Tensor]) -> Tensor:
        """Returns random actions."""
        return SquashedNormal(*parameters).rsample_and_log_prob()[0]


def make_gaussian_network(
    cfg: DictConfig, observations: int, actions: int, device: torch.device
) -> nn.Sequential:
    """Returns a network that outputs the mean and scale of a squashed Gaussian policy."""
    return make_network(cfg, observations, 2 * actions, NormalParamExtractor(), device)


def make_gaussian_actor(
    network: nn.Module, actions: int, device: torch.device
) -> tuple[ProbabilisticActor, TensorDictModule]:
    """Returns a squashed Gaussian policy, and a module that samples from it.

    Args:
        network: A module that returns mean and scale.
        actions: Number of action dimensions.
        device: The network's device.
    """
    actor = ProbabilisticActor(
        TensorDictModule(network, in_keys=["observation"], out_keys=["loc", "scale"]),
        in_keys=["loc", "scale"],
        spec=bounds(actions, device),
        distribution_class=SquashedNormal,
    )
    explorer = TensorDictModule(
        nn.Sequential(network, Explore()), in_keys=["observation"], out_keys=["action"]
    )
    return actor.eval(), explorer.eval()
