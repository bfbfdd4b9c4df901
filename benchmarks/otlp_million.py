"""One million spans from a run directory to a real Jaeger: time, memory, and how fast is its API with the overview?

Jaeger keeps the spans in memory, with the settings of `deploy/jaeger.yaml`. `make jaeger` builds it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from parts import fabricated, turns

from xsp import rundir

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))
from realparts import Jaeger, poll

ROOT = Path(__file__).resolve().parents[1]
SMALL_TRACE = 10_000
"""Number of spans in a trace that is not folded."""


class Outcome(NamedTuple):
    """The result of one export."""

    seconds: float
    delivered: int
    ours_bytes: int
    """Peak memory of the export."""

    jaegers_bytes: int
    """Memory of Jaeger at the end."""

    overview_s: float
    """Seconds from the request to the last byte of the first trace, from the API that Jaeger's page uses."""

    overview_spans: int
    overview_bytes: int


def export(run: Path, folder: Path, *options: str) -> Outcome:
    """Send a run to a new Jaeger, and request its first trace."""
    jaeger = Jaeger(folder)
    jaeger.start()
    try:
        command = [sys.executable, "-m", "xsp.cli", "export", str(run), "--to", jaeger.otlp_http, "--quiet", *options]
        begin = time.perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        peak_bytes = _peak_memory(process)
        seconds = time.perf_counter() - begin
        if process.returncode != 0:
            raise SystemExit("the export failed")
        delivered = rundir.read_run(run)["delivery"][-1]["spans"]
        overview = _overview(jaeger)
        return Outcome(seconds, delivered, peak_bytes, _memory(jaeger._process.pid), *overview)
    finally:
        jaeger.kill()


def _overview(jaeger: Jaeger) -> tuple[float, int, int]:
    url = f"{jaeger.query}/api/traces/{1:032x}"
    poll(lambda: _size_of(url) == _size_of(url))  # accepted spans are stored a moment later
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        with urllib.request.urlopen(url, timeout=120) as answer:
            content = answer.read()
        times.append(time.perf_counter() - begin)
    return turns.median(times), len(json.loads(content)["data"][0]["spans"]), len(content)


def _size_of(url: str) -> int:
    with urllib.request.urlopen(url, timeout=120) as answer:
        return len(answer.read())


def _peak_memory(process: subprocess.Popen[bytes]) -> int:
    """Wait for a process, and return its peak memory."""
    peak_bytes = 0
    while process.poll() is None:
        peak_bytes = max(peak_bytes, _memory(process.pid, "VmHWM"))
        time.sleep(0.02)
    return peak_bytes


def _memory(process: int, name: str = "VmRSS") -> int:
    try:
        lines = Path(f"/proc/{process}/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(name)), 0)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, save."""
    parser = turns.parser(__doc__, rounds=3)
    parser.add_argument("--spans", type=int, help="number of spans (default: 1000000, quick: 100000)")
    options = turns.parse(parser, arguments)
    if not (ROOT / ".jaeger" / "jaeger").exists():
        turns.skip("this needs a Jaeger: make jaeger")
    measure(options, options.spans or (100_000 if options.quick else 1_000_000)).finish(options)


def measure(options: argparse.Namespace, spans: int) -> turns.Report:
    """Send the spans as one trace and as many traces, `--rounds` times each."""
    columns = ("run", "spans sent", "s", "spans/s", "our memory, MB", "first trace, spans", "API, ms", "API, MB")
    report = turns.Report("otlp_million", f"{spans:,} spans from a run directory to a real Jaeger", columns)
    shapes = {"one step, folded": (1, spans), f"steps of {SMALL_TRACE:,}": (spans // SMALL_TRACE, SMALL_TRACE)}
    with tempfile.TemporaryDirectory() as root:
        for name, (steps, size) in shapes.items():
            run = fabricated.write(Path(root) / f"run-{steps}", steps, size)
            outcomes = []
            for number in range(options.rounds):
                folder = Path(root) / f"{steps}-{number}"
                folder.mkdir()
                outcomes.append(export(run, folder))
                turns.say(f"  {name}: {outcomes[-1]}")
            seconds = turns.middle([outcome.seconds for outcome in outcomes])
            api_ms = turns.middle([1000 * outcome.overview_s for outcome in outcomes])
            last = outcomes[-1]
            report.add([name, f"{last.delivered:,}", seconds.text(1), f"{last.delivered / seconds.value:,.0f}",
                        f"{max(outcome.ours_bytes for outcome in outcomes) / 1e6:,.0f}", f"{last.overview_spans:,}",
                        api_ms.text(0), f"{last.overview_bytes / 1e6:.1f}"],
                       outcomes=[outcome._asdict() for outcome in outcomes])  # fmt: skip
    report.notes.append(
        "Seconds are those of the whole command, including the start of Python. API: /api/traces/<id>, which Jaeger's "
        "page requests, the median of five. A trace beyond 10,000 spans is sent as an overview with detail traces; "
        "`--fold 0` would send it as it is."
    )
    return report


if __name__ == "__main__":
    main()
