"""A service of the tests, and that every test closes what it opened."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from xsp.instrumentation import instrument

if TYPE_CHECKING:
    from services import Service


@pytest.fixture(autouse=True)
def every_handle_is_closed() -> Iterator[None]:
    yield
    assert instrument._active is None


@pytest.fixture
def service() -> Iterator[Service]:
    from services import Service

    made = Service()
    yield made
    made.provider.shutdown()
