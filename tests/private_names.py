"""Finds the private names of other projects that our code uses, without running it."""

from __future__ import annotations

import ast
import importlib
import sys
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

THEIRS = ("torchrl", "tensordict", "torch")
TUPLES = ("_asdict", "_fields", "_make", "_replace")  # of named tuples, which are public
LOOKUPS = ("getattr", "setattr", "hasattr", "delattr")


def find_private_names(root: Path) -> dict[str, set[str]]:
    """Returns the private names of others in the modules below `root`, by relative path.

    Counts `thing._name`, also by `getattr` and its like, and an import of such a name. Of a class's
    own names, `self._name` and `def _name`, only those count that a class of TorchRL, tensordict or
    torch has as well from which it inherits, or for which it is a mixin.
    """
    trees = {path: ast.parse(path.read_text()) for path in sorted(root.rglob("*.py"))}
    inherited = _inherited_names(list(trees.values()))
    found = {path: set(_used(tree, inherited)) for path, tree in trees.items()}
    return {path.relative_to(root).as_posix(): names for path, names in found.items() if names}


def _is_private(name: str) -> bool:
    public = name.startswith("__") or name in ("_", *TUPLES)
    return name.startswith("_") and not public


def _dotted(node: ast.AST) -> str:
    """Returns `a.b.c` as it is written; the result starts with a dot if it is not such a name."""
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def _is_own(node: ast.AST) -> bool:
    """Returns whether it is `self`, `cls` or `super()`."""
    return _dotted(node.func if isinstance(node, ast.Call) else node) in ("self", "cls", "super")


def _used(tree: ast.AST, inherited: dict[str, set[str]], of_class: str = "") -> Iterator[str]:
    for node in ast.iter_child_nodes(tree):
        inside = node.name if isinstance(node, ast.ClassDef) else of_class
        match node:
            case ast.Attribute(value=value, attr=name) if _is_private(name):
                if not _is_own(value) or name in inherited[of_class]:
                    yield name
            case ast.FunctionDef(name=name) if isinstance(tree, ast.ClassDef):
                if name in inherited[of_class]:
                    yield name
            case ast.Call(func=ast.Name(id=function), args=[_, ast.Constant(value=str(name)), *_]):
                if function in LOOKUPS and _is_private(name):
                    yield name
            case ast.ImportFrom(module=str(module), names=names):
                if module.split(".")[0] in THEIRS:
                    yield from (alias.name for alias in names if _is_private(alias.name))
        yield from _used(node, inherited, inside)


def _inherited_names(trees: list[ast.Module]) -> dict[str, set[str]]:
    """Maps the classes of the trees to the private names of others that their instances have."""
    bases: dict[str, set[str]] = defaultdict(set)
    for tree in trees:
        imported = _imports(tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                for base in map(_dotted, node.bases):
                    head, *rest = base.split(".")
                    bases[node.name].add(".".join([imported.get(head, head), *rest]))
    own: dict[str, set[str]] = defaultdict(set)
    for name in list(bases):
        family, names = [name], set()
        for member in family:  # which grows meanwhile
            for base in bases.get(member, ()):
                short = base.rpartition(".")[2]
                if base.split(".")[0] in THEIRS:
                    names |= _names_of(base)
                elif short not in family:
                    family.append(short)
        for member in family:
            own[member] |= names
    return own


def _imports(tree: ast.Module) -> dict[str, str]:
    imported = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            imported |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
        elif isinstance(node, ast.Import):
            imported |= {a.asname: a.name for a in node.names if a.asname}
    return imported


@cache
def _names_of(path: str) -> frozenset[str]:
    """Returns private names that the class at this path, or a base class, defines."""
    module, _, name = path.rpartition(".")
    names = set()
    for base in getattr(importlib.import_module(module), name).__mro__:
        if base.__module__.split(".")[0] in THEIRS:
            names |= vars(base).keys() | _names_in(base.__module__, base.__name__)
    return frozenset(filter(_is_private, names))


@cache
def _names_in(module: str, of_class: str) -> frozenset[str]:
    """Returns names that the source of a class uses on itself; none if it was made at run time."""
    names = set()
    for definition in _classes(module):
        if definition.name == of_class:
            for node in ast.walk(definition):
                if isinstance(node, ast.Attribute) and _is_own(node.value):
                    names.add(node.attr)
    return frozenset(names)


@cache
def _classes(module: str) -> list[ast.ClassDef]:
    file = Path(sys.modules[module].__file__)
    return [node for node in ast.parse(file.read_text()).body if isinstance(node, ast.ClassDef)]
