"""Which levels are on in which step."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xsp.errors import LevelError
from xsp.levels import parse_levels, rung_name
from xsp.record.schedule import NEW, SETTLE, SETTLE_NS, Schedule, Turn
from xsp.schema import Level

M, LAYER, OP, G = Level.MODEL, Level.LAYER, Level.OP, Level.KERNEL


@pytest.mark.parametrize(
    ("text", "rungs"),
    [
        ("M", (M,)),
        ("M/L", (M, LAYER, OP)),
        ("m/l/g", (M, LAYER, OP, G)),
        ("M/G", (M, G)),
        (" model / layer ", (M, LAYER)),
        ("model/layer/op/library/runtime/kernel", (M, LAYER, OP, Level.LIBRARY, Level.RUNTIME, G)),
        ("M/layer/op/G", (M, LAYER, OP, G)),
        ("M/L/op", (M, LAYER, OP)),
        ("m/l/OP/g", (M, LAYER, OP, G)),
    ],
)
def test_levels_as_a_user_writes_them(text: str, rungs: tuple[Level, ...]) -> None:
    assert parse_levels(text) == rungs


@pytest.mark.parametrize(
    "text", ["", "/", "M/", "X", "M/X", "L", "L/G", "G/L/M", "M/M", "M/L/op/op", "M/op/L", "application/M", "M,L"]
)
def test_levels_that_make_no_sense_are_quoted_and_answered_with_how_to_write_them(text: str) -> None:
    with pytest.raises(LevelError, match="write M, M/L or M/L/G") as caught:
        parse_levels(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize("levels", [["X"], ["G", "M"], ["M", "L"], [Level.MODEL, Level.LAYER], [], [3], {"M"}, None])
def test_what_is_suggested_for_levels_that_are_no_text_can_be_typed(levels: object) -> None:
    with pytest.raises(LevelError, match="write them as one text, levels='") as caught:
        parse_levels(levels)  # type: ignore[arg-type]
    assert parse_levels(str(caught.value).split("levels=")[1].strip("'"))


def test_rungs_are_shown_by_xsps_letters_and_by_number_where_a_third_party_made_one() -> None:
    assert [rung_name(rung) for rung in (M, LAYER, OP, G, Level.LIBRARY, 35)] == [
        "M", "M/L", "M/L/op", "M/L/G", "M/L/op/library", "35",
    ]  # fmt: skip


@pytest.mark.parametrize("level", [level for level in Level if level is not Level.APPLICATION])
def test_what_is_shown_can_be_written_and_reaches_that_rung(level: Level) -> None:
    assert level in parse_levels(rung_name(level))


def turns(schedule: Schedule, count: int) -> list[Turn]:
    return [schedule.next() for _ in range(count)]


def test_warm_up_then_a_description_then_blocks_each_after_a_bare_step() -> None:
    schedule = Schedule(parse_levels("M/L"), warmup=2)
    warm, rest = turns(schedule, 2), turns(schedule, 2 + 2 * 3)
    assert [(turn.rung, turn.is_kept) for turn in warm] == [(OP, False), (LAYER, False)]
    assert rest[0::2] == [SETTLE] * 4
    assert rest[1] == Turn(OP, timed=False, describe=True)
    assert {turn.rung for turn in rest[3::2]} == {M, LAYER, OP}
    assert all(turn.timed for turn in rest[3::2])


def test_warm_up_visits_each_rung_once_unless_told_otherwise() -> None:
    schedule = Schedule(parse_levels("M/L/G"))
    assert sorted(turn.rung for turn in turns(schedule, schedule.warmup)) == [M, LAYER, OP, G]


def test_each_block_holds_each_rung_once_in_an_order_that_varies_and_repeats_with_the_seed() -> None:
    def blocks(seed: int) -> list[list[Level]]:
        schedule = Schedule(parse_levels("M/L/G"), warmup=0, settle=0, seed=seed)
        assert schedule.next().describe
        return [[turn.rung for turn in turns(schedule, 4)] for _ in range(50)]

    assert all(sorted(block) == [M, LAYER, OP, G] for block in blocks(7))
    assert len({tuple(block) for block in blocks(7)}) > 15
    assert blocks(7) == blocks(7) != blocks(8)
    firsts = Counter(block[0] for block in blocks(7))
    assert min(firsts[rung] for rung in (M, LAYER, OP, G)) >= 5, "no rung always comes first"


def test_only_one_rung_and_only_the_deepest_describes() -> None:
    rungs = parse_levels("M/L")
    shallow = turns(Schedule(rungs, warmup=0, settle=0, only=M), 6)
    assert shallow == [Turn(M, timed=True, describe=False)] * 6
    deep = turns(Schedule(rungs, warmup=0, settle=0, only=OP), 3)
    assert [turn.describe for turn in deep] == [True, False, False]


def test_one_step_in_so_many_is_recorded_and_the_others_run_bare() -> None:
    taken = turns(Schedule(parse_levels("M/L"), warmup=1, every=100), 1 + 400)
    assert [place for place, turn in enumerate(taken) if not turn.is_bare] == [0, 100, 200, 300, 400]
    assert turns(Schedule((M,), every=1, warmup=0), 3) == [Turn(M, timed=True, describe=False)] * 3


@given(
    rungs=st.sampled_from([parse_levels(text) for text in ("M", "M/L", "M/L/G", "model/layer", "M/G")]),
    warmup=st.none() | st.integers(0, 7),
    repeats=st.integers(0, 9),
    settle=st.integers(0, 2),
    only=st.integers(-1, 3),
    seed=st.integers(0, 99),
)
def test_after_the_steps_for_k_repeats_each_rung_was_timed_k_times_and_not_one_step_sooner(
    rungs: tuple[Level, ...], warmup: int | None, repeats: int, settle: int, only: int, seed: int
) -> None:
    one = rungs[only] if 0 <= only < len(rungs) else None
    schedule = Schedule(rungs, warmup, seed, one, settle)
    taken = turns(schedule, schedule.steps_for(repeats))
    assert Counter(turn.rung for turn in taken if turn.timed) == (
        dict.fromkeys(schedule.rungs, repeats) if repeats else {}
    )
    assert sum(turn.describe for turn in taken) == (rungs[-1] >= LAYER and one in (None, rungs[-1]))
    assert not taken or not repeats or taken[-1].is_kept


def program(schedule: Schedule, kinds: list[int], dur_ns: int = 10_000_000) -> list[tuple[int, Turn]]:
    """Run a program whose kinds of steps are foreseen, and return each step's kind and turn."""
    taken = []
    for kind in kinds:
        turn = schedule.next(kind)
        schedule.count_step(turn, kind, dur_ns)
        taken.append((kind, turn))
    return taken


def recorded(taken: list[tuple[int, Turn]]) -> Counter[int]:
    return Counter(kind for kind, turn in taken if turn.timed)


def test_what_alternates_is_recorded_alike_also_if_nothing_tells_the_kinds_apart() -> None:
    schedule = Schedule((M,), warmup=0, spread=True)
    places = [place for place, (_, turn) in enumerate(program(schedule, [0] * 600)) if turn.timed]
    odd = sum(place % 2 for place in places)
    assert 0.3 < odd / len(places) < 0.7


@pytest.mark.parametrize("every", [2, 3, 10, 100])
def test_one_step_in_so_many_is_drawn_at_random(every: int) -> None:
    schedule = Schedule((M,), warmup=0, every=every, spread=True)
    places = [place for place, (_, turn) in enumerate(program(schedule, [0] * 60 * every)) if turn.timed]
    gaps = Counter(after - before for before, after in itertools.pairwise(places))
    assert len(gaps) > 1
    assert min(gaps) >= 2
    assert 0.7 * every <= sum(gaps.elements()) / len(places) <= 1.4 * every + 0.5


def test_a_rare_kind_is_recorded_at_all_rungs_as_well() -> None:
    prompts = ([1] + [0] * 49) * 40  # a prefill, and the decodes after it
    schedule = Schedule(parse_levels("M/L"), warmup=0, spread=True)
    taken = program(schedule, prompts)
    assert recorded(taken)[1] >= 12
    assert {turn.rung for kind, turn in taken if kind == 1 and turn.timed} == {M, LAYER, OP}
    assert {kind for kind, turn in taken if turn.describe} == {0, 1}


def test_a_step_that_was_of_another_kind_than_foreseen_counts_for_its_own() -> None:
    schedule = Schedule(parse_levels("M/L"), warmup=0, settle=0)
    for _ in range(2 + 2 * 3):  # foreseen as kind 0, and half of them are of kind 1
        for kind in (1, 0):
            turn = schedule.next(0)
            schedule.count_step(turn, kind, 1000)
    plans = [schedule._plans[kind] for kind in (0, 1)]
    assert [plan.is_described for plan in plans] == [True, True]
    assert abs(plans[0].recorded_steps - plans[1].recorded_steps) <= 1


def test_a_step_of_a_kind_that_was_never_seen_runs_bare() -> None:
    schedule = Schedule((M,), warmup=0, settle=0)
    assert schedule.next(NEW) == SETTLE
    assert schedule.next(0).timed


def test_short_steps_settle_for_a_time_once_each_rung_was_measured() -> None:
    schedule = Schedule(parse_levels("M"), warmup=0)
    taken = program(schedule, [0] * 2000, dur_ns=SETTLE_NS // 20)
    places = [place for place, (_, turn) in enumerate(taken) if turn.timed]
    assert places[0] <= 2
    assert all(after - before > 20 for before, after in itertools.pairwise(places))


def test_each_block_has_a_stretch_of_steady_steps_where_that_is_asked_for() -> None:
    schedule = Schedule(parse_levels("M/L"), warmup=0, stretch=2)
    steady = 0
    for _ in range(300):
        is_steady = schedule.is_steady
        turn = schedule.next(0)
        steady += is_steady and turn.is_bare
        schedule.count_step(turn, 0, 10_000_000)
    blocks = min(schedule.repeats.values())
    assert blocks > 10
    assert steady >= 2 * (blocks - 2)


@pytest.mark.parametrize(("every", "spread"), [(1, False), (2, False), (3, True), (10, False), (10, True)])
def test_a_program_waits_for_the_storing_where_at_most_one_bare_step_is_left(every: int, spread: bool) -> None:
    schedule = Schedule(parse_levels("M"), warmup=1, every=every, spread=spread)
    turns, waits = [], []
    while len(turns) < 300:
        waits.append(schedule.waits_for_storing)  # when the next step begins
        turns.append(schedule.next(0 if turns else None))  # of the first step the kind is not known, as in any program
        schedule.count_step(turns[-1], 0, 10_000_000)
    recorded = [place for place, turn in enumerate(turns) if turn.timed]
    for before, after in itertools.pairwise(recorded[1:]):
        assert waits[before + 1 : after + 1] == [place >= after - 1 for place in range(before + 1, after + 1)]


def test_ranks_come_to_the_same_turns_however_long_their_steps_take() -> None:
    def turns_of(dur_ns: int) -> list[Turn]:
        schedule = Schedule(parse_levels("M/L"), spread=True, by_time=False, later_every=20, seed=3)
        return [turn for _, turn in program(schedule, [0, 0, 1] * 200, dur_ns)]

    assert turns_of(1_000) == turns_of(10**9)
    assert sum(not turn.is_bare for turn in turns_of(1)[300:]) < 300 / 10, "and seldom after the first ones"
