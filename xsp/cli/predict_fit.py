"""Fit a model of step times to recorded configurations, and test it on held-out configurations.

Sources are tables (CSV, JSON, Parquet; a row for each configuration, with a column of times) and runs. The model is
t = (Σ a·I^p) · (Π E^q) + C: intrinsic columns are added up, all others multiply. It is used only if its error on
held-out groups of configurations is below that of each baseline, such as the nearest configuration, a power law or
ridge regression; otherwise the best baseline is used. The fit is kept in a file for `xsp predict at` and
`xsp predict next`.

examples:
  xsp predict fit table.csv --time step_ms
  xsp predict fit table.csv --intrinsic filters,kernel --extrinsic batch,threads
  xsp predict fit table.parquet --each model --group machine
  xsp predict fit runs/sweep-1 runs/sweep-2 --extrinsic batch,threads
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from xsp.cli import options, progress

SUMMARY = "fit step times to recorded configurations"


def names(text: str) -> tuple[str, ...]:
    """Return names of columns: batch,threads."""
    return tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))


def count(text: str) -> int:
    """Return the number of resampled fits: at least 20, so that there are percentiles."""
    if not (text.isascii() and text.isdigit() and 20 <= int(text) <= 10_000):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 20 to 10000")
    return int(text)


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("sources", nargs="+", metavar="SOURCE", help="tables and runs; directories hold runs")
    parser.add_argument("--time", metavar="COLUMN", help="column of times (default: step_s, step_ms, seconds, ms, …)")
    parser.add_argument(
        "--unit", choices=("s", "ms", "us", "ns"), help="unit of the times (default: the end of the column's name)"
    )
    parser.add_argument("--intrinsic", type=names, default=(), metavar="A,B", help="columns that are added up")
    parser.add_argument(
        "--extrinsic", type=names, default=(), metavar="A,B", help="columns that multiply (default: all others)"
    )
    parser.add_argument(
        "--category", type=names, default=(), metavar="A,B", help="columns whose numbers are categories"
    )
    parser.add_argument("--each", metavar="COLUMN", help="fit a separate model for each value of this category")
    parser.add_argument(
        "--group", type=names, default=(), metavar="A,B", help="rows equal in these are held out together (default: "
        "equal configurations)"
    )  # fmt: skip
    parser.add_argument(
        "--resamples",
        type=count,
        default=200,
        metavar="N",
        help="number of resampled fits for intervals (default: 200)",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of search and resampling (default: 0)")
    parser.add_argument("-o", "--out", type=Path, metavar="FILE", help="where the fit is kept (default: xsp-fit.json)")
    options.add_format_option(parser)


def run(args: argparse.Namespace) -> int:
    """Fit a model, judge it, store it, and print it."""
    from dataclasses import replace

    from xsp.errors import UsageError
    from xsp.predict import configurations, crossvalidation, fitfile, fittext, fromruns

    if args.seed < 0:
        raise UsageError(f"--seed {args.seed}: give a number of 0 or more")
    path = args.out or Path(fitfile.NAME)
    fitfile.check(path)  # before a fit, which takes long
    options.check_writable(path)
    rows, omitted = fromruns.rows(args.sources)
    factor_columns = (*args.intrinsic, *args.extrinsic)
    required = (*factor_columns, *((args.each,) if args.each else ()))
    columns, notes = (required if factor_columns else ()), list(omitted)
    if required and not args.extrinsic:  # columns that are not named multiply
        full_table = configurations.of_rows(rows, args.time, args.unit, (), args.category, args.group)
        columns = tuple(dict.fromkeys((*factor_columns, *(factor.name for factor in full_table.factors), *required)))
        notes = [*full_table.notes, *notes]
    table = configurations.of_rows(rows, args.time, args.unit, columns, args.category, args.group)
    table = replace(table, notes=tuple(dict.fromkeys((*table.notes, *notes))))
    split = crossvalidation.split_of(table, args.intrinsic, args.extrinsic, args.each)
    fit = crossvalidation.judge(table, split, args.seed, args.resamples)
    fitfile.write(fit, path)
    if args.format == "json":
        progress.write(json.dumps(fittext.as_json(fit), indent=2, allow_nan=False) + "\n")
    else:
        progress.echo(f"{fittext.page(fit)}\nkept in {path}")
    return 0
