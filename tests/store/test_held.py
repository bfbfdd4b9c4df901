"""The spans of a run directory in memory: the same rows, and only where they are few."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

import xsp
from xsp import table
from xsp.store.trace import Trace
from xsp.testing import spans, trace_of


def held(trace: Trace) -> set[str]:
    """Return which of them are tables, and not read from files."""
    found = trace.con.execute("SELECT table_name FROM duckdb_tables()").fetchall()
    return {"spans", "merged", "before", "samples"} & {name for (name,) in found}


@pytest.fixture
def on_disk(small_run: Path, monkeypatch: pytest.MonkeyPatch) -> Trace:
    """That run, of which nothing is in memory."""
    monkeypatch.setattr(table, "MOST_HELD", 0)
    return xsp.load(small_run)


def test_a_small_run_is_read_into_memory_when_it_is_loaded(small_run: Path, on_disk: Trace) -> None:
    assert not {"spans", "merged"} & held(on_disk)
    table.MOST_HELD = 100_000
    trace = xsp.load(small_run)
    assert {"spans", "merged", "before", "samples"} == held(trace)
    for name in ("spans", "merged", "alike_spans", "before", "samples"):
        query = f"SELECT * FROM {name} ORDER BY ALL"
        assert trace.sql(query).fetchall() == on_disk.sql(query).fetchall()


def test_the_report_reads_more_into_memory(on_disk: Trace) -> None:
    on_disk.load_into_memory(10)
    assert not {"spans", "merged"} & held(on_disk)
    assert len(on_disk.spans) > 10
    on_disk.load_into_memory(100_000)
    assert {"spans", "merged"} <= held(on_disk)
    on_disk.load_into_memory(100_000)


def test_a_trace_that_is_no_run_directory_is_left_as_it_is() -> None:
    trace = trace_of(spans("step s 0-1000"))
    trace.load_into_memory(100_000)
    assert len(trace.spans) == 1
