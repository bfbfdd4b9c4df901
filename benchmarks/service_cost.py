"""What does instrumenting a service cost: for sampled requests, for requests beside these, and for all others?

A FastAPI service with OpenTelemetry runs in its own process on loopback and exports its spans to another process. It
is instrumented and not instrumented in turns, for a number of requests each. The trace id that the client sends
determines whether a request is sampled.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import math
import random
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from time import perf_counter_ns
from typing import Any, NamedTuple

from parts import turns

from xsp import stats

SAMPLE = 0.01
SAMPLED_ID, UNSAMPLED_ID = 0, (1 << 64) - 1
"""Lower halves of trace ids: one that is sampled at any sampling share, and one that is sampled at none."""

SAMPLED_EVERY = 100
"""In cases with requests beside sampled ones, one in this many requests is sampled."""

GOAL, TAIL_GOAL = 1.01, 1.2
"""Goals for requests that are not sampled: ratio of their median and 99th percentile to those of the bare service."""

SETTLE_S = 0.2


class Case(NamedTuple):
    """A kind of requests that is compared with those of the bare service."""

    name: str
    way: str
    """Setting of the service: `bare`, `processors`, `otlp`."""

    sampled_every: int
    """One in this many requests is sampled; 0 for none."""

    measures_sampled: bool


BARE = Case("not instrumented", "bare", 0, False)
CASES = (
    BARE,
    Case("instrumented, request not sampled", "processors", 0, False),
    Case(f"… while 1 in {SAMPLED_EVERY} others is", "processors", SAMPLED_EVERY, False),
    Case("… and the others' spans are sent by xsp", "otlp", SAMPLED_EVERY, False),
    Case("request sampled, spans through the service", "processors", 1, True),
    Case("request sampled, spans sent by xsp", "otlp", 1, True),
)
MODELS = {"MLP, 4 layers": ("mlp", 300), "resnet18": ("resnet18", 60)}
"""Name in the table → name for the service, and number of requests of a case in a round."""


# --- the service, in a separate process -------------------------------------------------------------------


def serve(port: int, sink: int, name: str, threads: int) -> None:
    """Run the service until its process is killed."""
    import torch
    import uvicorn
    from fastapi import FastAPI
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.instrumentation.fastapi import FastAPIInstrumentor
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    import xsp

    torch.set_num_threads(threads)
    model, shape = _model(name)
    value = torch.rand(shape)
    target = f"http://127.0.0.1:{sink}"
    provider = TracerProvider(resource=Resource({"service.name": "shop"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(f"{target}/v1/traces")))
    app, traced = FastAPI(), contextlib.ExitStack()

    @app.post("/be/{way}")
    def be(way: str) -> None:
        traced.close()
        if way != "bare":
            otlp = target if way == "otlp" else None
            app.state.traced = traced.enter_context(xsp.instrument(model, sample=SAMPLE, provider=provider, otlp=otlp))

    @app.get("/flush")
    def flush() -> dict[str, Any]:
        app.state.traced.flush()
        return dict(app.state.traced.counts._asdict())

    @app.get("/call/{times}")
    def call(times: int) -> int:
        with torch.inference_mode():
            return statistics.median_low([_time(model, value) for _ in range(times)])

    @app.get("/predict")
    def predict() -> int:
        with torch.inference_mode():
            return int(model(value).argmax())

    FastAPIInstrumentor.instrument_app(app, tracer_provider=provider, exclude_spans=["receive", "send"])
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="error")


def _time(model: Any, value: Any) -> int:
    begin = perf_counter_ns()
    model(value)
    return perf_counter_ns() - begin


def _model(name: str) -> tuple[Any, tuple[int, ...]]:
    import torch
    from torch import nn

    torch.manual_seed(0)
    if name == "mlp":
        return nn.Sequential(*[nn.Sequential(nn.Linear(256, 256), nn.ReLU()) for _ in range(4)]).eval(), (8, 256)
    from torchvision import models

    return models.resnet18().eval(), (1, 3, 224, 224)


def receive(port: int) -> None:
    """Accept all requests, and discard their content."""
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

    class Sink(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    ThreadingHTTPServer(("127.0.0.1", port), Sink).serve_forever()


# --- the client -------------------------------------------------------------------------------------------


class Client:
    """A persistent connection to the service."""

    def __init__(self, port: int, seed: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        self._draw = random.Random(seed)

    def ask(self, method: str, path: str, low: int = UNSAMPLED_ID) -> tuple[int, bytes]:
        """Send a request whose trace id ends in `low`; return the nanoseconds until the answer, and the answer."""
        trace_id = f"{self._draw.getrandbits(63) + 1:016x}{low:016x}"
        headers = {"traceparent": f"00-{trace_id}-{1:016x}-01"}
        begin = perf_counter_ns()
        self._connection.request(method, path, headers=headers)
        answer = self._connection.getresponse()
        content = answer.read()
        elapsed_ns = perf_counter_ns() - begin
        if answer.status != 200:
            raise SystemExit(f"{method} {path}: {answer.status} {content[:200]!r}")
        return elapsed_ns, content

    def set(self, case: Case) -> None:
        """Set the service for a case, and warm it up."""
        self.ask("POST", f"/be/{case.way}")
        if case.sampled_every:  # the first sampled request starts threads and a process
            self.ask("GET", "/predict", SAMPLED_ID)
            self.ask("GET", "/flush")
        time.sleep(SETTLE_S)
        for _ in range(10):
            self.ask("GET", "/predict")

    def take(self, case: Case, requests: int) -> list[int]:
        """Send the requests of a case; return the nanoseconds of the sampled ones, or else of the others."""
        self.set(case)
        if case.measures_sampled:
            return [self._take_sampled() for _ in range(max(requests // 10, 5))]
        times = []
        for number in range(requests):
            is_sampled = case.sampled_every > 0 and number % case.sampled_every == case.sampled_every // 2
            elapsed_ns, _ = self.ask("GET", "/predict", SAMPLED_ID if is_sampled else UNSAMPLED_ID)
            if not is_sampled:
                times.append(elapsed_ns)
        return times

    def _take_sampled(self) -> int:
        """Wait until all spans are delivered, then send a sampled request; return its nanoseconds."""
        self.ask("GET", "/flush")
        return self.ask("GET", "/predict", SAMPLED_ID)[0]

    def call(self, case: Case, times: int) -> int:
        """Return the nanoseconds of the model's call alone, in a request that is not sampled."""
        self.set(case)
        return int(self.ask("GET", f"/call/{times}")[1])


@contextlib.contextmanager
def running_service(model: str, options: argparse.Namespace) -> Iterator[Client]:
    """Start the service and the receiver of its spans, and yield a client."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2)]
        port, sink = (listener.getsockname()[1] for listener in sockets)
        stack.close()
        script = str(Path(__file__).resolve())
        for command in (["--receive", str(sink)], ["--serve", str(port), str(sink), model, str(options.threads)]):
            process = subprocess.Popen([sys.executable, script, *command])
            stack.callback(process.wait)
            stack.callback(process.kill)
        yield _connect(port, options.seed)


def _connect(port: int, seed: int) -> Client:
    end = time.monotonic() + 120
    while True:
        client = Client(port, seed)
        try:
            client.ask("GET", "/predict")
        except OSError:
            if time.monotonic() > end:
                raise SystemExit("the service did not start within two minutes") from None
            time.sleep(0.2)
        else:
            return client


# --- figures ----------------------------------------------------------------------------------------------

Round = dict[str, list[int]]
MODEL_CALL = "the model's call alone"


def measure_rounds(name: str, options: argparse.Namespace, rounds: int) -> Iterator[Round]:
    """Yield the nanoseconds of each case's requests, round by round, after one round that does not count.

    The key `MODEL_CALL` has those of the model's call in the bare service, and in a request that is not sampled.
    """
    model, requests = MODELS[name]
    requests = min(requests, 12) if options.quick else requests
    draw = random.Random(options.seed + rounds)
    deadline = time.monotonic() + (options.seconds or math.inf) / len(MODELS)
    with running_service(model, options) as client:
        for number in range(rounds + 1):
            turns.say(f"{name}: round {number} of {rounds}")
            times = {case.name: client.take(case, requests) for case in draw.sample(CASES, k=len(CASES))}
            call_times = [client.call(case, requests) for case in CASES[:2]]
            if number:
                yield {**times, MODEL_CALL: call_times}
            if number and time.monotonic() > deadline:
                return


def percentile(share: float, rounds: Sequence[Round], name: str) -> float:
    """Return a percentile of a case's requests, over all rounds together."""
    return stats.percentile([elapsed_ns for round_times in rounds for elapsed_ns in round_times[name]], share)


def against_bare(share: float, rounds: Sequence[Round], name: str) -> turns.Figure:
    """Return the ratio of a percentile of a case to that of the bare service."""
    return turns.bootstrap(
        rounds, lambda sample: percentile(share, sample, name) / percentile(share, sample, BARE.name)
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, save."""
    parser = turns.parser(__doc__, rounds=12)
    parser.add_argument("--threads", type=int, default=1, help="threads of torch in the service (default: 1)")
    parser.add_argument("--out", type=Path, help="file to which each round is added; rounds in it are not repeated")
    parser.add_argument("--seconds", type=float, help="time limit, which limits the number of rounds")
    options = turns.parse(parser, arguments)
    stored = json.loads(options.out.read_text("utf-8")) if options.out and options.out.exists() else {}
    columns = ("requests", "median, ms", "99th, ms", "median to bare", "99th to bare", "≤ 1 %, ≤ 1.2 ×")
    report = turns.Report("service_cost", "Cost of instrumentation for the requests of a service", columns)
    for name in MODELS:
        rounds = stored.setdefault(name, [])
        if len(rounds) < options.rounds:
            for round_times in measure_rounds(name, options, options.rounds - len(rounds)):
                rounds.append(round_times)
                if options.out:
                    options.out.write_text(json.dumps(stored) + "\n", encoding="utf-8")
        if len(rounds) < 2:
            report.notes.append(f"{name}: not measured, the time limit was reached.")
            continue
        for case in CASES:
            middle, tail = (against_bare(share, rounds, case.name) for share in (0.5, 0.99))
            milliseconds = [f"{percentile(share, rounds, case.name) / 1e6:.3f}" for share in (0.5, 0.99)]
            goal = "–" if case.measures_sampled else f"{turns.verdict(middle, GOAL)}, {turns.verdict(tail, TAIL_GOAL)}"
            cells = ["1", "1", "–"] if case is BARE else [middle.text(4), tail.text(4), goal]
            report.add(
                [f"{name}: {case.name}", *milliseconds, *cells],
                median=middle,
                p99=tail,
                requests=sum(len(one_round[case.name]) for one_round in rounds),
                medians=[statistics.median(one_round[case.name]) for one_round in rounds],
            )
        call_cost = turns.middle(
            [instrumented - bare for bare, instrumented in (one_round[MODEL_CALL] for one_round in rounds)]
        )
        shares = [100 / percentile(share, rounds, BARE.name) for share in (0.5, 0.99)]
        report.notes.append(
            f"{name}: the model's call alone takes {call_cost.text(1, 1e-3)} µs longer in a request that is not "
            f"sampled: {call_cost.text(2, shares[0])} % of the bare request's median, "
            f"{call_cost.text(2, shares[1])} % of its 99th."
        )
        report.data[f"{name}: {MODEL_CALL}"] = {
            "nanoseconds": call_cost,
            "rounds": [one_round[MODEL_CALL] for one_round in rounds],
        }
    report.notes.append(
        "Times are the client's, on loopback; percentiles are over the requests of all rounds, intervals from "
        f"resampling rounds. The service always exports its requests' spans. sample={SAMPLE}; a verdict for the median "
        "and one for the 99th percentile."
    )
    report.finish(options)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], int(sys.argv[5]))
    elif sys.argv[1:2] == ["--receive"]:
        receive(int(sys.argv[2]))
    else:
        main()
