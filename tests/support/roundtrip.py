"""A small real run, its export, and a comparison of what is read back."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from torch import nn

import xsp
from xsp import cli, rundir
from xsp.analyses import ANALYSES, Analysis
from xsp.errors import AnalysisError
from xsp.schema import COLUMNS
from xsp.store.trace import Trace


class Snapshot(NamedTuple):
    """The content of a run that is compared with that of other runs."""

    rows: list[Any]
    tables: dict[str, Any]


def snapshot(run: Path) -> Snapshot:
    """Return the compared content of a run."""
    trace = xsp.load(run)
    return Snapshot(rows(trace), tables(trace))


def record(out: Path, repeats: int = 5) -> Path:
    """Record a convolution network on the CPU, with all levels; without what is not exported, the table `before`."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 30 * 30, 10)).eval()
    inputs = torch.randn(2, 3, 32, 32)
    with xsp.profile("small", out=out, samples=False) as prof:
        for _ in range(prof.schedule.steps_for(repeats=repeats)):
            with prof.step(), torch.inference_mode():
                model(inputs)
    shutil.rmtree(out / rundir.BEFORE, ignore_errors=True)
    return out


def export_run(run: Path, to: str | Path, *options: str) -> str:
    """Export a run, and return the target."""
    assert cli.main(["export", str(run), "--to", str(to), "--quiet", *options]) == 0
    return str(to)


def rows(trace: Trace) -> list[Any]:
    """Return all spans of all steps, with all columns; attributes are parsed, since JSON objects have no order."""
    names = ", ".join(column.name for column in COLUMNS)
    return [
        _with_parsed_json(row) for row in trace.sql(f"SELECT {names} FROM spans ORDER BY trace_id, span_id").fetchall()
    ]


SAMPLING_ANALYSES = ("samples", "samples-timeline", "throttling", "energy")


REPRESENTATIVE = ("A1", "A2", "A8", "ledger", "phases", "health")
"""Analyses of each kind. After all rows were compared, they represent all fifty, which take over a second."""


def tables(trace: Trace) -> dict[str, Any]:
    """Return the merged step and the table of each analysis of spans, or the reason for its absence; no samples."""
    return _tables(trace, [name for name in ANALYSES if name not in SAMPLING_ANALYSES])


def representative_tables(trace: Trace) -> dict[str, Any]:
    """Return the merged step and the tables of `REPRESENTATIVE`."""
    return _tables(trace, REPRESENTATIVE)


def select_representative(tables: dict[str, Any]) -> dict[str, Any]:
    """Return of all tables those that `representative_tables` returns."""
    return {name: tables[name] for name in (*REPRESENTATIVE, "merged")}


def _tables(trace: Trace, names: Iterable[str]) -> dict[str, Any]:
    tables_by_name = {name: _answer(ANALYSES[name], trace) for name in names}
    return {**tables_by_name, "merged": [_with_parsed_json(row) for row in trace.merged.fetchall()]}


def without(tables: dict[str, Any], *names: str) -> dict[str, Any]:
    """Return tables without some of them."""
    return {name: table for name, table in tables.items() if name not in names}


def _answer(analysis: Analysis, trace: Trace) -> list[Any] | str:
    try:
        return [tuple(map(_rounded, row)) for row in analysis(trace).fetchall()]
    except AnalysisError as error:
        return str(error)


def _rounded(value: Any) -> Any:
    """Return a number without its last digits, which depend on the order of additions: the engine adds in parallel."""
    return float(f"{value:.12g}") if isinstance(value, float) else value


def _with_parsed_json(row: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(json.loads(value) if isinstance(value, str) and value[:1] == "{" else value for value in row)


def request(**fields: Any) -> ExportTraceServiceRequest:
    """Return a request with one span of another program; `fields` replaces its fields."""
    message = ExportTraceServiceRequest()
    resource = message.resource_spans.add()
    attribute = resource.resource.attributes.add(key="service.name")
    attribute.value.string_value = "shop"
    scope = resource.scope_spans.add()
    scope.scope.name = "handmade"
    defaults = {
        "trace_id": b"\x01" * 16,
        "span_id": b"\x02" * 8,
        "name": "GET /",
        "start_time_unix_nano": 1_000_000,
        "end_time_unix_nano": 3_000_000,
    }
    scope.spans.add(**{**defaults, **fields})
    return message


def spans_of(message: ExportTraceServiceRequest) -> Any:
    """Return the spans of a request of `request`, to be changed."""
    return message.resource_spans[0].scope_spans[0].spans
