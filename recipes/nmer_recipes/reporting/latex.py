"""Writes LaTeX tables that fit a page: wide ones are split by columns, long ones by rows."""

from __future__ import annotations

import itertools
import math
import re
from functools import cache
from pathlib import Path

import matplotlib
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import TextToPath

from nmer_recipes.reporting.text import NONE, Text, escape

WIDTH = 345.0  # points: the text width of the class article on A4 and letter paper
_WIDEST = 100.0  # points; wider columns have their lines broken
_GAP = 6.0  # points between columns
_LINES = 45  # lines on a page, with the caption

_SIGNS = {sign: "\\" + sign for sign in "&%$#_{}"} | {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "±": r"$\pm$",
    "Δ": r"$\Delta$",
    ">": "$>$",
    "<": "$<$",
    "–": "--",
}
_BREAK = re.compile(r"(?:\\_|[./:])(?=[A-Za-z])|=")  # a name may be broken after these
_MINUS = re.compile(r"(?<![\w-])-(?=\d)")  # the minus of a number, not the hyphen of a name


def latex(text: Text, caption: str, keys: int) -> str:
    """Returns one table per page, each with the first `keys` columns; they need no package.

    Columns without an entry are left out.
    """
    columns = [
        column for column in zip(text[0], *text[1], strict=True) if set(column[1:]) != {NONE}
    ]
    header, *rows = map(list, zip(*columns, strict=True))
    parts = []
    for start, end in _pages([_height(row) for row in rows]):
        lines = [header, *rows[start:end]]
        widths = [max(map(measure, column)) for column in zip(*lines, strict=True)]
        for block in _blocks([min(width, _WIDEST) + _GAP for width in widths], keys):
            chosen = [[line[i] for i in block] for line in lines]
            parts.append((chosen, [widths[i] for i in block]))
    tables = []
    for number, (lines, widths) in enumerate(parts, 1):
        which = f" ({number} of {len(parts)})" if len(parts) > 1 else ""
        tables.append(_table(lines, widths, caption + which))
    return "\n".join(tables)


@cache
def measure(text: str) -> float:
    """Returns the width of an entry in points, in LaTeX's font at footnote size."""
    font = Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "cmr10.ttf"
    # Mathematical signs are wide.
    plain = re.sub(r"[^\x00-\x7f]|[<>]", "M", _MINUS.sub("M", text))
    size = FontProperties(fname=str(font), size=8.5)  # cmr8 is wider than cmr10 at 8 points
    return float(TextToPath().get_text_width_height_descent(plain, size, False)[0])


def _height(row: list[str]) -> int:
    """Returns the number of lines of a row; broken lines do not fill their width."""
    widest = max(map(measure, row))
    return 1 if widest <= _WIDEST else math.ceil(1.2 * widest / _WIDEST)


def _pages(heights: list[int]) -> list[tuple[int, int]]:
    """Returns the first row and the end of each page."""
    starts, used = [0], 0
    for row, height in enumerate(heights):
        if used and used + height > _LINES:
            starts, used = [*starts, row], 0
        used += height
    return list(itertools.pairwise([*starts, len(heights)]))


def _blocks(widths: list[float], keys: int) -> list[list[int]]:
    """Returns the columns of each table: the keys, and as many others as fit."""
    blocks, room = [list(range(keys))], WIDTH - sum(widths[:keys])
    free = room
    for column in range(keys, len(widths)):
        if widths[column] > free and len(blocks[-1]) > keys:
            blocks.append(list(range(keys)))
            free = room
        blocks[-1].append(column)
        free -= widths[column]
    return blocks


def _table(lines: list[list[str]], widths: list[float], caption: str) -> str:
    columns = "".join("l" if width <= _WIDEST else f"p{{{_WIDEST:.0f}pt}}" for width in widths)
    end = r"\tabularnewline" if "p" in columns else r"\\"  # `\raggedright` redefines `\\`
    shown = [" & ".join([*map(_entry, line, widths)]) + f" {end}" for line in lines]
    return "\n".join(
        [
            r"\begin{table}[ht]",
            rf"\caption{{{_plain(caption)}}}",
            rf"\centering\footnotesize\setlength{{\tabcolsep}}{{{_GAP / 2:g}pt}}",
            rf"\begin{{tabular}}{{{columns}}}",
            r"\hline",
            shown[0],
            r"\hline",
            *shown[1:],
            r"\hline",
            r"\end{tabular}",
            r"\end{table}",
            "",
        ]
    )


def _plain(text: str) -> str:
    return _MINUS.sub("$-$", escape(text, _SIGNS))


def _entry(text: str, width: float) -> str:
    if width <= _WIDEST:
        return _plain(text)
    return r"\raggedright " + _BREAK.sub(r"\g<0>\\allowbreak{}", _plain(text))
