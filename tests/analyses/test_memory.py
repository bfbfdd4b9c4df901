"""Memory over a step that can be added up by hand: input, question, answer."""

from __future__ import annotations

import json
from typing import Any

import pytest

from xsp.analyses.contract import Analysis
from xsp.analyses.memory import MIB, NO_FREES, OF_DEVICES, SUMS, TOTALS, memory_steps, memory_timeline
from xsp.errors import AnalysisError
from xsp.schema import Span
from xsp.store.merge import true_trace
from xsp.store.trace import Trace
from xsp.table import connect, create, insert
from xsp.testing import spans, trace_of

# (µs, MiB, address, total MiB after it, layer): conv's output stays, its workspace goes; relu's output stays.
CHANGES = [
    (15, 4, 1, 104, "conv"),
    (20, 8, 2, 112, "conv"),
    (30, -8, 2, 104, "conv"),
    (60, 4, 3, 108, "relu"),
    (90, -4, 1, 104, None),
]


def step(number: int, totals: bool = True) -> list[Span]:
    common: dict[str, Any] = {"trace_id": f"{number:032x}", "step": number, "rung": 40, "timed": True, "process": 1}
    text = "step train 0-100\nmodule conv 10-50 layer_index=0\nmodule relu 55-70 layer_index=1\nop aten::conv2d 12-40"
    rows = [
        row._replace(**common, key=row.name, span_id=row.name, start_ns=row.start_ns + 100_000 * number)
        for row in spans(text)
    ]
    parents = {"conv": "aten::conv2d"}
    for at, mib, address, total, layer in CHANGES:
        output = {"total_allocated_bytes": (total + 4 * number) * MIB} if totals else {}
        result = spans(f"alloc alloc {at}-{at} alloc_bytes={mib * MIB}")[0]
        rows.append(
            result._replace(
                **common,
                key=f"a{at}",
                span_id=f"a{at}",
                device=0,
                attributes=json.dumps({"device_type": 1, "address": address + 10 * number, **output}),
                layer_id=layer,
                parent_id=parents.get(layer or ""),
                start_ns=result.start_ns + 100_000 * number,
            )
        )
    return rows


def trace(steps: int = 1, totals: bool = True) -> Trace:
    con = connect()
    create(con, "spans")
    for number in range(steps):
        insert(con, "spans", step(number, totals))
    return true_trace(con, {})


def ask(analysis: Analysis, of: Trace, columns: str) -> list[tuple[Any, ...]]:
    return analysis(of).select(columns).fetchall()


def test_the_level_of_each_layer_and_who_holds_memory_at_the_peak() -> None:
    columns = "device, name, start_mib, peak_mib, end_mib, growth_mib, peak_layer, peak_op, peak_at_ms"
    assert ask(memory_timeline, trace(), columns) == [
        (0, "train", 100, 112, 104, 4, "conv", "aten::conv2d", 0.02),
        (0, "conv", 100, 112, 104, 4, "conv", "aten::conv2d", 0.02),
        (0, "relu", 104, 108, 108, 4, "relu", None, 0.06),
    ]
    assert ask(memory_timeline, trace(), "name, allocated_mib, left_mib, live_at_peak_mib, basis") == [
        ("train", 16, 4, 12, TOTALS),
        ("conv", 12, 0, 12, TOTALS),
        ("relu", 4, 4, 0, TOTALS),
    ]


def test_without_totals_levels_are_sums() -> None:
    assert ask(memory_timeline, trace(totals=False), "name, start_mib, peak_mib, end_mib, basis")[0] == (
        "train", 0, 12, 4, SUMS,
    )  # fmt: skip


def test_each_step_leaves_memory_behind() -> None:
    assert ask(memory_steps, trace(3), "step, start_mib, peak_mib, end_mib, growth_mib, left_mib, allocations") == [
        (0, 100, 112, 104, 4, 4, 3),
        (1, 104, 116, 108, 4, 4, 3),
        (2, 108, 120, 112, 4, 4, 3),
    ]


def test_of_allocations_alone_no_level_is_made() -> None:
    text = """
        step predict  0-100
        module net    10-90
        module fc     20-60
        alloc alloc   30-30 alloc_bytes=1048576
        alloc alloc   70-70 alloc_bytes=2097152
    """
    columns = "name, allocated_mib, start_mib, peak_mib, left_mib, basis"
    assert ask(memory_timeline, trace_of(spans(text)), columns) == [
        ("net", 2, None, None, None, NO_FREES),
        ("fc", 1, None, None, None, NO_FREES),
    ]


def test_allocations_alone_are_those_of_the_device_that_the_step_used() -> None:
    text = """
        step predict  0-100
        module fc     20-60
        alloc alloc   30-30 alloc_bytes=1048576 device={}
        alloc alloc   31-31 alloc_bytes=1048576 device={}
        alloc alloc   32-32 alloc_bytes=99
    """
    one, two = (trace_of(spans(text.format(*devices))) for devices in ((3, 3), (0, 1)))
    columns = "device, name, allocated_mib, basis"
    assert ask(memory_timeline, one, columns) == [(3, "fc", 2, NO_FREES)]
    assert ask(memory_timeline, two, columns) == [(None, "fc", 2, OF_DEVICES)]
    ranks = trace_of([row for rank in (0, 1) for row in spans(text.format(rank, rank), rank=rank)])
    assert ask(memory_timeline, ranks, columns) == [(0, "fc", 2, NO_FREES)]


@pytest.mark.parametrize("analysis", [memory_timeline, memory_steps])
def test_where_nothing_is_known_of_memory_it_refuses(analysis: Analysis) -> None:
    with pytest.raises(AnalysisError, match=r"needs (allocations|each allocation and deallocation)"):
        analysis(trace_of(spans("step predict 0-100\nmodule net 10-90")))
