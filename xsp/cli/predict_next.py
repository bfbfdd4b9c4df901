"""Propose configurations to record next: those that reduce the uncertainty of a fit most for the time they take.

Candidates are the combinations of recorded values that were not recorded. With FACTOR=VALUE for each factor, the
uncertainty of this one configuration counts.

examples:
  xsp predict next
  xsp predict next --count 10 --steps 50 --start 20
  xsp predict next batch=512 threads=2 --fit cnn.json
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from xsp.cli import options, progress
from xsp.cli.predict_at import combinations, factor_values
from xsp.texts import parse_seconds

SUMMARY = "propose configurations to record next"


def seconds(text: str) -> float:
    """Return a number of seconds, at least 0."""
    value = parse_seconds(text)
    if value is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")
    return value


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument(
        "values", nargs="*", type=factor_values, metavar="FACTOR=VALUE", help="the configuration to predict"
    )
    options.add_fit_option(parser)
    parser.add_argument(
        "--count", type=options.positive_int, default=5, metavar="N", help="number of proposals (default: 5)"
    )
    parser.add_argument(
        "--steps", type=options.positive_int, default=100, metavar="N", help="steps per recording (default: 100)"
    )
    parser.add_argument(
        "--start", type=seconds, default=5.0, metavar="SECONDS", help="start-up time of each recording (default: 5)"
    )
    options.add_format_option(parser)


def run(args: argparse.Namespace) -> int:
    """Choose configurations, and print them."""
    from xsp.errors import UsageError
    from xsp.predict import fitfile, fittext, nextrun

    fit = fitfile.read(args.fit or Path(fitfile.NAME))
    point = None
    if args.values:
        points = combinations(fit, args.values)
        if len(points) > 1:
            raise UsageError("xsp predict next takes one configuration: one value for each factor")
        point = points[0]
    proposals = nextrun.choose(fit, min(args.count, 1_000), point, args.steps, args.start)
    if args.format == "json":
        progress.write(json.dumps(fittext.proposals_json(fit, proposals), indent=2, allow_nan=False) + "\n")
    else:
        progress.echo(fittext.proposals_text(fit, proposals, point))
    return 0
