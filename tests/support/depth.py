"""Parameters that `make test-all` adds to those of `make test`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def deep(*values: Any, id: str | None = None) -> Any:
    """Return values of a parameter that repeat a question with more input: they are marked as slow."""
    return pytest.param(*values, marks=pytest.mark.slow, id=id)


def first(count: int, values: Iterable[Any]) -> list[Any]:
    """Return values of a parameter that each repeat a question: all but the first `count` are marked as slow."""
    every = list(values)
    return [*every[:count], *map(deep, every[count:])]
