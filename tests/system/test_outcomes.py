"""However a program ends, it ends with xsp as it does without: exit status, output, complaints and files.

Each end is tried in one of the ways to profile, with a model in plain Python; `XSP_FAULT_TIMES=100` or more tries it
in all of them, with torch and every collector.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from xsp import rundir

THOROUGH = int(os.environ.get("XSP_FAULT_TIMES", "4")) >= 100
WAYS = ("block", "run", "open")
STORED_WITHIN_S = 60.0

ENDS = {
    "an exception": "raise KeyError('mine')",
    "an exception in the model": "bad(x)",
    "an exception of many lines": "raise ValueError('one\\ntwo') from KeyError('mine')",
    "an exception in a thread": "started(bad)",
    "an exception in __del__": """
        class Bad:
            def __del__(self): raise ValueError('at the end')
        kept.append(Bad())""",
    "an object that says goodbye": "kept.append(Goodbye())",
    "an exit code": "sys.exit(3)",
    "an exit code above a byte": "sys.exit(256 + 7)",
    "an exit code below 0": "sys.exit(-1)",
    "an exit with a text": "sys.exit('done with it')",
    "an exit with something else": "sys.exit([1, 2])",
    "an exit with nothing": "sys.exit()",
    "os._exit": "os._exit(7)",
    "os.abort": "os.abort()",
    "SIGINT": "os.kill(os.getpid(), signal.SIGINT); time.sleep(9)",
    "SIGTERM": "os.kill(os.getpid(), signal.SIGTERM)",
    "SIGHUP": "os.kill(os.getpid(), signal.SIGHUP)",
    "SIGKILL": "os.kill(os.getpid(), signal.SIGKILL)",
    "SIGABRT": "os.kill(os.getpid(), signal.SIGABRT)",
    "SIGSEGV": "os.kill(os.getpid(), signal.SIGSEGV)",
    "an address that is none": "ctypes.string_at(0)",
    "SIGTERM that is caught": "signal.signal(signal.SIGTERM, lambda *_: sys.exit(5)); os.kill(os.getpid(), 15)",
    "SIGINT that is caught": """
        try: os.kill(os.getpid(), signal.SIGINT); time.sleep(9)
        except KeyboardInterrupt: print("no, go on")""",
    "signals of its own": """
        for each in (signal.SIGUSR1, signal.SIGALRM, signal.SIGCHLD): signal.signal(each, lambda n, _: heard.append(n))
        os.kill(os.getpid(), signal.SIGUSR1); signal.setitimer(signal.ITIMER_REAL, 0.01); time.sleep(0.1)
        atexit.register(lambda: print(heard, signal.getsignal(signal.SIGINT) is signal.default_int_handler))""",
    "no memory": "resource.setrlimit(resource.RLIMIT_AS, (2**33, -1)); bytearray(2**40)",
    "no memory for a tensor": "resource.setrlimit(resource.RLIMIT_AS, (2**34, -1)); large()",
    "no memory, caught": """
        try: bytearray(2**60)
        except MemoryError: print("less, then")""",
    "a hook for exceptions": "sys.excepthook = lambda *_: print('hooked', flush=True); raise KeyError('mine')",
    "a fork that goes on": """
        if os.fork(): os.wait()
        else: print("child", flush=True)""",
    "children that are waited for": """
        if not os.fork(): os._exit(0)
        try:
            while True: print("ended", os.wait()[1])
        except ChildProcessError: print("none is left")""",
    "processes that are forked": "print(pool('fork'))",
    "processes that are spawned": "print(pool('spawn'))",
    "loading in processes": "print(loaded('fork'), loaded('spawn'))",
    "another program": "os.execv(sys.executable, [sys.executable, '-c', 'print(1)'])",
    "SIGPIPE left to the system": "signal.signal(signal.SIGPIPE, signal.SIG_DFL); kill_storing()",
    "the storing process dies": "kill_storing()",
    "a thread that goes on": "started(lambda: (time.sleep(0.3), model(x), print('late')))",
    "a daemon that goes on": "started(forever, daemon=True)",
    "a default for sockets": "socket.setdefaulttimeout(0.001)",
    "files": "open('result', 'w').write(str(model(x)))",
    "another directory": "os.mkdir('there'); os.chdir('there'); open('result', 'w').write('1'); os.chmod('.', 0o500)",
    "another umask": "os.umask(0o777); open('result', 'w').close()",
    "few descriptors": "resource.setrlimit(resource.RLIMIT_NOFILE, (32, 32))",
    "no descriptor left": """
        try:
            while True: kept.append(open(os.devnull))
        except OSError as error: print(error.strerror)""",
    "handlers at exit": """
        atexit.register(lambda: print('goodbye', model(x)))
        atexit.register(bad, x)
        kept.append(Goodbye())""",
    "output that is replaced": """
        sys.stdout = io.StringIO()
        atexit.register(lambda: sys.__stdout__.write('kept: ' + sys.stdout.getvalue()))""",
    "output into a file": "os.dup2(os.open('result', os.O_WRONLY | os.O_CREAT), 1)",
    "output that is closed": "sys.stdout.close()",
    "descriptors that are closed": "os.closerange(0, 3)",
    "all descriptors closed": "os.closerange(0, 256)",
    "input": "print(sys.stdin.read())",
    "names": "print(__name__, sys.argv[0], sys.path[0] == os.getcwd(), __file__)",
}

AROUND = {
    "no output": 'exec "$@" >&-',
    "no output and no input": 'exec "$@" >&- <&-',
    "no place for complaints": 'exec "$@" 2>&-',
    "nothing open": 'exec "$@" <&- >&- 2>&-',
    "nobody who reads": 'exec 3>&1; (sleep 0.1; exec "$@"; ) | true',
    "few descriptors from the start": 'ulimit -n 24; exec "$@"',
    "a full disk behind the output": 'exec "$@" > /dev/full',
    "interrupts that are ignored": 'trap "" INT HUP; exec "$@"',
}
"""What a shell gives the program, which then does its steps and ends."""

PROGRAM = """
import atexit, contextlib, ctypes, io, multiprocessing, os, resource, signal, socket, sys, threading, time
how, thorough = sys.argv[1], sys.argv[2] == "True"
kept, heard, step, kill_storing = [], [], contextlib.nullcontext, lambda: None
def bad(x): raise KeyError('mine')
def model(x): return 2 * x
def large(): return bytearray(2**40)
def double(x): return 2 * x
x = 1
class Goodbye:
    def __del__(self): print("gone", model(x), flush=True)
if thorough:
    import torch
    torch.manual_seed(0)
    class Bad(torch.nn.Module):
        def forward(self, x): raise KeyError('mine')
    model, x = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout()), torch.randn(2, 4)
    bad = torch.nn.Sequential(Bad())
    def large(): return torch.empty(2**40)
def pool(kind):
    with multiprocessing.get_context(kind).Pool(2) as two: return two.map(double, range(4))
def loaded(kind):
    if not thorough: return None
    loader = torch.utils.data.DataLoader(list(range(8)), batch_size=4, num_workers=2, multiprocessing_context=kind)
    return [each.tolist() for each in loader]
def forever():
    while True: model(x)
def started(function, daemon=False):
    thread = threading.Thread(target=function, args=(x,) * (function is bad), daemon=daemon, name="own")
    thread.start()
    if function is bad: thread.join()
def kill():
    os.kill(prof._writer.process, signal.SIGKILL)
def steps():
    for number in range(6):
        if number == 3:
{end}
        with step():
            print(model(x), flush=True)
if __name__ == "__main__":
    block = contextlib.nullcontext()
    if how in ("block", "open"):
        import xsp
        block = prof = xsp.profile("x", out="run", warmup=0, settle=False, collectors=None if thorough else [])
        step, kill_storing = prof.step, kill
    if how == "open":
        block.__enter__()
        block = contextlib.nullcontext()
    with block:
        steps()
"""


def outcome(place: Path, end: str, how: str, around: str = 'exec "$@"') -> tuple[Any, ...]:
    """Return exit status, output, complaints but xsp's, and the program's files with their modes."""
    place.mkdir()
    code = textwrap.indent(textwrap.dedent(end).strip(), " " * 12)
    (place / "program.py").write_text(PROGRAM.replace("{end}", code))
    command = [sys.executable, "-m", "xsp.cli", "run", "-q", "--out", "run"] if how == "run" else [sys.executable]
    command = ["sh", "-c", around, "sh", *command, "program.py", how, str(THOROUGH)]
    done = subprocess.run(command, cwd=place, input="typed", capture_output=True, text=True, timeout=590)
    files = {
        str(path.relative_to(place)): (oct(path.stat().st_mode), path.read_bytes())
        for path in place.rglob("*")
        if path.is_file() and "run" not in path.relative_to(place).parts[:1]
    }
    if how != "bare":
        assert rundir.read_run(place / "run")["name"]
        deadline = time.monotonic() + STORED_WITHIN_S  # an open block's end is stored after the program has ended
        while list((place / "run").rglob("*.part")):
            assert time.monotonic() < deadline, "half written"
            time.sleep(0.05)
    return done.returncode, done.stdout.replace(str(place), ""), complaints(done.stderr.replace(str(place), "")), files


def complaints(text: str) -> list[str]:
    """Return what stands on stderr, without xsp's lines, without addresses and names of loaded libraries.

    Of tracebacks only the program's own frames: where a module is called, a collector's frame stands in for torch's.
    """
    others = ("xsp: ", "Extension modules:", "Error in cpuinfo:")  # the last is torch's, where no descriptor is left
    lines = [line for line in text.splitlines() if not line.startswith(others)]
    own = [line for line in lines if not line.startswith("  ") or "program.py" in line]
    return [re.sub(r"0x[0-9a-f]+", "0x", line) for line in own]


def ways(name: str, names: dict[str, str]) -> tuple[str, ...]:
    """Return the ways to profile that are tried: one, the next one for each name, or all where that is asked for."""
    return WAYS if THOROUGH else (WAYS[list(names).index(name) % len(WAYS)],)


@pytest.mark.parametrize("end", ENDS)
def test_a_program_ends_as_it_does_without(tmp_path: Path, end: str) -> None:
    bare = outcome(tmp_path / "bare", ENDS[end], "bare")
    for how in ways(end, ENDS):
        assert outcome(tmp_path / how, ENDS[end], how) == bare, how


@pytest.mark.parametrize("around", AROUND)
def test_a_program_ends_as_it_does_without_in_a_poor_place(tmp_path: Path, around: str) -> None:
    bare = outcome(tmp_path / "bare", "pass", "bare", AROUND[around])
    for how in ways(around, AROUND):
        assert outcome(tmp_path / how, "pass", how, AROUND[around]) == bare, how
