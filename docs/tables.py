"""Writes the generated parts of pages: the table and names of methods, and benchmark tables.

python docs/tables.py
"""

from __future__ import annotations

import csv
import math
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

from nmer_torchrl.methods import METHODS, Method

DOCS = Path(__file__).parent


def parts(method: Method[Any]) -> list[str]:
    """Names the classes that a method is made of."""
    sampler = method.make_sampler(10)
    transform = method.make_transform(sampler)
    found = [sampler] if transform is None else [sampler, transform]
    names = [type(part).__name__ for part in found]
    own = method.buffer_class.__name__
    return names if own == "TensorDictReplayBuffer" else [*names, own]


def options(method: Method[Any]) -> list[str]:
    """Names the options of a method with their defaults, apart from those that name entries."""
    named = [each for each in fields(method) if not each.name.endswith(("_key", "keys"))]
    return [f"{each.name}={each.default!r}" for each in named]


def methods_table() -> str:
    """Returns a row for each method: what it does, its parts and its options."""
    lines = ["| method | class | what it does | parts | options |", "|---" * 5 + "|"]
    for name, method in METHODS.items():
        summary = (method.__doc__ or "").splitlines()[0]
        cells = [f"`{name}`", f"`{method.__name__}`", summary]
        cells += [", ".join(f"`{word}`" for word in words(method())) for words in (parts, options)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def reference() -> str:
    """Returns an entry of the reference for each method."""
    return "\n\n".join(f"::: nmer_torchrl.methods.{each.__name__}" for each in METHODS.values())


def benchmark_table(name: str) -> str:
    """Returns a CSV of `docs/benchmarks` as the table that the benchmark prints.

    Columns without a number, of loops that were not timed, are left out.
    """
    with (DOCS / "benchmarks" / f"{name}.csv").open() as file:
        columns = [column for column in zip(*csv.reader(file), strict=True) if any(column[1:])]
    header, *rows = zip(*columns, strict=True)
    lines = [header, ["---"] * len(header), *([_show(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _show(cell: str) -> str:
    try:
        return f"{int(cell):,}"
    except ValueError:
        pass
    try:
        return "" if math.isnan(float(cell)) else f"{float(cell):.3g}"
    except ValueError:
        return cell


def pages() -> dict[Path, str]:
    """Returns each page with its generated parts, between marks such as `<!-- methods -->`."""
    found = {}
    for name, text in (("methods.md", methods_table()), ("api/methods.md", reference())):
        path = DOCS / name
        before, _, after = path.read_text().split("<!-- methods -->\n")
        found[path] = f"<!-- methods -->\n{text}\n\n<!-- methods -->\n".join([before, after])
    benchmarks = DOCS / "benchmarks.md"
    marked = re.compile(r"<!-- (\w+)\.csv -->\n.*?\n<!-- \1\.csv -->", re.DOTALL)
    found[benchmarks] = marked.sub(
        lambda match: (
            f"<!-- {match[1]}.csv -->\n{benchmark_table(match[1])}\n\n<!-- {match[1]}.csv -->"
        ),
        benchmarks.read_text(),
    )
    recipes = DOCS / "recipes.md"
    names = ", ".join(f"`{name}`" for name in sorted(METHODS))
    row = re.compile(r"^(\| `replay` \| nmer \| ).*?(: \[every method\])", re.MULTILINE)
    found[recipes] = row.sub(rf"\1{names}\2", recipes.read_text())
    return found


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text)
