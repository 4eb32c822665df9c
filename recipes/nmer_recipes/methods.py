"""Defines the config group `replay`: the package's methods by name, and yours as `MODULE.CLASS`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from inspect import isabstract
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf

from nmer_recipes.errors import UsageError
from nmer_recipes.imports import import_parent
from nmer_torchrl import Method, methods
from nmer_torchrl.methods import METHODS
from nmer_torchrl.methods.options import read_key, read_keys

_PATH = re.compile(r"[^\W\d]\w*(?:\.\w+)+")
_own: set[str] = set()  # methods that the command line names by path


def find_method(kind: str) -> type[Method[Any]]:
    """Returns the method with that name, or the class at that path."""
    if kind in METHODS:
        return METHODS[kind]
    if "." not in kind:
        raise UsageError(
            f"There is no replay method {kind}; the methods are {', '.join(METHODS)}. For your own "
            "method, give MODULE.CLASS."
        )
    loaded, name = import_parent(kind, f"replay={kind}")
    found = getattr(loaded, name, None)
    if not (isinstance(found, type) and issubclass(found, Method)) or isabstract(found):
        file = getattr(loaded, "__file__", loaded.__name__)
        raise UsageError(
            f"replay={kind}: {file} has no method {name}; a method is a subclass of "
            "nmer_torchrl.Method that defines `make_sampler`."
        )
    return found


def settings_of(kind: str) -> dict[str, Any]:
    """Returns a method's settings with their defaults.

    Keys are left out, since the recipes store rows under the default keys. The package's methods
    use the paper's k.
    """
    options = {
        field.name: field.default if field.default is not MISSING else "???"
        for field in fields(find_method(kind))
        if field.metadata.get("read") not in (read_key, read_keys)
    }
    if kind in METHODS and "k" in options:
        options["k"] = "${paper:k}"
    return {"kind": kind, **options}


def register_methods(words: Sequence[str] = ()) -> None:
    """Adds the package's methods to the group, and those that a command line names by path.

    Args:
        words: The command line.
    """
    chosen = [word.partition("=")[2] for word in words if re.match(r"\+*replay=", word)]
    _own.update(_PATH.findall(" ".join(chosen)))
    for kind in registered_methods():
        ConfigStore.instance().store(kind, settings_of(kind), group="replay", provider="recipes")


def registered_methods() -> set[str]:
    """Returns the group's choices."""
    return {*METHODS, *_own}


def make_method(replay: DictConfig | Mapping[str, Any]) -> Method[Any]:
    """Builds the method that a config describes by its kind and its options."""
    resolved = (
        OmegaConf.to_container(replay, resolve=True) if OmegaConf.is_config(replay) else replay
    )
    options = {str(name): value for name, value in resolved.items()}
    kind = options.pop("kind")
    try:
        return methods.make_method(kind if kind in METHODS else find_method(kind), options)
    except (TypeError, ValueError) as error:
        raise UsageError(f"replay={kind}: {error}") from None
