"""Writes tables and curves from runs: statistics over seeds, beside the paper's figures.

python recipes/report.py runs                        # all runs below that directory
python recipes/report.py runs --at 100000            # every run as it was at 100,000 frames
python recipes/report.py --wandb ENTITY/PROJECT      # the runs of a project of Weights & Biases
"""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

from nmer_recipes.errors import UsageError
from nmer_recipes.reporting.cells import make_cells
from nmer_recipes.reporting.document import write_report
from nmer_recipes.reporting.estimates import REPS
from nmer_recipes.reporting.online import fetch_runs
from nmer_recipes.reporting.read import find_runs


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(
        prog="report.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="*", type=Path, help="directories that hold run directories")
    parser.add_argument("--wandb", metavar="ENTITY/PROJECT", help="also read the runs of a project")
    parser.add_argument("--out", type=Path, default=Path("report"), help="where to write to")
    parser.add_argument("--at", type=int, metavar="FRAMES", help="score at this step of every run")
    parser.add_argument("--reps", type=int, default=REPS, help="bootstrap samples (%(default)s)")
    parser.add_argument("--no-pdf", action="store_true", help="write figures as PNG alone")
    options = parser.parse_args(arguments)
    if not options.runs and not options.wandb:
        parser.error("name a directory of runs, as in `report.py runs`, or --wandb ENTITY/PROJECT")
    for name in ("at", "reps"):
        value = getattr(options, name)
        if value is not None and value < 1:
            parser.error(f"--{name} {value}; it is an integer, at least 1")
    return options


def report(options: argparse.Namespace) -> None:
    """Reads the runs, groups them and writes the report."""
    notices: list[str] = []

    def tell(line: str) -> None:
        notices.append(line)
        print(line, file=sys.stderr)

    runs = []
    for directory in options.runs:
        if not directory.is_dir():
            raise UsageError(f"{directory} is no directory; name one that holds runs.")
        runs += find_runs(directory, tell)
    if options.wandb:
        runs += fetch_runs(options.wandb, tell)
    cells = make_cells(runs, tell, at=options.at)
    if not cells:
        places = ", ".join([*map(str, options.runs), *([options.wandb] if options.wandb else [])])
        found = f"{len(runs)} runs, but none that could be scored" if runs else "no run"
        raise UsageError(
            f"{places}: {found}. A run directory holds config.yaml and metrics.csv with an "
            "evaluation; make one by `python recipes/td3.py env=InvertedPendulum "
            "total_frames=2000 random_frames=500 logger=csv`, or name another directory."
        )
    how = {"reps": options.reps, "pdf": not options.no_pdf}
    write_report(options.out, cells, notices, tell, **how)
    count = sum(len(cell.runs) for cell in cells)
    print(f"{count} runs of {len(cells)} settings: see {options.out / 'report.md'}")


def main(arguments: list[str] | None = None) -> None:
    """Runs the command; prints usage errors without a traceback."""
    logging.getLogger("absl").setLevel(logging.WARNING)  # rliable logs each estimate
    try:
        report(parse(arguments))
    except UsageError as error:
        raise SystemExit(f"report.py: {error}") from None


if __name__ == "__main__":
    main()
