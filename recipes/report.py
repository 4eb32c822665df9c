"""Writes tables, learning curves and statistics over seeds, with the paper's results beside them.

python recipes/report.py runs                      # all runs below this directory
python recipes/report.py runs --at 100000          # scores every run at 100,000 frames
python recipes/report.py --wandb ENTITY/PROJECT    # the runs of a Weights & Biases project
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
    default = " (default: %(default)s)"
    add = parser.add_argument
    add("runs", nargs="*", type=Path, help="directories that contain runs, at any depth")
    add(
        "--wandb", metavar="ENTITY/PROJECT", help="also read the runs of a Weights & Biases project"
    )
    add("--out", type=Path, default=Path("report"), help=f"output directory{default}")
    add("--at", type=int, metavar="FRAMES", help="score every run at this number of frames")
    add("--reps", type=int, default=REPS, help=f"number of bootstrap samples{default}")
    add("--no-pdf", action="store_true", help="write figures only as PNG")
    options = parser.parse_args(arguments)
    if not options.runs and not options.wandb:
        parser.error("give a directory of runs, as in `report.py runs`, or --wandb ENTITY/PROJECT")
    for name in ("at", "reps"):
        value = getattr(options, name)
        if value is not None and value < 1:
            parser.error(f"--{name} {value} is out of range; give an integer, at least 1")
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
            raise UsageError(f"{directory} is not a directory; give one that contains runs.")
        runs += find_runs(directory, tell)
    if options.wandb:
        runs += fetch_runs(options.wandb, tell)
    cells = make_cells(runs, tell, at=options.at)
    if not cells:
        places = ", ".join([*map(str, options.runs), *([options.wandb] if options.wandb else [])])
        found = f"none of the {len(runs)} runs can be scored" if runs else "no runs were found"
        raise UsageError(
            f"{places}: {found}. A run directory contains config.yaml, and metrics.csv with at "
            "least one evaluation; give another directory, or create a run with `python "
            "recipes/td3.py env=InvertedPendulum total_frames=2000 random_frames=500 logger=csv`."
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
