"""Read traces of PyTorch's profiler (Kineto), of all versions: the meaning of their trace events.

The categories and the names of arguments have changed since 2021, and differ by vendor, so all their names are known
(see `xsp.importers.kineto_rows`). Whether a row is a step, an optimizer, a collective or an operator follows from its
name, because old traces have one category for all of these. Events that are not imported are counted.
"""

from __future__ import annotations

import re
from typing import Any

import duckdb

from xsp.errors import TraceError
from xsp.importers import contract, kineto_counters, kineto_rows, kineto_whole, traceevents
from xsp.importers.contract import Losses, SourceInfo, TableImporter
from xsp.importers.kineto_rows import parse_integer

MARKS = (b'"schemaVersion"', b'"deviceProperties"', b'"distributedInfo"', b'"baseTimeNanoseconds"', b"PyTorch Profiler",
         b"ProfilerStep#", b'"cpu_op"', b'"python_function"', b'"ac2g"', b'"aten::')  # fmt: skip
"""A Kineto trace has one of these in its first bytes, which distinguishes it from traces of other programs."""

PUBLIC = {"schemaVersion", "deviceProperties", "distributedInfo", kineto_rows.BASE, "displayTimeUnit"}
"""Top-level keys that are imported or contain nothing private. Others may name people, machines and paths."""

MAX_DEVICES = 1024
"""Maximum number of devices of a machine."""


class Kineto(TableImporter):
    """Reads a trace file of torch.profiler."""

    name = "kineto"

    def recognises(self, head: bytes, source: str) -> bool:
        """Return whether the file is JSON with trace events from PyTorch."""
        return is_kineto(head)

    def fill(self, con: duckdb.DuckDBPyConnection, source: str) -> SourceInfo:
        """Make the table `raw_spans`, see `TableImporter.fill`."""
        rows = kineto_rows.Rows()
        envelope = traceevents.read(con, source, rows)
        losses = Losses(self.name)
        if envelope.is_unclosed:
            losses.note("the list of trace events is not closed: the program that wrote it ended early")
        return _complete(con, source, rows, envelope.keys, losses)


def fill_from(con: duckdb.DuckDBPyConnection, source: str, events: str, losses: Losses) -> SourceInfo:
    """Make the table `raw_spans` from trace events of another form of file.

    Args:
        con: the engine.
        source: path of the file, for errors.
        events: SQL of a table with the columns of `traceevents.EventSink.store`, without those of `extra_columns`.
        losses: counts what is left out.

    Raises:
        TraceError: there is no operator, call or kernel.
    """
    rows = kineto_rows.Rows()
    rows.begin(con, {})
    query = f"SELECT * FROM {events}"
    for name, value in rows.extra_columns.items():
        query = f"SELECT *, {value} AS {name} FROM ({query})"
    con.execute(f"CREATE OR REPLACE TEMP TABLE portion AS {query}")
    rows.store(con)
    con.execute("DROP TABLE portion")
    return _complete(con, source, rows, {}, losses)


def _complete(
    con: duckdb.DuckDBPyConnection, source: str, rows: kineto_rows.Rows, keys: dict[str, Any], losses: Losses
) -> SourceInfo:
    """Complete the spans of stored events; `keys` are the top-level keys of the file."""
    run = _run(keys)
    counters = kineto_counters.attach(con, run["machine"]["device_properties"], losses)
    base_ns = parse_integer(keys.get(kineto_rows.BASE)) or 0
    if frames := kineto_whole.long_frames(con, base_ns - rows.base_ns):
        run["frames"] = frames
    if kinds := kineto_whole.finish(con, base_ns - rows.base_ns, losses):
        run["kinds"] = kinds
    losses.spans = con.execute("SELECT count(*) FROM raw_spans").fetchall()[0][0]
    if not losses.spans:
        reason = (
            f"{source}: a trace of PyTorch's profiler that holds no operator, call or kernel; record steps with "
            "torch.profiler.profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])"
        )
        raise TraceError("; ".join([reason, *losses.sentences()]))
    private = {key: value for key, value in keys.items() if key not in PUBLIC and "version" not in key}
    # a span may extend beyond its parent by more if times are whole microseconds
    rounded = con.execute("SELECT coalesce(bool_and(start_ns % 1000 = 0 AND dur_ns % 1000 = 0), false) FROM raw_spans")
    return SourceInfo(run | counters, losses, 2500 if rounded.fetchall()[0][0] else 500, private)


def is_kineto(head: bytes) -> bool:
    """Return whether a file with these first bytes is a trace of PyTorch's profiler."""
    start = head.lstrip(b"\xef\xbb\xbf \t\r\n")[:1]
    is_spans = b'"resourceSpans"' in head or b'"spanID"' in head
    return start in (b"{", b"[") and not is_spans and any(mark in head for mark in MARKS)


def _run(keys: dict[str, Any]) -> dict[str, Any]:
    """Return the description of a trace's run: devices, versions, rank; nothing that identifies its owner."""
    distributed = keys.get("distributedInfo")
    distributed = distributed if isinstance(distributed, dict) else {}
    properties = keys.get("deviceProperties")
    entries = properties[:MAX_DEVICES] if isinstance(properties, list) else []
    devices = [_device(entry) for entry in entries if isinstance(entry, dict)]
    run: dict[str, Any] = {
        "machine": {
            "devices": [device["name"] for device in devices],
            "device_properties": devices,
            "versions": {key: keys[key] for key in sorted(keys) if re.search("version", key) and _is_plain(keys[key])},
        },
    }
    if (rank := parse_integer(distributed.get("rank"), below=1 << 31)) is not None:  # the range of the column
        run["rank"] = rank
    if (size := parse_integer(distributed.get("world_size"))) is not None:
        run["world_size"] = size
    if isinstance(distributed.get("backend"), str):
        run["backend"] = distributed["backend"]
    return run


def _device(properties: dict[str, Any]) -> dict[str, Any]:
    keys = ("numSms", "totalGlobalMem", "computeMajor", "computeMinor", "warpSize")
    return contract.device(str(properties.get("name", ""))[:256], *(parse_integer(properties.get(key)) for key in keys))


def _is_plain(value: Any) -> bool:
    return isinstance(value, (int, float)) or (isinstance(value, str) and len(value) < 40)
