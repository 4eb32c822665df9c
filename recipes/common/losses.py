"""The losses of TD3 and SAC by direct calls of the networks, and the moves of targets and weights.

TorchRL's losses hold the parameters and say what the losses are. They call networks through
tensordicts, and the two critics as one by vmap; for networks of this size that takes about as long
as the products themselves. Here the same losses are plain functions of weights and batches: all
shapes are known beforehand and nothing is read by the host, so that `torch.compile` and a CUDA
graph can hold all gradient steps of a frame. Networks are `torchrl.modules.MLP` with ReLU; actions
are in [-1, 1].
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torchrl.objectives
from tensordict import TensorDictBase
from tensordict.nn import NormalParamExtractor
from torch import Tensor
from torch.nn.functional import linear, mse_loss, relu, softplus
from torch.optim.adam import adam

Layers = list[tuple[Tensor, Tensor]]  # weight and bias, from the first layer to the last


class Batch(NamedTuple):
    """The entries of `[B]` transitions, or of a block `[K, B]` of them, as plain tensors."""

    observation: Tensor  # [..., B, observations]
    action: Tensor  # [..., B, actions]
    following: Tensor  # [..., B, observations], the next observation
    reward: Tensor  # [..., B]
    terminated: Tensor  # [..., B]
    weight: Tensor | None = None  # [..., B], importance of rows drawn by priority

    def unbind(self) -> list[Batch]:
        """Returns the K batches of a block."""
        parts = [[None] * len(self.reward) if x is None else x.unbind() for x in self]
        return [Batch(*entries) for entries in zip(*parts, strict=True)]

    def clone(self) -> Batch:
        """Returns a copy in memory of its own."""
        return Batch(*(None if x is None else x.clone() for x in self))

    def copy_(self, other: Batch) -> None:
        """Takes on the values of another, without waiting for the device."""
        for x, y in zip(self, other, strict=True):
            if x is not None and y is not None:
                x.copy_(y, non_blocking=True)


def as_block(rows: TensorDictBase, size: int, device: torch.device) -> Batch:
    """Returns rows `[K * size]` as a block `[K, size]` on the device."""
    following, weight = rows["next"], rows.get("priority_weight", None)
    entries = (rows["observation"], rows["action"], following["observation"])
    flat = (following["reward"], following["terminated"], weight)

    def place(entry: Tensor, *shape: int) -> Tensor:
        return entry.to(device, non_blocking=True).reshape(-1, size, *shape)

    wide = [place(entry, entry.shape[-1]) for entry in entries]
    return Batch(*wide, *(None if entry is None else place(entry) for entry in flat))


class Weights(NamedTuple):
    """The parameters of an agent: of each network the weight and bias of each layer in turn.

    Critics are stacked. TD3 has no `log_alpha`, SAC no `target_actor`: these lists are empty.
    """

    actor: list[Tensor]
    critics: list[Tensor]
    log_alpha: list[Tensor]
    target_actor: list[Tensor]
    target_critics: list[Tensor]


def find_weights(module: torchrl.objectives.LossModule) -> Weights:
    """Returns the parameters that a loss of TorchRL holds."""

    def find(name: str) -> list[Tensor]:
        parameters = getattr(module, f"{name}_network_params", None)
        return [] if parameters is None else list(parameters.flatten_keys().values())

    has_alpha = hasattr(module, "log_alpha")  # and then the actor has no target
    return Weights(
        find("actor"),
        find("qvalue"),
        [module.log_alpha] if has_alpha else [],
        [] if has_alpha else find("target_actor"),
        find("target_qvalue"),
    )


def as_layers(weights: list[Tensor]) -> Layers:
    """Returns the layers of a network, or of several as one stack."""
    return list(zip(weights[::2], weights[1::2], strict=True))


def call(layers: Layers, inputs: Tensor) -> Tensor:
    """Returns the output of an MLP."""
    for weight, bias in layers[:-1]:
        inputs = relu(linear(inputs, weight, bias))
    return linear(inputs, *layers[-1])


def call_critics(layers: Layers, observation: Tensor, action: Tensor) -> Tensor:
    """Returns the values `[critics, B]` by a stack of critics, called one after the other."""
    inputs = torch.cat([observation, action], -1)
    stacks = [zip(weight.unbind(), bias.unbind(), strict=True) for weight, bias in layers]
    return torch.stack([call(list(critic), inputs) for critic in zip(*stacks, strict=True)])[..., 0]


def mean(batch: Batch, losses: Tensor) -> Tensor:
    """Averages losses `[B]` over the rows, by their importance where they have one."""
    if batch.weight is None:
        return losses.mean()
    return (losses * batch.weight).sum() / batch.weight.sum()


class _Critics:
    """The critics' part of both losses."""

    def __init__(self, module: Any) -> None:
        self.gamma = float(module.value_estimator.gamma)

    def bootstrap(self, batch: Batch, value: Tensor) -> Tensor:
        """Returns reward plus, where the episode goes on, the discounted value `[B]` after it."""
        return batch.reward + self.gamma * ~batch.terminated * value

    def regress(self, critics: list[Tensor], batch: Batch, goal: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the critics' loss, summed over critics, and each row's mean absolute error."""
        values = call_critics(as_layers(critics), batch.observation, batch.action)
        losses = mse_loss(values, goal.expand_as(values), reduction="none")
        return mean(batch, losses.sum(0)), (values - goal).detach().abs().mean(0)


class TD3Losses(_Critics):
    """Computes the losses of twin delayed DDPG, with the options that TorchRL's loss holds."""

    def __init__(self, module: torchrl.objectives.TD3Loss) -> None:
        super().__init__(module)
        self.sigma, self.clip = float(module.policy_noise), float(module.noise_clip)

    @torch.no_grad()
    def goal(self, weights: Weights, batch: Batch, noise: Tensor) -> Tensor:
        """Returns the critics' targets `[B]`; the noise `[B, actions]` is standard normal."""
        action = call(as_layers(weights.target_actor), batch.following).tanh()
        noise = (self.sigma * noise).clamp(-self.clip, self.clip)
        action = (action + noise).clamp(-1, 1)
        critics = as_layers(weights.target_critics)
        return self.bootstrap(batch, call_critics(critics, batch.following, action).amin(0))

    def critic_loss(self, weights: Weights, batch: Batch, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the critics' loss, and the absolute TD error `[B]` averaged over the critics."""
        return self.regress(weights.critics, batch, self.goal(weights, batch, noise))

    def actor_loss(self, weights: Weights, batch: Batch) -> Tensor:
        """Returns the negative value of what the actor does, by the first critic."""
        action = call(as_layers(weights.actor), batch.observation).tanh()
        first = as_layers([weight.detach()[:1] for weight in weights.critics])
        return mean(batch, -call_critics(first, batch.observation, action)[0])


class SACLosses(_Critics):
    """Computes the losses of soft actor-critic, with the options that TorchRL's loss holds."""

    _extract = NormalParamExtractor()

    def __init__(self, module: torchrl.objectives.SACLoss) -> None:
        super().__init__(module)
        self.target_entropy = float(module.target_entropy)

    def act(self, actor: list[Tensor], observation: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Returns actions and their log-probabilities `[B]`; the noise is standard normal."""
        loc, scale = self._extract(call(as_layers(actor), observation))
        raw = loc + scale * noise
        normal = -noise.square() / 2 - scale.log() - math.log(2 * math.pi) / 2
        slope = 2 * (math.log(2) - raw - softplus(-2 * raw))  # log of that of tanh
        return raw.tanh(), (normal - slope).sum(-1)

    def __call__(
        self, weights: Weights, batch: Batch, noise: Tensor
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Returns losses, entropy and its coefficient, and the absolute TD errors `[B]`.

        The noise `[2, B, actions]` makes the actions random at the next observation and at this
        one. The TD error is averaged over the critics.
        """
        (log_alpha,) = weights.log_alpha
        alpha = log_alpha.detach().exp()
        with torch.no_grad():
            action, log_prob = self.act(weights.actor, batch.following, noise[0])
            critics = as_layers(weights.target_critics)
            value = call_critics(critics, batch.following, action).amin(0)
            goal = self.bootstrap(batch, value - alpha * log_prob)
        loss_qvalue, error = self.regress(weights.critics, batch, goal)
        action, log_prob = self.act(weights.actor, batch.observation, noise[1])
        # The actor's gradient passes through the critics without reaching them.
        critics = as_layers([weight.detach() for weight in weights.critics])
        value = call_critics(critics, batch.observation, action).amin(0)
        excess = log_prob.detach() + self.target_entropy
        losses = {
            "loss_qvalue": loss_qvalue,
            "loss_actor": mean(batch, alpha * log_prob - value),
            "loss_alpha": mean(batch, -log_alpha * excess),
            "entropy": -log_prob.detach().mean(),
            "alpha": alpha,
        }
        return losses, error


def differentiate(
    function: Callable[[list[Tensor]], tuple[Tensor, Any]], weights: list[Tensor]
) -> tuple[list[Tensor], Any]:
    """Returns the gradients of a function's first result, and its second result."""
    if torch.compiler.is_compiling():  # a compiled loop takes no other gradients
        gradients, (_, rest) = torch.func.grad_and_value(function, has_aux=True)(weights)
        return list(gradients), rest
    with torch.enable_grad():
        total, rest = function(weights)
    return list(torch.autograd.grad(total, weights)), rest


def decay(weights: list[Tensor]) -> Tensor:
    """Returns half of the sum of squares of the weight matrices of a network."""
    return torch.stack([weight.square().sum() for weight in weights[::2]]).sum() / 2


def clip(gradients: list[Tensor], limit: float | None) -> list[Tensor]:
    """Returns the gradients of a network, scaled so that their norm is at most the limit."""
    if limit is None:
        return gradients
    norm = torch.nn.utils.get_total_norm(gradients)
    return list(torch._foreach_mul(gradients, (limit / (norm + 1e-6)).clamp(max=1.0)))


class Moments(NamedTuple):
    """What Adam keeps for each parameter."""

    first: list[Tensor]
    second: list[Tensor]
    steps: list[Tensor]


class Adam(torch.optim.Adam):
    """Adam with a step that a compiled or captured update can hold.

    `step` is not for `torch.compile`, and makes its state at the first call. `move` is a plain
    function of weights, gradients and moments, which are there from the start; both do the same.
    """

    def __init__(self, parameters: list[Tensor], *, lr: float) -> None:
        super().__init__(parameters, lr=lr, fused=True)
        for weight in parameters:
            moments = {name: torch.zeros_like(weight) for name in ("exp_avg", "exp_avg_sq")}
            self.state[weight] = {"step": torch.zeros((), device=weight.device), **moments}
        self._collect()

    def _collect(self) -> None:
        (group,) = self.param_groups
        states = [self.state[weight] for weight in group["params"]]
        names = ("exp_avg", "exp_avg_sq", "step")
        self.moments = Moments(*([state[name] for state in states] for name in names))
        self._options = {name: group[name] for name in ("lr", "eps", "weight_decay", "maximize")}
        self._options["beta1"], self._options["beta2"] = group["betas"]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes up a saved state."""
        super().load_state_dict(state_dict)
        self._collect()

    @torch.no_grad()
    def move(self, weights: list[Tensor], gradients: list[Tensor], moments: Moments) -> None:
        """Moves weights by their gradients, in place, and the moments with them."""
        if torch.compiler.is_compiling():
            self._move_all(weights, gradients, moments)
        else:
            adam(
                weights,
                gradients,
                moments.first,
                moments.second,
                [],
                moments.steps,
                foreach=False,
                capturable=False,
                fused=True,
                amsgrad=False,
                **self._options,
            )

    def _move_all(self, weights: list[Tensor], gradients: list[Tensor], moments: Moments) -> None:
        """Does the same by operations on lists, which `torch.compile` fuses into one kernel.

        A compiled loop takes no lists that are changed in place: results are copied one by one.
        """
        lr, eps, beta1, beta2 = (self._options[name] for name in ("lr", "eps", "beta1", "beta2"))
        step = moments.steps[0] + 1  # all are the same
        first = torch._foreach_lerp(moments.first, gradients, 1 - beta1)
        second = torch._foreach_mul(moments.second, beta2)
        second = torch._foreach_addcmul(second, gradients, gradients, 1 - beta2)
        roots = torch._foreach_div(torch._foreach_sqrt(second), (1 - beta2**step).sqrt())
        moves = torch._foreach_div(first, torch._foreach_add(roots, eps))
        moved = torch._foreach_sub(weights, torch._foreach_mul(moves, lr / (1 - beta1**step)))
        old = [*weights, *moments.first, *moments.second, *moments.steps]
        copy_all(old, [*moved, *first, *second, *[step] * len(weights)])


def copy_all(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Writes tensors into others, one by one."""
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


@torch.no_grad()
def move_targets(weights: Weights, tau: float) -> None:
    """Moves each target towards what it follows by the share `tau`, in place."""
    followed = [*(weights.actor if weights.target_actor else []), *weights.critics]
    targets = [*weights.target_actor, *weights.target_critics]
    if not torch.compiler.is_compiling():
        torch._foreach_lerp_(targets, followed, tau)
    else:
        copy_all(targets, torch._foreach_lerp(targets, followed, tau))
