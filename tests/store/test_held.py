"""The spans of a run directory in memory: the same rows, and only where they are few."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

import xsp
from xsp.store.trace import Trace
from xsp.testing import spans, trace_of


def held(trace: Trace) -> set[str]:
    """Return which of the two are tables, and no longer read from files."""
    found = trace.con.execute("SELECT table_name FROM duckdb_tables()").fetchall()
    return {"spans", "merged"} & {name for (name,) in found}


def test_a_run_in_memory_has_the_rows_that_it_has_on_the_disk(small_run: Path) -> None:
    on_disk, trace = xsp.load(small_run), xsp.load(small_run)
    trace.load_into_memory(100_000)
    assert held(trace) == {"spans", "merged"}
    trace.load_into_memory(100_000)
    for name in ("spans", "merged", "alike_spans"):
        query = f"SELECT * FROM {name} ORDER BY trace_id, span_id"
        assert trace.sql(query).fetchall() == on_disk.sql(query).fetchall()


def test_a_run_with_more_spans_stays_on_the_disk(small_run: Path) -> None:
    trace = xsp.load(small_run)
    trace.load_into_memory(10)
    assert held(trace) == set()
    assert len(trace.spans) > 10


def test_a_trace_that_is_no_run_directory_is_left_as_it_is() -> None:
    trace = trace_of(spans("step s 0-1000"))
    trace.load_into_memory(100_000)
    assert len(trace.spans) == 1
