"""Kills, full disks and interrupts at random moments: what was reported as stored is there, and the program is as ever.

`XSP_FAULT_TIMES=300` says how many random moments are tried, `XSP_FAULT_SEED` which; a few are in the suite.
"""

from __future__ import annotations

import contextlib
import os
import random
import resource
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from realparts import ServeProcess

import xsp
from xsp import rundir, table
from xsp.errors import OutputError
from xsp.record.session import profile

pytest.importorskip("opentelemetry.exporter.otlp.proto.grpc")

from xsp.cli import main

TIMES, SEED = (int(os.environ.get(f"XSP_FAULT_{name}", value)) for name, value in (("TIMES", "4"), ("SEED", "0")))
FAULTS = ("program", "storing", "receiver", "disk")
STEPS = 12
ROWS = "SELECT step, kind, name, span_id, parent_id, start_ns, dur_ns FROM spans ORDER BY ALL"

PROGRAM = f"""
    import os, sys, time, xsp
    with xsp.profile("faulty", levels="M", out=sys.argv[1], warmup=0, settle=False, collectors=[], samples=False,
                     otlp=sys.argv[2] or None, otlp_policy="shed") as prof:
        print(prof._writer.process, flush=True)
        for number in range({STEPS}):
            before = prof.steps_stored
            with prof.step():
                for block in range(number % 5):
                    with xsp.span(f"{{number}}.{{block}}"):
                        time.sleep(0.001)
            print(number if prof.steps_stored > before else "lost", flush=True)
"""


@contextlib.contextmanager
def a_receiver(out: Path) -> Iterator[ServeProcess]:
    receiver = ServeProcess(out)
    try:
        yield receiver
    finally:
        receiver.end(signal.SIGKILL)


def interfere(
    fault: str, program: subprocess.Popen[str], storing: int, receiver: ServeProcess, chance: random.Random
) -> None:
    if fault == "program":
        program.kill()
    elif fault == "receiver":
        receiver.end(signal.SIGKILL)
        receiver.start_again()
    else:
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            if fault == "storing":
                os.kill(storing, signal.SIGKILL)
            else:
                _, most = resource.prlimit(storing, resource.RLIMIT_FSIZE)
                resource.prlimit(storing, resource.RLIMIT_FSIZE, (1, most))  # no file takes more than a byte
                time.sleep(chance.uniform(0, 0.05))
                resource.prlimit(storing, resource.RLIMIT_FSIZE, (most, most))


def attempt(fault: str, chance: random.Random, run: Path, receiver: ServeProcess) -> set[int]:
    """Run the program, do it harm at a random moment, and return the steps that it was told are stored."""
    to = receiver.http if fault == "receiver" or chance.random() < 0.25 else ""
    command = [sys.executable, "-c", textwrap.dedent(PROGRAM), str(run), to]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        assert program.stderr is not None
        said = [program.stdout.readline() for _ in range(1 + chance.randrange(STEPS))]
        time.sleep(chance.uniform(0, 0.005))
        interfere(fault, program, int(said[0]), receiver, chance)
        said += program.stdout.readlines()
        complaint = program.stderr.read()
    assert program.returncode == (-signal.SIGKILL if fault == "program" else 0), complaint
    assert "Traceback" not in complaint
    lost = said.count("lost\n")
    assert (f"{lost} steps were not stored" in complaint) == (lost > 0)
    assert fault in ("storing", "disk") or not lost
    if fault != "program":
        assert rundir.read_run(run)["steps"]["lost"] == lost
    return {int(line) for line in said[1:] if line.strip().isdigit()}


def check(run: Path, stored: set[int]) -> None:
    """Each step that was reported as stored is there, with what happened in it and nothing else."""
    con = table.connect()
    for step in stored:
        rows = con.execute(f"SELECT kind, name, step FROM {table.parquet(rundir.segment(run, step))}").fetchall()
        blocks = [("user", f"{step}.{block}", step) for block in range(step % 5)]
        assert sorted(rows) == sorted([("step", "faulty", step), *blocks])
    if stored:
        assert len(xsp.load(run).rungs) == 1


def delivering(run: Path) -> bool:
    return (run / rundir.DELIVERY_FILE).exists() and bool(rundir.segments(run))


def test_every_step_that_was_reported_as_stored_is_readable_and_right_and_is_delivered_once(tmp_path: Path) -> None:
    runs = [tmp_path / f"run-{number}" for number in range(TIMES)]
    counted = dict.fromkeys(FAULTS, 0)
    with a_receiver(tmp_path / "received") as receiver:
        for number, run in enumerate(runs):
            chance = random.Random(SEED + number)
            fault = FAULTS[number % len(FAULTS)]
            print(f"XSP_FAULT_SEED={SEED}, number {number}: {fault}")
            stored = attempt(fault, chance, run, receiver)
            check(run, stored)
            counted[fault] += len(stored)
            if delivering(run):
                assert main(["export", str(run), "--resume", "--to", receiver.http, "-q"]) == 0
        receiver.end(signal.SIGTERM)
    arrived = {xsp.load(place).run["id"]: place for place in receiver.out.iterdir()}
    for run in filter(delivering, runs):
        place = arrived[rundir.read_run(run)["id"]]
        assert xsp.load(place).sql(ROWS).fetchall() == xsp.load(run).sql(ROWS).fetchall()
    print(f"{TIMES} faults; steps reported as stored, all there: {counted}")


# --- the run directory ------------------------------------------------------------------------------------

BARE: dict[str, Any] = {"levels": "M", "warmup": 0, "settle": False, "collectors": [], "samples": False}


def test_a_run_that_is_being_written_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rundir, "PATIENCE_S", 0.2)
    with profile("first", out=tmp_path / "run", **BARE) as prof:
        with prof.step():
            pass
        with pytest.raises(OutputError, match="another process is writing a run there"):
            rundir.create(tmp_path / "run", overwrite=True)
    assert xsp.load(tmp_path / "run").run["steps"]["stored"] == 1
    rundir.create(tmp_path / "run", overwrite=True)


def test_a_program_that_was_killed_before_its_run_began_blocks_nothing(tmp_path: Path) -> None:
    rundir.create(tmp_path / "run")
    assert rundir.create(tmp_path / "run") == tmp_path / "run"
    with rundir.runs_directory(tmp_path / "run") as several:
        assert list(several.iterdir()) == []


def test_of_commands_that_name_the_same_directory_at_once_one_gets_it(tmp_path: Path) -> None:
    for name in ("one", "two", "three"):
        (tmp_path / f"{name}.py").write_text(TRAIN)
    command = [each for each in RUN if each != "--overwrite"]
    started = [
        subprocess.Popen([*command, f"{name}.py"], cwd=tmp_path, stderr=subprocess.PIPE, text=True)
        for name in ("one", "two", "three")
    ]
    complaints = [each.communicate()[1] for each in started]
    (winner,) = [place for place, text in enumerate(complaints) if not text]
    others = [(started[place].returncode, text) for place, text in enumerate(complaints) if place != winner]
    assert all(code == (2 if "a run is there already" in text else 0) for code, text in others), others
    assert all(("continues without a profile" in text) == (code == 0) for code, text in others), others
    trace = xsp.load(tmp_path / "run")
    assert trace.sql("SELECT DISTINCT name FROM spans").fetchall() == [(("one", "two", "three")[winner],)]
    assert trace.run["steps"]["seen"] == 20


IMPORTED = '{"traceEvents": [{"ph": "X", "name": "imported", "ts": 1, "dur": 2, "pid": 1, "tid": 1}]}'
TRAIN = "def train():\n    pass\nfor _ in range(20):\n    train()\n"
XSP = (sys.executable, "-m", "xsp.cli")
RUN = (*XSP, "run", "-q", "--step", "train", "--levels", "M", "--warmup", "0", "--overwrite", "--out", "run")
IMPORT = (*XSP, "import", "trace.json", "--overwrite", "--out", "run")
WRITERS = {
    "programs": ((*RUN, "train.py"), (*RUN, "again.py"), (*RUN, "train.py")),
    "a program and an import": ((*RUN, "train.py"), IMPORT),
    "imports": (IMPORT, IMPORT, IMPORT),
    "a program once per level": ((*RUN, "--once-each", "train.py"), (*RUN, "--once-each", "again.py"), IMPORT),
}


@pytest.mark.parametrize("writers", WRITERS if TIMES >= 100 else [list(WRITERS)[SEED % 2]])
@pytest.mark.parametrize("before", ["nothing", "a run"])
def test_what_wants_one_directory_at_once_gets_it_whole_or_goes_without(
    tmp_path: Path, writers: str, before: str
) -> None:
    for name, content in (("trace.json", IMPORTED), ("train.py", TRAIN), ("again.py", TRAIN)):
        (tmp_path / name).write_text(content)
    if before == "a run":
        assert subprocess.run(IMPORT, cwd=tmp_path, capture_output=True, check=False).returncode == 0
    started = [
        subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        for command in WRITERS[writers]
    ]
    complaints = [each.communicate(timeout=300)[1] for each in started]
    without = [text for text in complaints if text]
    assert len(without) < len(started), without
    assert all(text.startswith("xsp: ") and len(text.splitlines()) == 1 for text in without), without
    for each, text in zip(started, complaints, strict=True):
        assert (each.returncode != 0) == text.startswith("xsp: error: "), text
    trace = xsp.load(tmp_path / "run")
    found = trace.sql("SELECT DISTINCT name FROM spans WHERE name <> 'window'").fetchall()
    assert found in ([("imported",)], [("train",)], [("again",)])
    assert trace.run["finished"] is True
    assert {path.name for path in tmp_path.iterdir()} == {"trace.json", "train.py", "again.py", "run"}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "disk"
    place.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512k", "none", place], capture_output=True, check=False)
    if done.returncode:
        pytest.skip("a small disk cannot be mounted here")
    yield place
    subprocess.run(["umount", place], check=True)


def test_a_full_disk_costs_steps_until_there_is_room_again(
    small_disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ballast = small_disk / "ballast"
    with profile("full", out=small_disk / "run", **BARE) as prof:
        for number in range(9):
            if number == 3:
                with contextlib.suppress(OSError), open(ballast, "wb", buffering=0) as file:
                    while file.write(bytes(4096)):
                        pass
            if number == 6:
                ballast.unlink()
            with prof.step():
                pass
    assert (prof.steps_stored, prof.steps_lost) == (6, 3)
    trace = xsp.load(small_disk / "run")
    assert trace.sql("SELECT DISTINCT step FROM spans ORDER BY 1").fetchall() == [(n,) for n in (0, 1, 2, 6, 7, 8)]
    assert any("3 steps were not stored" in note["text"] for note in trace.run["notes"])
    assert "3 steps were not stored" in capsys.readouterr().err


@pytest.mark.parametrize("state", ["full", "read-only"])
def test_a_program_goes_on_without_a_profile_where_the_disk_refuses_from_the_start(
    small_disk: Path, state: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if state == "full":
        with contextlib.suppress(OSError), open(small_disk / "ballast", "wb", buffering=0) as file:
            while file.write(bytes(4096)):
                pass
    else:
        subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    done = []
    with profile("x", out=small_disk / "run", **BARE) as prof, prof.step(), xsp.span("block"):
        done.append(1)
    said = capsys.readouterr().err
    assert (done, prof.records, prof.steps_stored) == ([1], False, 0)
    assert "run: cannot be written" in said or "run/run.json: cannot be written" in said
    assert said.endswith("The program continues without a profile.\n")
    assert len(said.splitlines()) == 1


def test_a_script_and_its_exit_code_are_as_ever_where_the_disk_refuses(small_disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    script = small_disk.parent / "script.py"
    script.write_text("import sys\nprint('trained')\nsys.exit(3)\n")
    command = [*XSP, "run", "--out", str(small_disk / "run"), str(script)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (3, "trained\n")
    assert len(done.stderr.splitlines()) == 1


def test_a_model_that_is_run_for_its_figures_alone_is_not_run_where_the_disk_refuses(small_disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    command = [*XSP, "profile", "torchvision:resnet18", "--out", str(small_disk / "run")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"xsp: error: {small_disk}/run: cannot be written (Read-only file system)")


def test_a_directory_that_another_user_closed_is_refused(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o555)
    code = "import os, sys; from xsp import rundir\n"  # root may write anywhere: be nobody, who may not load more
    code += "if not os.getuid(): os.setuid(65534)\nrundir.create(sys.argv[1])"
    command = [sys.executable, "-c", code, str(closed / "run")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    said = f"xsp.errors.UnwritableError: {closed}/run: cannot be written (Permission denied); choose another directory"
    assert (done.returncode, done.stdout, done.stderr.splitlines()[-1]) == (1, "", said)
    assert list(closed.iterdir()) == []


# --- interrupts --------------------------------------------------------------------------------------------


def test_an_interrupt_while_a_step_is_stored_reaches_the_program_and_each_step_is_counted(tmp_path: Path) -> None:
    class Interrupt(Exception):
        pass

    def raise_it(*_: object) -> None:
        raise Interrupt

    print(f"XSP_FAULT_SEED={SEED}")
    before = signal.signal(signal.SIGALRM, raise_it)
    stored = set()
    try:
        with profile("interrupted", out=tmp_path / "run", **BARE) as prof:
            for number in range(60):
                known = prof.steps_stored
                try:
                    with prof.step():
                        for _ in range(300 * (number % 3)):
                            with xsp.span("block"):
                                pass
                        moment = random.Random(SEED + number).uniform(0.0001, 0.03)
                        signal.setitimer(signal.ITIMER_REAL, moment * (number % 2))
                    signal.setitimer(signal.ITIMER_REAL, 0)  # inside the try: it may still arrive after the step
                except Interrupt:
                    pass
                if prof.steps_stored > known:
                    stored.add(number)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert prof._writer.failure is None
    assert prof.steps_stored + prof.steps_lost + prof.steps_skipped == 60
    trace = xsp.load(tmp_path / "run")
    counts = dict(trace.sql("SELECT step, count(*) FROM spans GROUP BY step").fetchall())
    assert {number: 1 + 300 * (number % 3) for number in stored}.items() <= counts.items()
    if not prof.steps_skipped:  # an interrupt between the last line of a step and its end leaves it open
        assert stored >= set(range(0, 60, 2))
    assert trace.run["finished"] is True
