"""Collectives: how long, how much hidden, at which bandwidth; which rank the others wait for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from asking import ask_rounded as ask

from xsp import load
from xsp.analyses import ANALYSES
from xsp.errors import AnalysisError
from xsp.schema import Span
from xsp.store.skew import ClockDifference, ClockOffset, align
from xsp.testing import spans, trace_of


def stated(name: str, elements: int, dtype: str = "Float", ranks: int = 4) -> str:
    message = {
        "name": name,
        "communicator": "0",
        "in_elements": elements,
        "out_elements": elements,
        "dtype": dtype,
        "group_size": ranks,
    }
    return "attributes=" + json.dumps(
        {f"xsp.collective.{key}": value for key, value in message.items()}, indent=None
    ).replace(" ", "")


TOLD_BY_ANNOTATION = [
    ("nccl:all_reduce", [[1000], [500]], ["float", "float"], 6000),
    ("nccl:_all_gather_base", [[1000]], ["c10::BFloat16"], None),  # of which ranks would be needed
    ("nccl:all_to_all", [[[10, 100]]], ["TensorList"], None),  # whose type is not told
    ("nccl:reduce_scatter", [], [], None),
]


@pytest.mark.parametrize(("name", "dims", "types", "size"), TOLD_BY_ANNOTATION)
def test_the_shapes_of_its_annotation_tell_a_collectives_size_in_traces_without_message_sizes(
    name: str, dims: list[Any], types: list[str], size: int | None, tmp_path: Path
) -> None:
    annotation = {"Input Dims": dims, "Input type": types}
    events = [
        {"ph": "X", "cat": "user_annotation", "name": name, "pid": 1, "tid": 1, "ts": 0, "dur": 90, "args": annotation},
        {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 1, "tid": 1, "ts": 10, "dur": 5,
         "args": {"correlation": 7}},
        {"ph": "X", "cat": "kernel", "name": "ncclDevKernel_Generic", "pid": 0, "tid": 20, "ts": 50, "dur": 100,
         "args": {"device": 0, "stream": 20, "correlation": 7}},
    ]  # fmt: skip
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    assert ask("communication", load(str(path)), "bytes") == [(size,)]


def test_an_all_gather_whose_input_alone_is_told_is_as_much_larger_as_its_group() -> None:
    output = stated("_allgather_base", 2500).replace('"xsp.collective.out_elements":2500,', "")
    trace = trace_of(spans(f"step s 0-900\nkernel ncclDevKernel_Generic 0-100 {output}"))
    assert ask("communication", trace, "bytes, algorithm_gb_per_s") == [(40_000, 0.4)]


def test_two_devices_in_one_file_wait_until_the_later_one_has_come() -> None:
    trace = trace_of(
        spans("""
        step s 0-1000
        kernel ncclDevKernel_AllReduce_Sum_f32  100-300 device=0 stream=20
        kernel ncclDevKernel_AllReduce_Sum_f32  250-300 device=1 stream=20
        kernel ncclDevKernel_AllReduce_Sum_f32  400-440 device=0 stream=20
        kernel ncclDevKernel_AllReduce_Sum_f32  420-440 device=1 stream=20
    """)
    )
    assert ask("communication", trace, "calls, total_ms, waited_ms, transfer_us") == [(4, 0.31, 0.17, 35.0)]


def test_what_does_not_overlap_in_order_did_not_meet() -> None:
    trace = trace_of(
        spans("""
        step s 0-1000
        kernel ncclDevKernel_AllReduce_Sum_f32  100-300 device=0 stream=20
        kernel ncclDevKernel_AllReduce_Sum_f32  350-500 device=1 stream=20
    """)
    )
    assert ask("communication", trace, "calls, waited_ms, transfer_us") == [(2, None, None)]


def test_ranks_of_a_collective_wait_only_where_all_of_them_are_seen() -> None:
    def member(rank: int, start: int, group: int) -> str:
        message = {"name": "allreduce", "communicator": "0", "seq": 5, "in_elements": 1000, "out_elements": 1000,
                "dtype": "Float", "group_size": group}  # fmt: skip
        output = json.dumps({f"xsp.collective.{key}": value for key, value in message.items()}).replace(" ", "")
        return f"step s 0-900 rank={rank}\nkernel ncclDevKernel_Generic {start}-200 rank={rank} attributes={output}"

    columns = "calls, waited_ms, transfer_us, transfer_bus_gb_per_s"
    whole = trace_of([*spans(member(0, 100, 2)), *spans(member(1, 150, 2))])
    assert ask("communication", whole, columns) == [(2, 0.05, 50.0, 0.08)]
    part = trace_of([*spans(member(0, 100, 8)), *spans(member(1, 150, 8))])
    assert ask("communication", part, columns) == [(2, None, None, None)]


@pytest.mark.slow
def test_groups_without_a_rank_in_common_are_told_apart_though_they_have_one_name() -> None:
    def member(rank: int, start: int, end: int) -> str:
        kernels = []
        group = "[0,1]" if rank < 2 else "[2,3]"
        for communicator, ranks, size, begins, ends in (("1", group, 2, start, end), ("0", "[0,1,2,3]", 4, 500, 600)):
            message = {"name": "allreduce", "communicator": communicator, "seq": 5, "group_size": size,
                    "group_ranks": ranks}  # fmt: skip
            output = json.dumps({f"xsp.collective.{key}": value for key, value in message.items()}).replace(" ", "")
            kernels.append(f"kernel ncclDevKernel_Generic {begins}-{ends} rank={rank} attributes={output}")
        return "\n".join([f"step s 0-900 rank={rank}", *kernels])

    times = [(100, 200), (150, 200), (300, 400), (380, 400)]
    trace = trace_of([row for rank, both in enumerate(times) for row in spans(member(rank, *both))])
    assert ask("communication", trace, "communicator, calls, waited_ms, transfer_us") == [
        ("0", 4, 0.0, 100.0),
        ("1", 4, 0.13, 35.0),
    ]
    assert ask("collective-skew", trace, "id, ranks, skew_us") == [
        ("1:5 [2,3]", 2, 80.0),
        ("1:5 [0,1]", 2, 50.0),
        ("0:5 [0,1,2,3]", 4, 0.0),
    ]


# --- one rank ---------------------------------------------------------------------------------------------


def test_communication_is_hidden_while_its_own_device_computes() -> None:
    trace = trace_of(spans("""
        kernel gemm                             100-200
        kernel gemm                             180-250 stream=8
        kernel ncclDevKernel_AllReduce_Sum_f32  150-300 stream=20
        kernel ncclDevKernel_AllReduce_Sum_f32  400-500 stream=20
        kernel gemm                             400-420
        kernel gemm                             430-440
        copy Memcpy                             450-460
        kernel gemm                             260-600 device=1
        kernel ncclDevKernel_Generic            600-700 stream=20
    """ + "step s 0-1000"))  # fmt: skip
    assert ask("communication", trace, "collective, calls, total_ms, hidden_ms, exposed_ms, shortest_us, bytes") == [
        ("all_reduce", 2, 0.25, 0.13, 0.12, 100.0, None), ("unknown", 1, 0.1, 0.0, 0.1, 100.0, None),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "kind", "algorithm", "bus"),
    [("allreduce", "all_reduce", 0.1, 0.15), ("_allgather_base", "all_gather", 0.1, 0.075),
     ("reduce_scatter", "reduce_scatter", 0.1, 0.075), ("alltoallv", "all_to_all", 0.1, 0.075),
     ("broadcast", "broadcast", 0.1, 0.1), ("gather", "gather", 0.1, 0.075), ("barrier", "barrier", 0.1, None)],
)  # fmt: skip
def test_bandwidths_follow_the_benchmarks_of_nccl(name: str, kind: str, algorithm: float, bus: float | None) -> None:
    trace = trace_of(spans(f"step s 0-900\nkernel ncclDevKernel_Generic 0-100 {stated(name, 2500)}"))
    assert ask("communication", trace, "collective, communicator, bytes, algorithm_gb_per_s, bus_gb_per_s") == [
        (kind, "0", 10_000, algorithm, bus)
    ]


def test_what_a_collective_is_stands_on_the_call_or_the_operator_above_its_kernel() -> None:
    trace = trace_of(spans(f"""
        step s                                 0-1000
        op record_param_comms                  10-90 {stated("all_to_allv", 100, "BFloat16")}
        call nccl:all_to_all                   20-80 thread=1
        launch cudaLaunchKernel                30-40 correlation_id=1
        kernel ncclDevKernel_SendRecv          100-200 correlation_id=1
        call nccl:all_gather                   120-180 thread=1
        launch cudaLaunchKernel                130-140 correlation_id=2
        kernel ncclDevKernel_Generic           300-400 correlation_id=2
        kernel ncclDevKernel_SendRecv          500-600
    """))  # fmt: skip
    assert ask("communication", trace, "collective, bytes, calls") == [
        ("all_gather", None, 1), ("all_to_all", 200, 1), ("send_recv", None, 1),
    ]  # fmt: skip


def test_without_a_collective_it_refuses() -> None:
    trace = trace_of(spans("step s 0-100\nkernel gemm 1-10"))
    for name in ("communication", "collective-skew", "stragglers"):
        with pytest.raises(AnalysisError, match="no communication kernel"):
            ANALYSES[name](trace)


# --- several ranks ----------------------------------------------------------------------------------------

LATE = {0: [0, 0, 0], 1: [30, 0, 5], 2: [10, 50, 0]}
"""By how many µs each rank comes late to each of three all-reduces of 100 µs, one a millisecond."""

AHEAD = {0: 0, 1: 1000, 2: -2000}
"""How far each rank's clock is ahead, in µs."""


def job(ids: bool = True, ran: str = "kernel ncclDevKernel_AllReduce_Sum_f32", drift: int = 0) -> list[Span]:
    rows: list[Span] = []
    for rank, late in LATE.items():
        lines = ["step s 5000-9000"]
        for number, own in enumerate(late):
            start, last = 5000 + (1000 + drift * rank) * number, max(entry[number] for entry in LATE.values())
            message = {
                "xsp.collective.name": "allreduce",
                "xsp.collective.communicator": "0",
                "xsp.collective.seq": number,
            }
            attributes = f"attributes={json.dumps(message, separators=(',', ':'))}" if ids else ""
            lines.append(f"{ran} {start + own}-{start + last + 100} {attributes}")
        moved = AHEAD[rank] * 1000
        rows += [row._replace(rank=rank, start_ns=row.start_ns + moved) for row in spans("\n".join(lines))]
    return rows


@pytest.mark.parametrize("ids", [True, False])
def test_skew_of_each_collective_on_aligned_clocks(ids: bool) -> None:
    columns = "collective, ranks, last_rank, skew_us, transfer_us, waited_us, certain, arrivals_us"
    assert ask("collective-skew", trace_of(job(ids)), columns) == [
        ("all_reduce", 3, 2, 50.0, 100.0, 100.0, True, '{"0":0.0,"1":0.0,"2":50.0}'),
        ("all_reduce", 3, 1, 30.0, 100.0, 50.0, True, '{"0":0.0,"1":30.0,"2":10.0}'),
        ("all_reduce", 3, 1, 5.0, 100.0, 10.0, True, '{"0":0.0,"1":5.0,"2":0.0}'),
    ]


def test_who_waits_for_whom() -> None:
    columns = "rank, came_last, others_waited_ms, waited_ms, clock_offset_us, clock_uncertainty_us, unmatched"
    assert ask("stragglers", trace_of(job()), columns) == [
        (2, 1, 0.1, 0.025, -2000.0, 0.0, 0), (1, 2, 0.06, 0.05, 1000.0, 0.0, 0), (0, 0, 0.0, 0.085, 0.0, 0.0, 0),
    ]  # fmt: skip


def test_a_skew_within_the_uncertainty_of_the_clocks_is_not_certain() -> None:
    result = ask("collective-skew", trace_of(job(drift=30)), "skew_us > clock_uncertainty_us, certain")
    assert set(result) == {(True, True), (False, False)}


def test_collectives_of_the_host_are_compared_where_no_device_ran_any() -> None:
    trace = trace_of(job(ran="call gloo:all_reduce"))
    assert ask("stragglers", trace, "rank, came_last") == [(2, 1), (1, 2), (0, 0)]
    assert ask("communication", trace, "collective, calls, ranks, total_ms, exposed_ms") == [
        ("all_reduce", 9, 3, 1.06, None)
    ]


@pytest.mark.slow
def test_what_cannot_be_matched_is_counted_or_refused() -> None:
    extra = 'attributes={"xsp.collective.id":"0:9"}'
    alone = spans(f"kernel ncclDevKernel_AllReduce_Sum_f32 8000-8001 {extra}")
    assert (0, 3, 1) in ask("stragglers", trace_of([*job(), *alone]), "rank, collectives, unmatched")
    uneven = [*job(ids=False), *spans("kernel ncclDevKernel_AllReduce_Sum_f32 8000-8001")]
    with pytest.raises(AnalysisError, match=r"different numbers of them .ncclDevKernel_AllReduce_Sum_f32: 3 to 4"):
        ANALYSES["stragglers"](trace_of(uneven))
    with pytest.raises(AnalysisError, match="more than their duration"):
        ANALYSES["stragglers"](trace_of(job(ids=False, drift=400)))
    with pytest.raises(AnalysisError, match="compares ranks"):
        ANALYSES["collective-skew"](trace_of([row for row in job() if row.rank == 0]))


# --- clocks -----------------------------------------------------------------------------------------------


def test_clocks_go_over_the_most_certain_differences() -> None:
    result = align(
        [0, 1, 2, 3], [ClockDifference(0, 1, 10, 1), ClockDifference(1, 2, 5, 1), ClockDifference(0, 2, 99, 50)]
    )
    assert result == {0: ClockOffset(0, 0), 1: ClockOffset(10, 1), 2: ClockOffset(15, 2)}
    assert align([4, 2], [ClockDifference(2, 4, -7, 0)]) == {2: ClockOffset(0, 0), 4: ClockOffset(-7, 0)}
    assert align([], []) == {}


@pytest.mark.slow
def test_why_a_bandwidth_is_null_stands_beside_it() -> None:
    known = {
        "no size, group": {}, "no size": {"group_size": 2}, "no group": {"in_elements": 10, "dtype": "Float"},
        None: {"in_elements": 10, "out_elements": 10, "dtype": "Float", "group_size": 2},
    }  # fmt: skip
    for reason, message in known.items():
        output = {f"xsp.collective.{key}": value for key, value in {"name": "allreduce", **message}.items()}
        trace = trace_of(
            spans(
                f"step s 0-900\nkernel ncclDevKernel_Generic 100-200 attributes={json.dumps(output).replace(' ', '')}"
            )
        )
        assert ask("communication", trace, "why_null") == [(reason,)]
        assert (ask("communication", trace, "bus_gb_per_s")[0][0] is None) == (reason is not None)
