"""How many spans are lost on the way to a real Collector at full speed, also if it is killed and restarted meanwhile?

The Collector appends received spans to a file without a queue between its receiver and the file, so that acknowledged
spans survive a kill. A span of the run directory counts as lost if it is not in the file at the end. `make jaeger`
builds the Collector.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from parts import fabricated, turns

from xsp import rundir

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))
from realparts import Collector, poll, to_file

ROOT = Path(__file__).resolve().parents[1]
STEP = 8_192
KILLS = 3
_SPAN = re.compile(
    rb'"traceId":"([0-9a-f]{32})","spanId":"([0-9a-f]{16})"(?:,"parentSpanId":"[0-9a-f]*")?(?:,"flags":[0-9]+)?,"name"'
)


class Outcome(NamedTuple):
    """The result of one export."""

    seconds: float
    delivered: int
    """Number of spans that the sender reports as accepted."""

    lost: int
    twice: int
    """Number of duplicate spans: the Collector had written them, and was killed before it could answer."""


def export(run: Path, protocol: str, kills: int, folder: Path) -> Outcome:
    """Send a run to a Collector, kill the Collector `kills` times meanwhile, and compare its file with the run."""
    received = folder / "taken.jsonl"
    collector = Collector(folder, to_file(received))
    collector.start()
    url = collector.otlp_http if protocol == "HTTP" else collector.otlp_grpc.replace("http://", "grpc://")
    command = [sys.executable, "-m", "xsp.cli", "export", str(run), "--to", url, "--quiet"]
    begin = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    size = sum(path.stat().st_size for path in rundir.segments(run))
    for kill in range(kills):
        before = received.stat().st_size if received.exists() else 0
        poll(lambda before=before: _size(received) > before + size or process.poll() is not None)
        turns.say(f"  kill {kill + 1} of {kills}, {_size(received) / 1e6:.0f} MB arrived")
        collector.kill()
        collector.start()
    if process.wait() != 0:
        raise SystemExit("the export failed")
    seconds = time.perf_counter() - begin
    collector.stop()
    delivered = rundir.read_run(run)["delivery"][-1]["spans"]
    id_counts = ids_in(received)
    return Outcome(seconds, delivered, len(ids_of(run) - set(id_counts)), sum(id_counts.values()) - len(id_counts))


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def ids_of(run: Path) -> set[bytes]:
    """Return the trace and span ids of all spans in a run directory, including the span of the run itself."""
    from xsp import table

    con = table.connect()
    rows = con.execute(f"SELECT trace_id || span_id FROM {table.parquet(rundir.segments(run))}").fetchall()
    run_span = rundir.read_run(run)["otel"]
    return {bytes.fromhex(row[0]) for row in rows} | {bytes.fromhex(run_span["trace_id"] + run_span["span_id"])}


def ids_in(file: Path) -> Counter[bytes]:
    """Count the spans in a file of JSON lines; a kill may have truncated a line."""
    id_counts: Counter[bytes] = Counter()
    with file.open("rb") as lines:
        for line in lines:
            id_counts.update(bytes.fromhex((trace + span).decode()) for trace, span in _SPAN.findall(line))
    return id_counts


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, save."""
    parser = turns.parser(__doc__, rounds=3)
    parser.add_argument("--spans", type=int, help="number of spans (default: 1000000, quick: 100000)")
    options = turns.parse(parser, arguments)
    if not (ROOT / ".jaeger" / "otelcol").exists():
        turns.skip("this needs a Collector: make jaeger")
    report = measure(options, options.spans or (100_000 if options.quick else 1_000_000))
    report.finish(options)


def measure(options: argparse.Namespace, spans: int) -> turns.Report:
    """Send the same run `--rounds` times by each protocol, with and without kills."""
    columns = ("way", "spans", "lost", "came twice", "s", "spans/s")
    report = turns.Report("otlp_loss", "Spans lost between xsp and a real Collector", columns)
    ways = [("HTTP", 0), ("gRPC", 0), ("HTTP", KILLS), ("gRPC", KILLS)]
    with tempfile.TemporaryDirectory() as root:
        run = fabricated.write(Path(root) / "run", -(-spans // STEP), STEP)
        for protocol, kills in ways:
            outcomes = []
            for number in range(options.rounds):
                folder = Path(root) / f"{protocol}-{kills}-{number}"
                folder.mkdir()
                outcomes.append(export(run, protocol, kills, folder))
                (folder / "taken.jsonl").unlink()
            seconds = turns.middle([outcome.seconds for outcome in outcomes])
            delivered = outcomes[0].delivered
            name = f"{protocol}, killed and restarted {kills} times" if kills else protocol
            counts = [
                f"{sum(outcome.lost for outcome in outcomes):,}",
                f"{max(outcome.twice for outcome in outcomes):,}",
            ]
            report.add([name, f"{delivered:,}", *counts, seconds.text(1), f"{delivered / seconds.value:,.0f}"],
                       outcomes=[outcome._asdict() for outcome in outcomes])  # fmt: skip
    report.notes.append(
        f"Lost: over {options.rounds} rounds. Seconds are those of the whole command, including the start of "
        "Python and restarts of the Collector. A span that came twice has the same ids and content."
    )
    return report


if __name__ == "__main__":
    main()
