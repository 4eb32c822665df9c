"""Imports the user's own modules, which settings name by a path such as `my_package.MyClass`."""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from types import ModuleType
from typing import Any

from nmer_recipes.errors import UsageError


def search_current_directory() -> None:
    """Lets imports find modules in the current directory, after all other places."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())


def import_parent(path: str, given: str) -> tuple[ModuleType, str]:
    """Returns the module and the name of a path `MODULE.NAME`.

    Args:
        path: The path.
        given: The setting as the user wrote it, for the error.
    """
    module, _, name = path.rpartition(".")
    if not module:
        raise UsageError(f"{given} is not a path; give MODULE.NAME, as in my_package.MyClass.")
    search_current_directory()
    try:
        return importlib.import_module(module), name
    except ImportError as error:
        raise UsageError(
            f"{given} cannot be imported: {error}. Modules are imported from the current directory "
            "and from PYTHONPATH."
        ) from None


def import_callable(path: str, given: str) -> Any:
    """Returns the class or function at a path `MODULE.NAME`."""
    module, name = import_parent(path, given)
    found = getattr(module, name, None)
    if not callable(found):
        file = getattr(module, "__file__", None) or module.__name__
        near = difflib.get_close_matches(name, vars(module), n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise UsageError(f"{given}: {file} has no class or function {name}.{hint}")
    return found
