"""List the results of evaluations, newest last.

examples:
  xsp evaluate list
  xsp evaluate list --store results --format json
"""

from __future__ import annotations

import argparse
import json

from xsp.cli import evaluate_run, options, progress

SUMMARY = "list the results"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    evaluate_run.add_store_option(parser)
    options.add_format_option(parser)


def run(args: argparse.Namespace) -> int:
    """List the results."""
    from xsp.evaluate import tables

    results = evaluate_run.read_results(args.store)
    if args.format == "json":
        progress.write(
            json.dumps([dict(result.content) | {"path": str(result.path)} for result in results], indent=1) + "\n"
        )
    elif not results:
        progress.echo(f"no results in {args.store}; make some with `xsp evaluate run MANIFEST`")
    else:
        progress.echo(tables.results_table(results))
    return 0
