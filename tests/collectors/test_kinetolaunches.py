"""What Kineto tells of a launch becomes attributes; the text is as its CUPTI activities write it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from depth import deep

from xsp_collectors.torchops import attributes

KERNEL = """
      "queued": 0, "device": 0, "context": 1,
      "stream": 7, "correlation": 12,
      "registers per thread": 40,
      "shared memory": 1024,
      "blocks per SM": "inf",
      "warps per SM": 4.5,
      "grid": [8, 2, 1],
      "block": [128, 1, 1],
      "est. achieved occupancy %": 3{}"""
LAUNCH = {"grid": [8, 2, 1], "block": [128, 1, 1], "registers": 40, "shared_bytes": 1024, "context": 1}


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        (KERNEL.format(""), LAUNCH),
        (KERNEL.format(',\n"graph id": 0, "graph node id": 0'), LAUNCH),
        (KERNEL.format(',\n"graph id": 3, "graph node id": 9'), LAUNCH | {"graph": True, "graph_node": 9}),
        ('"device": 0, "context": 1, "bytes": 64, "memory bandwidth (GB/s)": 1.5', {"context": 1, "bytes": 64}),
    ],
)
def test_what_is_told_becomes_attributes(told: str, expected: dict[str, object]) -> None:
    assert json.loads(attributes(SimpleNamespace(metadata_json=lambda: told)) or "") == expected


@pytest.mark.parametrize("told", ["", '"grid": [8', '"device": 0'])
def test_what_says_nothing_is_left_out(told: str) -> None:
    assert attributes(SimpleNamespace(metadata_json=lambda: told)) is None


def test_an_older_torch_tells_nothing() -> None:
    assert attributes(SimpleNamespace()) is None


# --- Kineto, used for the first time in a thread of the program -------------------------------------------------------


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
