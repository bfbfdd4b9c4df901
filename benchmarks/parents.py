"""How long does bulk placement of five million spans (more with --sizes) take, and does it grow linearly?

The spans are fabricated: steps on four threads in turn, layers in the steps, operators in the layers, launches in the
operators, and a kernel for each launch. `xsp.correlate.columns.correlate_table` is measured, which assigns identities,
parents, steps, layers and keys. Up to 200 thousand spans, `xsp.correlate` is measured on the same spans as well.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from math import log
from pathlib import Path

import duckdb
from kineto_scale import slope
from parts import turns

from xsp import table
from xsp.correlate import columns as placing
from xsp.correlate.evidence import correlate
from xsp.importers.contract import RAW_COLUMNS, Losses, SourceInfo
from xsp.ingest import jobs
from xsp.schema import Kind, Level, Span

SIZES = (200_000, 1_000_000, 2_000_000, 5_000_000)
MOST_CORRELATED = 200_000
"""Maximum number of spans for which `xsp.correlate` is measured too."""

THREADS = 4
STEP_SPANS = 20_000
"""Number of spans in a step; the first one is the span of the step itself."""

_PART = "n % 20"
_KINDS = f"""
    SELECT n, CASE WHEN n % {STEP_SPANS} = 0 THEN '{Kind.STEP}' WHEN {_PART} = 1 THEN '{Kind.MODULE}'
                   WHEN {_PART} < 8 THEN '{Kind.OP}' WHEN {_PART} < 14 THEN '{Kind.LAUNCH}'
                   ELSE '{Kind.KERNEL}' END AS kind,
           CASE WHEN {_PART} >= 2 THEN ({_PART} - 2) % 6 END AS pair, (n // 20) * 12_000 AS begin_ns
    FROM range($spans) AS _(n)
"""
_SPANS = f"""
    SELECT n AS number, kind, kind || n % 97 AS name, 1 AS process, 'ok' AS status, 'fabricated' AS collector,
           CASE kind WHEN '{Kind.STEP}' THEN {int(Level.MODEL)} WHEN '{Kind.MODULE}' THEN {int(Level.LAYER)}
                WHEN '{Kind.OP}' THEN {int(Level.OP)} WHEN '{Kind.LAUNCH}' THEN {int(Level.RUNTIME)}
                ELSE {int(Level.KERNEL)} END AS level,
           CASE WHEN kind <> '{Kind.KERNEL}' THEN n // {STEP_SPANS} % {THREADS} END AS thread,
           CASE WHEN kind = '{Kind.KERNEL}' THEN 0 END AS device,
           CASE WHEN kind = '{Kind.KERNEL}' THEN 7 END AS stream,
           CASE WHEN kind IN ('{Kind.LAUNCH}', '{Kind.KERNEL}') THEN n // 20 * 6 + pair + 1 END AS correlation_id,
           begin_ns + CASE kind WHEN '{Kind.STEP}' THEN 0 WHEN '{Kind.MODULE}' THEN 1_000
                WHEN '{Kind.OP}' THEN coalesce(1_100 + pair * 1_600, 50) WHEN '{Kind.LAUNCH}' THEN 1_700 + pair * 1_600
                ELSE 3_000 + pair * 1_600 END AS start_ns,
           CASE kind WHEN '{Kind.STEP}' THEN {STEP_SPANS // 20 * 12_000} WHEN '{Kind.MODULE}' THEN 10_500
                WHEN '{Kind.OP}' THEN CASE WHEN pair IS NULL THEN 900 ELSE 1_500 END
                WHEN '{Kind.LAUNCH}' THEN 500 ELSE 1_200 END AS dur_ns
    FROM ({_KINDS})
"""


def fabricate(con: duckdb.DuckDBPyConnection, spans: int) -> SourceInfo:
    """Create the table `raw_spans`, as an importer does."""
    con.execute(
        f"CREATE OR REPLACE TABLE raw_spans ({', '.join(f'{column.name} {column.type}' for column in RAW_COLUMNS)})"
    )
    con.execute(f"INSERT INTO raw_spans BY NAME {_SPANS}", {"spans": spans})
    return SourceInfo({}, Losses("fabricated", spans))


def place_spans(spans: int) -> tuple[float, int, int]:
    """Place `spans` spans; return the seconds, the peak memory of the process in bytes, and the number of orphans."""
    with tempfile.TemporaryDirectory() as folder:
        con = jobs.connect(Path(folder))
        info = fabricate(con, spans)
        begin = time.perf_counter()
        placing.correlate_table(con, info, "fabricated")
        seconds = time.perf_counter() - begin
        ((orphans,),) = con.execute(
            "SELECT count(*) FROM correlated WHERE parent_id IS NULL AND kind <> 'step'"
        ).fetchall()
    return seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, orphans


def correlation_s(spans: int) -> float:
    """Return the seconds that `xsp.correlate` takes for all spans, one step at a time."""
    con = table.connect()
    fabricate(con, spans)
    names = [column.name for column in RAW_COLUMNS if column.name in Span._fields]
    rows = con.execute(f"SELECT {', '.join(names)} FROM raw_spans ORDER BY number").fetchall()
    fabricated = [Span(**dict(zip(names, row, strict=True))) for row in rows]
    begin = time.perf_counter()
    for start in range(0, len(fabricated), STEP_SPANS):
        correlate(fabricated[start : start + STEP_SPANS])
    return time.perf_counter() - begin


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, save."""
    parser = turns.parser(__doc__, rounds=3)
    parser.add_argument("--sizes", type=int, nargs="*", help="spans (default: 200 thousand to 5 million)")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)  # a measurement in a process of its own
    options = turns.parse(parser, arguments)
    if options.one:
        print(json.dumps(place_spans(options.one)))
    else:
        measure(options, options.sizes or ((20_000, 200_000) if options.quick else SIZES)).finish(options)


def measure(options: argparse.Namespace, sizes: Sequence[int]) -> turns.Report:
    """Place each number of spans `--rounds` times, each time in a new process."""
    columns = ("spans", "s", "spans/s", "peak MB", "orphans", "xsp.correlate takes")
    report = turns.Report("parents", "Parents, layers and keys in bulk", columns)
    seconds: list[list[float]] = []
    for size in sizes:
        results = [_place_in_process(size) for _ in range(options.rounds)]
        seconds.append([elapsed_s for elapsed_s, _, _ in results])
        ratios = [correlation_s(size) / elapsed_s for elapsed_s in seconds[-1]] if size <= MOST_CORRELATED else []
        middle_s = turns.middle(seconds[-1])
        turns.say(f"  {size:,}: {middle_s.text()} s")
        peak, orphans = max(peak_bytes for _, peak_bytes, _ in results) / 1e6, results[0][2]
        cells = [f"{size:,}", middle_s.text(), f"{size / middle_s.value:,.0f}", f"{peak:,.0f}", f"{orphans:,}",
                 f"{turns.middle(ratios).text(1)} ×" if ratios else "–"]  # fmt: skip
        report.add(cells, rounds=results)
    if len(set(sizes)) < 2:
        report.notes.append("One size: there is no exponent.")
        return report
    points = [[(log(size), log(elapsed_s[n])) for size, elapsed_s in zip(sizes, seconds, strict=True)]
              for n in range(options.rounds)]  # fmt: skip
    exponent = turns.middle([slope(round_points) for round_points in points])
    report.notes.append(f"Exponent: {exponent.text(2)} {turns.verdict(exponent, 1.0)}")
    return report


def _place_in_process(size: int) -> tuple[float, int, int]:
    command = [sys.executable, __file__, "--one", str(size)]
    seconds, peak, orphans = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    return seconds, peak, orphans


if __name__ == "__main__":
    main()
