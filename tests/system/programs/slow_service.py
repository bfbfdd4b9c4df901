"""A service in small: requests come in at a rate, wait in a queue, and threads answer them with a model.

With `--to` requests are traced with OpenTelemetry and the model is instrumented by xsp; spans go to that receiver.
"""

from __future__ import annotations

import argparse
import json
import queue
import random
import statistics
import threading
import time
from contextlib import ExitStack, nullcontext

import torch
from served import build, build_slow

parser = argparse.ArgumentParser()
parser.add_argument("--requests", type=int, default=200)
parser.add_argument("--rate", type=float, default=30.0, help="requests per second")
parser.add_argument("--workers", type=int, default=1, help="threads that answer")
parser.add_argument("--torch-threads", type=int, default=1, help="of a model's call")
parser.add_argument("--batch", type=int, default=1, help="requests that are answered by one call, at most")
parser.add_argument("--slow-layer", action="store_true", help="a layer that goes through its rows in Python")
parser.add_argument("--to", help="a receiver of OTLP, http://127.0.0.1:4318 for instance")
parser.add_argument("--sample", type=float, default=1.0)
options = parser.parse_args()


torch.manual_seed(0)
torch.set_num_threads(options.torch_threads)
model, _ = build_slow(1) if options.slow_layer else build(1)


class Request:
    """A request with its span, where it has one."""

    def __init__(self) -> None:
        self.came, self.x = time.perf_counter(), torch.randn(1, 128, 256)
        self.span = tracer.start_span("GET /predict") if tracer else None
        self.waits = self._child("queue")

    def _child(self, name):
        return tracer.start_span(name, context=trace.set_span_in_context(self.span)) if tracer else None

    def taken(self) -> None:
        waited.append(time.perf_counter() - self.came)
        if self.waits is not None:
            self.waits.end()

    def answered(self) -> None:
        took.append(time.perf_counter() - self.came)
        if self.span is not None:
            self.span.end()


def serve() -> None:
    """Answer until there is nothing more, as many requests by one call as are waiting and fit."""
    while (first := inbox.get()) is not None:
        group = [first]
        while len(group) < options.batch and not inbox.empty():
            following = inbox.get()
            if following is None:
                inbox.put(None)
                break
            group.append(following)
        for request in group:
            request.taken()
        x = torch.cat([request.x for request in group])
        if traced is None:
            inside = nullcontext()
        elif len(group) > 1:
            inside = traced.batch([request.span for request in group])
        else:
            inside = trace.use_span(first.span)
        begin = time.perf_counter()
        with inside, torch.inference_mode():
            model(x)
        called.append(time.perf_counter() - begin)
        for request in group:
            request.answered()


def ms(seconds: list[float], share: float = 0.5) -> float:
    return round(1e3 * statistics.quantiles(seconds, n=100)[int(100 * share) - 1], 3)


trace = tracer = traced = None
waited: list[float] = []
took: list[float] = []
called: list[float] = []
inbox: queue.Queue[Request | None] = queue.Queue()
with ExitStack() as stack:
    if options.to:
        from opentelemetry import trace
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        import xsp

        provider = TracerProvider(resource=Resource({"service.name": "shop"}))
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(f"{options.to}/v1/traces")))
        stack.callback(provider.shutdown)
        tracer = provider.get_tracer("shop")
        traced = stack.enter_context(xsp.instrument(model, provider=provider, otlp=options.to, sample=options.sample))
    with torch.inference_mode():
        for size in range(1, options.batch + 1):
            model(build(size)[1])
    threads = [threading.Thread(target=serve) for _ in range(options.workers)]
    for thread in threads:
        thread.start()
    between = random.Random(0)
    begin = time.perf_counter()
    for _ in range(options.requests):
        time.sleep(between.expovariate(options.rate))
        inbox.put(Request())
    for _ in threads:
        inbox.put(None)
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - begin
said = {"request_ms": ms(took), "request_p95_ms": ms(took, 0.95), "queue_ms": ms(waited), "model_ms": ms(called)}
print(json.dumps({**said, "requests": len(took), "calls": len(called), "per_s": round(len(took) / seconds, 1)}))
