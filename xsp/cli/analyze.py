"""Print analyses of a run as tables, or write them for other programs.

Without names it prints the first screen: what limits, where the time goes, what to change, what is doubtful. --list
lists the analyses that this run supports, and the others with the reason.

examples:
  xsp analyze runs/demo                          what limits, and what to change
  xsp analyze runs/demo --list                   list the analyses
  xsp analyze runs/demo A2 A6
  xsp analyze runs/served request-figures --ttft 500 --itl 100     goodput
  xsp analyze trace.json.gz ops                  operators by GPU time
  xsp analyze RUN ops --where "name ~ 'mm' and calls > 9" --sort calls --limit 5
  xsp analyze runs/demo A8 --format csv > kernels.csv
  xsp analyze runs/demo A2 --format parquet --out layers.parquet
  xsp analyze runs/demo A2 A6 ops --format csv --out tables      a file for each
  xsp analyze runs/sweep A1                      over the runs of a sweep
  xsp analyze traces.jsonl A2                    a Collector's file
  xsp analyze s3a://traces/job stragglers --engine spark://host:7077
"""

from __future__ import annotations

import argparse
import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from xsp.cli import options, progress
from xsp.errors import AnalysisError, UsageError, nearest

if TYPE_CHECKING:
    from rich.console import RenderableType

    from xsp.analyses import Analysis
    from xsp.report.tablefiles import Answer, Answers
    from xsp.store.trace import Limits, Trace

SUMMARY = "print tables of a run"
ROWS = 40
"""Default number of rows of a printed table."""

FORMATS = ("table", "csv", "json", "parquet")


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument(
        "path",
        metavar="RUN",
        help="run directory, sweep, Parquet file of spans, a trace that xsp imports, a folder or several files with "
        "one per rank, or its URL in Jaeger",
    )
    parser.add_argument(
        "names", nargs="*", default=[], metavar="ANALYSIS", help="phases, A1 … A15, ops, health, …: --list lists them"
    )
    parser.add_argument("--list", action="store_true", help="list the analyses that this run supports")
    parser.add_argument("--format", choices=FORMATS, default="table", help="table (default), csv, json or parquet")
    parser.add_argument(
        "-o",
        "--out",
        type=Path,
        metavar="FILE",
        help="write to this file instead of printing; for several tables a folder, with a file for each",
    )
    parser.add_argument(
        "--sort",
        metavar="COLUMN",
        help="sort the rows by this column: numbers from the largest, text from A; COLUMN:asc and COLUMN:desc set the "
        "order; separate several by commas",
    )
    parser.add_argument(
        "--where",
        action="append",
        default=[],
        metavar="CONDITION",
        help="keep only rows that meet it: \"device_ms > 1 and name ~ 'gemm'\"; =, !=, <, <=, >, >=, ~ (a regular "
        "expression), like, is null, and, or, not; may be given several times",
    )
    parser.add_argument(
        "--limit",
        type=options.positive_int,
        metavar="N",
        help="rows of a table (default: 40 printed, all of them in files)",
    )
    parser.add_argument(
        "--kind",
        metavar="KIND",
        help="kind of step, by number or name: `xsp analyze RUN loop` lists them (default: the one with the most time)",
    )
    parser.add_argument("--skip-damaged", action="store_true", help="leave damaged segments out")
    for name, what in LIMITS.items():
        parser.add_argument(f"--{name}", type=_limit, metavar="MS", help=f"goodput: most time {what}")
    parser.add_argument(
        "--engine",
        default="duckdb",
        metavar="WHERE",
        help="duckdb, in this process (default); spark, on this machine; a Spark cluster: spark://HOST:7077",
    )


def run(args: argparse.Namespace) -> int:
    """Load the runs, and print or write the named analyses; without names, print the first screen."""
    files = [name for name in args.names if (options.find_analysis(name) is None and Path(name).is_file())]
    names = [name for name in args.names if name not in files]
    analyses = list({analysis.id: analysis for analysis in map(_find, names)}.values())
    _check(args, len(analyses))
    if not analyses and not args.list:
        return _print_screen(args, files)
    traces = _load(args, files, analyses)
    if not analyses:
        _list(traces[0])
        return 0
    answers_by_name, refusals = _answers(analyses, traces)
    answers_by_name = {
        name: [_selected_rows(answer, name, args) for answer in answers] for name, answers in answers_by_name.items()
    }
    if args.format == "table":
        tables = _tables(answers_by_name, args, several=len(traces) > 1)
        progress.put(progress.rendered(tables, for_file=args.out is not None), args.out)
    else:
        _write(answers_by_name, args, several=len(analyses) > 1)
    return 1 if refusals else 0


def _print_screen(args: argparse.Namespace, files: Sequence[str]) -> int:
    """Print the first screen of a trace; of a file, from the user's cache if it was printed before."""
    from xsp.report import cachedscreens

    width = progress.terminal_width()
    is_single = not files and args.engine == "duckdb" and not any(getattr(args, name) for name in LIMITS)
    key = cachedscreens.key_of(args.path, width, [args.kind, args.skip_damaged]) if is_single else None
    screen = cachedscreens.read(key)
    if screen is not None:
        progress.echo(screen)
        return 0
    from xsp.ingest import cachedimports
    from xsp.report import firstscreen

    with cachedimports.afterwards():
        traces = _load(args, files, ())
        screen = firstscreen.text(firstscreen.first_screen(traces[0], args.path), width)
        progress.echo(screen, flush=True)
    cachedscreens.store(key, screen, traces[0].run)
    return 0


def _load(args: argparse.Namespace, files: Sequence[str], analyses: Sequence[Analysis]) -> list[Trace]:
    """Load the traces, with the limits of requests, and print what is missing of them."""
    traces = _load_on_spark(args) if args.engine != "duckdb" else _load_locally(args, files)
    for trace in traces:
        progress.warn_of_missing_files(trace.path or args.path, trace.run)
        trace.limits = _limits(args, [analysis.id for analysis in analyses])
    return traces


LIMITS = {
    "ttft": "to the first token", "itl": "between tokens", "tpot": "per further token, mean", "latency": "of a request",
}  # fmt: skip


def _limit(text: str) -> float:
    """Return a limit in milliseconds.

    Raises:
        ArgumentTypeError: it is no number above 0.
    """
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of milliseconds above 0")
    return value


def _limits(args: argparse.Namespace, names: Sequence[str]) -> Limits | None:
    """Return the limits on requests; None without any.

    Raises:
        UsageError: no table has figures within limits.
    """
    from xsp.store.trace import Limits

    limits = Limits(*(getattr(args, name.removesuffix("_ms")) for name in Limits._fields))
    if not any(limits):
        return None
    if "request-figures" not in names:
        raise UsageError(
            "--ttft, --itl, --tpot and --latency are limits for: xsp analyze RUN request-figures --ttft 500"
        )
    return limits


def _check(args: argparse.Namespace, analysis_count: int) -> None:
    """Check options that depend on each other, given the number of analyses.

    Raises:
        UsageError: they cannot be combined; the message says what to type.
    """
    if not analysis_count and (args.out is not None or args.format != "table"):
        raise UsageError("--format and --out need the name of an analysis: xsp analyze RUN A2 --format csv")
    if not analysis_count and (args.sort or args.where or args.limit):
        raise UsageError("--sort, --where and --limit need the name of an analysis: xsp analyze RUN ops --sort calls")
    if args.format == "parquet" and args.out is None:
        raise UsageError("--format parquet writes to a file: give --out FILE, or --out FOLDER for several analyses")
    if args.format == "csv" and args.out is None and analysis_count > 1:
        raise UsageError(
            "a CSV file holds one table: name one analysis, give --out FOLDER for a file each, or use --format json"
        )


def _write(answers_by_name: Mapping[str, Answers], args: argparse.Namespace, several: bool) -> None:
    """Write tables as CSV, JSON or Parquet: to the standard output, a file, or a file each in a folder."""
    from xsp.report import tablefiles

    if several and args.out is not None:
        tablefiles.write_each(answers_by_name, args.out, args.format)
    elif several:
        progress.put(tablefiles.several_as_json(answers_by_name), None)
    else:
        for answers in answers_by_name.values():
            if args.format == "parquet":
                tablefiles.write(answers, args.out, args.format)
            else:
                progress.put(tablefiles.text(answers, args.format), args.out)


def _answers(analyses: Sequence[Analysis], traces: Sequence[Trace]) -> tuple[dict[str, Answers], int]:
    """Return the results of each analysis on the traces, and the number of refusals; the reasons go to stderr."""
    refusals = 0
    answers_by_name: dict[str, Answers] = {}
    for analysis in analyses:
        answers = []
        for trace in traces:
            try:
                answers.append((trace.path.name if trace.path is not None else trace.name, trace.con, analysis(trace)))
            except AnalysisError as error:
                refusals += 1
                progress.warn(f"xsp: {error}")
        if answers:
            answers_by_name[analysis.id] = answers
    return answers_by_name, refusals


def _selected_rows(answer: Answer, name: str, args: argparse.Namespace) -> Answer:
    """Return an answer with the requested rows; a printed table limits their number itself."""
    from xsp.report import choosing

    run, con, relation = answer
    relation = choosing.select_rows(relation, name, args.where, args.sort)
    return run, con, relation if args.limit is None or args.format == "table" else relation.limit(args.limit)


def _tables(
    answers_by_name: Mapping[str, Answers], args: argparse.Namespace, several: bool
) -> Iterator[RenderableType]:
    from xsp.analyses import ANALYSES
    from xsp.report import choosing, text

    for name, answers in answers_by_name.items():
        for run, _, relation in answers:
            title = f"{ANALYSES[name].title} ({name})" + (f", {run}" if several else "")
            main = [*choosing.sort_columns(relation, name, args.sort), *text.MAIN_COLUMNS.get(name, ())]
            kernels = text.KERNEL_COLUMNS.get(name, ())
            yield text.table(relation, title, limit=args.limit or ROWS, main=main, kernels=kernels)


def _load_locally(args: argparse.Namespace, files: Sequence[str]) -> list[Trace]:
    from xsp.ingest import load

    if files:
        return [load.load([args.path, *files], kind=args.kind)]
    paths: Sequence[str | Path] = load.parts(args.path) if Path(args.path).is_dir() else [args.path]
    return [load.load(path, skip_damaged=args.skip_damaged, kind=args.kind) for path in paths]


def _load_on_spark(args: argparse.Namespace) -> list[Trace]:
    from xsp import spark

    if not args.names or args.skip_damaged or args.kind is not None:
        raise UsageError(
            "--engine reads whole runs: omit --kind and --skip-damaged, and name the analyses: "
            "xsp analyze RUN stragglers --engine spark"
        )
    return [spark.load(args.path, args.engine)]


def _find(name: str) -> Analysis:
    from xsp.analyses import ANALYSES

    analysis = options.find_analysis(name)
    if analysis is None:
        hint = nearest(name, ANALYSES) or f"; there are {', '.join(ANALYSES)}"
        raise UsageError(f"there is no analysis {name!r}{hint}")
    return analysis


def _list(trace: Trace) -> None:
    from rich.console import Console

    from xsp.analyses import ANALYSES
    from xsp.scrub import plain

    refusals: dict[str, list[Analysis]] = {}
    for analysis in ANALYSES.values():
        reason = analysis.refusal(trace)
        if reason is None:
            progress.echo(f"{analysis.id:22} {analysis.title}")
        else:  # many share one reason, which follows their name
            refusals.setdefault(reason.removeprefix(f"{analysis.id} ({analysis.title})").lstrip(": "), []).append(
                analysis
            )
    for reason, analyses in refusals.items():
        progress.echo(textwrap.fill(f"not available: {plain(reason)}", Console().width, break_on_hyphens=False))
        for analysis in analyses:
            progress.echo(f"  {analysis.id:22} {analysis.title}")
