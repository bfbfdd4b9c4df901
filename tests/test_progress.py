"""Progress bars: on a terminal, and on nothing else."""

from __future__ import annotations

import subprocess
import sys

import pytest

from xsp import clock
from xsp.cli import progress


def test_a_file_gets_no_bar_drawn_line_below_line_whatever_the_environment_says_of_colours() -> None:
    program = """
from xsp.cli import progress

with progress.progress_bar(quiet=False) as show:
    for done in range(50):
        show("work", done, 50)
"""
    for forced in ("FORCE_COLOR", "TTY_COMPATIBLE"):
        ran = subprocess.run([sys.executable, "-c", program], env={forced: "1"}, capture_output=True, check=True)
        assert b"\x1b" not in ran.stderr
        assert ran.stderr.count(b"work") <= 1


def test_python_minus_m_xsp_is_xsp() -> None:
    ran = subprocess.run([sys.executable, "-m", "xsp", "--version"], capture_output=True, text=True, check=True)
    assert ran.stdout.startswith("xsp ")
    assert subprocess.run([sys.executable, "-m", "xsp", "nothing"], capture_output=True, check=False).returncode == 2


def test_brackets_in_a_description_are_text(capsys: pytest.CaptureFixture[str]) -> None:
    with progress.progress_bar(quiet=False) as show:
        show("resnet [/x] of [fp16]\x1b[2J", 1, 2)
    message = capsys.readouterr().err
    assert "resnet [/x] of [fp16]" in message
    assert "\x1b" not in message


def test_a_pipe_gets_a_line_now_and_then(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "LINE_S", 0.0)
    with progress.progress_bar(quiet=False) as show:
        for done in range(3):
            show("turn of attach", done, 60)
    assert "xsp: turn of attach: 2 of 60\n" in capsys.readouterr().err


def test_a_pipe_gets_no_line_twice(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "LINE_S", 0.0)
    with progress.progress_bar(quiet=False) as show:
        for done in (1, 2, 2, 2):
            show("work", done, 2)
    assert capsys.readouterr().err.count("xsp: work: 2 of 2\n") == 1


@pytest.mark.parametrize(("is_terminal", "printed"), [(True, 1), (False, 0)])
def test_a_long_end_of_a_program_is_said_in_a_terminal(
    is_terminal: bool, printed: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "SILENT_S", 0.0)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    ending = progress.Ending()
    ending.prepare(clock.monotonic_ns())
    if ending._line is not None:
        ending._line.join()
    ending.end()
    assert capsys.readouterr().err.count("xsp: the program has ended; ") == printed


def test_a_short_end_of_a_program_prints_no_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "SILENT_S", 1000.0)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    ending = progress.Ending()
    ending.prepare(clock.monotonic_ns())
    ending.end()
    assert ending._line is not None
    ending._line.join()
    assert capsys.readouterr().err == ""
