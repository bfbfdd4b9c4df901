"""What the first screen of a run or a trace costs: few queries, none twice, and no module that it does not use."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from depth import deep
from rich.console import Console

from xsp import plugins, table
from xsp.advise import registry
from xsp.cached import VARIABLE
from xsp.cli import progress
from xsp.ingest import load
from xsp.report import firstscreen

TRACES = Path(__file__).resolve().parents[1] / "gpu" / "recorded" / "kineto"
MOST_OF_LOADING, MOST_OF_SCREEN = 107, 84
"""Most statements of an import with a few thousand events, and of its first screen."""

UNUSED_OF_A_RUN = (
    "pandas", "rich.console", "torch", "xsp.bench", "xsp.bound", "xsp.comparison.align", "xsp.correlate", "xsp.graph",
    "xsp.ingest.sources", "xsp.ingest.write", "xsp.questions", "xsp.record",
)  # fmt: skip
UNUSED_OF_SCREEN = (
    "asyncio", "http.client", "multiprocessing", "numpy.random", "pandas", "pyarrow", "rich.console", "sqlite3",
    "torch", "xsp.bench", "xsp.bound", "xsp.comparison.align", "xsp.exporters", "xsp.graph", "xsp.predict",
    "xsp.questions", "xsp.record", "xsp.report.html", "xsp.share", "xsp.spark",
)  # fmt: skip
UNUSED_OF_REPETITION = (
    *UNUSED_OF_SCREEN, "duckdb", "numpy", "xsp.account", "xsp.advise", "xsp.analyses",
    "xsp.health", "xsp.ingest.load", "xsp.store",
)  # fmt: skip


class Connection:
    """A connection to the engine that lists what is executed."""

    def __init__(self, con: Any, statements: list[tuple[str, str]]) -> None:
        self._con, self._statements = con, statements

    def __getattr__(self, name: str) -> Any:
        member = getattr(self._con, name)
        if name == "cursor":
            return lambda: Connection(self._con.cursor(), self._statements)
        if name not in ("execute", "sql"):
            return member

        def call(query: str, parameters: Any = None, **options: Any) -> Any:
            given = parameters if parameters is not None else options.get("params")
            self._statements.append((query, repr(given)))
            result = member(query, **options) if parameters is None else member(query, parameters, **options)
            return self if result is self._con else result

        return call

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self._con.close()


@pytest.mark.parametrize("name", ["conv", deep("transformer"), deep("compiled"), "graph"])
def test_few_queries_are_run_and_none_twice(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    statements: list[tuple[str, str]] = []
    connect = table.connect
    monkeypatch.setattr(table, "connect", lambda *threads: Connection(connect(*threads), statements))
    monkeypatch.setenv(VARIABLE, "")
    trace = load.load(TRACES / f"{name}.json.gz")
    of_loading = len(statements)
    statements.clear()
    text = firstscreen.text(firstscreen.first_screen(trace), 100)
    assert "grade" in text
    assert {query: count for query, count in Counter(statements).items() if count > 1} == {}
    assert of_loading <= MOST_OF_LOADING
    assert len(statements) <= MOST_OF_SCREEN


def loaded(path: Path, names: tuple[str, ...], **variables: str) -> set[str]:
    """Return which of these modules a new process has loaded when it has printed the first screen of a path."""
    code = (
        f"import sys\nfrom xsp.cli import main\nassert main(['analyze', {str(path)!r}]) == 0\n"
        f"print(*({{name for name in {names} if name in sys.modules}}), file=sys.stderr)"
    )
    environment = {**os.environ, **variables}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert "grade" in done.stdout
    return set(done.stderr.split())


def test_of_a_run_no_second_line_and_nothing_of_imports_is_loaded(small_run: Path) -> None:
    if not plugins.names(registry.GRAPH_GROUP):
        pytest.skip("the installed metadata is older than this checkout: install it again")
    assert loaded(small_run, UNUSED_OF_A_RUN) == set()


def test_of_a_trace_nothing_is_loaded_that_is_not_used_and_less_when_it_was_printed_before(tmp_path: Path) -> None:
    trace, cache = TRACES / "conv.json.gz", {VARIABLE: str(tmp_path / "cache")}
    assert loaded(trace, UNUSED_OF_SCREEN, **cache) == set()
    assert loaded(trace, UNUSED_OF_REPETITION, **cache) == set()


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
