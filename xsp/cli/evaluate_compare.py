"""Compare results of evaluations: figures, outputs, and differences in manifest, software and machine.

Each result is compared with the first.

examples:
  xsp evaluate compare 4f1c2a9b03de-0001 4f1c2a9b03de-0002
  xsp evaluate compare 4f1c 77aa 01ee --format json
"""

from __future__ import annotations

import argparse
import json

from xsp.cli import evaluate_run, options, progress

SUMMARY = "compare results side by side"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument(
        "result", nargs="+", metavar="RESULT", help="names or paths of results, or the beginning of a manifest's hash"
    )
    evaluate_run.add_store_option(parser)
    options.add_format_option(parser)


def run(args: argparse.Namespace) -> int:
    """Compare the results, and print the comparison."""
    from xsp.evaluate import results, standings, tables

    comparisons = standings.compare([results.find(name, args.store) for name in args.result])
    if args.format == "json":
        progress.write(json.dumps([tables.comparison_json(comparison) for comparison in comparisons], indent=1) + "\n")
    else:
        progress.echo("\n\n".join(tables.comparison_text(comparison) for comparison in comparisons))
    return 0
