"""Why devices were idle: one gap of each cause, by hand; and that the causes add up."""

from __future__ import annotations

import random

import pytest
from asking import ask

import xsp
from xsp.analyses.idle import LAUNCH_NS
from xsp.testing import spans, trace_of


def causes(text: str) -> dict[str, float]:
    """Return the microseconds by cause of the gap from 200 to 300 µs between two kernels."""
    trace = trace_of(
        spans(f"""
        step s                  0-1000
        launch cudaLaunchKernel 10-15 correlation_id=1
        kernel first            100-200 correlation_id=1
        kernel second           300-400 correlation_id=2
        {text}
        """)
    )
    result = {entry: round(idle_ms * 1000, 3) for entry, idle_ms in ask("idle-causes", trace, "cause, idle_ms")}
    assert sum(result.values()) == 100
    return result


def cause(text: str) -> str:
    """Return the one cause of that gap."""
    (result,) = causes(text)
    return result


def test_a_launch_that_comes_when_the_device_is_idle_is_the_hosts() -> None:
    assert cause("launch cudaLaunchKernel 280-285 correlation_id=2") == "host-bound"
    assert cause("launch cudaLaunchKernel 205-299 correlation_id=2") == "host-bound"  # the call itself took so long


def test_what_lies_behind_a_late_launch_is_not_the_hosts() -> None:
    assert causes("launch cudaLaunchKernel 220-224 correlation_id=2") == {"host-bound": 30, "kernel wait": 70}
    just_in_time = 200 - (LAUNCH_NS / 1000 - 1)
    late_by_one = f"launch cudaLaunchKernel {just_in_time}-199 correlation_id=2"
    assert causes(late_by_one) == {"host-bound": 1, "kernel wait": 99}


def test_a_launch_that_came_long_before_is_no_fault_of_the_host() -> None:
    assert cause("launch cudaLaunchKernel 20-25 correlation_id=2") == "kernel wait"


def test_a_launch_after_a_wait_for_the_device_is_late_because_of_the_wait() -> None:
    assert cause("sync cudaStreamSynchronize 20-205\nlaunch cudaLaunchKernel 290-295 correlation_id=2") == "sync"
    short = "sync cudaStreamSynchronize 190-205\nlaunch cudaLaunchKernel 290-295 correlation_id=2"
    assert cause(short) == "host-bound"  # 15 µs sooner it would still have been late
    elsewhere = "sync cudaStreamSynchronize 20-205 thread=9\nlaunch cudaLaunchKernel 290-295 correlation_id=2"
    assert cause(elsewhere) == "host-bound"


def test_a_wait_in_the_gap_is_its_cause_where_it_takes_most_of_it() -> None:
    assert cause("sync cudaEventSynchronize 210-285\nlaunch cudaLaunchKernel 288-292 correlation_id=2") == "sync"
    assert cause("sync cudaEventSynchronize 210-230\nlaunch cudaLaunchKernel 288-292 correlation_id=2") == "host-bound"
    stream = "sync cudaStreamWaitEvent 210-285\nlaunch cudaLaunchKernel 288-292 correlation_id=2"
    assert cause(stream) == "host-bound"  # it lets a stream wait, and not the host


def test_a_call_that_lasts_until_its_copy_is_done_waited_for_it() -> None:
    copied = """
        launch cudaMemcpyAsync  20-201 correlation_id=7
        copy MemcpyDtoH         190-200 correlation_id=7
        launch cudaLaunchKernel 290-295 correlation_id=2
    """
    assert cause(copied) == "sync"
    assert cause(copied.replace("20-201", "20-25")) == "host-bound"


def test_a_copy_that_blocks_while_it_waits_is_a_wait_and_no_late_launch() -> None:
    text = """
        step s                  0-1000
        launch cudaLaunchKernel 10-15 correlation_id=1
        kernel first            100-200 correlation_id=1
        launch cudaMemcpyAsync  205-452 correlation_id=2
        copy MemcpyHtoD         400-450 correlation_id=2 attributes={"bytes":256}
    """
    trace = trace_of(spans(text))
    columns = "cause, round(idle_us), call, call_us, call_bytes"
    assert ask("idle-gaps", trace, columns) == [
        ("sync", 185.0, "cudaMemcpyAsync", 247.0, 256),
        ("sync", 15.0, "cudaMemcpyAsync", 247.0, 256),
    ]


def test_the_call_that_held_the_thread_while_a_launched_kernel_waited_is_named() -> None:
    trace = trace_of(
        spans("""
        step s                      0-1000
        launch hipLaunchKernel      10-15 correlation_id=1
        kernel first                20-30 correlation_id=1
        launch hipLaunchKernel      60-65 correlation_id=2
        launch hipMemcpyWithStream  80-905 correlation_id=3
        kernel second               890-899 correlation_id=2
        copy MemcpyDtoH             900-902 correlation_id=3
        """)
    )
    rows = ask("idle-gaps", trace, "cause, idle_us, call, call_at_ms, call_us, launched_after_us, next_work")[:2]
    assert rows == [
        ("kernel wait", 820.0, "hipMemcpyWithStream", 0.06, 825.0, 30.0, "second"),
        ("host-bound", 40.0, None, None, None, 30.0, "second"),
    ]
    assert name_of_call(trace) == [("hipMemcpyWithStream",), (None,)]
    assert ask("idle-causes", trace, "cause, call, round(call_ms, 3)")[0] == (
        "kernel wait",
        "hipMemcpyWithStream",
        0.82,
    )


def name_of_call(trace: xsp.Trace) -> list[tuple[str | None]]:
    """Return the names of the spans that the two longest gaps say held the host."""
    gaps = ask("idle-gaps", trace, "call_span_id")[:2]
    names = dict(trace.sql("SELECT span_id, name FROM spans").fetchall())
    return [(names.get(identity),) for (identity,) in gaps]


def test_the_operator_that_a_gap_is_spent_in_is_named_and_what_lies_around_it_all_is_not() -> None:
    trace = trace_of(
        spans("""
        step s                  0-10000
        op train                1-9000
        launch cudaLaunchKernel 10-15 correlation_id=1
        kernel first            20-30 correlation_id=1
        op aten::nonzero        40-290
        launch cudaLaunchKernel 280-285 correlation_id=2
        kernel second           292-300 correlation_id=2
        launch cudaLaunchKernel 480-485 correlation_id=3
        kernel third            492-500 correlation_id=3
        """)
    )
    assert ask("idle-gaps", trace, "call, next_work") == [("aten::nonzero", "second"), (None, "third")]


def test_waiting_for_data_is_told_from_other_work_of_the_host() -> None:
    assert cause("data next 195-270\nlaunch cudaLaunchKernel 280-285 correlation_id=2") == "data loading"
    assert cause("data next 195-230\nlaunch cudaLaunchKernel 280-285 correlation_id=2") == "host-bound"


def test_without_a_launch_or_with_one_from_the_future_the_cause_is_unknown() -> None:
    assert cause("") == "unknown"
    assert cause("launch cudaLaunchKernel 310-315 correlation_id=2") == "unknown"
    assert cause("launch cudaLaunchKernel 280-285 correlation_id=2 process=5") == "unknown"


def test_the_longest_gaps_say_what_came_next() -> None:
    trace = trace_of(spans("""
        step s                  0-1000
        module net.a            5-90 type=Linear
        op aten::mm             6-80
        launch cudaLaunchKernel 10-15 correlation_id=1
        launch cudaLaunchKernel 60-65 correlation_id=2
        kernel first            20-30 correlation_id=1
        kernel second           70-80 correlation_id=2
        kernel third            85-90
    """))  # fmt: skip
    columns = "begins_at_ms, idle_us, cause, launched_after_us, next_work, next_op, next_layer"
    assert ask("idle-gaps", trace, columns) == [
        (0.01, 40.0, "host-bound", 30.0, "second", "aten::mm", "net.a"),
        (0.06, 5.0, "unknown", None, "third", None, None),
    ]


@pytest.mark.parametrize("seed", range(5))
def test_the_causes_of_each_device_add_up_to_its_idle_time(seed: int) -> None:
    chance = random.Random(seed)
    lines = []
    for number in range(200):
        start, device = chance.randrange(100, 3000), chance.randrange(2)
        end = start + chance.randrange(20)
        lines.append(f"kernel k {start}-{end} device={device} stream={chance.randrange(3)} correlation_id={number}")
        launch = start + chance.randrange(-60, 3)
        lines += [f"launch cudaLaunchKernel {launch}-{launch + 4} correlation_id={number}"] * chance.randrange(3)
        lines += [f"sync cudaDeviceSynchronize {start}-{end}"] * chance.randrange(2)
        lines += [f"data next {launch}-{end}"] * (number % 7 == 0)
    trace = trace_of(spans("\n".join(lines)))
    idle = dict(ask("device-activity", trace, "device, round(idle_ms * 1000)"))
    for device in (0, 1):
        result = ask("idle-causes", trace, "device, round(idle_ms * 1000)")
        assert sum(time for here, time in result if here == device) == idle[device]
