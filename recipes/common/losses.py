"""TorchRL's losses and targets, with networks called directly.

TorchRL calls networks through tensordicts, and the two critics as one by vmap; for networks of this
size that takes about as long as the products themselves. Here parameters, targets, draws and
results are TorchRL's, and the calls are plain. Networks are `torchrl.modules.MLP` with ReLU.
"""

from __future__ import annotations

import math
from functools import cached_property

import torch
import torchrl.objectives
from tensordict import TensorDictBase
from tensordict.nn import NormalParamExtractor
from torch import Tensor
from torch.nn.functional import linear, relu, softplus
from torchrl.objectives.utils import distance_loss

Layers = list[tuple[Tensor, Tensor]]  # weight and bias, from the first layer to the last


def find_layers(parameters: TensorDictBase) -> Layers:
    """The linear layers among the parameters of a network, or of several as one stack."""
    named = dict(parameters.flatten_keys().items())
    weights = [name for name in named if name.endswith("weight")]
    return [(named[name], named[name.removesuffix("weight") + "bias"]) for name in weights]


def call(layers: Layers, inputs: Tensor) -> Tensor:
    """The output of an MLP."""
    for weight, bias in layers[:-1]:
        inputs = relu(linear(inputs, weight, bias))
    return linear(inputs, *layers[-1])


def call_critics(layers: Layers, observation: Tensor, action: Tensor) -> Tensor:
    """The values `[critics, B]` by a stack of critics, one after the other."""
    inputs = torch.cat([observation, action], -1)
    stacks = [zip(weight.unbind(), bias.unbind(), strict=True) for weight, bias in layers]
    return torch.stack([call(list(critic), inputs) for critic in zip(*stacks, strict=True)])[..., 0]


class _DirectLoss:
    """What both losses share: their layers, and the step from values to a loss."""

    @cached_property
    def _actor(self) -> Layers:
        return find_layers(self.actor_network_params)

    @cached_property
    def _critics(self) -> Layers:
        return find_layers(self.qvalue_network_params)

    @cached_property
    def _fixed_critics(self) -> Layers:
        """The critics, through which the actor's gradient passes without reaching them."""
        return [(weight.detach(), bias.detach()) for weight, bias in self._critics]

    @cached_property
    def _target_critics(self) -> Layers:
        return find_layers(self.target_qvalue_network_params)

    def _goal(self, batch: TensorDictBase, value: Tensor) -> Tensor:
        """Reward and, where the episode goes on, the discounted value of what follows; `[B]`."""
        reward, terminated = batch["next", "reward"], batch["next", "terminated"]
        return (reward + self.value_estimator.gamma * ~terminated * value.unsqueeze(-1))[..., 0]

    def _regress(self, batch: TensorDictBase, goal: Tensor) -> tuple[Tensor, Tensor]:
        """The critics' loss, and the absolute error of each row, averaged over the critics."""
        values = call_critics(self._critics, batch["observation"], batch["action"])
        losses = distance_loss(values, goal.expand_as(values), loss_function=self.loss_function)
        return self._mean(batch, losses.sum(0)), (values - goal).detach().abs().mean(0)

    def _mean(self, batch: TensorDictBase, losses: Tensor) -> Tensor:
        """Over the rows, by their importance weights where they have some."""
        weights = self._maybe_get_priority_weight(batch)
        return self._reduce_loss(losses, tensordict=batch, weights=weights)


class TD3Loss(_DirectLoss, torchrl.objectives.TD3Loss):
    """Twin delayed DDPG; actions are in [-1, 1].

    `value_loss` gives the `td_error` of each row, the absolute error averaged over the critics.
    """

    @cached_property
    def _target_actor(self) -> Layers:
        return find_layers(self.target_actor_network_params)

    def value_loss(self, tensordict: TensorDictBase) -> tuple[Tensor, dict[str, Tensor]]:
        """The critics' loss, summed over critics; target and TD error of each row."""
        noise = self.policy_noise * torch.randn_like(tensordict["action"])
        with torch.no_grad():
            after = tensordict["next", "observation"]
            action = call(self._target_actor, after).tanh()
            action = (action + noise.clamp(-self.noise_clip, self.noise_clip)).clamp(-1, 1)
            value = call_critics(self._target_critics, after, action).amin(0)
            goal = self._goal(tensordict, value)
        loss, error = self._regress(tensordict, goal)
        return loss, {"td_error": error, "target_value": goal}

    def actor_loss(self, tensordict: TensorDictBase) -> tuple[Tensor, dict[str, Tensor]]:
        """The negative value of what the actor does, by the first critic."""
        observation = tensordict["observation"]
        action = call(self._actor, observation).tanh()
        first = [(weight[:1], bias[:1]) for weight, bias in self._fixed_critics]
        return self._mean(tensordict, -call_critics(first, observation, action)[0]), {}


class SACLoss(_DirectLoss, torchrl.objectives.SACLoss):
    """Soft actor-critic with a squashed Gaussian policy; actions are in [-1, 1].

    Its `td_error` is the absolute error averaged over the critics; TorchRL's is the largest of
    them.
    """

    _extract = NormalParamExtractor()

    def _act(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        """Random actions, and their log-probabilities `[B]`."""
        loc, scale = self._extract(call(self._actor, observation))
        noise = torch.randn_like(loc)
        raw = loc + scale * noise
        normal = -noise.square() / 2 - scale.log() - math.log(2 * math.pi) / 2
        slope = 2 * (math.log(2) - raw - softplus(-2 * raw))  # log of that of tanh
        return raw.tanh(), (normal - slope).sum(-1)

    def qvalue_v2_loss(self, tensordict: TensorDictBase) -> tuple[Tensor, dict[str, Tensor]]:
        """The critics' loss, summed over critics, and the priority of each row."""
        with torch.no_grad():
            after = tensordict["next", "observation"]
            action, log_prob = self._act(after)
            value = call_critics(self._target_critics, after, action).amin(0)
            goal = self._goal(tensordict, value - self._alpha * log_prob)
        loss, error = self._regress(tensordict, goal)
        return loss, {"td_error": error}

    def actor_loss(self, tensordict: TensorDictBase) -> tuple[Tensor, dict[str, Tensor]]:
        """The policy's loss, and the log-probabilities for that of the entropy coefficient."""
        observation = tensordict["observation"]
        action, log_prob = self._act(observation)
        value = call_critics(self._fixed_critics, observation, action).amin(0)
        loss = self._mean(tensordict, self._alpha * log_prob - value)
        return loss, {"log_prob": log_prob.detach()}


class SoftUpdate(torchrl.objectives.SoftUpdate):
    """Targets that follow slowly, all by one call."""

    @cached_property
    def _pairs(self) -> tuple[list[Tensor], list[Tensor]]:
        """The targets' data, and that of what they follow."""
        targets, sources = self._targets.values(True, True), self._sources.values(True, True)
        return [target.data for target in targets], [source.data for source in sources]

    def step(self) -> None:
        """One step of each."""
        torch._foreach_lerp_(*self._pairs, 1 - self.eps)
