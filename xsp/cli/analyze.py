"""Print analyses of a run as tables, or write them for other programs.

Without names it lists the analyses that this run can carry, and the others with the reason; of a trace with device
work it says before what takes the time and what to change.

examples:
  xsp analyze runs/demo                          what can be asked
  xsp analyze runs/demo A2 A6
  xsp analyze runs/demo A8 --format csv > kernels.csv
  xsp analyze runs/demo A2 --format parquet --out layers.parquet
  xsp analyze runs/sweep A1                      over the runs of a sweep
  xsp analyze traces.jsonl A2                    what a Collector wrote
  xsp analyze s3a://traces/job stragglers --engine spark://host:7077
"""

from __future__ import annotations

import argparse
import io
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from xsp.cli import options
from xsp.errors import AnalysisError, UsageError, nearest

if TYPE_CHECKING:
    from xsp.analyses import Analysis
    from xsp.trace import Trace

SUMMARY = "print tables of a run"
WIDTH_OF_A_FILE = 160
FORMATS = ("table", "csv", "json", "parquet")


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument(
        "path",
        metavar="RUN",
        help="run directory, sweep, Parquet file of spans, a trace that xsp imports, or its URL in Jaeger",
    )
    parser.add_argument(
        "names", nargs="*", default=[], metavar="ANALYSIS", help="A1 … A15, ledger, …; none lists them all"
    )
    parser.add_argument("--format", choices=FORMATS, default="table", help="table (default), csv, json or parquet")
    parser.add_argument("-o", "--out", type=Path, metavar="FILE", help="write here instead of printing")
    parser.add_argument(
        "--limit", type=options.rows, default=40, metavar="N", help="rows of a printed table (default: 40)"
    )
    parser.add_argument("--skip-damaged", action="store_true", help="leave damaged segments out")
    parser.add_argument(
        "--engine",
        default="duckdb",
        metavar="WHERE",
        help="duckdb, in this process (default); spark, on this machine; a cluster of Spark's: spark://HOST:7077",
    )


def run(given: argparse.Namespace) -> int:
    """Load, analyse, print."""
    from xsp import rundir

    if not given.names and (given.out is not None or given.format != "table"):
        raise UsageError("--format and --out are for the analyses that you name: xsp analyze RUN A2 --format csv")
    chosen = [_find(name) for name in given.names]
    if given.format == "parquet" and (given.out is None or len(chosen) > 1):
        raise UsageError("--format parquet writes one analysis to a file: name one, and give --out FILE")
    traces = _on_spark(given) if given.engine != "duckdb" else _here(given)
    if not given.names:
        _overview(traces[0])
        _list(traces[0])
        return 0
    refused = 0
    printed = io.StringIO()
    for each in chosen:
        for one in traces:
            try:
                _show(each, one, given, printed, several=len(traces) > 1)
            except AnalysisError as error:
                refused += 1
                print(f"xsp: {error}", file=sys.stderr)
    if given.out is None:
        sys.stdout.write(printed.getvalue())
    elif given.format != "parquet":
        rundir.write_whole(given.out, printed.getvalue().encode())
    return 1 if refused else 0


def _here(given: argparse.Namespace) -> list[Trace]:
    from xsp import runs

    places: Sequence[str | Path] = runs.parts(given.path) if Path(given.path).is_dir() else [given.path]
    return [runs.load(place, skip_damaged=given.skip_damaged) for place in places]


def _on_spark(given: argparse.Namespace) -> list[Trace]:
    from xsp import spark

    if not given.names or given.skip_damaged:
        raise UsageError(
            "--engine reads whole runs and answers what is named: xsp analyze RUN stragglers --engine spark"
        )
    return [spark.load(given.path, given.engine)]


def _find(name: str) -> Analysis:
    from xsp.analyses import ANALYSES

    found = {known.lower(): each for known, each in ANALYSES.items()}.get(name.lower())
    if found is None:
        hint = nearest(name, ANALYSES) or f"; there are {', '.join(ANALYSES)}"
        raise UsageError(f"there is no analysis {name!r}{hint}")
    return found


def _overview(trace: Trace) -> None:
    """Print what a person wants to see first of a trace with device work."""
    from rich.console import Console

    from xsp.report import text

    if trace.con.execute("SELECT 1 FROM spans WHERE device IS NOT NULL LIMIT 1").fetchall():
        Console().print(text.overview(trace))
        print()


def _list(trace: Trace) -> None:
    from xsp.analyses import ANALYSES

    refused: dict[str, list[Analysis]] = {}
    for each in ANALYSES.values():
        reason = each.refusal(trace)
        if reason is None:
            print(f"{each.id:22} {each.title}")
        else:  # many have one reason, which follows their name
            refused.setdefault(reason.removeprefix(f"{each.id} ({each.title})").lstrip(": "), []).append(each)
    for reason, those in refused.items():
        print(f"not of this run: {reason}")
        for each in those:
            print(f"  {each.id:22} {each.title}")


def _show(each: Analysis, trace: Trace, given: argparse.Namespace, printed: TextIO, several: bool) -> None:
    """Add one analysis to what is printed; Parquet, which is no text, goes to its file at once."""
    from xsp import table

    relation = each(trace)
    if given.format == "parquet":
        table.write(trace.con, relation, given.out, "parquet")
    elif given.format == "table":
        from rich.console import Console

        from xsp.report import text

        title = f"{each.title} ({each.id})" + (f", {trace.name} batch {trace.run.get('batch_size')}" if several else "")
        width = Console().width if given.out is None else WIDTH_OF_A_FILE
        Console(file=printed, width=width).print(text.table(relation, title, limit=given.limit))
    else:
        with tempfile.TemporaryDirectory() as place:
            written = Path(place) / "rows"
            table.write(trace.con, relation, written, given.format)
            printed.write(written.read_text(encoding="utf-8"))
