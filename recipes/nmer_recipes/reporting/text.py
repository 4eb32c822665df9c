"""Formats frames of numbers as tables for readers, and these as Markdown."""

from __future__ import annotations

import math
from collections.abc import Hashable

import pandas as pd

from nmer_recipes.reporting.estimates import FEW
from nmer_recipes.scores import duration

NONE = "–"
Text = tuple[list[str], list[list[str]]]  # a header, and rows with as many entries


def show_glance(table: pd.DataFrame, pooled: pd.DataFrame) -> Text:
    """Returns a row per task, a column per method, and the change in percent below."""
    ours = table[table["seeds"].notna()]
    pooled = pooled[pooled["method"].isin(ours["method"])]  # without quoted methods
    methods = list(pooled["method"])
    rows = []
    for (env, version, frames), group in ours.groupby(["env", "version", "frames"], sort=False):
        entries = {row["method"]: row for row in group.to_dict("records")}
        shown = [
            _plus_minus(entries[name]["mean"], entries[name]["std"]) if name in entries else NONE
            for name in methods
        ]
        task = f"{env}-{version}" if version else env
        budgets = ours[(ours["env"] == env) & (ours["version"] == version)]["frames"].nunique()
        rows.append([f"{task}, {frames:,} frames" if budgets > 1 else task, *shown])
    if pooled["change_percent"].notna().any():
        changes = zip(pooled["change_percent"], pooled["change_tasks"], strict=True)
        rows.append(["Δ NMER", *(_share(percent, tasks) for percent, tasks in changes)])
    return ["environment", *methods], rows


def show_table(frame: pd.DataFrame) -> Text:
    """Formats the columns of `make_table` for readers."""
    header = ["environment", "frames", "method", "ratio", "seeds", "mean ± std", "paper, 200K"]
    header += ["IQM [95 %]", "P(> uniform)", "Δ NMER", "paper's Δ NMER"]
    header += ["time per run", "updates/s"]
    rows = []
    for row in frame.to_dict("records"):
        env = f"{row['env']}-{row['version']}" if row["version"] else row["env"]
        printed = _plus_minus(row.get("paper_mean"), row.get("paper_std"), "{:.0f}")
        if _missing(row.get("mean")):  # quoted
            line = [env, f"{row['frames']:,}", row["method"], *[NONE] * 3, printed, NONE, NONE]
            rows.append([*line, *_show_changes(row), NONE, NONE])
            continue
        seeds = int(row["seeds"])
        rows.append(
            [
                env,
                f"{row['frames']:,}",
                " ".join([row["method"], row["setting"]]).strip(),
                f"{row['replay_ratio']:g}",
                f"{seeds} (few)" if seeds < FEW else str(seeds),
                _plus_minus(row["mean"], row["std"]),
                printed,
                _interval(row["iqm"], row["iqm_low"], row["iqm_high"]),
                _format(row.get("p_improvement"), "{:.2f}"),
                *_show_changes(row),
                NONE if _missing(row["seconds_per_run"]) else duration(row["seconds_per_run"]),
                _format(row["updates_per_second"], "{:.0f}"),
            ]
        )
    return header, rows


def _show_changes(row: dict[Hashable, float]) -> list[str]:
    changes = (row.get("change_percent"), row.get("paper_change_percent"))
    return [_format(change, "{:+.1f} %") for change in changes]


def show_paired_table(frame: pd.DataFrame, *, by_seed: bool = True) -> Text:
    """Formats the columns of `make_paired_table` for readers, with or without each seed."""
    header = ["environment", "method", "against", "seeds", "verdict", "score [95 %]", "ahead"]
    header += ["by seed", "area [95 %]", "ahead", "by seed"]
    if not by_seed:
        header[6:] = ["score ahead", "area [95 %]", "area ahead"]
    rows = []
    for row in frame.to_dict("records"):
        env = f"{row['env']}-{row['version']}" if row["version"] else row["env"]
        line = [env, row["method"], row["against"], str(row["seeds"]), row["verdict"]]
        for name in ("score", "area"):
            value, low, high = row[name], row[f"{name}_low"], row[f"{name}_high"]
            how = _digits(value).replace(":", ":+")
            line.append(_interval(value, low, high, how))
            line.append(f"{row[f'{name}_ahead']} of {row['seeds']}")
            if by_seed:
                gaps = [float(gap) for gap in row[f"{name}_by_seed"].split()]
                line.append(", ".join(_format(gap, how) for gap in gaps))
        rows.append(line)
    return header, rows


def show_pooled_table(frame: pd.DataFrame) -> Text:
    """Formats the columns of `make_pooled_table` for readers."""
    header = ["method", "tasks", "seeds", "normalized IQM [95 %]", "P(> uniform) [95 %]"]
    header += ["Δ NMER", "paper's Δ NMER"]
    rows = []
    for row in frame.to_dict("records"):
        rows.append(
            [
                row["method"],
                _format(row.get("tasks"), "{:.0f}"),
                _format(row.get("seeds"), "{:.0f}"),
                _interval(row.get("iqm"), row.get("iqm_low"), row.get("iqm_high"), "{:.2f}"),
                _interval(row.get("p_improvement"), row.get("p_low"), row.get("p_high"), "{:.2f}"),
                _share(row["change_percent"], row["change_tasks"]),
                _share(row["paper_change_percent"], row["paper_change_tasks"]),
            ]
        )
    return header, rows


def _missing(value: float | None) -> bool:
    return value is None or math.isnan(value)


def _format(value: float | None, how: str) -> str:
    return NONE if value is None or math.isnan(value) else how.format(value)


def _digits(mean: float) -> str:
    return "{:.0f}" if abs(mean) >= 100 else "{:.1f}"


def _plus_minus(mean: float | None, std: float | None, how: str | None = None) -> str:
    if mean is None or math.isnan(mean):
        return NONE
    how = how or _digits(mean)
    return " ± ".join(_format(value, how) for value in (mean, std) if not _missing(value))


def _interval(
    value: float | None, low: float | None, high: float | None, how: str | None = None
) -> str:
    if value is None or math.isnan(value):
        return NONE
    how = how or _digits(value)
    alone = _missing(low) or low == high  # so few runs that every resample gives the same
    bounds = "" if alone else f" [{_format(low, how)}, {_format(high, how)}]"
    return _format(value, how) + bounds


def _share(percent: float, tasks: int) -> str:
    return NONE if math.isnan(percent) else f"{percent:+.1f} % ({tasks:.0f})"


def markdown(text: Text) -> str:
    """Formats a table in GitHub's Markdown."""
    header, rows = text
    lines = [header, ["---"] * len(header), *rows]
    shown = ([escape(entry, {"|": chr(92) + "|"}) for entry in line] for line in lines)
    return "".join(f"| {' | '.join(line)} |\n" for line in shown)


def escape(entry: str, signs: dict[str, str]) -> str:
    """Replaces each sign of the entry that is in `signs`."""
    return "".join(signs.get(sign, sign) for sign in entry)
