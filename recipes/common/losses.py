"""TorchRL's losses, where the paper wants more of them."""

from __future__ import annotations

import torchrl.objectives
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.objectives.utils import distance_loss


class SACLoss(torchrl.objectives.SACLoss):
    """Soft actor-critic whose `td_error` is the absolute error averaged over the critics.

    TorchRL's is the largest of them. The losses are the same.
    """

    def qvalue_v2_loss(self, tensordict: TensorDictBase) -> tuple[Tensor, dict[str, Tensor]]:
        """The critics' loss, summed over critics, and the priority of each row."""
        weights = self._maybe_get_priority_weight(tensordict)
        target = self._compute_target_v2(tensordict)
        inputs = tensordict.select(*self.qvalue_network.in_keys, strict=False)
        values = self._vmap_qnetworkN0(inputs, self.qvalue_network_params)
        values = values.get(self.tensor_keys.state_action_value).squeeze(-1)
        losses = distance_loss(values, target.expand_as(values), loss_function=self.loss_function)
        loss = self._reduce_loss(losses.sum(0), tensordict=tensordict, weights=weights)
        return loss, {"td_error": (values - target).detach().abs().mean(0)}
