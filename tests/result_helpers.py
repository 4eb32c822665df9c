"""Reads the numbers of committed results, in the form in which pages print them."""

from __future__ import annotations

import pandas as pd
from page_helpers import ROOT

RESULTS = ROOT / "docs" / "results"


def span(values) -> tuple[float, float]:
    return min(values), max(values)


def range_of(values, form: str = ",.0f") -> str:
    return " to ".join(format(value, form) for value in span(values))


def table(part: str, env: str) -> pd.DataFrame:
    """Returns the rows of a part's table, by method."""
    rows = pd.read_csv(RESULTS / part / "table.csv")
    return rows[rows.env == env].set_index("method")


def spread(row: pd.Series) -> str:
    return f"{row['mean']:.0f} ± {row['std']:.0f}"


def by_seed(part: str, env: str, column: str, against: str = "uniform") -> list[float]:
    """Returns NMER's score minus that of another method, for each seed."""
    rows = pd.read_csv(RESULTS / part / "paired.csv")
    rows = rows[(rows.env == env) & (rows.method == "nmer") & (rows.against == against)]
    (row,) = rows[f"{column}_by_seed"]
    return [float(number) for number in str(row).split()]
