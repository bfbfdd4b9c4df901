"""How much is tried at random: little and the same each time in the suite, more and else with XSP_FUZZ_TIMES; and how
inputs are damaged.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from hypothesis import HealthCheck, settings

TIMES = int(os.environ.get("XSP_FUZZ_TIMES", "1"))
"""How many times as many examples are tried as in the suite."""

SEED = int(os.environ.get("XSP_FUZZ_SEED", "1"))
"""Of the tests that use no Hypothesis."""

settings.register_profile("xsp", deadline=None, derandomize=TIMES == 1, print_blob=True, database=None)
settings.load_profile("xsp")
"""For every test that uses Hypothesis, see conftest.py: what fails comes with what it takes to see it again."""


def examples(count: int) -> settings:
    """Return how many examples are tried."""
    return settings(
        max_examples=count * TIMES,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )


def places(content: Any, before: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path to each value in a JSON document, and to each object or list that holds values."""
    if before:
        yield before
    each = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for key, value in each:
        yield from places(value, (*before, key))


def replaced(content: Any, path: tuple[Any, ...], value: Any) -> Any:
    """Return a copy of a JSON document with another value at a path."""
    if not path:
        return value
    copied = dict(content) if isinstance(content, dict) else list(content)
    copied[path[0]] = replaced(copied[path[0]], path[1:], value)
    return copied


def mutated(content: bytes, mutations: list[tuple[float, str, bytes]]) -> bytes:
    """Return bytes after some changes: where, from 0 to 1, how, and what is put there."""
    for where, how, new in mutations:
        at = int(where * len(content))
        if how == "set":
            content = content[:at] + new + content[at + len(new) :]
        elif how == "cut":
            content = content[:at] + content[at + 16 * len(new) :]
        elif how == "insert":
            content = content[:at] + new + content[at:]
        elif how == "repeat":
            content = content[:at] + content[at : at + 40] * 2 + content[at + 40 :]
        else:
            content = content[:at]
    return content
