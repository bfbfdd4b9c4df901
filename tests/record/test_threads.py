"""Steps of several threads: the time between them, and those that run beside another one."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

import xsp
from xsp.record.threads import Gap, Threads
from xsp.schema import Level
from xsp.store.iterations import iterations
from xsp.store.loop import BARE
from xsp.store.overlap import threads as threads_of
from xsp.testing import spans, trace_of, with_loop

MS = 1_000_000


def run_step(threads: Threads, thread: int, begin_ns: int, end_ns: int) -> Gap | None:
    gap = threads.begin(thread, begin_ns)
    threads.end(thread, end_ns)
    threads.go_on(thread, end_ns)
    return gap


def test_threads_that_take_turns_have_the_gaps_of_one() -> None:
    threads = Threads()
    assert [run_step(threads, number % 3, 10 * number, 10 * number + 5) for number in range(30)] == [None] * 30
    assert not threads.is_one
    assert not threads.overlap


def test_the_time_of_other_threads_is_no_gap_of_a_thread() -> None:
    """Thread 1 runs from 0 to 10 and from 50 to 60; thread 2 from 5 to 30, and thread 3 from 20 to 40."""
    threads = Threads()
    assert threads.begin(1, 0) is None
    assert threads.begin(2, 5) == (0, 0)
    threads.end(1, 10)
    threads.go_on(1, 10)
    threads.begin(3, 20)
    threads.end(2, 30)
    threads.go_on(2, 30)
    threads.end(3, 40)
    threads.go_on(3, 40)
    assert threads.begin(1, 50) == (10, 30)
    threads.end(1, 60)
    threads.go_on(1, 60)
    assert threads.begin(2, 65) == (15, 20), "idle from 40 to 50 and from 60 to 65"
    assert threads.overlap
    threads.end(2, 70)
    threads.go_on(2, 70)
    assert threads.begin(4, 75) == (5, 0), "the first step of a thread follows the last one of all"


def test_after_many_steps_of_one_thread_there_is_one_thread() -> None:
    threads = Threads()
    threads.begin(1, 0)
    run_step(threads, 2, 1, 2)
    threads.end(1, 3)
    assert threads.overlap
    for number in range(70):
        gap = run_step(threads, 1, 10 + 2 * number, 11 + 2 * number)
    assert gap is None
    assert threads.is_one


def test_the_throughput_is_that_of_all_threads_per_wall_time() -> None:
    """Two threads: steps of 8 ms and 2 ms of sleep, half an iteration apart; 4 samples each."""
    rows = [
        {
            "step": 2 * number + thread,
            "thread": 1 + thread,
            "start_ns": (10 * number + 5 * thread) * MS,
            "dur_ns": 8 * MS,
            "before_ns": 0,
            "beside_ns": 2 * MS,
            "samples": 4,
        }
        for number in range(50)
        for thread in range(2)
    ]
    [found] = iterations(with_loop(trace_of(spans("step s 0-2000", step=9)), rows))
    assert found.mean_ns == pytest.approx(8 * MS)
    assert found.between_ns == 0
    assert found.at_once == pytest.approx(2, rel=0.02)
    assert found.samples_per_s == pytest.approx(8 / 0.010, rel=0.02)


def test_recorded_steps_of_several_threads_leave_their_pace_as_it_is() -> None:
    rows = []
    for thread in range(2):
        began = thread * MS
        for number in range(100):
            is_recorded = number >= 60
            rows.append(
                {
                    "step": 2 * number + thread, "thread": 1 + thread, "start_ns": began, "before_ns": 0,
                    "dur_ns": (30 if is_recorded else 10) * MS, "beside_ns": 1, "samples": 4,
                    "rung": int(Level.LAYER) if is_recorded else BARE,
                }
            )  # fmt: skip
            began += rows[-1]["dur_ns"] + 1
    [found] = iterations(with_loop(trace_of(spans("step s 0-2000", step=9)), rows))
    assert found.samples_per_s == pytest.approx(2 * 4 / 0.010, rel=0.02)


@pytest.mark.parametrize(("steps_on_second", "expected"), [(0, 1), (4, 1), (20, 2)])
def test_a_few_steps_on_another_thread_are_exceptions(steps_on_second: int, expected: int) -> None:
    rows = [{"step": number, "thread": 1 + (number < steps_on_second), "dur_ns": MS} for number in range(50)]
    trace = with_loop(trace_of(spans("step s 0-2000", step=9)), rows)
    assert threads_of(trace.con) == {(0, 0): expected}


def test_steps_that_overlap_are_all_in_the_loop(tmp_path: Path) -> None:
    inside = threading.Barrier(3)

    def work(profile: xsp.profile) -> None:
        for _ in range(6):
            with profile.step():
                inside.wait()
            time.sleep(0.001)

    with xsp.profile("threads", out=tmp_path / "run", levels="M", samples=False) as profile:
        threads = [threading.Thread(target=work, args=(profile,)) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    trace = xsp.load(tmp_path / "run")
    counts = trace.sql("SELECT count(*), count(DISTINCT step), count(DISTINCT thread) FROM loop").fetchall()
    assert counts == [(18, 18, 3)]
    assert trace.run["steps"]["skipped"] == 0
    [found] = iterations(trace)
    assert found.at_once is not None
    assert found.at_once > 1.5
