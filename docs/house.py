"""Counts lines of the package, and the calls that writing and sampling a row take.

python docs/house.py

CONTRIBUTING.md has the numbers under "In numbers". With PYTHONPATH set to a copy of another commit,
it counts there.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from tensordict import TensorDict

import nmer_torchrl
from nmer_torchrl import make_replay_buffer

PACKAGE = Path(nmer_torchrl.__file__).parent
ROWS = 1_000


def count_lines(folder: Path) -> dict[str, int]:
    """Counts files, lines, and lines of code: not blank, not a comment, not in a docstring."""
    files = list(folder.rglob("*.py"))
    total = code = 0
    for file in files:
        text = file.read_text()
        lines, told = text.splitlines(), docstring_lines(ast.parse(text))
        total += len(lines)
        code += sum(
            bool(line.strip()) and not line.strip().startswith("#") and number not in told
            for number, line in enumerate(lines, 1)
        )
    return {"files": len(files), "lines": total, "of code": code}


def docstring_lines(tree: ast.Module) -> set[int]:
    """Returns the line numbers of docstrings."""
    holders = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node.body[0] for node in ast.walk(tree) if isinstance(node, holders) and node.body]
    strings = [
        node
        for node in nodes
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    ]
    return {n for node in strings for n in range(node.lineno, (node.end_lineno or 0) + 1)}


def count_calls(act: Callable[[], Any]) -> dict[str, int]:
    """Counts the calls of the package's functions, these functions and their files."""
    calls: list[tuple[str, str, int]] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and Path(code.co_filename).is_relative_to(PACKAGE):
            calls.append((code.co_filename, code.co_name, code.co_firstlineno))

    sys.setprofile(note)
    try:
        act()
    finally:
        sys.setprofile(None)
    return {"calls": len(calls), "functions": len({*calls}), "files": len({c[0] for c in calls})}


def make_rows(n: int) -> TensorDict:
    """Returns random transitions."""
    following = TensorDict(
        observation=torch.randn(n, 17),
        reward=torch.randn(n, 1),
        terminated=torch.zeros(n, 1, dtype=torch.bool),
        batch_size=[n],
    )
    return TensorDict(
        observation=torch.randn(n, 17), action=torch.randn(n, 6), next=following, batch_size=[n]
    )


def main() -> None:
    """Prints all counts."""
    torch.manual_seed(0)
    print("package", count_lines(PACKAGE))
    buffer = make_replay_buffer("nmer", capacity=2 * ROWS, batch_size=256, search="graph")
    buffer.extend(make_rows(ROWS))
    nobody, everybody = torch.arange(0), torch.arange(ROWS)

    def write() -> None:
        buffer.add(make_rows(1)[0])
        buffer.sampler.neighbors(buffer.storage, nobody)  # has the search take up the row

    for _ in range(3):  # until all lists are made
        buffer.sampler.neighbors(buffer.storage, everybody)
        write()
        buffer.sample()
    print("a row's way in", count_calls(write))
    buffer.sample()
    print("a batch's way out", count_calls(buffer.sample))


if __name__ == "__main__":
    main()
