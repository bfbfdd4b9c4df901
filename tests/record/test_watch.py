"""Watching a run while it goes on."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import shutil
import signal
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest
import torch

import xsp
from xsp import cli, rundir
from xsp.clock import monotonic_ns
from xsp.record import progress
from xsp.report.watch import read_figures

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def looks(tmp_path_factory: pytest.TempPathFactory) -> list:
    """What was seen of a run of 30 steps in the middle and after the end."""
    out = tmp_path_factory.mktemp("watched") / "run"
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU()).eval()
    found = []
    with xsp.profile("watched", levels="M/L", out=out, settle=1, samples=False) as prof:
        for number in range(30):
            prof._steps.progress._next_ns = 0  # not once a second, but always
            with prof.step():
                model(torch.ones(1, 8))
            if number in (0, 20):
                found.append(read_figures(out))
    return [*found, read_figures(out), out]


def test_before_the_first_stored_step_there_is_progress_only(looks: list) -> None:
    first = looks[0]
    assert (first.is_finished, first.steps_stored, first.steps_seen, first.steps_ms, first.layers) == (
        False,
        0,
        1,
        {},
        [],
    )


def test_in_the_middle_there_are_steps_by_rung_layers_and_what_it_costs(looks: list) -> None:
    middle = looks[1]
    assert (middle.is_finished, middle.steps_seen) == (False, 21)
    assert middle.steps_stored == 9
    assert set(middle.steps_ms) == {"M", "M/L", "M/L/op"}
    assert {name for name, _, _ in middle.layers} == {"0", "1"}
    assert middle.budget["taken"]["bare"] == 9


def test_in_the_end_the_run_says_it_and_nothing_else_is_left(looks: list) -> None:
    last, out = looks[2:]
    assert (last.is_finished, last.steps_seen) == (True, 30)
    assert not (out / progress.PROGRESS_FILE).exists()


def test_the_command_prints_once_where_there_is_no_terminal(looks: list, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["watch", str(looks[3])]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("watched: finished, step 30, 13 steps stored\noverhead ")
    assert "slowest layers, ms a step:" in shown
    rungs = [line.split()[:-2] for line in shown.splitlines() if line.startswith("  ") and "%" not in line]
    assert rungs == [["nothing"], ["steps", "and", "calls"], ["layers"], ["operators"]]  # in words, no `M/L/op`


def test_what_is_no_run_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["watch", str(tmp_path / "none")]) == 2
    assert "there is no such file or directory" in capsys.readouterr().err
    (tmp_path / "job").mkdir()
    rundir.write_run(tmp_path / "job", {"kind": "sweep", "parts": ["batch-0001"]})
    assert cli.main(["watch", str(tmp_path / "job")]) == 2
    assert "watch one of them: batch-0001" in capsys.readouterr().err


def test_a_progress_file_that_is_damaged_is_no_progress(tmp_path: Path) -> None:
    for content in ("", "[1]", '{"seen": '):
        (tmp_path / progress.PROGRESS_FILE).write_text(content)
        assert progress.read(tmp_path) == {}


def test_progress_is_written_once_a_second_and_goes_away(tmp_path: Path) -> None:
    shown = progress.ProgressDisplay()
    shown.begin(tmp_path)
    now_ns = monotonic_ns()
    assert shown.is_due(now_ns)
    shown.show({"seen": 12_000, "stored": 31})
    assert not shown.is_due(now_ns + progress.PAUSE_NS), "not again for a second"
    assert json.loads((tmp_path / progress.PROGRESS_FILE).read_text())["stored"] == 31
    shown.end()
    assert list(tmp_path.iterdir()) == []


# --- in a terminal ----------------------------------------------------------------------------------------


def in_terminal(command: list[str], columns: int, interrupt_at: bytes = b"") -> tuple[bytes, int]:
    """Run a command in a terminal of so many columns; return what it wrote there and its exit code."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    environment = {**os.environ, "TERM": "xterm", "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, *command], stdin=theirs, stdout=theirs, stderr=theirs, env=environment, start_new_session=True
    ) as process:
        os.close(theirs)
        written = b""
        with contextlib.suppress(OSError):  # Linux says so at the end
            while piece := os.read(ours, 1 << 16):
                written += piece
                if interrupt_at and interrupt_at in written:
                    interrupt_at = b""
                    process.send_signal(signal.SIGINT)
        os.close(ours)
    return written, process.returncode


def left_on_screen(written: bytes) -> str:
    """Return what such a terminal shows in the end, where nothing moves the cursor up."""
    lines = written.decode().replace("\x1b[?7l", "").replace("\x1b[?7h", "").split("\r\n")
    return "\n".join(line.rpartition("\r\x1b[2K")[2] for line in lines)


LINES = """
import sys
from pathlib import Path
from xsp.record.progress import ProgressDisplay
shown = ProgressDisplay()
shown.draws_line = True
shown.begin(Path(sys.argv[1]))
budget = {"bare_step_ns": 2_500_000, "overhead_percent": 0.834, "asked_percent": 1.0}
draw = lambda step: shown.show({"seen": step, "stored": 31, "budget": budget})
draw(1); draw(2)
print("loss 0.5")
draw(3)
print("half", end=" ", flush=True)
draw(4)
print("a line", file=sys.stderr)
draw(12_000)
shown.end()
print([name for name in ("stdout", "stderr") if "write" in vars(getattr(sys, name))])
"""


@pytest.mark.parametrize(("columns", "room"), [(80, 79), (40, 39)])
def test_the_line_leaves_the_programs_own_lines_whole_and_nothing_of_itself(
    tmp_path: Path, columns: int, room: int
) -> None:
    written, _ = in_terminal(["-c", LINES, str(tmp_path)], columns)
    assert left_on_screen(written) == "loss 0.5\nhalf a line\n[]\n"
    line = "xsp: step {}, 31 stored, 2.5 ms a step, overhead 0.83 % of 1 %"
    drawn = re.findall(r"\x1b\[\?7l(.*?)\x1b\[\?7h", written.decode())
    assert drawn == [line.format(step)[:room] for step in ("1", "2", "3", "12,000")], "not behind half a line"


@pytest.mark.slow
def test_of_a_script_that_fails_under_xsp_run_the_traceback_alone_is_left(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import time, torch\nm = torch.nn.Linear(4, 4).eval()\n"
        "for _ in range(10): m(torch.ones(1, 4)); time.sleep(0.1)\nraise ValueError('as ever')\n"
    )
    run = ["-m", "xsp.cli", "run", "--no-samples", "--levels", "M", "-o", str(tmp_path / "run"), str(script)]
    written, code = in_terminal(run, 60)
    assert code == 1
    assert b"xsp: step " in written, "how often depends on how long the drawing takes"
    shown = left_on_screen(written)
    assert shown.startswith(f'Traceback (most recent call last):\n  File "{script}", line 4')
    assert "xsp: step" not in shown


def test_xsp_watch_goes_on_in_a_terminal_until_it_is_interrupted(looks: list, tmp_path: Path) -> None:
    run = shutil.copytree(looks[3], tmp_path / "run")
    rundir.write_run(run, {**rundir.read_run(run), "finished": False})
    written, code = in_terminal(["-m", "xsp.cli", "watch", str(run), "--interval", "0.05"], 40, b"running")
    assert code == 0
    assert b"watched: running, 13 steps stored" in written
    assert b"Traceback" not in written


def test_a_disk_that_is_full_stops_nobody(tmp_path: Path) -> None:
    shown = progress.ProgressDisplay()
    shown.begin(tmp_path / "gone")
    shown.show({"seen": 1})
    shown.end()


@pytest.mark.slow
def test_xsp_run_takes_every_and_budget(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "script.py"
    script.write_text("import torch\nm = torch.nn.Linear(4, 4).eval()\nfor _ in range(60): m(torch.ones(1, 4))\n")
    run = ["run", "-q", "--no-samples", "--levels", "M", "--every", "10", "--warmup", "0", "-o", str(tmp_path / "run")]
    subprocess.run([sys.executable, "-m", "xsp.cli", *run, str(script)], check=True)
    steps = xsp.load(tmp_path / "run").run["steps"]
    assert 4 <= steps.pop("stored") <= 11, "one in ten on average, each 5 to 14 bare ones after the last"
    assert steps == {"seen": 60, "lost": 0, "skipped": 0, "found": True}
    assert cli.main([*run, "--budget", "1%", "torchrun", str(script)]) == 2
    assert "use --every N" in capsys.readouterr().err
