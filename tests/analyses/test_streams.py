"""Streams: lengths of their queues over time, and sequences of kernels that come again."""

from __future__ import annotations

from typing import Any

import pytest

from xsp.analyses import ANALYSES
from xsp.store.trace import Trace
from xsp.testing import spans, trace_of


def ask(name: str, trace: Trace, columns: str) -> list[tuple[Any, ...]]:
    rows = ANALYSES[name](trace).select(columns).fetchall()
    return [tuple(round(cell, 3) if isinstance(cell, float) else cell for cell in row) for row in rows]


def test_each_stream_has_a_queue_of_what_was_launched_and_has_not_begun() -> None:
    """Stream 7: one waits for 80 us, two for 10, none for 10, one for 100; stream 8: its work begins at once."""
    trace = trace_of(
        spans("""
        step s                   0-1000
        launch cudaLaunchKernel  0-5     correlation_id=1
        launch cudaLaunchKernel  80-85   correlation_id=2
        launch cudaLaunchKernel  100-105 correlation_id=3
        launch cudaLaunchKernel  100-105 correlation_id=4
        kernel a                 90-95   correlation_id=1 stream=7
        kernel a                 90-95   correlation_id=2 stream=7
        kernel a                 200-300 correlation_id=3 stream=7
        kernel b                 100-300 correlation_id=4 stream=8
        kernel b                 300-400 correlation_id=9 stream=8
    """)
    )
    columns = "stream, kernels_and_copies, mean_waiting, p50, p90, p99, most, empty_percent, without_launch"
    assert ask("queues", trace, columns) == [
        (7, 3, 1.0, 1, 1, 2, 2, 5.0, 0),
        (8, 2, None, None, None, None, None, None, 1),
    ]


def launched(names: str, stream: int = 7, apart: int = 15) -> str:
    return "\n".join(
        f"kernel {name} {at * apart}-{at * apart + 10} stream={stream}" for at, name in enumerate(names.split())
    )


def test_a_sequence_that_comes_again_is_found_whole_and_with_the_gaps_between_its_kernels() -> None:
    trace = trace_of(spans("step s 0-9000\n" + launched("x a b c y a b c z b")))
    assert ask("kernel-sequences", trace, "times, kernels, device_ms, percent_of_device_time, gap_us, sequence") == [
        (2, 3, 0.06, 60.0, 10.0, "a → b → c")
    ]


@pytest.mark.parametrize(("count", "times"), [(4, 2), (5, 2), (6, 3), (7, 3)])
def test_occurrences_that_overlap_are_not_counted_twice(count: int, times: int) -> None:
    trace = trace_of(spans("step s 0-9000\n" + launched("a " * count)))
    result = {kernels: many for many, kernels in ask("kernel-sequences", trace, "times, kernels")}
    assert result[2] == times
    assert result.get(3, 0) == (count // 3 if count >= 6 else 0)


def test_sequences_do_not_go_from_stream_to_stream_or_over_copies_of_others() -> None:
    text = launched("a b", 7) + "\n" + launched("a b", 8) + "\ncopy Memcpy 10-15 stream=7"
    trace = trace_of(spans("step s 0-9000\n" + text))
    assert ask("kernel-sequences", trace, "times, sequence") == [(2, "a → b")]


def test_names_are_cut_to_what_tells_them_apart() -> None:
    names = [
        "void at::native::(anonymous namespace)::layer_norm<float>(int)",
        "void cutlass::Kernel2<cutlass_80_gemm_relu>(int)",
    ]
    rows = spans("step s 0-9000\n" + launched("0 1 0 1"))
    named = [row._replace(name=names[int(row.name)]) if row.name.isdigit() else row for row in rows]
    assert ask("kernel-sequences", trace_of(named), "sequence") == [("layer_norm → cutlass_80_gemm_relu>",)]
