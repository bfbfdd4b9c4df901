"""Processes that xsp starts beside a program whose other threads go on."""

from __future__ import annotations

import os
import subprocess
import threading

from xsp import processes


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


def test_a_process_has_the_variables_of_the_program() -> None:
    os.environ["XSP_TEST_OF_THE_PROGRAM"] = "yes"
    try:
        code = "import os; raise SystemExit(os.environ['XSP_TEST_OF_THE_PROGRAM'] != 'yes')"
        assert processes.start_python(code).wait(60) == 0
        assert processes.start_python(code, env={**processes.environment(), "XSP_TEST_OF_THE_PROGRAM": "no"}).wait(60)
    finally:
        del os.environ["XSP_TEST_OF_THE_PROGRAM"]
