"""Fabricated run directories with any number of spans, which look like those of a program on a GPU.

A step has a root span, layers as its children, operators as children of layers, and kernels as children of operators,
in the proportions of a convolutional network: of twenty spans one is a layer, five are operators, the rest kernels.
"""

from __future__ import annotations

from pathlib import Path

import duckdb

from xsp import identity, rundir, table
from xsp.schema import Kind, Level, Span

EPOCH_NS = 1_790_000_000_000_000_000
KERNELS = [f"void implicit_gemm_{kind}_{size}x{size}x32_stage{stage}<float, 128, 3>(float const*, float const*, float*)"
           for kind in ("forward", "dgrad", "wgrad") for size in (32, 64, 128, 256) for stage in (3, 4)]  # fmt: skip
OPERATORS = [f"aten::{name}" for name in ("convolution", "cudnn_batch_norm", "relu_", "add_", "max_pool2d", "addmm")]


def write(run: Path, steps: int, spans: int) -> Path:
    """Write a run of `steps` steps with `spans` spans each, and return its directory."""
    rundir.create(run)
    con = table.connect()
    for step in range(steps):
        table.create(con, "segment")
        _fill(con, step, spans)
        table.write_parquet(con, "segment", rundir.segment(run, step))
    identifiers = identity.of_this_process({})
    otel = {"trace_id": identifiers.trace_id, "span_id": identifiers.span_id, "parent_id": None}
    origin = {
        "id": identifiers.id,
        "otel": otel,
        "process": identifiers.process,
        "host": identifiers.host,
        "rank": 0,
        "world_size": 1,
    }
    times = {"start_ns": EPOCH_NS, "end_ns": EPOCH_NS + (steps + 1) * 10**9}
    rundir.write_run(run, {"name": "fabricated", "finished": True, **origin, **times})
    return run


def _fill(con: duckdb.DuckDBPyConnection, step: int, spans: int) -> None:
    """Insert one step: the number of a span determines its level and its parent."""
    common = Span(process=1, thread=1, step=step, rung=int(Level.KERNEL), timed=True, collector="fabricated")
    layer, op = "n - n % 20 + 1", "n - n % 20 + 2 + n % 5"
    columns = {
        "trace_id": f"printf('%032x', {step + 1})",
        "span_id": _id(step, "n"),
        "parent_id": f"CASE WHEN n = 0 THEN NULL WHEN n % 20 = 1 THEN {_id(step, '0')} "
        f"WHEN n % 20 BETWEEN 2 AND 6 THEN {_id(step, layer)} ELSE {_id(step, op)} END",
        "level": f"CASE WHEN n = 0 THEN {Level.MODEL:d} WHEN n % 20 = 1 THEN {Level.LAYER:d} "
        f"WHEN n % 20 BETWEEN 2 AND 6 THEN {Level.OP:d} ELSE {Level.KERNEL:d} END",
        "kind": f"CASE WHEN n = 0 THEN '{Kind.STEP}' WHEN n % 20 = 1 THEN '{Kind.MODULE}' "
        f"WHEN n % 20 BETWEEN 2 AND 6 THEN '{Kind.OP}' ELSE '{Kind.KERNEL}' END",
        "name": "CASE WHEN n = 0 THEN 'fabricated' "
        "WHEN n % 20 = 1 THEN 'layer' || (n // 2000) || '.' || (n // 20 % 100) "
        f"WHEN n % 20 BETWEEN 2 AND 6 THEN {OPERATORS}[1 + n % {len(OPERATORS)}] "
        f"ELSE {KERNELS}[1 + n % {len(KERNELS)}] END",
        "start_ns": f"{EPOCH_NS + step * 10**9} + n * 900",
        "dur_ns": f"CASE WHEN n = 0 THEN {spans * 900} WHEN n % 20 = 1 THEN 17000 ELSE 800 END",
        "thread": "CASE WHEN n % 20 BETWEEN 0 AND 6 THEN 1 END",
        "device": "CASE WHEN n % 20 BETWEEN 0 AND 6 THEN NULL ELSE 0 END",
        "stream": "CASE WHEN n % 20 BETWEEN 0 AND 6 THEN NULL ELSE 7 END",
        "correlation_id": "CASE WHEN n % 20 BETWEEN 0 AND 6 THEN NULL ELSE n END",
        "key": "printf('%016x', hash(n))",
    }
    table.create(con, "one")
    table.insert(con, "one", [common])
    replacements = ", ".join(f"{value} AS {name}" for name, value in columns.items())
    con.execute(f"INSERT INTO segment SELECT one.* REPLACE ({replacements}) FROM one, range({spans}) AS _(n)")


def _id(step: int, number: str) -> str:
    return f"printf('%08x%08x', {step + 1}, CAST({number} AS BIGINT))"
