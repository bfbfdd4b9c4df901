"""What profiling costs, counted step by step."""

from __future__ import annotations

import itertools
import sys

import pytest

from xsp.collector import Collector
from xsp.record import collecting, overhead
from xsp.record.overhead import Account, Differences
from xsp.record.schedule import SETTLE, Turn
from xsp.schema import Level

M = Turn(Level.MODEL, timed=True, describe=False)
MS = 1_000_000
NOW = 10**12


@pytest.fixture(autouse=True)
def still(monkeypatch: pytest.MonkeyPatch) -> None:
    """The account reads a clock that stands still, so nothing is added that a test does not state."""
    monkeypatch.setattr(overhead, "monotonic_ns", lambda: NOW)


def add(account: Account, turn: Turn, dur_ms: float) -> None:
    account.add(turn, int(dur_ms * MS), 0, NOW)


def test_a_recorded_step_is_compared_with_the_pace_of_the_device_if_the_host_runs_ahead_of_it() -> None:
    """As on an H200: launches of 5 ms, 67 ms on the device, and a recorded step that waits for its own work."""
    account = Account()
    for _ in range(4):
        add(account, SETTLE, 5)
    account.add_burst(4, 268 * MS, 248 * MS)
    account.waited_ns += 248 * MS
    add(account, Turn(Level.KERNEL, timed=True, describe=False), 68)
    assert account.content()["inside_ns"] == pytest.approx(MS, rel=0.1)
    assert account.loop_ns == pytest.approx(335 * MS, rel=0.01)


def test_a_host_that_waits_for_no_device_is_compared_with_its_own_steps() -> None:
    account = Account()
    for _ in range(4):
        add(account, SETTLE, 5)
    account.add_burst(4, 40 * MS, 1000)
    add(account, Turn(Level.KERNEL, timed=True, describe=False), 8)
    assert account.content()["inside_ns"] == pytest.approx(3 * MS, rel=0.1)


def test_a_recorded_step_costs_what_it_takes_longer_than_the_bare_ones_nearby() -> None:
    account = Account()
    for _ in range(4):
        for dur_ms in (11, 10, 10, 10, 10):  # the first is on cold caches, except at the very beginning
            add(account, SETTLE, dur_ms)
        add(account, M, 12)
    found = account.content()
    assert found["taken"] == {"bare": 20, "M": 4}
    assert found["inside_ns"] == pytest.approx(4 * 2 * MS)
    assert found["after_ns"] == pytest.approx(3 * 1 * MS)
    assert found["bare_step_ns"] == 10 * MS
    assert found["overhead_percent"] == pytest.approx(100 * 11 / 241, abs=1e-4)


def test_what_steps_take_longer_while_another_is_stored_is_a_cost_and_tells_not_what_a_bare_step_takes() -> None:
    account = Account()
    for _ in range(5):
        for _ in range(4):
            add(account, SETTLE, 10)
        add(account, M, 10)
        for _ in range(3):
            account.add(SETTLE, 12 * MS, 0, NOW, is_disturbed=True)
    found = account.content()
    assert found["bare_step_ns"] == 10 * MS
    assert found["after_ns"] == pytest.approx(5 * 3 * 2 * MS, abs=6 * MS)  # the first after a recorded step apart
    assert found["spent_ns"] == found["after_ns"]


def test_time_around_the_step_is_read_from_the_clock() -> None:
    account = Account()
    add(account, SETTLE, 10)
    account.add(M, 10 * MS, before_ns=2 * MS, end_ns=NOW - 3 * MS)
    assert account.content()["around_ns"] == 5 * MS
    assert account.cost_ns(Level.MODEL) == 5 * MS


def test_a_bare_step_between_whose_readings_another_program_ran_costs_what_others_do() -> None:
    account = Account()
    for _ in range(64):
        account.add(SETTLE, 10 * MS, 0, NOW - MS)
    before = account.spent_ns
    account.add(SETTLE, 10 * MS, 0, NOW - 500 * MS)
    assert account.spent_ns - before == MS
    account.spend(7 * MS)
    assert account.spent_ns - before == 8 * MS


def test_a_slow_machine_is_not_taken_for_overhead() -> None:
    account = Account()
    for dur_ms in (10, 40):
        for _ in range(20):
            add(account, SETTLE, dur_ms)
        add(account, M, dur_ms)
    assert account.content()["inside_ns"] == 0


def test_steps_before_the_first_bare_one_are_unknown_and_said_to_be() -> None:
    account = Account()
    add(account, M, 10)
    found = account.content()
    assert (found["unknown_steps"], found["overhead_percent"], found["bare_step_ns"]) == (1, None, None)


def test_one_or_two_steps_tell_nothing_so_their_margin_is_all_that_they_cost() -> None:
    differences = Differences()
    differences.add(5.0)
    assert (differences.total_ns, differences.margin_ns) == (5.0, 5.0)
    for _ in range(9):
        differences.add(5.0)
    assert (differences.total_ns, differences.margin_ns) == (50.0, pytest.approx(0.0))


def test_a_machine_that_became_faster_makes_no_cost_below_zero() -> None:
    account = Account()
    for _ in range(20):
        add(account, SETTLE, 10)
    for _ in range(10):
        add(account, M, 5)
    low, high = account.interval_percent()
    assert account.content()["overhead_percent"] == high == 0
    assert low is not None
    assert low < 0


def test_memory_does_not_grow_with_the_steps() -> None:
    account = Account()
    for _ in range(3000):
        add(account, SETTLE, 10)
        add(account, M, 11)
    rung = account.rungs[Level.MODEL]
    assert (rung.timed_differences.count, len(rung.timed_differences._latest)) == (3000, 64)


def test_the_import_of_the_observed_package_is_no_cost_of_profiling(monkeypatch: pytest.MonkeyPatch) -> None:
    now = itertools.count(0, 7)

    class Observing(Collector):
        levels = (Level.MODEL,)

    monkeypatch.setattr(collecting, "OBSERVED_PACKAGE", "observed_package")
    monkeypatch.setattr(collecting.clock, "monotonic_ns", lambda: next(now))

    def load(item: object) -> tuple[Collector, str | None]:
        monkeypatch.setitem(sys.modules, "observed_package", sys)
        return Observing(), None

    monkeypatch.setattr(collecting.plugins, "collector", load)
    found = collecting.Collecting()
    found.find(["imports it", "has it"], Level.MODEL)
    assert found.import_ns == 7


@pytest.mark.parametrize("first", [False, True], ids=["bare first", "recorded first"])
def test_a_long_step_among_short_ones_costs_nothing_by_its_length(first: bool) -> None:
    account = Account()
    for number in range(200):
        for kind, dur_ms in ((0, 1), (1, 50)) if number % 10 == 9 else ((0, 1),):
            recorded = (number % 20 == 9) if kind else (number % 50 == 25 or (first and number < 3))
            account.add(M if recorded else SETTLE, dur_ms * MS, 0, NOW, kind=kind)
            account._follows_recorded = False  # steps after recorded ones are as long as others here
    assert account.unknown == 0
    assert sum(rung.timed_differences.total_ns for rung in account.rungs.values()) == 0
    assert account.steps_ns == pytest.approx((200 * 1 + 20 * 50) * MS)
    assert account.mean_ns == pytest.approx(1200 * MS / 220)


def test_what_a_kind_costs_that_never_ran_bare_is_not_known() -> None:
    account = Account()
    account.add(SETTLE, MS, 0, NOW)
    account.add(M, 50 * MS, 0, NOW, kind=1)
    assert account.unknown == 1
    assert account.content()["unknown_steps"] == 1
    assert account.content()["inside_ns"] == 0
