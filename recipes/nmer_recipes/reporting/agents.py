"""Finds which agent a run trained: the recipe's, or a variant of it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_NAMES = {"crossq": "CrossQ", "droq": "DroQ"}  # others are written in capitals
# The critics that define an agent by name. Other critics make it a different agent.
_CRITICS: dict[str, dict[str, Any]] = {
    "crossq": {"critic_hidden": [2048, 2048]},
    "droq": {"layer_norm": True, "num_critics": 2, "dropout": 0.01},
    "redq": {"layer_norm": False, "num_critics": 10, "dropout": 0.0},
}


@dataclass(frozen=True, order=True)
class Agent:
    """The agent that replay methods are compared on; runs of two agents are never compared."""

    key: str  # for files and their names, as in `sac-layer-norm`
    name: str  # for readers, as in `SAC + layer norm`


def find_agent(config: Mapping[str, Any]) -> Agent:
    """Returns the agent of a run from its flat config.

    Examples:
        >>> find_agent({"algorithm": "sac", "layer_norm": True})
        Agent(key='sac-layer-norm', name='SAC + layer norm')
        >>> find_agent({"algorithm": "redq", "num_critics": 2, "dropout": 0.01}).name
        'DroQ'
    """
    algorithm = str(config["algorithm"])
    if algorithm == "redq" and config.get("num_critics") == 2 and config.get("dropout"):
        algorithm = "droq"
    usual = {"layer_norm": False, "precision": "float32", "critic_hidden": config.get("hidden")}
    words = [algorithm]
    name = _NAMES.get(algorithm, algorithm.upper())
    for setting, value in (usual | _CRITICS.get(algorithm, {})).items():
        given = config.get(setting, value)
        if given is None or given == value:
            continue
        if setting == "layer_norm":
            words.append("layer-norm" if given else "no-layer-norm")
            name += " + layer norm" if given else " without layer norm"
        elif setting == "precision":
            words.append(str(given))
            name += f" + {given}"
        elif setting == "critic_hidden":
            units = "-".join(map(str, given)) if isinstance(given, list) else str(given)
            words += ["critics", units]
            name += f", critics {units}"
        else:
            shown = f"{given:g}" if isinstance(given, int | float) else str(given)
            words += [setting, shown]
            name += f", {setting}={shown}"
    return Agent(re.sub(r"[^\w.-]+", "-", "-".join(words)), name)
