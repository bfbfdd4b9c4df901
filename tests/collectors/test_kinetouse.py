"""Kineto, used for the first time in a thread of the program."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from depth import deep

PROGRAM = """
import ctypes, sys, threading, torch, xsp
from torch import nn

model = nn.Linear(4, 4)

def profiled():
    with xsp.profile(out=sys.argv[1]) as prof:
        for _ in range(8):
            with prof.step():
                model(torch.ones(1, 4))

def instrumented():
    from opentelemetry.sdk.trace import TracerProvider
    handle = xsp.instrument(model, sample=1.0, provider=TracerProvider())
    model(torch.ones(1, 4))
    handle.close()

libc = ctypes.CDLL(None)
stderr = ctypes.c_void_p.in_dll(libc, "stderr")
before = stderr.value
thread = threading.Thread(target=globals()[sys.argv[2]])
thread.start()
thread.join()
assert stderr.value == before
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["profiled", deep("instrumented")])
def test_a_thread_that_is_profiled_writes_nothing_into_the_programs_stderr(tmp_path: Path, how: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "run"), how], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""


def test_what_others_print_through_c_meanwhile_is_passed_on() -> None:
    program = (
        "import ctypes, threading\n"
        "from xsp_collectors import kinetouse\n"
        "libc = ctypes.CDLL(None)\n"
        "def use():\n"
        "    stream = ctypes.c_void_p.in_dll(libc, 'stderr')\n"
        "    with kinetouse.without_complaint():\n"
        "        libc.fputs(kinetouse.COMPLAINT + b' (1 != 2)\\n', stream)\n"
        "        libc.fputs(b'a warning of another library\\n', ctypes.c_void_p(stream.value))\n"
        "    libc.fputs(b'afterwards\\n', ctypes.c_void_p(stream.value))\n"
        "thread = threading.Thread(target=use); thread.start(); thread.join()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert done.stderr == "a warning of another library\nafterwards\n"
