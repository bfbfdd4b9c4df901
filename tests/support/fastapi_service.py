"""A FastAPI service with OpenTelemetry and an instrumented model: test_service_fastapi.py runs it.

python fastapi_service.py PORT                  serve on loopback; spans go to stdout, a JSON object a line
python fastapi_service.py PORT OTLP             or to OTLP
python fastapi_service.py PORT OTLP directly    and those below the models' are sent there by xsp's own process
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import torch
import uvicorn
from fastapi import FastAPI
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.instrumentation.fastapi import FastAPIInstrumentor
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter
from torch import nn

import xsp


def application(provider: TracerProvider, **options: Any) -> FastAPI:
    """Return the service; `options` are those of `xsp.instrument`."""
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)).eval()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        with xsp.instrument(model, provider=provider, **options) as app.state.traced:
            yield
        provider.force_flush()

    app = FastAPI(lifespan=lifespan)

    def predict(rows: int) -> list[int]:
        with torch.inference_mode():
            return list(model(torch.ones(rows, 8)).shape)

    @app.get("/thread/{rows}")
    def in_a_thread(rows: int) -> list[int]:
        return predict(rows)

    @app.get("/loop/{rows}")
    async def in_the_event_loop(rows: int) -> list[int]:
        return predict(rows)

    @app.get("/fail")
    def fail() -> None:
        model(torch.ones(1, 7))

    FastAPIInstrumentor.instrument_app(app, tracer_provider=provider, exclude_spans=["receive", "send"])
    return app


if __name__ == "__main__":
    port, otlp, directly = [*sys.argv[1:], "", ""][:3]
    provider = TracerProvider(resource=Resource({"service.name": "shop"}))
    lines = ConsoleSpanExporter(formatter=lambda span: span.to_json(indent=None) + "\n")
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(f"{otlp}/v1/traces") if otlp else lines))
    app = application(provider, sample=1.0, otlp=otlp if directly else None)
    uvicorn.run(app, host="127.0.0.1", port=int(port), log_level="warning")
