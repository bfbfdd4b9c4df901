"""What the program does between steps, in iterations that were recorded from the end of the step before."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from asking import main_of
from depth import first

from xsp import account, analyses
from xsp.account import entries as names
from xsp.account.entries import Iterations
from xsp.account.sentences import limit, lines
from xsp.advise import advisor
from xsp.advise.advice import Needs
from xsp.errors import XspError
from xsp.store.trace import Trace
from xsp.testing import spans, trace_of, with_loop


def bare(times: int, first: int = 100, **values: Any) -> list[dict[str, Any]]:
    return [{"step": first + number, **values} for number in range(times)]


def parts(main: Iterations) -> dict[str, float]:
    between = main.host[names.BETWEEN]
    assert between is not None
    return {child.name: child.ms or 0.0 for child in between.children}


def copying(with_window: bool = True) -> Trace:
    """Return a run in which each iteration copies 30 of 50 ms from pageable memory before the model is called."""
    text = """
        before before_the_step   0-30000 step=4
        op aten::to              100-29900 step=4
        op aten::_to_copy        110-29890 step=4
        launch cudaMemcpyAsync   200-29800 correlation_id=1 step=4
        copy Memcpy_HtoD         210-29800 correlation_id=1 step=4
        step train               30100-50100 step=4
        forward Net              30200-50000 step=4
        op aten::mm              30300-30400 step=4
        launch cudaLaunchKernel  30310-30320 correlation_id=2 step=4
        kernel sgemm             30330-49900 correlation_id=2 step=4
    """
    rows = [row for row in spans(text) if with_window or row.start_ns >= 30_000_000]
    recorded = {"step": 4, "rung": 70, "steady": False, "dur_ns": 20e6, "before_ns": 30e6}
    return with_loop(trace_of(rows), [recorded, *bare(20, dur_ns=20e6, before_ns=30e6)])


def test_a_pageable_copy_before_the_model_is_called_is_named_with_its_time() -> None:
    main = main_of(copying())
    assert main.time.ms == pytest.approx(50)
    assert main.host.ms(names.BETWEEN) == pytest.approx(30)
    assert parts(main) == pytest.approx({names.TO_DEVICE: 29.8, names.OUTSIDE_OPERATORS: 0.2})
    assert main.device is not None
    assert main.device.ms(names.COPIES) == pytest.approx(29.59)
    assert main.device.ms(names.NOT_RECORDED) == 0
    (line, *_) = lines(main, main.host)
    assert line.name == f"between steps: {names.TO_DEVICE}"
    assert line.ms == pytest.approx(29.8)
    sentence = limit(account.of(copying()))
    assert "29.6 of 50.0 ms (59 %) of it copies that no computation hides" in sentence
    advice = advisor.of(copying(), max_needs=Needs.TRACE).advice
    assert any("non_blocking=True" in piece.do and names.TO_DEVICE in piece.what for piece in advice)


def test_without_a_window_the_time_between_steps_is_not_divided() -> None:
    main = main_of(copying(with_window=False))
    assert parts(main) == {}
    assert main.device is not None
    assert main.device.ms(names.NOT_RECORDED) == pytest.approx(30)


def test_reading_results_after_the_model_is_named_and_a_save_is_outside_operators() -> None:
    text = """
        before before_the_step   0-400000 step=4
        op aten::to              1000-300000 step=4
        launch cudaMemcpyAsync   1100-299000 correlation_id=1 step=4
        copy Memcpy_DtoH         1110-299000 correlation_id=1 step=4
        op aten::item            310000-320000 step=4
        op aten::sort            330000-350000 step=4
        step train               400100-420100 step=4
        forward Net              400200-420000 step=4
    """
    rows = [{"step": 4, "rung": 70, "steady": False, "dur_ns": 20e6, "before_ns": 4e8}]
    main = main_of(with_loop(trace_of(spans(text)), [*rows, *bare(20, dur_ns=20e6, before_ns=4e8)]))
    assert parts(main) == pytest.approx(
        {names.FROM_DEVICE: 299.0, names.READING: 10.0, "aten::sort": 20.0, names.OUTSIDE_OPERATORS: 71.0}
    )


def test_a_wait_that_recorded_steps_do_at_their_end_is_the_read_of_the_loss_between_steps() -> None:
    """`loss.item()` after the step waits for the device, which a recorded step has already waited for."""
    text = """
        before before_the_step   0-100 step=4
        op aten::item            10-60 step=4
        step train               200-10200 step=4
        forward Net              300-2200 step=4
        launch cudaLaunchKernel  1000-1010 correlation_id=2 step=4
        kernel sgemm             1020-10190 correlation_id=2 step=4
        sync cudaDeviceSynchronize 2210-10195 step=4
    """
    recorded = {"step": 4, "rung": 70, "steady": False, "dur_ns": 10e6, "before_ns": 0.1e6}
    main = main_of(with_loop(trace_of(spans(text)), [recorded, *bare(20, dur_ns=2e6, before_ns=8e6)]))
    assert main.host.ms(names.FORWARD) == pytest.approx(1.9, rel=0.05)
    assert parts(main)[names.WAITING] == pytest.approx(7.9, rel=0.05)
    assert main.limit is not None
    assert main.limit.side == "device"
    assert main.limit.host_ms == pytest.approx(2.1, abs=0.2)


@pytest.mark.parametrize("seed", first(6, range(20)))
def test_the_parts_of_a_drawn_program_equal_the_truth_and_add_up(seed: int) -> None:
    draw = random.Random(seed)
    kinds = [*(f"aten::op{number}" for number in range(4)), "aten::item", "HtoD", "DtoH"]
    truth: Counter[str] = Counter()
    rows, now, correlation, steps = [], 0, 0, draw.randint(2, 6)
    iteration_us = between_us = 0
    for step in range(steps):
        begin, text = now, ""
        for _ in range(draw.randint(1, 8)):
            rest, us, name = draw.randint(0, 200), draw.randint(50, 5000), draw.choice(kinds)
            truth[names.OUTSIDE_OPERATORS] += rest
            now += rest
            if name in ("HtoD", "DtoH"):
                correlation += 1
                text += f"op aten::to {now}-{now + us}\nlaunch cudaMemcpyAsync {now + 5}-{now + us} "
                text += f"correlation_id={correlation}\n"
                text += f"copy Memcpy_{name} {now + 6}-{now + us} correlation_id={correlation}\n"
                truth[names.TO_DEVICE if name == "HtoD" else names.FROM_DEVICE] += us
            else:
                text += f"op {name} {now}-{now + us}\n"
                truth[names.READING if name == "aten::item" else name] += us
            now += us
        between_us += now - begin
        text += f"before before_the_step {begin}-{now}\n"
        length = draw.randint(2000, 9000)
        text += f"step train {now + 20}-{now + 20 + length}\nforward Net {now + 30}-{now + 10 + length}\n"
        rows += spans(text, step=2 * step, rung=70)
        iteration_us += now - begin + length
        now += length + draw.randint(1000, 9000)
    loop = [
        {"step": 2 * step, "rung": 70, "steady": False, "dur_ns": 1e3 * iteration_us / steps, "before_ns": 0.0}
        for step in range(steps)
    ]
    loop += bare(10, dur_ns=1e3 * (iteration_us - between_us) / steps, before_ns=1e3 * between_us / steps)
    main = main_of(with_loop(trace_of(rows), loop))
    assert main.time.ms == pytest.approx(iteration_us / steps / 1e3, rel=1e-6)
    found = parts(main)
    told = {name: us / steps / 1e3 for name, us in truth.items() if us and name in found}
    assert {name: found[name] for name in told} == pytest.approx(told, rel=1e-6, abs=1e-9)
    assert sum(found.values()) == pytest.approx(between_us / steps / 1e3)
    for side in (main.host, *main.devices):
        assert side.total_ms == pytest.approx(main.time.ms)
        assert side[names.UNEXPLAINED] is None


@pytest.mark.slow
def test_what_was_recorded_before_a_step_is_in_no_table_of_steps() -> None:
    """Each analysis that does not read the account says the same with and without it."""
    answers = []
    for trace in (copying(), copying(with_window=False)):
        found = {}
        for name, each in analyses.ANALYSES.items():
            try:
                found[name] = each(trace).fetchall()
            except XspError:
                continue
        answers.append(found)
    different = [name for name in answers[0] if answers[0][name] != answers[1].get(name)]
    assert not [name for name in different if name not in ("health", "account", "phases")], different
    with_window, without = (account.of(copying(has)).main for has in (True, False))
    assert with_window is not None
    assert without is not None
    assert with_window.host.ms(names.FORWARD) == pytest.approx(without.host.ms(names.FORWARD))


def test_parts_are_not_more_than_a_gap_that_was_mostly_not_recorded() -> None:
    text = """
        before before_the_step   0-1000 step=4
        op aten::to              100-900 step=4
        step train               1100-5100 step=4
        forward Net              1200-5000 step=4
    """
    recorded = {"step": 4, "rung": 40, "steady": False, "dur_ns": 4e6, "before_ns": 1e6}
    main = main_of(with_loop(trace_of(spans(text)), [recorded, *bare(20, dur_ns=4e6, before_ns=50e6)]))
    assert parts(main) == pytest.approx({"aten::to": 0.8, names.OUTSIDE_OPERATORS: 0.2, names.NOT_RECORDED: 49.0})


def test_slow_steps_that_were_never_recorded_are_an_entry_and_no_phase_is_blown_up() -> None:
    """Seven of eight steps take 3 ms, one 100 ms: none of the latter was recorded."""
    text = "step train 0-3000 step=4\nforward Net 0-2000 step=4"
    loop = [{"step": 100 + number, "dur_ns": 1e8 if number % 8 == 5 else 3e6} for number in range(80)]
    recorded = {"step": 4, "rung": 20, "steady": False, "dur_ns": 3e6}
    main = main_of(with_loop(trace_of(spans(text)), [recorded, *loop]))
    assert main.time.ms == pytest.approx((7 * 3 + 100) / 8)
    assert main.host.ms(names.FORWARD) == pytest.approx(2.0, rel=0.05)
    assert main.host.ms(names.UNLIKE) == pytest.approx(97 / 8, rel=0.05)
    forward = main.host[names.FORWARD]
    assert forward is not None
    assert main.host[names.UNLIKE].place == "10 steps of about 100 ms, one in 8 steps"  # type: ignore[union-attr]
    assert forward.high_ms is None or forward.high_ms > 10


def test_slow_steps_that_were_recorded_at_another_depth_count_as_often_as_they_occur() -> None:
    """The shallow recordings, which phases come from, hold no slow step; a deeper one does."""
    text = """
        step train  0-5000 step=4 rung=20
        forward Net 0-3000 step=4 rung=20
        step train  10000-110000 step=6 rung=40
        forward Net 10000-108000 step=6 rung=40
    """
    loop = [{"step": 100 + number, "dur_ns": 1e8 if number % 8 == 5 else 5e6} for number in range(80)]
    recorded = [{"step": 4, "rung": 20, "steady": False, "dur_ns": 5e6}, {"step": 6, "rung": 40, "dur_ns": 1e8}]
    main = main_of(with_loop(trace_of(spans(text)), [*recorded, *loop]))
    assert main.host[names.UNLIKE] is None
    assert main.host.ms(names.FORWARD) == pytest.approx((7 * 3 + 98) / 8, rel=0.05)


def waiting(asleep_ms: float, calls: str, trains: bool = False) -> Trace:
    """Return a run with 40 ms between steps of 10 ms, in one line, in part of which the thread sleeps."""
    text = """
        before before_the_step   0-40000 step=4
        op aten::argmax          1000-3000 step=4
        step s                   40100-50100 step=4
        forward Net              40200-50000 step=4
    """
    line = {"file": "server.py", "line": 438, "calls": calls, "ns": 80_000_000, "gaps": 2}
    between = {"gaps": 2, "ns": 80_000_000, "lines": [line], "asleep_ns": round(2e6 * asleep_ms)}
    recorded = {"step": 4, "rung": 40, "steady": False, "dur_ns": 10e6, "before_ns": 40e6}
    run = {"between": between, "kinds": [{"kind": 0, "name": "Net", "training": trains}]}
    return with_loop(trace_of(spans(text), run), [recorded, *bare(20, dur_ns=10e6, before_ns=40e6)])


def test_time_between_steps_in_which_the_thread_sleeps_is_a_wait_and_no_work() -> None:
    """A server that waits for requests was told to make the line that receives them take less time."""
    trace = waiting(36, "handle_one_request")
    assert parts(main_of(trace)) == pytest.approx({names.ASLEEP: 36.0, names.OUTSIDE_OPERATORS: 2.0, "aten::argmax": 2})
    assert limit(account.of(trace)).endswith(
        "40.0 ms of it in server.py:438, handle_one_request; the thread sleeps in 36.0 ms: it waits for work, the "
        "network, files or other threads."
    )
    (piece,) = [each for each in advisor.of(trace, max_needs=Needs.TRACE).advice if each.question == "between"]
    assert (piece.gain_known, piece.do.startswith("see what it waits for at server.py:438")) == (False, True)


@pytest.mark.parametrize(
    ("asleep_ms", "calls", "trains"),
    [(36, "torch.save", False), (10, "handle_one_request", False), (0, "prepare", False), (36, "upload", True)],
)
def test_a_save_and_work_can_be_saved_although_the_thread_may_sleep(asleep_ms: float, calls: str, trains: bool) -> None:
    (piece, *_) = advisor.of(waiting(asleep_ms, calls, trains), max_needs=Needs.TRACE).advice
    assert (piece.question, piece.gain_known) == ("between", True)
    assert ("let another thread wait at server.py:438" in piece.do) is trains


def test_a_long_gap_that_was_recorded_once_does_not_hide_the_line_of_all_gaps() -> None:
    """The only deep recording of 100 had a gap of 126 ms, of others 16: no line had a quarter of it."""
    text = """
        before before_the_step   0-400000 step=4
        op aten::div             1000-2000 step=4
        step s                   400100-401100 step=4
        forward Net              400200-401000 step=4
    """
    line = {"file": "find.py", "line": 26, "calls": "np.argsort", "ns": 80_000_000, "gaps": 2}
    between = {"gaps": 2, "ns": 82_000_000, "lines": [line]}
    recorded = {"step": 4, "rung": 40, "steady": False, "dur_ns": 1e6, "before_ns": 4e8}
    rows = [recorded, *bare(200, dur_ns=1e6, before_ns=40e6)]
    trace = with_loop(trace_of(spans(text), {"between": between}), rows)
    assert ", 39.0 ms of it in find.py:26, np.argsort" in limit(account.of(trace))
    (piece,) = [each for each in advisor.of(trace, max_needs=Needs.TRACE).advice if each.question == "between"]
    assert piece.do.startswith("the largest few need no sort of all: np.argpartition")
    assert piece.gain.value == pytest.approx(39.0, rel=0.01), "of 40 ms, as the line takes"
