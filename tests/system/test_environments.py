"""Programs under a debugger, with green threads, with a limit of processes, in odd places: they run as without xsp."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest

import xsp

pytestmark = pytest.mark.slow

LOOP = """
import torch, xsp
net = torch.nn.Linear(8, 8)
with xsp.profile("odd", out="run") as prof:
    for _ in range(40):
        with prof.step():
            net(torch.ones(2, 8))
print("done")
"""


def ran(program: str, folder: Path, command: tuple[str, ...] = (sys.executable,), given: str = "") -> str:
    """Run a program in a folder, and return what it printed."""
    script = folder / "odd.py"
    script.write_text(textwrap.dedent(program))
    environment = {**os.environ, "PYDEVD_DISABLE_FILE_VALIDATION": "1"}
    done = subprocess.run(
        [*command, str(script)],
        cwd=folder,
        env=environment,
        input=given,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_debugpy_does_not_stop_what_stores(tmp_path: Path) -> None:
    pytest.importorskip("debugpy")
    assert "done" in ran("import debugpy\ndebugpy.listen(('127.0.0.1', 0))\n" + LOOP, tmp_path)
    assert xsp.load(tmp_path / "run").run["steps"]["stored"] > 0


def test_debugpy_does_not_stop_what_correlates_in_a_service(tmp_path: Path) -> None:
    pytest.importorskip("debugpy")
    service = """
    import debugpy
    debugpy.listen(("127.0.0.1", 0))
    import torch, xsp
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
    kept = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(kept))
    trace.set_tracer_provider(provider)
    net = torch.nn.Sequential(torch.nn.Linear(8, 8))
    xsp.instrument(net, sample=1.0)
    for _ in range(5):
        with trace.get_tracer("t").start_as_current_span("request"):
            net(torch.ones(2, 8))
    print("done")
    """
    assert "done" in ran(service, tmp_path)


def test_a_program_is_stepped_through_in_pdb(tmp_path: Path) -> None:
    stepped = ran(LOOP, tmp_path, (sys.executable, "-m", "pdb"), "b 7\nc\nn\nn\ncl 1\nc\nq\n")
    assert "done" in stepped
    assert xsp.load(tmp_path / "run").run["steps"]["stored"] > 0


@pytest.mark.parametrize("tracer", ["sys.settrace(trace); threading.settrace(trace)", "sys.setprofile(trace)"])
def test_a_tracer_of_the_program_stays_on(tracer: str, tmp_path: Path) -> None:
    program = f"import sys, threading\nseen = []\ndef trace(*_):\n    seen.append(1)\n{tracer}\n{LOOP}"
    program += "print(len(seen) > 100, (sys.gettrace() or sys.getprofile()) is trace)"
    assert "True True" in ran(program, tmp_path)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become a user who has no process left")
def test_a_program_that_may_start_no_process_and_no_thread_runs_without_a_profile() -> None:
    limited = """
    import os, resource, torch, xsp
    torch.set_num_threads(1)
    with xsp.profile("first", out="first") as first:  # what it imports may not be there for another user
        for _ in range(40):
            with first.step():
                torch.nn.Linear(8, 8)(torch.ones(2, 8))
    os.setgid(65534)
    os.setuid(65534)
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
    """
    with tempfile.TemporaryDirectory() as name:  # the folder of pytest is closed to other users
        folder = Path(name)
        folder.chmod(0o777)
        assert "done" in ran(textwrap.dedent(limited) + LOOP, folder)
        assert not (folder / "run" / "run.json").exists()


SET_BACK = """
#define _GNU_SOURCE
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>
static long back(void) { const char *mark = getenv("MARK"); return mark && access(mark, F_OK) == 0 ? 3600 : 0; }
int clock_gettime(clockid_t clock, struct timespec *now) {
    int code = syscall(SYS_clock_gettime, clock, now);
    if (code == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec -= back();
    return code;
}
int gettimeofday(struct timeval *now, void *zone) {
    struct timespec exact;
    clock_gettime(CLOCK_REALTIME, &exact);
    now->tv_sec = exact.tv_sec;
    now->tv_usec = exact.tv_nsec / 1000;
    return 0;
}
time_t time(time_t *now) {
    struct timespec exact;
    clock_gettime(CLOCK_REALTIME, &exact);
    if (now) *now = exact.tv_sec;
    return exact.tv_sec;
}
"""
"""A library that sets the clock of the epoch back by an hour in all processes, as soon as a file is there."""


@pytest.mark.skipif(not (shutil.which("gcc") and sys.platform == "linux"), reason="needs gcc, to set the clock back")
def test_a_clock_that_is_set_back_by_an_hour_in_the_middle_moves_no_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "back.c").write_text(SET_BACK)
    library = tmp_path / "back.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(library), str(tmp_path / "back.c")], check=True)
    monkeypatch.setenv("LD_PRELOAD", str(library))
    monkeypatch.setenv("MARK", str(tmp_path / "mark"))
    began = "import time\nbegan = time.time()\n"
    half = LOOP.replace("            net(", "            _ == 20 and open('mark', 'w').close()\n            net(")
    assert "set back True" in ran(f"{began}{half}print('set back', time.time() < began)", tmp_path)
    trace = xsp.load(tmp_path / "run")
    assert 0 < trace.run["seconds"] < 3000
    assert any("clock was set by -3600" in note["text"] for note in trace.run.notes)
    steps = trace.sql("SELECT start_ns FROM loop ORDER BY step").fetchall()
    assert len(steps) == 40
    assert steps == sorted(steps)
    assert steps[-1][0] - steps[0][0] < 3000e9
    outside = "SELECT count(*) FROM spans s JOIN spans p ON p.trace_id = s.trace_id AND p.span_id = s.parent_id "
    assert trace.sql(f"{outside} WHERE s.start_ns < p.start_ns - 1000000").fetchall() == [(0,)]
    at = [each for (each,) in trace.sql("SELECT time_ns FROM samples").fetchall()]
    assert max(at, default=0) - min(at, default=0) < 3000e9


GREEN = """
{patch}
import torch, xsp
net = torch.nn.Linear(8, 8)
done = []
def work(number):
    for _ in range(20):
        net(torch.ones(2, 8))
        {pause}
    done.append(number)
with xsp.profile("odd", out="run") as prof:
    for _ in range(20):
        with prof.step():
            net(torch.ones(2, 8))
    {start}
print("done", sorted(done))
"""


@pytest.mark.parametrize(
    ("package", "patch", "pause", "start"),
    [
        ("gevent", "from gevent import monkey; monkey.patch_all()\nimport gevent", "gevent.sleep(0)",
         "gevent.joinall([gevent.spawn(work, n) for n in range(3)])"),
        ("eventlet", "import eventlet; eventlet.monkey_patch()", "eventlet.sleep(0)",
         "pool = eventlet.GreenPool(); [pool.spawn(work, n) for n in range(3)]; pool.waitall()"),
    ],
    ids=["gevent", "eventlet"],
)  # fmt: skip
def test_a_program_whose_threads_are_green_runs_to_its_end(
    package: str, patch: str, pause: str, start: str, tmp_path: Path
) -> None:
    pytest.importorskip(package, exc_type=ImportError)
    said = ran(GREEN.format(patch=patch, pause=pause, start=start), tmp_path)
    assert "done [0, 1, 2]" in said
    trace = xsp.load(tmp_path / "run")
    assert trace.run["steps"]["stored"] > 0
    stored = trace.sql("SELECT count(DISTINCT step) FROM spans WHERE kind = 'step'").fetchall()
    assert stored == [(trace.run["steps"]["stored"],)]


def test_a_disk_without_free_inodes_ends_no_program(tmp_path: Path) -> None:
    place = tmp_path / "small"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "nr_inodes=12,size=64m", "tmpfs", str(place)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("no file system with few inodes can be mounted here")
    try:
        program = LOOP.replace("range(40)", "range(200)").replace('out="run"', f"out={str(place / 'run')!r}")
        assert "done" in ran(program, tmp_path)
        if (place / "run" / "run.json").exists():
            steps = xsp.load(place / "run").run["steps"]
            assert len(list((place / "run" / "steps").glob("*.parquet"))) >= min(1, steps["stored"])
    finally:
        subprocess.run(["umount", str(place)], check=False)
