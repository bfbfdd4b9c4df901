"""What oneDNN prints for xsp never comes out, and what the program prints through C always does."""

from __future__ import annotations

import _thread
import gc
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import pytest
from depth import deep

pytest.importorskip("torch")

from xsp_collectors.cstdout import CapturedStdout
from xsp_collectors.onednn import OneDnnPrimitives

if OneDnnPrimitives().available() is not None:
    pytest.skip(f"no oneDNN primitives here: {OneDnnPrimitives().available()}", allow_module_level=True)

MODEL = """
import ctypes, os, sys, threading, torch, xsp
from torch import nn
net = nn.Sequential(*[nn.Conv2d(16, 16, 3, padding=1) for _ in range(4)]).eval()
image, done = torch.randn(2, 16, 48, 48), threading.Event()
libc = ctypes.CDLL(None)
def work():
    with torch.inference_mode():
        net(image)
def work_beside():
    while not done.is_set():
        work()
beside = [threading.Thread(target=work_beside) for _ in range(3)]
"""

SERVICE = (
    MODEL
    + """
from opentelemetry.sdk.trace import TracerProvider
provider = TracerProvider()
tracer = provider.get_tracer("app")
def serve():
    for _ in range(40):
        with tracer.start_as_current_span("GET /"):
            work()
traced = xsp.instrument(net, sample=1.0, provider=provider)
serving = [threading.Thread(target=serve) for _ in range(2)]
for each in beside + serving: each.start()
for each in serving: each.join()
done.set()
for each in beside: each.join()
traced.close()
print(traced.counts.recorded, traced.counts.recorded > traced.counts.layers_only, file=sys.stderr)
"""
)

PROFILE = (
    MODEL
    + """
for each in beside: each.start()
with xsp.profile(sys.argv[1], warmup=1) as prof:
    for number in range(30):
        with prof.step():
            work()
            libc.printf(b"in %d\\n", number)
        libc.printf(b"after %d\\n", number)
done.set()
for each in beside: each.join()
libc.fflush(None)
"""
)

CHILD = (
    MODEL
    + """
from xsp_collectors.onednn import OneDnnPrimitives
from xsp.collector import Level
torch.set_num_threads(1)  # OpenMP's do not survive a fork
collector = OneDnnPrimitives()
collector.open()
collector.start(Level.LIBRARY, False)
beside[0].start()
work()
if "after" in sys.argv:
    collector.stop()
child = os.fork()
if not child:
    torch.mm(torch.ones(64, 64, dtype=torch.bfloat16), torch.ones(64, 64, dtype=torch.bfloat16))
    libc.puts(b"child")
    libc.fflush(None)
    os._exit(0)
os.waitpid(child, 0)
collector.stop()
done.set()
beside[0].join()
collector.close()
libc.puts(b"parent")
libc.fflush(None)
"""
)


def ran(code: str, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=cwd, capture_output=True, text=True, timeout=240, check=True
    )


@pytest.mark.slow
def test_a_service_with_other_threads_at_work_prints_nothing(tmp_path: Path) -> None:
    pytest.importorskip("opentelemetry.sdk")
    run = ran(SERVICE, cwd=tmp_path)
    assert run.stdout == ""
    assert run.stderr.splitlines()[-1] == "80 True"


@pytest.mark.slow
def test_a_profiled_program_with_other_threads_prints_its_own_lines_each_once_and_in_order(tmp_path: Path) -> None:
    run = ran(PROFILE, str(tmp_path / "run"), cwd=tmp_path)
    assert run.stdout.splitlines() == [f"{when} {number}" for number in range(30) for when in ("in", "after")]


@pytest.mark.slow
@pytest.mark.parametrize("when", ["during", deep("after")])
def test_a_forked_child_prints_what_it_prints(tmp_path: Path, when: str) -> None:
    assert ran(CHILD, when, cwd=tmp_path).stdout.splitlines() == ["child", "parent"]


PARTS = """
import ctypes
from xsp_collectors.cstdout import CapturedStdout
libc = ctypes.CDLL(None)
first, second = CapturedStdout(b"verbose,", int), CapturedStdout(b"verbose,", int)
assert first.begin() and not second.begin()
libc.printf(b"50 %%")
libc.printf(b"verbose,a\\n")
libc.printf(b" done\\nverbose,b\\nlast")
assert first.end() == [b"verbose,a\\n", b"verbose,b\\n"]
assert second.begin()
libc.printf(b"verbose,c\\n")
assert second.end() == [b"verbose,c\\n"]
libc.printf(b".\\n")
assert first.close() and second.close()
libc.fflush(None)
"""


def test_a_thread_that_sleeps_and_has_no_name_holds_nothing_up() -> None:
    """`threading` knows no thread that was started through `_thread`, as servers of other libraries do."""
    asleep = _thread.allocate_lock()
    asleep.acquire()
    begun = threading.Event()

    def sleep() -> None:
        begun.set()
        asleep.acquire()

    _thread.start_new_thread(sleep, ())
    begun.wait()
    output = CapturedStdout(b"onednn_verbose", lambda: None)
    try:
        assert output.begin()
        assert output.end() == []
    finally:
        clear = output.close()
        asleep.release()
    assert clear, "the thread counts as one that may still print"


def test_lines_are_told_apart_where_they_run_into_each_other(tmp_path: Path) -> None:
    assert CapturedStdout.unavailable() is None
    assert ran(PARTS, cwd=tmp_path).stdout == "50 % done\nlast.\n"


@pytest.mark.slow
def test_the_end_of_a_capture_keeps_nothing_of_its_callers() -> None:
    """A frame among its own variables would hold all of them until garbage is collected: an optimizer, a batch."""

    class Batch:
        pass

    def step(output: CapturedStdout) -> weakref.ref[Batch]:
        batch = Batch()
        output.begin()
        output.end()
        return weakref.ref(batch)

    output = CapturedStdout(b"nothing", lambda: None)
    gc.collect()
    gc.disable()
    try:
        assert step(output)() is None
    finally:
        gc.enable()
        output.close()
