"""What the first screen of a trace asks of the table engine: few queries, and none twice."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from depth import deep

from xsp import table
from xsp.cached import VARIABLE
from xsp.ingest import load
from xsp.report import firstscreen

TRACES = Path(__file__).resolve().parents[1] / "gpu" / "recorded" / "kineto"
MOST_OF_LOADING, MOST_OF_SCREEN = 107, 84
"""Most statements of an import with a few thousand events, and of its first screen."""

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


@pytest.mark.parametrize("again", [False, True], ids=["computed", "printed before"])
def test_nothing_is_imported_that_is_not_used(again: bool, tmp_path: Path) -> None:
    unused = UNUSED_OF_REPETITION if again else UNUSED_OF_SCREEN
    code = (
        f"import sys\nfrom xsp.cli import main\nassert main(['analyze', {str(TRACES / 'conv.json.gz')!r}]) == 0\n"
        f"print(*({{name for name in {unused} if name in sys.modules}}), file=sys.stderr)"
    )
    environment = {**os.environ, VARIABLE: str(tmp_path / "cache")}
    for _ in range(1 + again):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert "grade" in done.stdout
    assert done.stderr.split() == []
