"""Parameters that `make test-all` adds to those of `make test`."""

from __future__ import annotations

from typing import Any

import pytest


def deep(*values: Any, id: str | None = None) -> Any:
    """Return values of a parameter that repeat a question with more input: they are marked as slow."""
    return pytest.param(*values, marks=pytest.mark.slow, id=id)
