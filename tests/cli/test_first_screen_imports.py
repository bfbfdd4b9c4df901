"""What `xsp analyze RUN` loads before it prints the first screen: what it prints, and nothing of the second line."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from xsp import plugins
from xsp.advise import registry
from xsp.cli import progress

UNUSED = (
    "xsp.bench", "xsp.bound", "xsp.comparison.align", "xsp.correlate", "xsp.graph", "xsp.ingest.sources",
    "xsp.ingest.write", "xsp.questions", "xsp.record", "pandas", "rich.console", "torch",
)  # fmt: skip


def test_the_first_screen_loads_no_second_line_and_nothing_of_imports(small_run: Path) -> None:
    if not plugins.names(registry.GRAPH_GROUP):
        pytest.skip("the installed metadata is older than this checkout: install it again")
    code = (
        f"import sys\nfrom xsp.cli import main\nassert main(['analyze', {str(small_run)!r}]) == 0\n"
        f"print(*({{name for name in {UNUSED} if name in sys.modules}}), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "grade" in done.stdout
    assert done.stderr.split() == []


def test_questions_that_need_a_graph_are_loaded_when_they_are_asked() -> None:
    code = (
        "import sys\nfrom xsp.advise import registry, Needs\n"
        "few = registry.questions(Needs.TRACE)\nassert all(each.needs is Needs.TRACE for each in few.values())\n"
        "assert 'xsp.bound' not in sys.modules or not registry.plugins.names(registry.GRAPH_GROUP)\n"
        "every = registry.questions()\nassert set(few) < set(every) and 'bound' in registry.PROVIDERS"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_metadata_of_packages_is_read_once_for_all_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = []
    read = importlib.metadata.entry_points

    def counted(**selection: Any) -> Any:
        reads.append(selection)
        return read(**selection)

    monkeypatch.setattr(importlib.metadata, "entry_points", counted)
    monkeypatch.setattr(sys, "path", [*sys.path, "/a folder that no other test has"])
    assert all(plugins.names(group) for group in ("xsp.collectors", "xsp.importers", registry.GROUP))
    assert reads == [{}]


@pytest.mark.parametrize("columns", ["132", "", "none"])
def test_the_width_of_the_terminal_is_that_which_rich_would_use(columns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    for size in (os.terminal_size((97, 30)), os.terminal_size((0, 0))):
        monkeypatch.setattr(os, "get_terminal_size", lambda _descriptor, size=size: size)
        assert progress.terminal_width() == Console().width
