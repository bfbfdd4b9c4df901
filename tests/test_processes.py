"""Processes that xsp starts beside a program whose other threads go on."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import threading
import time
from typing import Any

import pytest

from xsp import processes
from xsp.schema import Level


@pytest.mark.slow
def test_a_process_starts_while_a_thread_sets_variables() -> None:
    """The C library moves its array of variables as it grows: the start of a process must not read it."""
    stop = threading.Event()
    names = [f"XSP_TEST_{number}" for number in range(400)]

    def grow_and_shrink() -> None:
        while not stop.is_set():
            for name in names:
                os.environ[name] = "1" * 10
            for name in names:
                os.environ.pop(name)

    thread = threading.Thread(target=grow_and_shrink)
    thread.start()
    try:
        for _ in range(20):
            process = processes.start_python("pass", stdin=subprocess.DEVNULL)
            assert process.wait(60) == 0
    finally:
        stop.set()
        thread.join()


def test_answers_are_lines_in_whatever_pieces_they_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces = iter([b"on", b"e\ntwo\nth", b"ree\n", b"cut off", b""])
    monkeypatch.setattr(processes, "start_python", lambda *_, **__: None)
    requested = processes.WorkerProcess("")
    monkeypatch.setattr("select.select", lambda *given: (given[0], [], []))
    monkeypatch.setattr("os.read", lambda *_: next(pieces))
    result = [requested.answer(0.0) for _ in range(4)]
    monkeypatch.undo()
    os.close(requested._answers)
    assert result == [b"one", b"two", b"three", b""]


def test_a_long_answer_takes_time_in_proportion_to_its_length(monkeypatch: pytest.MonkeyPatch) -> None:
    def took_s(length: int) -> float:
        pieces = iter([b"." * 64] * (length // 64) + [b"\n"])
        requested = processes.WorkerProcess("")
        with monkeypatch.context() as patched:
            patched.setattr("select.select", lambda *given: (given[0], [], []))
            patched.setattr("os.read", lambda *_: next(pieces))
            began_s = time.process_time()
            assert len(requested.answer(0.0)) == length
            taken_s = time.process_time() - began_s
        os.close(requested._answers)
        return taken_s

    monkeypatch.setattr(processes, "start_python", lambda *_, **__: None)
    short_s, long_s = (min(took_s(length) for _ in range(3)) for length in (1 << 18, 1 << 21))
    assert long_s < 24 * short_s, "eight times as long, not 64 times"


class _Handler:
    def method(self, *_: object) -> None:
        raise TimeoutError

    def __call__(self, *_: object) -> None:
        raise TimeoutError


@pytest.mark.parametrize(
    "handler",
    [_Handler().method, _Handler(), functools.partial(_Handler().method, 1), lambda *_: _Handler().method()],
    ids=["method", "object", "partial", "function"],
)
def test_what_a_signal_handler_raises_is_told_from_an_error_of_the_code_that_it_interrupts(handler: Any) -> None:
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with pytest.raises(TimeoutError) as raised:
            signal.raise_signal(signal.SIGUSR1)
        assert processes.is_from_signal_handler(raised.value)
        with pytest.raises(ValueError, match="99") as own:
            Level(99)
        assert not processes.is_from_signal_handler(own.value)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert not processes.is_from_signal_handler(raised.value), "it is a handler no longer"


def test_a_process_has_the_variables_of_the_program() -> None:
    os.environ["XSP_TEST_OF_THE_PROGRAM"] = "yes"
    try:
        code = "import os; raise SystemExit(os.environ['XSP_TEST_OF_THE_PROGRAM'] != 'yes')"
        assert processes.start_python(code).wait(60) == 0
        assert processes.start_python(code, env={**processes.environment(), "XSP_TEST_OF_THE_PROGRAM": "no"}).wait(60)
    finally:
        del os.environ["XSP_TEST_OF_THE_PROGRAM"]


def test_threads_of_xsp_are_known_while_they_run_and_in_no_child() -> None:
    stop = threading.Event()
    thread = processes.start_thread(stop.wait, "xsp tests")
    assert thread.daemon
    assert thread.ident in processes.OWN_THREADS
    child = os.fork()
    if not child:
        os._exit(len(processes.OWN_THREADS))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert thread.ident in processes.OWN_THREADS
    stop.set()
    thread.join()
    assert thread.ident not in processes.OWN_THREADS
