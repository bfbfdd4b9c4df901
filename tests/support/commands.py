"""Commands of xsp in this process."""

from __future__ import annotations

import pytest

from xsp.cli import main


def exit_code(*words: str) -> int:
    """Return the exit code of a command: what it returns, or what the parser of its options exits with."""
    try:
        return main(list(words))
    except SystemExit as ended:
        return int(ended.code or 0)


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Return what a command that succeeds prints."""
    capsys.readouterr()
    code = main(list(words))
    printed = capsys.readouterr()
    assert code == 0, printed.err
    return printed.out


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Return the only line that a command prints that is refused."""
    capsys.readouterr()
    assert exit_code(*words) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("xsp: error: ")
    assert printed.count("\n") == 1
    return printed
