"""How many spans a second does `xsp serve` acknowledge from eight exporters, durably, and how soon does it end?

Each exporter is a connection over HTTP that sends requests of 512 spans, as OpenTelemetry's batch processor does, each
after the answer to the one before. The requests are encoded beforehand, so that the exporters take little of the
processor. Then the receiver gets an interrupt, and the spans in its directories are counted. With `--other DIR`,
another checkout takes turns with this one.
"""

from __future__ import annotations

import argparse
import http.client
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from parts import turns

ROOT = Path(__file__).resolve().parents[1]
EXPORTERS, SPANS = 8, 512
GOAL = 20_000
BEGIN_NS = 1_790_000_000_000_000_000


class Outcome(NamedTuple):
    """The result of one receiver."""

    rate: float
    """Acknowledged spans a second."""

    p50_ms: float
    p99_ms: float
    ending_s: float
    lost: int
    """Acknowledged spans that cannot be loaded after the receiver has ended."""


def body(number: int) -> bytes:
    """Return a request of `SPANS` spans of a service, in traces of sixteen; ids follow from the number."""
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    message = ExportTraceServiceRequest()
    resource = message.resource_spans.add()
    resource.resource.attributes.add(key="service.name").value.string_value = "shop"
    scope = resource.scope_spans.add()
    for index in range(number * SPANS + 1, (number + 1) * SPANS + 1):
        start_ns = BEGIN_NS + index * 1000
        span = scope.spans.add(
            trace_id=(index // 16 + 1).to_bytes(16, "big"), span_id=index.to_bytes(8, "big"), name=f"GET {index % 20}",
            start_time_unix_nano=start_ns, end_time_unix_nano=start_ns + 500,
        )  # fmt: skip
        if index % 16:
            span.parent_span_id = (index - index % 16).to_bytes(8, "big")
        for name in ("http.request.method", "http.route"):
            span.attributes.add(key=name).value.string_value = "GET"
        for name in ("http.response.status_code", "thread.id"):
            span.attributes.add(key=name).value.int_value = 200
    return bytes(message.SerializeToString())


def send(address: str, bodies: Sequence[bytes], seconds: float, times_s: list[float]) -> None:
    """Send requests for some seconds, and append the time of each until its answer."""
    connection = http.client.HTTPConnection(address, timeout=60)
    end_s = time.monotonic() + seconds
    for content in bodies:
        begin_s = time.monotonic()
        if begin_s > end_s:
            return
        connection.request("POST", "/v1/traces", content, {"Content-Type": "application/x-protobuf"})
        answer = connection.getresponse()
        answer.read()
        if answer.status != 200:
            raise SystemExit(f"the receiver answered {answer.status}")
        times_s.append(time.monotonic() - begin_s)


def measure(checkout: Path, bodies: Sequence[bytes], seconds: float) -> Outcome:
    """Send to a receiver of a checkout for some seconds, and interrupt it."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        command = [sys.executable, "-m", "xsp.cli", "serve", "--out", str(out), "--http", "127.0.0.1:0"]
        paths = os.pathsep.join([str(checkout), str(checkout / "collectors")])
        process = subprocess.Popen(
            [*command, "--grpc", "off"], stdout=subprocess.PIPE, text=True, cwd=folder,
            env={**os.environ, "PYTHONPATH": paths},
        )  # fmt: skip
        assert process.stdout is not None
        address = process.stdout.readline().split()[-1].removeprefix("http://").removesuffix("/v1/traces")
        times_s: list[float] = []
        exporters = [
            threading.Thread(target=send, args=(address, bodies[number::EXPORTERS], seconds, times_s))
            for number in range(EXPORTERS)
        ]
        begin_s = time.monotonic()
        for exporter in exporters:
            exporter.start()
        for exporter in exporters:
            exporter.join()
        spent_s = time.monotonic() - begin_s
        begin_s = time.monotonic()
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=600)
        ending_s = time.monotonic() - begin_s
        import xsp

        found = sum(xsp.load(path).sql("SELECT count(*) FROM spans").fetchall()[0][0] for path in out.iterdir())
    times_s.sort()
    lost = len(times_s) * SPANS - int(found)
    return Outcome(
        len(times_s) * SPANS / spent_s, times_s[len(times_s) // 2] * 1e3, times_s[len(times_s) * 99 // 100] * 1e3,
        ending_s, lost,
    )  # fmt: skip


def main() -> None:
    """Measure, and print the table."""
    parser = turns.parser(__doc__, 5)
    parser.add_argument("--seconds", type=float, help="seconds of sending (default: 10, quick: 1)")
    parser.add_argument("--other", type=Path, metavar="DIR", help="another checkout that takes turns with this one")
    options = turns.parse(parser)
    seconds = options.seconds or (1 if options.quick else 10)
    report(options, seconds).finish(options)


def report(options: argparse.Namespace, seconds: float) -> turns.Report:
    """Measure each checkout `--rounds` times, in turns."""
    checkouts = {"this one": ROOT, **({"the other one": options.other.resolve()} if options.other else {})}
    bodies = [body(number) for number in range(int(seconds * 200))]
    outcomes: dict[str, list[Outcome]] = {name: [] for name in checkouts}
    draw = random.Random(options.seed)
    for number in range(options.rounds):
        for name in draw.sample(list(checkouts), len(checkouts)):
            outcomes[name].append(measure(checkouts[name], bodies, seconds))
            turns.say(f"  round {number + 1}, {name}: {outcomes[name][-1].rate:,.0f} spans/s")
    columns = ("checkout", "spans/s", "p50 ms", "p99 ms", "end s", "lost")
    table = turns.Report("serve_load", f"Spans that xsp serve acknowledges from {EXPORTERS} exporters", columns)
    for name, measured in outcomes.items():
        figures = [turns.middle([outcome[index] for outcome in measured]) for index in range(4)]
        row = [name, f"{figures[0].value:,.0f}", *(figure.text(1) for figure in figures[1:])]
        table.add([*row, f"{sum(outcome.lost for outcome in measured):,}"],
                  outcomes=[outcome._asdict() for outcome in measured])  # fmt: skip
    if options.other:
        rates = zip(outcomes["this one"], outcomes["the other one"], strict=True)
        ratio = turns.middle([this.rate / other.rate for this, other in rates])
        table.notes.append(f"Spans a second, this one to the other one: {ratio.text(2)}.")
    table.notes.append(
        f"Goal: {GOAL:,} spans a second, and an end within 5 s. The exporters are threads of one process on the same "
        "cores. Lost: over all rounds, acknowledged spans that cannot be loaded after the end."
    )
    return table


if __name__ == "__main__":
    main()
