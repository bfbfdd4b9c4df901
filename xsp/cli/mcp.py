"""Answer questions about runs and traces over the Model Context Protocol (MCP), on stdin and stdout.

An MCP client starts it, and can ask for a summary, doubtful or missing data, where the time goes, advice, tables, a
comparison of two runs, and spans by their ids. It reads only the given runs, traces and folders, and changes nothing.
Answers are JSON in one form (docs/use/agents.md), limited in size and time. Logs go to stderr.

It needs the extra `mcp`: pip install 'xsp[mcp]'.

examples:
  xsp mcp runs                             all runs in a folder, also later ones
  xsp mcp runs/before runs/after
  xsp mcp trace.json.gz --seconds 300
  xsp mcp --schema > evidence.schema.json
"""

from __future__ import annotations

import argparse
import json

from xsp.cli import options, progress
from xsp.errors import UsageError

SUMMARY = "answer questions of MCP clients about runs"
LEAST_KIB, MOST_KIB = 2, 4096


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument(
        "paths",
        nargs="*",
        default=[],
        metavar="PATH",
        help="run directory, trace of another profiler, or folder of these; nothing else can be read",
    )
    parser.add_argument(
        "--seconds", type=float, default=60.0, metavar="N", help="time limit of an answer (default: 60)"
    )
    parser.add_argument(
        "--kib",
        type=options.positive_int,
        default=48,
        metavar="N",
        help="maximum size of an answer, in KiB (default: 48)",
    )
    parser.add_argument("--schema", action="store_true", help="print the JSON Schema of all answers, and exit")


def run(args: argparse.Namespace) -> int:
    """Serve until the client disconnects, or an interrupt."""
    from xsp.evidence import form, server

    if args.schema:
        progress.echo(json.dumps(form.schema(), indent=1, ensure_ascii=False))
        return 0
    if not args.paths:
        raise UsageError("name the runs that may be read: xsp mcp runs")
    if not 0 < args.seconds < float("inf"):
        raise UsageError("--seconds must be above 0")
    if not LEAST_KIB <= args.kib <= MOST_KIB:
        raise UsageError(f"--kib must be from {LEAST_KIB} to {MOST_KIB}")
    server.serve(args.paths, args.kib << 10, args.seconds)
    return 0
