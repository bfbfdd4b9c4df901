"""Windows in which the collectors that see the whole process are on: somebody closes each of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from xsp.instrumentation import windows
from xsp.schema import Level


def test_a_window_that_its_first_call_left_while_another_gave_up_waiting_is_closed() -> None:
    seen: list[Any] = []
    collecting: Any = SimpleNamespace(
        collectors=[],
        start=lambda *levels, **how: ["torchops"],
        settle=lambda on: None,
        stop=lambda on: seen.append(on),
    )
    made = windows.Windows(collecting, lambda: Level.OP, seen.append)
    first, second = (SimpleNamespace(window=None, anchor=None) for _ in range(2))
    assert made.join(first) is None
    window: Any = first.window

    def wait(seconds: float) -> bool:
        assert made.leave(first) is None  # the other call counts still
        return False

    window.ready = SimpleNamespace(wait=wait)
    assert made.join(second) == windows.BUSY
    assert not made.is_open
    assert seen == [["torchops"], window]
