from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def board(tmp_path: Path) -> Path:
    """A folder with a program that answers as a model."""
    from evaluations import PROGRAM

    (tmp_path / "board.py").write_text(PROGRAM, encoding="utf-8")
    return tmp_path
