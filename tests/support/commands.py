"""Commands of xsp in this process."""

from __future__ import annotations

from xsp.cli import main


def exit_code(*words: str) -> int:
    """Return the exit code of a command: what it returns, or what the parser of its options exits with."""
    try:
        return main(list(words))
    except SystemExit as ended:
        return int(ended.code or 0)
