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

    def send_step(self, *content: Any) -> int:
        return 1

    def is_answered(self, number: int, patience_s: float = 0.0) -> bool:
        self.waits_s.append(patience_s)
        return False


@pytest.mark.parametrize(("is_open", "patience_s"), [(True, 0.1), (False, 0.1 + OPENING_PATIENCE_S)])
def test_the_first_step_waits_for_the_storing_process_to_load_and_later_ones_do_not(
    is_open: bool, patience_s: float
) -> None:
    schedule = SimpleNamespace(
        storing_patience_s=0.1, waits_for_storing=True, is_storing=False, restart_settling=lambda: None
    )
    spent_ns: list[int] = []
    account = SimpleNamespace(spend=spent_ns.append, start_ns=0)
    steps: Any = SimpleNamespace(schedule=schedule, account=account)
    writer: Any = Writer(is_open)
    storing = Storing(steps)
    storing.writer = writer
    storing.begin(0, [], {}, b"", 0)
    assert writer.waits_s == [pytest.approx(patience_s)]
    assert storing.is_underway
    storing.poll()
    assert writer.waits_s[1] < patience_s, "what was waited is not waited again"
    assert (len(spent_ns), account.start_ns > 0) == (int(is_open), not is_open), "loading is part of the start"
