"""Every field of a run's `run.json` may be somebody else's: each is replaced by what it is not, one at a time."""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("hypothesis")

from depth import deep
from fuzzing import SEED, TIMES, places, replaced

from xsp import cli

ESCAPES = "\x1b[2J\x9b1A\u202e"
ODD = [None, True, -1, 0, 1 << 80, 1e308, "", ESCAPES, [], [None], {}, {ESCAPES: ESCAPES}, [[]], "\ud800", "x" * 10_000]
COMMANDS = (
    ["analyze"],
    ["analyze", "A1", "loop", "phases", "health", "ledger"],
    ["analyze", "A2", "--format", "csv"],
    ["report"],
    ["watch", "--once"],
    ["compare", "RUN"],
    ["export", "--format", "chrome", "--out", "RUN/../out"],
    ["export", "--to", "RUN/../out.jsonl"],
    ["counters", "RUN/run.json"],
    ["import", "--out", "RUN/../imported", "--overwrite"],
    ["doctor", "--measure"],
)


def said(command: list[str], run: Path) -> tuple[int, str]:
    """Return how a command ended on a run, and all that it printed."""
    printed = io.StringIO()
    more = ["--out", str(run / "report.html")] if command == ["report"] else []
    rest = [entry.replace("RUN", str(run)) for entry in command[1:]]
    measures = "--measure" in rest  # its runs follow the option
    typed = [command[0], *rest, str(run)] if measures else [command[0], str(run), *rest, *more]
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        code = cli.main(typed)
    return code, printed.getvalue()


@pytest.mark.slow
def test_no_field_of_a_run_ends_a_command_with_more_than_a_line_or_reaches_the_terminal(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("xsp.device.ceilings.measure", list)  # which would take seconds each time
    monkeypatch.setattr("xsp.device.ceilings.store", lambda _: None)
    place = tmp_path / "run"
    shutil.copytree(run, place)
    content = json.loads((run / "run.json").read_text())
    chance = random.Random(SEED)
    cases = [(way, odd) for way in places(content) for odd in ODD]
    for way, odd in chance.sample(cases, k=min(len(cases), 25 * TIMES)):
        (place / "run.json").write_text(json.dumps(replaced(content, way, odd)))
        command = chance.choice(COMMANDS)
        case = f"seed {SEED}: {'/'.join(map(str, way))} = {str(odd)[:40]!r}, xsp {' '.join(command)}"
        try:
            code, printed = said(command, place)
        except Exception as error:
            raise AssertionError(case) from error
        assert code in (0, 1, 2), case
        assert not set("\x1b\x9b\u202e") & set(printed), case
        assert code == 0 or len(printed.splitlines()) <= 2, f"{case}\n{printed}"


@pytest.mark.parametrize("encoding", [deep("latin-1"), "ascii"])
def test_a_terminal_that_is_not_utf_8_gets_question_marks_and_no_traceback(run: Path, encoding: str) -> None:
    command = [sys.executable, "-m", "xsp.cli", "analyze", str(run), "A2"]
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    done = subprocess.run(command, env=environment, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"?" in done.stdout
