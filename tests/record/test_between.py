"""Lines of the program between steps: what is counted for them, and that nothing of following stays behind."""

from __future__ import annotations

import gc
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest

from xsp.collector import Signal
from xsp.record import between
from xsp.record.between import Between, _Times, awake
from xsp.record.steps import Steps


@pytest.fixture
def followed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Between]:
    """Return what follows lines, also under coverage or a debugger."""
    before = sys.gettrace()
    sys.settrace(None)
    monkeypatch.setattr(between, "_OWN_MODULES", "/nowhere")
    yield Between()
    sys.settrace(before)


def lines(found: Between) -> dict[str, float]:
    """Return milliseconds by the names that lines call."""
    content = found.content()
    assert content is not None
    taken: dict[str, float] = {}
    for each in content["lines"]:
        taken[each["calls"]] = taken.get(each["calls"], 0.0) + each["ns"] / 1e6
    return taken


def slow(seconds: float) -> None:
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        sum(range(50))


def step_in_a_function(found: Between) -> None:
    found.begin()
    slow(0.02)


def test_a_line_counts_with_all_that_it_calls_and_so_does_the_line_that_a_function_returns_to(
    followed: Between,
) -> None:
    began = time.perf_counter()
    step_in_a_function(followed)
    slept = time.perf_counter()
    time.sleep(0.01)
    slow_again = time.perf_counter()
    slow(0.03)
    followed.end()
    ended = time.perf_counter()
    taken = lines(followed)
    assert 50 <= taken["slow"] <= 1000 * (slept - began + ended - slow_again)
    assert 10 <= taken["time.sleep"] <= 1000 * (ended - slept)
    assert sum(taken.values()) == pytest.approx(followed.content()["ns"] / 1e6)
    passes = {each["calls"]: each["passes"] for each in followed.content()["lines"]}
    assert passes["time.sleep"] == 1
    functions = {each["function"] for each in followed.content()["lines"]}
    assert any(each.endswith("step_in_a_function") for each in functions)


def sleeps(times: int, seconds: float) -> FrameType:
    for _ in range(times):
        time.sleep(seconds)
    return sys._getframe()


def test_a_line_of_a_loop_counts_once_for_each_pass(followed: Between) -> None:
    followed.begin()
    for _ in range(7):
        sum(range(5))
    followed.end()
    (line,) = (each for each in followed.content()["lines"] if each["calls"] == "sum, range")
    assert (line["passes"], line["gaps"]) == (7, 1)


def goes_on(found: Between) -> FrameType:
    time.sleep(0.005)
    found.end()
    return sys._getframe()


def calls_a_function(found: Between) -> FrameType:
    sum(range(10))
    return sleeps(4, 0.005)


@pytest.mark.parametrize("most_events", [5, 5_000])
def test_the_line_of_the_program_inside_a_call_is_noted(
    followed: Between, monkeypatch: pytest.MonkeyPatch, most_events: int
) -> None:
    """Also if a long loop is followed for some of its passes only."""
    monkeypatch.setattr(between, "MOST_INNER", most_events)
    followed.begin()
    frame = calls_a_function(followed)
    followed.end()
    assert frame.f_trace is None
    (line,) = (each for each in followed.content()["lines"] if each["calls"] == "calls_a_function")
    assert line["ns"] > 20_000_000
    assert line["within"]["calls"] == "time.sleep"
    assert line["within"]["line"] == sleeps.__code__.co_firstlineno + 2
    if most_events > 100:
        assert 20_000_000 <= line["within"]["ns"] <= line["ns"]


def test_a_function_that_goes_on_after_the_gap_is_followed_no_further(followed: Between) -> None:
    followed.begin()
    frame = goes_on(followed)
    assert sys.gettrace() is None
    assert frame.f_trace is None
    followed.begin()  # refused where a frame is traced
    followed.end()
    assert followed.content()["gaps"] == 2


def test_nothing_is_left_behind(followed: Between) -> None:
    frame = sys._getframe()
    followed.begin()
    assert sys.gettrace() is not None
    slow(0.001)
    followed.end()
    assert sys.gettrace() is None
    at: FrameType | None = frame
    while at is not None:
        assert at.f_trace is None
        at = at.f_back
    followed.end()  # a second time
    assert followed.content()["gaps"] == 1


def goes_on_for(found: Between, seconds: float, is_sought: bool) -> bool:
    """Return whether a gap of a time was a slow one."""
    found.slow.least_ns, found.slow.traced = 10_000_000, 0
    found.begin(is_sought=is_sought)
    time.sleep(seconds)
    found.end()
    return bool(found.slow.traced)


def test_a_sought_gap_counts_if_it_is_slow_and_never_as_one_of_all(followed: Between) -> None:
    assert not goes_on_for(followed, 0.0, is_sought=True)
    assert followed.content() is None
    assert followed.content_of_steps() == []
    assert goes_on_for(followed, 0.02, is_sought=True)
    assert followed.is_sought
    assert followed.content() is None
    assert not goes_on_for(followed, 0.0, is_sought=False)
    assert goes_on_for(followed, 0.02, is_sought=False)
    assert not followed.is_sought
    (slow,) = followed.content_of_steps()
    assert (slow["phase"], slow["kind"], slow["gaps"]) == ("slow gaps", 0, 2)
    assert followed.content()["gaps"] == 2
    followed.begin_step()  # the step after a sought gap is traced no further
    goes_on_for(followed, 0.0, is_sought=True)
    followed.begin_step()
    assert sys.gettrace() is None


class Held:
    pass


def returns_soon(found: Between) -> weakref.ref[Held]:
    held = Held()
    found.begin()
    return weakref.ref(held)


def test_what_a_function_held_is_free_when_it_returns(followed: Between) -> None:
    gc.disable()
    try:
        held = returns_soon(followed)
        assert held() is None
    finally:
        gc.enable()
        followed.end()


def steps_in_a_generator(found: Between) -> Iterator[FrameType]:
    found.begin()
    yield sys._getframe()
    slow(0.01)
    yield sys._getframe()


def test_a_generator_that_yields_is_left_and_counts_for_the_line_that_resumes_it(followed: Between) -> None:
    generator = steps_in_a_generator(followed)
    began = time.perf_counter()
    inner = next(generator)
    assert inner.f_trace is None
    next(generator)
    followed.end()
    ended = time.perf_counter()
    assert inner.f_trace is None
    assert 10 <= lines(followed)["next"] <= 1000 * (ended - began)


def test_nothing_is_followed_where_somebody_else_traces(followed: Between) -> None:
    def other(*_: Any) -> None: ...

    sys.settrace(other)
    followed.begin()
    assert sys.gettrace() is other
    followed.end()
    sys.settrace(None)
    assert followed.content() is None


def test_another_tracer_that_comes_meanwhile_stays(followed: Between) -> None:
    def other(*_: Any) -> None: ...

    followed.begin()
    sys.settrace(other)
    followed.end()
    assert sys.gettrace() is other
    sys.settrace(None)


def test_waiting_for_data_is_not_the_line_s(followed: Between) -> None:
    def waits() -> None:
        began_ns = time.perf_counter_ns()
        slow(0.05)
        followed.exclude(time.perf_counter_ns() - began_ns)

    followed.begin()
    waits()
    followed.end()
    assert sum(lines(followed).values()) < 20


def test_a_gap_of_many_calls_is_followed_in_part_and_the_rest_is_said_to_be_unknown(
    followed: Between, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(between, "MOST_CALLS", 10)
    began_ns = time.perf_counter_ns()
    followed.begin()
    for _ in range(20):
        slow(0.001)
    time.sleep(0.01)
    followed.end()
    whole_ns = time.perf_counter_ns() - began_ns
    content = followed.content()
    assert content["unknown_ns"] > 15_000_000
    assert content["ns"] + content["unknown_ns"] <= whole_ns
    assert sys.gettrace() is None


def test_no_more_gaps_than_enough_are_followed(followed: Between, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(between, "MOST_GAPS", 2)
    for _ in range(4):
        followed.begin()
        followed.end()
    assert followed.content()["gaps"] == 2


def test_a_gap_may_end_on_another_thread(followed: Between) -> None:
    followed.begin()
    ends = threading.Thread(target=followed.end)
    ends.start()
    ends.join()
    slow(0.001)  # the first event after it takes the tracer out
    assert sys.gettrace() is None
    assert followed.content()["gaps"] == 1


def test_a_thread_whose_gap_has_ended_counts_nothing_in_the_next_one(followed: Between) -> None:
    begun, ended, left = threading.Event(), threading.Event(), []

    def serves() -> None:
        followed.begin()
        begun.set()
        ended.wait()
        time.sleep(0.05)
        slow(0.05)
        left.append(sys.gettrace())

    other = threading.Thread(target=serves)
    other.start()
    begun.wait()
    followed.end()  # a step begins on this thread, and ends
    followed.begin()
    ended.set()
    other.join()
    followed.end()
    assert left == [None]
    assert {each["calls"] for each in followed.content()["lines"] if each["gaps"] == 1 and each["ns"] > 4e7} <= {
        "ended.wait", "other.join",
    }  # fmt: skip
    assert followed.content()["gaps"] == 2


def test_an_error_in_a_gap_goes_its_way(followed: Between) -> None:
    def fails() -> None:
        followed.begin()
        raise ValueError("the program's own")

    with pytest.raises(ValueError, match="own"):
        fails()
    began = time.perf_counter()
    slow(0.01)
    followed.end()
    assert 10 <= lines(followed)["slow"] <= 1000 * (time.perf_counter() - began)


def test_a_forked_child_follows_nothing(followed: Between) -> None:
    followed.begin()
    followed.forget()
    assert sys.gettrace() is None
    assert followed.content() is None


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("    gc.collect()", "gc.collect"),
        ("wandb.login(key='hf_abcdefghijkl', to=\"print(1)\")  # secret(1)", "wandb.login"),
        ("if (loss.item() > 1) and not (other):", "loss.item"),
        ("for each in batches:", ""),
        ("seen.append({n: torch.histc(p.detach(), 64) for n, p in m.named_parameters()})",
         "seen.append, torch.histc, p.detach, m.named_parameters"),
        ("x = f(1).mean().item()", "f, .mean, .item"),
    ],
)  # fmt: skip
def test_the_names_of_a_line_are_those_that_it_calls_and_none_of_its_literals(text: str, names: str) -> None:
    assert between._called_names(text) == names


def test_files_are_named_without_the_directories_of_a_person(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.chdir(tmp_path)
    assert between.shown_path(str(tmp_path / "models" / "train.py")) == "models/train.py"
    assert between.shown_path("/home/someone/else/train.py") == "train.py"
    assert (
        between.shown_path("/home/someone/lib/python3.11/site-packages/lightning/loops/fit.py")
        == "lightning/loops/fit.py"
    )
    assert between.shown_path("<ipython-input-3>") == "<ipython-input-3>"


@pytest.mark.parametrize(
    ("module", "is_own"),
    [("xsp.record.steps", True), ("xsp_collectors.training", True), ("xspy.train", False), ("__main__", False)],
)
def test_frames_of_the_collectors_are_not_lines_of_the_program(module: str, is_own: bool) -> None:
    """They are installed beside xsp, and one of them is on the stack when the step of an optimizer ends a step."""
    place: dict[str, Any] = {"__name__": module, "sys": sys}
    exec("def frame():\n    return sys._getframe()\n", place)
    assert between._is_own(place["frame"]()) is is_own


# --- in steps ---------------------------------------------------------------------------------------------------------


def phases(found: Between) -> dict[tuple[int, str], dict[str, float]]:
    """Return milliseconds by kind and phase, and by the names that lines call."""
    taken: dict[tuple[int, str], dict[str, float]] = {}
    for each in found.content_of_steps():
        names = taken[each["kind"], each["phase"]] = {}
        for line in each["lines"]:
            names[line["calls"]] = names.get(line["calls"], 0.0) + line["ns"] / 1e6
    return taken


def computes(seconds: float) -> None:
    time.sleep(seconds)


def run_step(found: Between) -> tuple[float, float]:
    """Run a step, and return the milliseconds that its computation in forward, and its own backward pass, took."""
    found.begin()
    found.end()
    found.begin_step()
    found.on_signal(Signal.CALL_BEGIN)
    times = [time.perf_counter()]
    computes(0.05)
    times.append(time.perf_counter())
    found.on_signal(Signal.CALL_END)
    slow(0.05)
    found.on_signal(Signal.BACKWARD_BEGIN)
    times.append(time.perf_counter())
    found.on_signal(Signal.CALL_BEGIN)  # recomputation of a checkpoint
    time.sleep(0.004)
    found.on_signal(Signal.CALL_END)
    time.sleep(0.03)
    times.append(time.perf_counter())
    found.on_signal(Signal.BACKWARD_END)
    found.on_signal(Signal.BACKWARD_END)  # of a pass that began before
    found.end_step()
    return 1e3 * (times[1] - times[0]), 1e3 * (times[3] - times[2])


def test_lines_of_a_step_count_for_the_phase_that_runs(followed: Between) -> None:
    forward_ms, backward_ms = run_step(followed)
    assert sys.gettrace() is None
    followed.count_step(3)
    followed.count_step(3)  # nothing ran since
    taken = phases(followed)
    assert {key: max(names, key=lambda name: names[name]) for key, names in taken.items()} == {
        (3, "outside"): "slow",
        (3, "forward"): "computes",
        (3, "backward"): "time.sleep",
    }
    assert taken[3, "outside"]["slow"] >= 50
    assert 50 <= taken[3, "forward"]["computes"] <= forward_ms
    assert "time.sleep" not in taken[3, "forward"], "what runs again in the backward pass is part of that"
    assert 34 <= taken[3, "backward"]["time.sleep"] <= backward_ms
    (forward,) = (each for each in followed.content_of_steps() if each["phase"] == "forward")
    (line,) = (each for each in forward["lines"] if each["calls"] == "computes")
    assert (line["within"]["calls"], forward["gaps"]) == ("time.sleep", 1)
    assert followed.content()["gaps"] == 1


def test_a_step_that_failed_or_follows_no_traced_gap_is_not_counted(followed: Between) -> None:
    run_step(followed)
    run_step(followed)
    followed.count_step(0)
    assert [each["gaps"] for each in followed.content_of_steps() if each["phase"] == "outside"] == [1]
    followed.begin_step()
    assert sys.gettrace() is not None  # the last gap was traced, and no step since
    followed.end_step()
    followed.end()
    followed.begin_step()
    assert sys.gettrace() is None
    followed.on_signal(Signal.CALL_BEGIN)


def test_the_times_of_a_step_that_is_dropped_count_for_no_later_one(followed: Between) -> None:
    run_step(followed)
    followed.drop_step()
    followed.count_step(0)
    assert followed.content_of_steps() == []
    followed.begin()
    followed.drop_step()
    followed.end()
    assert followed.content()["gaps"] == 2  # a gap is no step


def test_lines_of_packages_are_marked(followed: Between, tmp_path: Path) -> None:
    names: dict[str, Any] = {}
    for folder in ("site-packages", "program"):
        file = tmp_path / folder / "looped.py"
        code = f"import time\ndef {folder[:4]}(found):\n    found.begin()\n    time.sleep(0.004)\n    found.end()\n"
        exec(compile(code, str(file), "exec"), names)
    names["site"](followed)
    names["prog"](followed)
    content = followed.content()
    assert content is not None
    marks = {line["function"]: line.get("package", False) for line in content["lines"] if line["function"] in names}
    assert marks == {"site": True, "prog": False}


def test_no_more_steps_than_enough_are_followed(followed: Between, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(between, "MOST_STEPS", 2)
    for _ in range(4):
        run_step(followed)
        followed.count_step(0)
    assert [each["gaps"] for each in followed.content_of_steps() if each["phase"] == "outside"] == [2]


def test_a_loop_of_a_phase_is_followed_for_some_passes_and_the_next_phase_anew(
    followed: Between, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(between, "MOST_INNER", 40)
    followed.begin()
    followed.end()
    followed.begin_step()
    followed.on_signal(Signal.CALL_BEGIN)
    frame = sleeps(100, 0.0002)
    assert frame.f_trace is None
    followed.on_signal(Signal.CALL_END)
    computes(0.002)
    followed.end_step()
    followed.count_step(0)
    within = {
        (each["phase"], line["calls"]): line["within"]["calls"]
        for each in followed.content_of_steps()
        for line in each["lines"]
        if "within" in line
    }
    assert within["forward", "sleeps"] == within["outside", "computes"] == "time.sleep"


def twice(seconds: float) -> None:
    slow(seconds)
    computes(seconds)


def test_a_long_loop_leaves_lines_for_others_and_has_all_of_its_call(
    followed: Between, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(between, "MOST_INNER", 200)
    monkeypatch.setattr(between, "MOST_IN_CALL", 20)
    followed.begin()
    for _ in range(3):
        twice(0.02)
    followed.end()
    (line,) = (each for each in followed.content()["lines"] if each["calls"] == "twice")
    (loop,) = (each for each in line["inner"] if each.get("is_loop"))
    (other,) = (each for each in line["inner"] if each["calls"] == "time.sleep")
    assert loop["line"] in range(slow.__code__.co_firstlineno + 2, slow.__code__.co_firstlineno + 4)
    assert loop["ns"] >= 50e6, "of each of three calls, although a few passes of each were traced"
    assert other["ns"] >= 60e6
    assert not other.get("is_loop")


def test_a_step_that_ends_on_another_thread_counts_nothing(followed: Between) -> None:
    followed.begin()
    followed.end()
    followed.begin_step()
    thread = threading.Thread(target=followed.end_step)
    thread.start()
    thread.join()
    followed.count_step(0)
    assert followed.content_of_steps() == []
    sum(range(10))  # the trace function removes itself
    slow(0.0)
    assert sys.gettrace() is None


def statistics(times: int) -> None:
    for _ in range(times):
        time.sleep(0.001)
        slow(0.001)
        sum(range(5))


def test_the_lines_of_a_loop_in_a_function_count_together(followed: Between) -> None:
    followed.begin()
    statistics(10)
    followed.end()
    (line,) = (each for each in followed.content()["lines"] if each["calls"] == "statistics")
    first = statistics.__code__.co_firstlineno + 2
    within = line["within"]
    assert within["line"] == first if "last" in within else within["line"] in (first, first + 1)
    assert within["ns"] <= within["of_ns"] <= line["ns"]


def test_lines_of_about_equal_time_near_each_other_are_a_loop() -> None:
    code, other = statistics.__code__, slow.__code__
    times = _Times()
    times.add_line((code, 1), 100)
    times.inner[code, 1] = {(code, 10): 30, (code, 12): 30, (other, 11): 20, (code, 40): 20}
    (line,) = times.content()["lines"]
    assert (line["within"]["line"], line["within"]["last"], line["within"]["ns"]) == (10, 12, 60)
    times.inner[code, 1] = {(code, 10): 30, (code, 12): 25, (other, 11): 45}
    (line,) = times.content()["lines"]
    assert (line["within"]["line"], line["within"]["last"], line["within"]["ns"]) == (10, 12, 55)
    times.inner[code, 1] = {(code, 10): 30, (code, 20): 30, (other, 11): 40}
    (line,) = times.content()["lines"]
    assert "within" not in line


def test_the_closure_of_an_optimizer_is_in_no_phase(followed: Between) -> None:
    followed.begin()
    followed.end()
    followed.begin_step()
    followed.on_signal(Signal.OPTIMIZER_BEGIN)
    computes(0.01)
    followed.on_signal(Signal.BACKWARD_BEGIN)
    followed.on_signal(Signal.BACKWARD_END)
    time.sleep(0.003)
    followed.on_signal(Signal.OPTIMIZER_END)
    followed.end_step()
    followed.count_step(0)
    taken = phases(followed)
    assert taken[0, "outside"]["computes"] >= 10
    assert "computes" not in taken[0, "optimizer"]
    assert taken[0, "optimizer"]["time.sleep"] >= 3


def test_no_line_has_the_time_in_which_xsp_handles_a_signal(followed: Between) -> None:
    """The hooks around a call of a model took more time of a short gap than the line that took most of it."""

    def handles(signal: Signal, subject: object) -> bool:
        time.sleep(0.3)
        if signal is Signal.CALL_BEGIN:
            followed.end()
            time.sleep(0.3)
        return True

    listen = Steps.listener(SimpleNamespace(between=followed), handles)  # type: ignore[arg-type]
    followed.begin()
    slow(0.004)
    listen(Signal.CALL_END, None)
    listen(Signal.CALL_BEGIN, None)
    assert 4 <= sum(lines(followed).values()) < 200
    followed.begin()
    slow(0.004)
    followed.end()
    assert sum(lines(followed).values()) >= 8, "it is counted again"


@pytest.mark.skipif(awake() is None, reason="the system does not tell how long a thread waits for a processor")
def test_the_time_in_which_the_thread_sleeps_is_noted_without_waits_for_data(followed: Between) -> None:
    followed.begin()
    slow(0.04)
    time.sleep(0.03)
    time.sleep(0.02)
    followed.exclude(20_000_000)
    followed.end()
    content = followed.content()
    assert content is not None
    assert 25 <= content["asleep_ns"] / 1e6 <= content["ns"] / 1e6 - 15
