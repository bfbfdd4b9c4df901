"""The spans of a short trace are a table, those of a long one a view of the columns that vary: with the same rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import xsp
from xsp.correlate import columns
from xsp.store.trace import Trace


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A trace with an operator, its launches, kernels, and a replayed graph whose kernels have the same names."""
    events: list[dict[str, Any]] = []

    def add(category: str, name: str, ts: int, dur: int, **args: Any) -> None:
        events.append(
            {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": 1, "ts": ts, "dur": dur, "args": args}
        )

    for step in (1, 2):
        start = 1000 * step
        add("user_annotation", f"ProfilerStep#{step}", start, 900)
        if step == 1:
            add("cpu_op", "aten::mm", start + 2, 80, **{"Input Dims": [[2, 3], [3, 4]], "Input type": ["float"] * 2})
            for number in (0, 1):
                add("cuda_runtime", "cudaLaunchKernel", start + 10 + 20 * number, 5, correlation=number + 1)
        else:
            add("cuda_runtime", "cudaGraphLaunch", start + 10, 5, correlation=9)
        for number, name in enumerate(("gemm", "reduce")):
            work = {"device": 0, "stream": 7, "correlation": number + 1 if step == 1 else 9}
            add("kernel", name, start + 20 + 30 * number, 20, **work)
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": events}))
    return path


def is_table(trace: Trace) -> bool:
    return bool(trace.sql("SELECT 1 FROM duckdb_tables() WHERE table_name = 'spans'").fetchall())


@pytest.mark.parametrize("replayed", [True, False])
def test_both_forms_have_the_same_rows(file: Path, monkeypatch: pytest.MonkeyPatch, replayed: bool) -> None:
    if not replayed:
        file.write_text(file.read_text().replace("cudaGraphLaunch", "cudaOtherLaunch"))
    short = xsp.load(file)
    monkeypatch.setattr(columns, "MOST_IN_TABLE", 0)
    long = xsp.load(file)
    assert is_table(short)
    assert is_table(long) == replayed  # what replays are given makes a table
    for name in ("spans", "merged"):
        rows = short.sql(f"SELECT * FROM {name} ORDER BY ALL").fetchall()
        assert rows == long.sql(f"SELECT * FROM {name} ORDER BY ALL").fetchall()
        assert rows
    tables = "SELECT table_name FROM duckdb_tables() ORDER BY 1"
    assert {"raw_spans", "varying", "correlated", "attributed"}.isdisjoint(
        name for (name,) in short.sql(tables).fetchall()
    )
