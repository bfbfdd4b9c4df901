"""Show the results of a task in order, the best first.

There is a row per manifest, batch size, software and machine. Below are conclusions: the Pareto front of throughput,
latency and accuracy, the batch size from which doubling no longer pays, rank correlations of accuracy, and with
--prices what a million inputs cost at full load.

examples:
  xsp evaluate leaderboard --task image-classification
  xsp evaluate leaderboard --by p99_ms
  xsp evaluate leaderboard --by rate             results of max-rate scenarios
  xsp evaluate leaderboard --prices prices.csv   cost of a million inputs
"""

from __future__ import annotations

import argparse
import json

from xsp import terminal
from xsp.cli import evaluate_run, options, progress

SUMMARY = "show the results of a task, the best first"

ORDER_KEYS = ("inputs_per_s", "p50_ms", "p90_ms", "p99_ms", "rate", "top1")


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("--task", metavar="NAME", help="task of the models (default: all)")
    parser.add_argument(
        "--by",
        choices=ORDER_KEYS,
        default=ORDER_KEYS[0],
        help="figure to order by; rate: the highest rate within a limit; top1: accuracy (default: inputs_per_s)",
    )
    parser.add_argument("--rows", type=options.positive_int, default=40, metavar="N", help="rows to show (default: 40)")
    parser.add_argument(
        "--prices",
        metavar="FILE",
        help="CSV with the columns machine (as in the table), per_hour, currency, date (YYYY-MM-DD), source",
    )
    evaluate_run.add_store_option(parser)
    options.add_format_option(parser)


def run(args: argparse.Namespace) -> int:
    """Print the leaderboard."""
    from xsp.evaluate import standings, tables
    from xsp.evaluate.quality import choices

    prices = choices.prices(args.prices) if args.prices is not None else ()
    results = evaluate_run.read_results(args.store)
    rows = standings.leaderboard(results, args.task, args.by)
    if args.format == "json":
        progress.write(json.dumps([tables.standing_json(row) for row in rows], indent=1) + "\n")
    elif not rows:
        scope = f" of the task {args.task!r}" if args.task else ""
        progress.echo(f"no results{scope} in {args.store}; make some with `xsp evaluate run MANIFEST`")
    else:
        progress.echo(tables.standing(rows, args.rows, args.by))
        for line in standings.conclusions(rows[: args.rows], prices):
            for part in terminal.wrapped(line):
                progress.echo(part)
    return 0
