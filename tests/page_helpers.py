"""Finds the pages of the documentation, and the code and tables in them."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def pages() -> list[Path]:
    """Returns README, contributing guide and docs, without reports that recipes write there."""
    written = (ROOT / "docs" / "manifold", ROOT / "docs" / "results")
    found = (ROOT / "docs").rglob("*.md")
    found = [path for path in found if not any(map(path.is_relative_to, written))]
    return sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *found])


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def first_column(page: Path, heading: str) -> list[str]:
    """Returns the code words in the first column of the tables with this heading."""
    rows = re.findall(
        rf"^\| {heading} \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", page.read_text(), re.MULTILINE
    )
    return re.findall(r"^\| `([^`]+)` \|", "".join(rows), re.MULTILINE)
