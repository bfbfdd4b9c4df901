"""Write one page with the timeline, the charts and the tables of a run. It opens offline.

If the program ran several kinds of steps (training and evaluation, the two models of a GAN), the page has a choice of
the four that take most of the time; --kind puts another one first.

With --serve the pages of one or more runs are served at http://127.0.0.1:8600/NAME-OF-THE-RUN, the target of
the links on spans in Jaeger (deploy/ui.json).

examples:
  xsp report runs/demo
  xsp report runs/demo -o demo.html
  xsp report runs/demo --kind 5
  xsp report runs/demo runs/other --serve
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from xsp.cli import options, progress
from xsp.errors import OutputError, UsageError

if TYPE_CHECKING:
    from xsp.ingest.ranks import Subject

SUMMARY = "write a run's page: timeline, charts, tables"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument(
        "paths",
        type=Path,
        nargs="+",
        metavar="RUN",
        help="run directory, or a trace of another profiler; a folder or files with a trace per rank are one run",
    )
    parser.add_argument(
        "-o",
        "--out",
        type=Path,
        metavar="FILE",
        help="file of the page of one run (default: RUN/report.html, TRACE.html)",
    )
    parser.add_argument(
        "--kind", metavar="KIND", help="kind of step that is shown first: its number, or a part of its name"
    )
    options.add_skip_damaged_option(parser)
    parser.add_argument(
        "--serve", action="store_true", help="serve the pages on loopback until Ctrl-C instead of writing them"
    )
    parser.add_argument(
        "--port", type=int, metavar="N", help="port of --serve (default: 8600, the target of links in Jaeger)"
    )


def run(args: argparse.Namespace) -> int:
    """Load the runs; write their pages and print where they are, or serve them."""
    from xsp.ingest import ranks

    subjects = ranks.subjects(args.paths)
    if args.out and (args.serve or len(subjects) > 1):
        raise UsageError("-o names the page of one run: omit it with several runs and with --serve")
    if args.port is not None and not args.serve:
        raise UsageError("--port is the port of --serve: add --serve")
    return _serve(args, subjects) if args.serve else _write(args, subjects)


def _write(args: argparse.Namespace, subjects: Sequence[Subject]) -> int:
    from xsp.report import html, loop

    for subject in subjects:
        trace, *other_kinds = loop.load(subject, args.kind, skip_damaged=args.skip_damaged)
        path = Path(subject[0] if isinstance(subject, list) else subject)
        progress.warn_of_missing_files(path, trace.run)
        # trace.html for trace.json.gz
        target = args.out or (
            path / "report.html"
            if path.is_dir()
            else path.with_name(path.name.removesuffix(".gz")).with_suffix(".html")
        )
        try:
            page = html.write(trace, target, other_kinds)
        except OSError as error:
            raise OutputError(f"{target}: cannot be written ({error.strerror})") from error
        progress.echo(f"wrote {page} ({page.stat().st_size / 1e6:.1f} MB); open it in a browser")
    return 0


def _serve(args: argparse.Namespace, subjects: Sequence[Subject]) -> int:
    from xsp.report import loop, serve

    port = serve.PORT if args.port is None else args.port
    pages = serve.pages(loop.load(path, args.kind, skip_damaged=args.skip_damaged) for path in subjects)
    with serve.server(pages, port) as server:
        for name in pages:
            progress.echo(f"serving {serve.address(server, name)}", flush=True)
        progress.echo("Ctrl-C stops the server", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return 0
    return 0
