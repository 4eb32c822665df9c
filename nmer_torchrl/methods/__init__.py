"""Replay methods, one per file: each has its options and builds its sampler and transform."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from nmer_torchrl.methods.base import Method, option, option_names
from nmer_torchrl.methods.ct import CT
from nmer_torchrl.methods.ero import ERO
from nmer_torchrl.methods.gp import GP
from nmer_torchrl.methods.interpolated_rewards import InterpolatedRewards
from nmer_torchrl.methods.mixreg import Mixreg
from nmer_torchrl.methods.mixup import Mixup
from nmer_torchrl.methods.neighborhood import Neighborhood
from nmer_torchrl.methods.nmer import NMER
from nmer_torchrl.methods.noisy import Noisy
from nmer_torchrl.methods.one_nn import OneNN
from nmer_torchrl.methods.per import PER
from nmer_torchrl.methods.per_nmer import PERNMER
from nmer_torchrl.methods.ras import RAS
from nmer_torchrl.methods.s4rl import S4RL
from nmer_torchrl.methods.tuned_ct import TunedCT
from nmer_torchrl.methods.uniform import Uniform

__all__ = [
    "CT",
    "ERO",
    "GP",
    "METHODS",
    "NMER",
    "PER",
    "PERNMER",
    "RAS",
    "S4RL",
    "InterpolatedRewards",
    "Method",
    "Mixreg",
    "Mixup",
    "Neighborhood",
    "Noisy",
    "OneNN",
    "TunedCT",
    "Uniform",
    "make_method",
    "option",
    "option_names",
]

METHODS: dict[str, type[Method[Any]]] = {
    "uniform": Uniform,
    "per": PER,
    "mixup": Mixup,
    "1nn": OneNN,
    "nmer": NMER,
    "per_nmer": PERNMER,
    "neighborhood": Neighborhood,
    "gp": GP,
    "ct": CT,
    "tuned_ct": TunedCT,
    "s4rl": S4RL,
    "noisy": Noisy,
    "ras": RAS,
    "mixreg": Mixreg,
    "interpolated_rewards": InterpolatedRewards,
    "ero": ERO,
}
"""The methods, by the names that `make_replay_buffer` and the recipes accept."""


def make_method(
    method: str | type[Method[Any]], options: Mapping[str, Any], beside: Iterable[str] = ()
) -> Method[Any]:
    """Builds a method from its options; raises an error for options that it does not have.

    Args:
        method: The name of a method, or its class.
        options: The method's options by name.
        beside: Further valid names that an error may suggest for a misspelled option.

    Examples:
        >>> make_method("per", {"priority_beta": 1.0})
        PER(priority_alpha=0.6, priority_beta=1.0, priority_eps=1e-06)
        >>> make_method("uniform", {"k": 3})
        Traceback (most recent call last):
        ...
        ValueError: The method 'uniform' does not accept k=3; remove it. Its options are: none.
    """
    name = method if isinstance(method, str) else getattr(method, "__name__", repr(method))
    found = METHODS.get(method) if isinstance(method, str) else method
    if not (isinstance(found, type) and issubclass(found, Method)):
        raise ValueError(
            f"Unknown method {method!r}; the known ones are {', '.join(METHODS)}. For your own "
            "method, give a Method object."
        )
    known = option_names(found)
    for option_name, value in options.items():
        if option_name not in known:
            near = difflib.get_close_matches(option_name, [*known, *beside], n=1, cutoff=0.5)
            remedy = f"did you mean {near[0]}?" if near else "remove it."
            raise ValueError(
                f"The method {name!r} does not accept {option_name}={value!r}; {remedy} "
                f"Its options are: {', '.join(sorted(known)) or 'none'}."
            )
    return found(**options)
