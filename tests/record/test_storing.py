"""How long a program waits until a step is stored."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from xsp.record.storing import OPENING_PATIENCE_S, Storing


class Writer:
    """A storing process that answers nothing, and notes how long it was waited for."""

    def __init__(self, is_open: bool) -> None:
        self.is_open = is_open
        self.waits_s: list[float] = []
        self.opening_waits_s: list[float] = []

    def send_step(self, *content: Any) -> int:
        return 1

    def wait_until_open(self, patience_s: float) -> bool:
        self.opening_waits_s.append(patience_s)
        return self.is_open

    def is_answered(self, number: int, patience_s: float = 0.0) -> bool:
        self.waits_s.append(patience_s)
        return False


def storing_with(writer: Any, patience_s: float | None = 0.1) -> tuple[Storing, Any, list[int]]:
    """Return a storing of a schedule with this patience, its account, and the list of what was spent."""
    schedule = SimpleNamespace(
        storing_patience_s=patience_s, waits_for_storing=True, is_storing=False, restart_settling=lambda: None
    )
    spent_ns: list[int] = []
    account = SimpleNamespace(spend=spent_ns.append, start_ns=0)
    steps: Any = SimpleNamespace(schedule=schedule, account=account)
    storing = Storing(steps)
    storing.writer = writer
    return storing, account, spent_ns


def test_what_was_waited_for_a_step_is_not_waited_again() -> None:
    writer = Writer(is_open=True)
    storing, account, spent_ns = storing_with(writer)
    storing.begin(0, [], {}, b"", 0)
    assert writer.waits_s == [pytest.approx(0.1)]
    assert storing.is_underway
    storing.poll()
    assert writer.waits_s[1] < 0.1
    assert (len(spent_ns), account.start_ns) == (1, 0)


@pytest.mark.parametrize(
    ("is_open", "patience_s", "waits"), [(False, 0.1, True), (True, 0.1, False), (False, None, False)]
)
def test_the_first_recording_waits_for_the_storing_process_to_load_as_part_of_the_start(
    is_open: bool, patience_s: float | None, waits: bool
) -> None:
    writer = Writer(is_open)
    storing, account, spent_ns = storing_with(writer, patience_s)
    wait_ns = storing.await_opening()
    assert writer.opening_waits_s == [OPENING_PATIENCE_S] * waits
    assert (account.start_ns, spent_ns) == (wait_ns, []), "it takes nothing from the first steps"
    if patience_s is not None:
        storing.begin(0, [], {}, b"", 0)
        assert storing.await_opening() == 0, "only the first one waits"
