"""A real `xsp serve` for each test that asks for one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from realparts import ServeProcess


@pytest.fixture
def receiver(tmp_path: Path) -> Iterator[ServeProcess]:
    started = ServeProcess(tmp_path / "received")
    yield started
    started.process.kill()
    started.process.communicate()
