"""What a collective was called with, from records: bytes and bandwidth without a cluster. NCCL itself is stated."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

from xsp import analyses
from xsp.schema import Span
from xsp.testing import spans, trace_of
from xsp_collectors import collectives

TOLD = (
    '"Collective name": "allreduce", "In msg nelems": 1000000, "Out msg nelems": 1000000, "Group size": 4, '
    '"dtype": "Float", "Process Group Name": "0", "Seq": 3, "In split size": "[]"'
)


def stated(name: str = "record_param_comms", text: str = TOLD) -> str | None:
    return collectives.parameters_json(SimpleNamespace(metadata_json=lambda: text), name)


def test_torch_states_what_a_collective_is_called_with():
    assert json.loads(stated() or "") == {
        "xsp.collective.name": "allreduce", "xsp.collective.communicator": "0", "xsp.collective.seq": 3,
        "xsp.collective.in_elements": 1000000, "xsp.collective.out_elements": 1000000,
        "xsp.collective.dtype": "Float", "xsp.collective.group_size": 4,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "text"), [("aten::add", TOLD), ("record_param_comms", ""), ("record_param_comms", "{")]
)
def test_nothing_is_said_of_other_operators_and_of_what_cannot_be_read(name, text):
    assert stated(name, text) is None


def allreduce() -> list[Span]:
    """A collective as torch and CUPTI show it: 4 MB in 100 µs."""
    step = spans("""
        step train 0-1000
        op c10d::allreduce_ 10-60
        op record_param_comms 12-58
        call nccl:all_reduce 14-50 thread=1
        launch cuLaunchKernelEx 20-25 correlation_id=7
        kernel ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>) 100-200 correlation_id=7
    """)
    return [entry._replace(attributes=stated()) if entry.name == "record_param_comms" else entry for entry in step]


def test_bytes_and_bandwidth_of_a_kernel_come_from_what_its_collective_was_called_with():
    counts = collectives.CollectiveCounts()
    counts.before, counts.after, counts.sizes = {"0": 2}, {"0": 3}, {"0": 4}
    trace = trace_of(collectives.label(allreduce(), counts).spans)
    result = analyses.ANALYSES["communication"](trace)
    columns = "communicator, group_size, bytes, algorithm_gb_per_s, bus_gb_per_s"
    assert result.select(columns).fetchall() == [("0", 4, 4_000_000, 40.0, 60.0)]
    ids = trace.sql("SELECT DISTINCT attributes->>'$.\"xsp.collective.id\"' FROM spans WHERE kind = 'call'").fetchall()
    assert ids == [("0:3",)]


def test_they_are_known_too_where_the_communicators_counter_says_something_else():
    counts = collectives.CollectiveCounts()
    counts.before, counts.after = {"0": 2}, {"0": 9}
    result = analyses.ANALYSES["communication"](trace_of(collectives.label(allreduce(), counts).spans))
    assert result.select("group_size, bytes").fetchall() == [(4, 4_000_000)]
