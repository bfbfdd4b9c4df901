"""How often and how deep a budget lets a program be profiled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import xsp
from xsp.clock import monotonic_ns
from xsp.errors import UsageError
from xsp.health import health
from xsp.health.finding import Severity
from xsp.levels import parse_levels, rung_name
from xsp.record import budget, overhead
from xsp.record.budget import USE_DEFAULT, Budgeted
from xsp.record.kinds import Kinds
from xsp.record.overhead import Account
from xsp.record.schedule import FIRST, MOST_DESCRIPTIONS, NEW, SETTLE, Turn
from xsp.schema import Kind, Level

MS = 1_000_000
NOW = 10**12


@pytest.fixture
def still(monkeypatch: pytest.MonkeyPatch) -> None:
    """The account reads a clock that stands still, so nothing is added that a test does not state."""
    monkeypatch.setattr(overhead, "monotonic_ns", lambda: NOW)


@pytest.mark.parametrize(("text", "share"), [("1%", 0.01), (" 0.5 %", 0.005), ("0.02", 0.02), (0.1, 0.1)])
def test_a_budget_as_a_user_writes_it(text: str | float, share: float) -> None:
    assert budget.parse(text) == pytest.approx(share)


@pytest.mark.parametrize("text", ["", "%", "a lot", "0%", "-1%", "100%", 1, "nan", "1%%"])
def test_what_is_no_share_is_refused(text: str | float) -> None:
    with pytest.raises(UsageError, match="write a share"):
        xsp.profile(budget=text)


def simulated(
    share: float, costs_ms: dict[str, float], steps: int, every: int | None = None, trials: int = 3000
) -> tuple[Account, list[Turn]]:
    """Run steps of 10 ms; those of a rung cost what is stated, half of it inside."""
    account = Account()
    schedule = budget.Budgeted(share, account, parse_levels("M/L/G"), every=every)
    turns: list[Turn] = []
    for _ in range(steps):
        turn = schedule.next()
        half = int(costs_ms.get(rung_name(turn.rung), 0) * MS / 2)
        account.add(turn, 10 * MS + half, half, NOW)
        turns.append(turn)
        if len(turns) > trials:  # they are paid by then
            assert account.spent_ns <= 1.02 * share * account.steps_ns
    return account, turns


CHEAP = {"M": 1.0, "M/L": 2.0, "M/L/op": 5.0, "M/L/G": 10.0}


def test_a_budget_records_nothing_while_a_step_is_stored_and_waits_for_none(still: None) -> None:
    account = Account()
    schedule = Budgeted(0.5, account, parse_levels("M"))

    def run(steps: int) -> list[Turn]:
        taken = []
        for _ in range(steps):
            taken.append(schedule.next())
            account.add(taken[-1], 10 * MS, 0, NOW)
            schedule.count_step(taken[-1], 0, 10 * MS)
            if schedule.is_storing:
                schedule.restart_settling()
        return taken

    assert any(turn.timed for turn in run(100))
    schedule.is_storing = True
    assert not any(turn.timed for turn in run(100))
    assert not schedule.waits_for_storing
    schedule.is_storing = False
    assert [turn.timed for turn in run(2)] == [False, True], "one step settles"


def test_the_share_is_kept_and_used(still: None) -> None:
    account, turns = simulated(0.01, CHEAP, 20_000)
    idle_percent = 100 * min(budget.IDLE_NS / (10 * MS), budget.IDLE_SHARE)
    assert 0.8 <= account.content()["overhead_percent"] + idle_percent <= 1.0, "idle collectors are part of the share"
    timed = Counter(rung_name(turn.rung) for turn in turns if turn.timed)
    assert set(timed) == set(CHEAP)
    assert max(timed.values()) - min(timed.values()) <= 1, "rungs take turns, whatever they cost"


def test_what_start_and_end_exceed_is_paid_before_more_steps_are_recorded(still: None) -> None:
    spent_ms = []
    for start_ms in (0, 500):
        account = Account()
        account.start_ns = start_ms * MS
        schedule = budget.Budgeted(0.1, account, parse_levels("M"), gives_first=True)
        for _ in range(1000):  # ten seconds earn one
            turn = schedule.next(0)
            cost_ns = 0 if turn.is_bare else 10 * MS
            account.add(turn, 10 * MS + cost_ns, 0, NOW)
            schedule.count_step(turn, 0, 10 * MS)
        spent_ms.append(account.spent_ns / MS)
        total_ns = account.start_ns + budget.END_NS + account.spent_ns
        assert total_ns <= budget.ALLOWANCE_NS + 0.1 * account.loop_ns + 10 * MS
    assert spent_ms[0] > spent_ms[1] > 0


def test_no_step_is_chosen_anew_before_it_can_be_afforded(still: None, monkeypatch: pytest.MonkeyPatch) -> None:
    account, chosen = Account(), []
    schedule = budget.Budgeted(0.01, account, parse_levels("M"))
    choose = schedule._choose
    monkeypatch.setattr(schedule, "_choose", lambda plan: chosen.append(plan) or choose(plan))
    for _ in range(2000):
        turn = schedule.next(0)
        account.add(turn, 10 * MS + (0 if turn.is_bare else MS), 0, NOW)
        schedule.count_step(turn, 0, 10 * MS)
    assert schedule.ns_until_due() is None or 0 < schedule.ns_until_due() <= budget.MOST_DUE_NS
    assert 5 < len(chosen) < 600


def test_a_larger_share_records_more_often(still: None) -> None:
    recorded = [sum(turn.timed for turn in simulated(share, CHEAP, 5000)[1]) for share in (0.005, 0.01, 0.05)]
    assert recorded == sorted(recorded)
    assert recorded[2] > 3 * recorded[0]


def test_a_rung_that_is_too_dear_is_left_out_after_its_trial(still: None) -> None:
    account, turns = simulated(0.01, {**CHEAP, "M/L/G": 500.0}, 20_000, trials=8000)
    assert sum(turn.rung is Level.KERNEL for turn in turns) == 1
    assert account.content()["overhead_percent"] <= 1.0
    schedule = budget.Budgeted(0.01, account, parse_levels("M/L/G"))
    assert schedule.excluded_rungs() == {"M/L/G": pytest.approx(5000, rel=0.02)}


def test_no_more_often_than_every_allows(still: None) -> None:
    _, turns = simulated(0.5, CHEAP, 2000, every=50)
    places = [place for place, turn in enumerate(turns) if not turn.is_bare]
    assert len(places) >= 35
    assert min(later - place for place, later in pairwise(places)) == 50


def train(model: torch.nn.Module, steps: int, **how: object) -> None:
    x = torch.randn(64, 256)
    with xsp.profile("train", samples=False, **how) as prof:  # type: ignore[arg-type]
        for _ in range(steps):
            with prof.step():
                model(x).sum().backward()


@pytest.mark.slow
def test_a_run_says_what_was_asked_and_what_it_cost(tmp_path) -> None:
    train(torch.nn.Linear(256, 256), 1000, out=tmp_path / "run", budget=0.9, levels="M/L")
    trace = xsp.load(tmp_path / "run")
    found = trace.run["budget"]
    assert found["asked_percent"] == pytest.approx(90)
    assert found["low_percent"] <= found["overhead_percent"] <= found["high_percent"]
    assert sum(found["taken"].values()) == 1000 == trace.run["steps"]["seen"]
    assert found["kept"] == (found["overhead_percent"] <= 90)
    [finding] = [each for each in health(trace) if each.subject == "budget"]
    assert (finding.severity is Severity.GOOD) == found["kept"]
    assert "the budget is" in finding.text


def test_every_hundredth_step_is_recorded_and_nothing_is_on_in_between(tmp_path) -> None:
    train(torch.nn.Linear(256, 256), 200, out=tmp_path / "run", every=40, spread=False, warmup=0, levels="M/L")
    trace = xsp.load(tmp_path / "run")
    steps = trace.sql("SELECT DISTINCT step FROM spans ORDER BY step").fetchall()
    assert [step for (step,) in steps] == [39, 79, 119, 159, 199]
    assert trace.run["budget"]["taken"] == {"bare": 195, **_taken(trace)}
    assert trace.run["budget"]["asked_percent"] is None


def _taken(trace: xsp.Trace) -> dict[str, int]:
    rows = trace.sql("SELECT rung, count(DISTINCT step) FROM spans GROUP BY rung ORDER BY rung").fetchall()
    return {rung_name(rung): steps for rung, steps in rows}


@pytest.mark.slow
def test_a_budget_that_nobody_asked_for_lets_a_short_program_have_its_first_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budget, "LEAST_FIRST_NS", 60_000 * MS)  # the allowance pays for them on the slowest machine
    train(torch.nn.Linear(256, 16), 500, out=tmp_path / "run", budget=USE_DEFAULT)
    trace = xsp.load(tmp_path / "run")
    taken = {rung.level: rung.steps for rung in trace.rungs if rung.level > 10}
    assert set(taken) == {20, 30, 40, 70}
    assert min(taken.values()) >= FIRST
    assert trace.run["budget"]["asked_percent"] == 10


@pytest.mark.parametrize("cost_ms", [2, 200])
def test_first_steps_are_free_until_the_allowance_is_used_up(cost_ms: int, still: None) -> None:
    """Steps of 10 ms, too few to earn a recorded one."""
    account = Account()
    schedule = Budgeted(0.001, account, parse_levels("M/L/op"), warmup=0, gives_first=True)
    timed = Counter[int]()
    for _ in range(60):
        turn = schedule.next(0)
        cost = 0 if turn.is_bare else cost_ms * MS
        account.add(turn, 10 * MS, cost, NOW)
        schedule.count_step(turn, 0, 10 * MS)
        timed[turn.rung] += turn.timed
    least = min(timed[rung] for rung in schedule.rungs)
    assert least >= FIRST if cost_ms == 2 else least < FIRST


@pytest.mark.parametrize(("cost_ms", "descriptions"), [(120, 1), (400, 0)])
def test_a_short_program_whose_steps_have_many_operators_has_one_that_describes(
    cost_ms: int, descriptions: int, still: None
) -> None:
    """Steps of 20 ms with 6,000 operators used up the allowance, and 17 questions had no shapes."""
    account = Account()
    schedule = Budgeted(0.1, account, parse_levels("M/L/G"), warmup=0, gives_first=True)
    account.start_ns = 400 * MS
    turns: list[Turn] = []
    for _ in range(120):
        turn = schedule.next(0)
        cost = 0 if turn.is_bare else (cost_ms if turn.rung >= Level.OP else 40) * MS
        account.add(turn, 20 * MS, cost, NOW)
        schedule.count_step(turn, 0, 20 * MS)
        turns += [] if turn.is_bare else [turn]
    assert [turn.rung for turn in turns[:3]] == [Level.MODEL, Level.LAYER, Level.OP]
    assert sum(turn.describe for turn in turns) == descriptions
    assert account.spent_ns <= (3 * cost_ms + 2 * 40) * MS


def test_a_short_program_of_many_kinds_has_first_steps_too(still: None) -> None:
    """A dozen models in turn, too short to earn a recorded step: 3,600 steps had none, whatever the allowance."""
    account = Account()
    schedule = Budgeted(0.001, account, parse_levels("M/L/op"), warmup=0, gives_first=True)
    kinds = range(12)
    for kind in kinds:
        schedule.count_step(SETTLE, kind, MS)
    timed = Counter[int]()
    for step in range(600):
        turn = schedule.next(step % len(kinds))
        account.add(turn, MS, 0 if turn.is_bare else 2 * MS, NOW)
        schedule.count_step(turn, step % len(kinds), MS)
        timed[turn.rung] += turn.timed
    assert min(timed[rung] for rung in schedule.rungs) >= FIRST
    assert schedule.unearned_ns <= budget.ALLOWANCE_NS


@pytest.mark.parametrize("cost_ms", [20, 90])
def test_neither_a_kind_that_occurs_often_nor_a_rung_is_without_a_recorded_step(cost_ms: int, still: None) -> None:
    """A discriminator and its generator on a busy machine: the first kind has used up what is free."""
    account = Account()
    account.start_ns = 3_000 * MS
    schedule = Budgeted(0.1, account, parse_levels("M/L/op"), warmup=0, gives_first=True)
    recorded = Counter[int]()
    for step in range(400):
        kind = int(step % 4 == 3)
        turn = schedule.next(kind if step > 3 else NEW)
        account.add(turn, 5 * MS, 0 if turn.is_bare else cost_ms * MS, NOW)
        schedule.count_step(turn, kind, 5 * MS)
        recorded[kind] += not turn.is_bare
    assert min(recorded[0], recorded[1]) >= 1
    assert min(schedule.repeats.values()) >= 1, "and no rung"
    assert schedule.unearned_ns <= budget.LEAST_FIRST_NS + budget.LATER_KIND_NS + 4 * budget.FREE_NS


@pytest.mark.parametrize("kinds", [3, 9])
def test_the_largest_of_several_models_that_run_one_after_the_other_has_a_timed_step_with_operators(
    kinds: int, still: None
) -> None:
    """A sweep whose last model takes most of the time: the small ones had used up the allowance."""
    account = Account()
    account.start_ns = 350 * MS
    schedule = Budgeted(0.03, account, parse_levels("M/L/op"), warmup=0, gives_first=True)
    turns: list[Turn] = []
    for kind in range(kinds):
        step_ms = 1 if kind < kinds - 1 else 10
        for step in range(200):
            turn = schedule.next(kind if step else NEW)
            account.add(turn, step_ms * MS, 0 if turn.is_bare else (20 if step_ms == 1 else 90) * MS, NOW)
            schedule.count_step(turn, kind, step_ms * MS)
            turns += [turn] if kind == kinds - 1 and turn.timed else []
    assert turns
    assert turns[0].rung is Level.OP


def test_what_was_earned_is_kept_for_a_rare_kind_that_is_behind(still: None) -> None:
    account = Account()
    schedule = Budgeted(0.2, account, [Level.MODEL], warmup=0, spread=True)
    timed = Counter()
    for kind in ([1] + [0] * 30) * 60:
        turn = schedule.next(kind)
        cost = 0 if turn.is_bare else 20 * MS
        account.add(turn, 10 * MS, cost, NOW)
        schedule.count_step(turn, kind, 10 * MS)
        timed[kind] += turn.timed
    assert timed[1] >= 0.75 * 60, "nearly each of its steps"
    assert timed[0] >= 84, "half of what it would have alone: it gets what the rare kind leaves"


@pytest.mark.slow
@given(
    odd_steps=st.sets(st.integers(0, 399), max_size=40),
    odd_kinds=st.integers(1, 4),
    share=st.sampled_from([0.05, 0.1, 0.2]),
    gives_first=st.booleans(),
    seed=st.integers(0, 9),
)
@example(odd_steps={3}, odd_kinds=1, share=0.1, gives_first=True, seed=0)
@example(odd_steps={3}, odd_kinds=1, share=0.2, gives_first=False, seed=0)
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_rare_kinds_take_neither_the_turns_nor_the_budget_of_the_common_one(
    still: None, odd_steps: set[int], odd_kinds: int, share: float, gives_first: bool, seed: int
) -> None:
    """Steps of 10 ms; a recorded one costs 20 ms more. The odd ones begin with the same call as the others."""

    def recorded(kind_of: Callable[[int], int]) -> tuple[Counter[int], Counter[int]]:
        account, kinds = Account(), Kinds()
        schedule = Budgeted(share, account, parse_levels("M/L"), seed=seed, spread=True, gives_first=gives_first)
        timed, described = Counter[int](), Counter[int]()
        for step in range(400):
            first = (Kind.FORWARD, 1, object, True, (4,))
            outline = [first] * (1 << kind_of(step))
            turn = schedule.next(kinds.expected_kind(first))
            account.add(turn, (10 if turn.is_bare else 30) * MS, 0, NOW)
            schedule.count_step(turn, kinds.count_step(outline).kind.number, 10 * MS)
            timed[kind_of(step)] += turn.timed
            described[kind_of(step)] += turn.describe
        return timed, described

    alone, _ = recorded(lambda step: 0)
    timed, described = recorded(lambda step: 1 + step % odd_kinds if step in odd_steps else 0)
    assert sum(described.values()) <= MOST_DESCRIPTIONS * (odd_kinds + 1)
    assert timed[0] >= (alone[0] / 2 if len(odd_steps) == 1 else alone[0] / 3) - 2


def test_a_kind_that_occurred_once_long_ago_reserves_nothing(still: None) -> None:
    def timed(steps: list[int]) -> int:
        account = Account()
        schedule = Budgeted(0.2, account, [Level.MODEL], spread=True)
        count = 0
        for kind in steps:
            turn = schedule.next(kind)
            account.add(turn, 10 * MS, 0 if turn.is_bare else 20 * MS, NOW)
            schedule.count_step(turn, kind, 10 * MS)
            count += turn.timed
        return count

    assert timed([0] * 3 + [1] + [0] * 2000) >= timed([0] * 2004) - 3 > 100


def test_steps_that_turn_out_to_be_of_another_kind_are_not_given_away_for_ever(still: None) -> None:
    account = Account()
    schedule = Budgeted(0.1, account, [Level.MODEL], warmup=0, spread=True, gives_first=True)
    for kind in range(2):  # both are known
        schedule.count_step(SETTLE, kind, MS)
    recorded = 0
    for _ in range(3000):
        turn = schedule.next(1)  # what is foretold, and never comes
        account.add(turn, MS, 0 if turn.is_bare else 20 * MS, NOW)
        schedule.count_step(turn, 0, MS)
        recorded += not turn.is_bare
    given = 2 * budget.FIRST
    earned = 0.1 * 3000 / 20
    assert budget.FIRST <= recorded <= given + earned


def test_waits_between_steps_earn_too(still: None) -> None:
    account = Account()
    account.add(SETTLE, 10 * MS, 0, NOW)
    before = account.loop_ns
    account.waited_ns += 90 * MS
    assert account.loop_ns == before + 90 * MS


def test_blocks_that_are_earned_have_a_stretch_of_steady_steps_before_them() -> None:
    account = Account()
    schedule = Budgeted(0.5, account, parse_levels("M"), gives_first=True, has_rests=True)
    recorded, steady = [], 0
    for _ in range(200):
        steady = steady + 1 if schedule.is_steady else 0
        turn = schedule.next(0)
        dur_ns = 10_000_000
        schedule.count_step(turn, 0, dur_ns)
        account.add(turn, dur_ns, 0, monotonic_ns())
        if turn.timed:
            recorded.append(steady)
            steady = 0
    assert recorded[: budget.FIRST] == [0] * budget.FIRST  # they are given, and do not wait
    assert len(recorded) > budget.FIRST
    assert all(before >= 12 for before in recorded[budget.FIRST :])
