"""Gaps between steps far longer than others: which one is traced in search of the line that takes the time."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from xsp.record.slowgaps import ENOUGH, MOST_SOUGHT, SlowGaps

MS = 1_000_000


def after(steps: int, is_slow: Callable[[int], bool], slow_ms: int = 50) -> SlowGaps:
    """Return what is known after steps with gaps of 1 ms, or of `slow_ms`."""
    found = SlowGaps()
    for number in range(steps):
        found.add(number, (slow_ms if is_slow(number) else 1) * MS, 10 * MS)
    return found


def test_a_periodic_gap_is_sought_when_it_is_due() -> None:
    found = after(35, lambda number: number % 10 == 0 and number > 0)
    assert found.steps_until_due(35) == 5
    assert not found.begin_seeking(39)
    assert found.begin_seeking(40)
    for _ in range(ENOUGH):
        assert found.steps_until_due(40) == 0
        found.traced += 1
    assert found.steps_until_due(40) is None


def test_gaps_that_do_not_come_as_expected_are_not_sought_for_ever() -> None:
    found = after(35, lambda number: number % 10 == 0 and number > 0)
    assert sum(found.begin_seeking(number) for number in range(35, 1000)) == MOST_SOUGHT


@pytest.mark.parametrize(
    "found",
    [
        after(40, lambda number: False),
        after(40, lambda number: number == 20),
        after(40, lambda number: number in (10, 20)),
        after(40, lambda number: number in (10, 17, 31)),
        after(40, lambda number: number in (20, 21, 22)),
        after(40, lambda number: number in (10, 20, 30), slow_ms=5),
        after(2000, lambda number: number in (500, 1000, 1500)),
    ],
    ids=["none", "one", "two", "no-period", "consecutive", "short", "rare"],
)
def test_nothing_is_sought_where_slow_gaps_take_little(found: SlowGaps) -> None:
    assert found.steps_until_due(1000) is None
