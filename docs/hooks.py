"""Adds two files of the root to the site, and converts equations so that they need no script."""

from __future__ import annotations

import re
from html import unescape
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
_FROM_ROOT = ("CHANGELOG.md", "CONTRIBUTING.md")
_EQUATION = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Adds the changelog and the contributing guide as pages, without copying them."""
    for name in _FROM_ROOT:
        files.append(File.generated(config, name.lower(), abs_src_path=str(ROOT / name)))


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Rewrites the links of these two pages, which are relative to the root."""
    from_root = page.file.src_uri in [name.lower() for name in _FROM_ROOT]
    return markdown.replace("](docs/", "](") if from_root else markdown


def on_page_content(html: str, **_: Any) -> str:
    """Converts LaTeX to MathML, which browsers show without a script."""
    return _EQUATION.sub(
        lambda found: convert(
            unescape(found[2]), display="inline" if found[1] == "span" else "block"
        ),
        html,
    )
