"""Carry out a stored manifest again, and judge whether the result is the same.

Outputs and environment are judged by one repeat; latencies by several, up to --turns. Exit code 0: the same; 1:
different; 3: nobody can tell.

examples:
  xsp evaluate reproduce 4f1c2a9b03de-0001
  xsp evaluate reproduce 4f1c --turns 5
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from xsp.cli import evaluate_run, options, progress

SUMMARY = "carry out a stored manifest again, and judge the difference"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("result", metavar="RESULT", help="name or path of a result")
    parser.add_argument("--turns", type=options.rows, default=5, metavar="N", help="repeats at most (default: 5)")
    parser.add_argument(
        "--folder", type=Path, default=Path(), metavar="DIR", help="where files of the manifest are (default: here)"
    )
    parser.add_argument("--agents", metavar="NAME", help="local or process (default: process, a new one each time)")
    evaluate_run.stored(parser)
    parser.add_argument("--format", choices=("table", "json"), default="table", help="table (default) or json")
    parser.add_argument("-q", "--quiet", action="store_true", help="no progress")


def run(given: argparse.Namespace) -> int:
    """Carry it out again, and say what it is."""
    from xsp.errors import UsageError
    from xsp.evaluate import agents, reading, results, standings, tables, transports

    before = results.named(given.result, given.store)
    manifest = reading.read(before.path / results.MANIFEST).manifest
    found = transports.named(given.agents or "process")
    if len(found) != 1:
        raise UsageError("--agents: one agent reproduces a result, local or process")
    asked = agents.Options(given.store, trusted=True)
    made: list[results.Result] = []
    with progress.shown(given.quiet) as show:

        def again() -> results.Result:
            made.append(results.read(found[0].submit(manifest, given.folder, asked, show)))
            return made[-1]

        judgement = standings.reproduced(before, again, given.turns)
    if given.format == "json":
        said = tables.judgement_json(judgement) | {"before": before.name, "after": [each.name for each in made]}
        progress.put(json.dumps(said, indent=1) + "\n")
    else:
        progress.tell(f"{before.name}, made again {len(made)} times: {tables.judgement(judgement)}")
    return {"same": 0, "different": 1}.get(judgement.verdict.value, 3)
