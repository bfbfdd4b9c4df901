"""The number of random examples, few and the same each time in the suite, more and others with XSP_FUZZ_TIMES; and
functions that damage inputs, and that read them.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from xsp import table
from xsp.errors import PluginError, TraceError
from xsp.importers import contract

TIMES = int(os.environ.get("XSP_FUZZ_TIMES", "1"))
"""Factor on the number of examples of the suite."""

SEED = int(os.environ.get("XSP_FUZZ_SEED", "1"))
"""Seed of the tests that do not use Hypothesis."""

settings.register_profile("xsp", deadline=None, derandomize=TIMES == 1, print_blob=True, database=None)
settings.load_profile("xsp")
"""For every test that uses Hypothesis, see conftest.py; a failure prints what reproduces it."""


def examples(count: int) -> settings:
    """Return settings with a number of examples."""
    return settings(
        max_examples=count * TIMES,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )


def places(content: Any, before: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path to each value in a JSON document, and to each object or list that holds values."""
    if before:
        yield before
    items = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for key, value in items:
        yield from places(value, (*before, key))


def replaced(content: Any, path: tuple[Any, ...], value: Any) -> Any:
    """Return a copy of a JSON document with another value at a path."""
    if not path:
        return value
    copied = dict(content) if isinstance(content, dict) else list(content)
    copied[path[0]] = replaced(copied[path[0]], path[1:], value)
    return copied


MUTATIONS = st.lists(
    st.tuples(
        st.floats(0, 1), st.sampled_from(["set", "cut", "insert", "repeat", "end"]), st.binary(min_size=1, max_size=8)
    ),
    min_size=1,
    max_size=6,
)
"""Changes of bytes for `mutated`."""


def mutated(content: bytes, mutations: list[tuple[float, str, bytes]]) -> bytes:
    """Return bytes after some changes: a position from 0 to 1, the kind of change, and new bytes."""
    for position, mutation, new in mutations:
        offset = int(position * len(content))
        if mutation == "set":
            content = content[:offset] + new + content[offset + len(new) :]
        elif mutation == "cut":
            content = content[:offset] + content[offset + 16 * len(new) :]
        elif mutation == "insert":
            content = content[:offset] + new + content[offset:]
        elif mutation == "repeat":
            content = content[:offset] + content[offset : offset + 40] * 2 + content[offset + 40 :]
        else:
            content = content[:offset]
    return content


def is_read(path: Path, importer: contract.Importer | None = None) -> None:
    """Read a file into the table of spans, or get an error of xsp's; by default by the importer that recognises it."""
    con = table.connect()
    con.execute("SET threads = 1")
    with contextlib.suppress(TraceError, PluginError):
        importer = importer or contract.find_importer(str(path))
        if isinstance(importer, contract.TableImporter):
            importer.fill(con, str(path))
            rows = con.execute("SELECT count(*) - count(DISTINCT number), min(start_ns), min(dur_ns) FROM raw_spans")
            doubled, start, duration = rows.fetchall()[0]
            assert (doubled, (start or 0) >= 0, (duration or 0) >= 0) == (0, True, True)
    con.close()
