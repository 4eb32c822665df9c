"""Gates: which of the rows drawn are mixed at all.

A gate is given a batch of anchors and partners and says which anchors may be mixed; the others come
out as they are stored, with a weight of 1. A fold takes any number of them as `gates=`. Any
callable of this form is a gate; one with `state_dict` and `load_state_dict` is saved with its
buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from nmer_torchrl.checks import SHARE
from nmer_torchrl.functional import any_feature
from nmer_torchrl.keys import as_keys, get_entry
from nmer_torchrl.transforms.rows import device_of
from nmer_torchrl.transforms.schedules import Schedule


class Gate(Protocol):
    """Which anchors may be mixed with their partners.

    Examples:
        >>> from nmer_torchrl import PairMixup
        >>> def both_rewarded(batch, generator):
        ...     return (batch["next", "reward"] > 0).flatten(1).all(-1)
        >>> fold = PairMixup(0.75, gates=[both_rewarded])
    """

    def __call__(self, batch: TensorDictBase, generator: torch.Generator | None) -> Tensor:
        """Rows `[*B, 1 + m]`, the anchor first, to boolean `[*B]`; true where they may be mixed."""
        ...


class Fraction:
    """Lets each row be mixed with a probability, independently of the others.

    Args:
        share: The probability, from 0 to 1, or a schedule such as `LinearFraction(1.0, 0.0, rows)`,
            which gives it from the number of rows that this gate has seen so far.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> gate = Fraction(0.25)
        >>> pairs = TensorDict(batch_size=[100_000, 2])
        >>> mixed = gate(pairs, torch.Generator().manual_seed(0))
        >>> round(float(mixed.float().mean()), 2)
        0.25
    """

    def __init__(self, share: float | Schedule) -> None:
        self.share = share if callable(share) else float(SHARE("share", share))
        self.drawn = 0  # rows seen so far

    def __call__(self, batch: TensorDictBase, generator: torch.Generator | None) -> Tensor:
        """See `Gate`."""
        share = self.share(self.drawn) if callable(self.share) else self.share
        shape = batch.shape[:-1]
        self.drawn += shape.numel()
        return torch.rand(shape, generator=generator, device=device_of(batch, generator)) < share

    def state_dict(self) -> dict[str, Any]:
        """The number of rows seen so far."""
        return {"drawn": self.drawn}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from there."""
        self.drawn = int(state["drawn"])

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.share!r})"


class Same:
    """Keeps rows unmixed that differ from their partner, or from any of them, in some entries.

    For entries that cannot be mixed, such as discrete actions: leave them out of what is measured
    and mixed, and mix only rows that agree in them.

    Args:
        keys: The entries, of any dtype.

    Examples:
        >>> from nmer_torchrl import NeighborPairSampler, PairMixup
        >>> values = ["observation", ("next", "observation"), ("next", "reward")]
        >>> sampler = NeighborPairSampler(k=10, keys=["observation"])
        >>> fold = PairMixup(0.75, mix_keys=values, gates=[Same("action")])
    """

    def __init__(self, *keys: NestedKey) -> None:
        self.keys = as_keys(keys, "keys")
        if not self.keys:
            raise ValueError('Same() names no entry; name at least one, as in Same("action").')

    def __call__(self, batch: TensorDictBase, generator: torch.Generator | None) -> Tensor:
        """See `Gate`."""
        dims = batch.ndim - 1
        entries = (get_entry(batch, key) for key in self.keys)
        return ~torch.stack(
            [any_feature(entry != entry.narrow(dims, 0, 1), dims) for entry in entries]
        ).any(0)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(repr, self.keys))})"


def as_gates(gates: Sequence[Gate]) -> tuple[Gate, ...]:
    """Returns the gates as a tuple; raises if one is no gate."""
    if callable(gates):
        raise TypeError(f"gates={gates!r} is a single gate; give a list, as in gates=[{gates!r}].")
    for gate in gates:
        if not callable(gate):
            raise TypeError(
                f"`gates` holds {gate!r}, which is not callable; give gates such as Fraction(0.5)."
            )
    return tuple(gates)
