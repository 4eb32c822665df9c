"""Base class of the transforms that change single rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase
from torchrl.envs.transforms import Transform

from nmer_torchrl.generators import generator_state, load_generator_state
from nmer_torchrl.transforms.n_step import forget_steps
from nmer_torchrl.transforms.schema import RowSchema


class Augmentation(Transform, ABC):
    """Changes some continuous entries of rows `[*B]` at random. A subclass implements `augment`.

    All randomness comes from its generator, whose state is part of the transform's state. Rows are
    checked before they are stored.

    Args:
        keys: Entries to change.
        argument: Name of the user's argument that lists these entries, for errors.
        generator: Source of all randomness; `None` uses torch's global one.
    """

    folds = False

    def __init__(
        self, keys: Sequence[NestedKey], argument: str, generator: torch.Generator | None
    ) -> None:
        super().__init__(in_keys=[], out_keys=[])
        self.schema = RowSchema(keys, argument)
        self.generator = generator

    @abstractmethod
    def augment(self, rows: TensorDictBase) -> TensorDictBase:
        """Returns a changed copy of rows `[*B]`."""

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Returns changed rows `[*B]`; returns a single row unchanged."""
        return self.augment(tensordict) if tensordict.ndim else tensordict

    def _inv_call(self, tensordict: TensorDictBase | None) -> TensorDictBase | None:
        """Checks rows before they are stored; `None` if an n-step transform waits for more."""
        if tensordict is not None:
            self.schema.check(self, tensordict)
        return tensordict

    def get_extra_state(self) -> dict[str, Any]:
        """Returns the layout of rows and the state of the generator."""
        return {**self.schema.state_dict(), **generator_state(self.generator)}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Restores a state that `get_extra_state` returned."""
        self.schema.load_state_dict(state)
        forget_steps(self)
        load_generator_state(self.generator, state)
