"""What pieces gain together, and which of two that set the same is shown."""

from __future__ import annotations

import pytest

from xsp.advise import Advice, Interval
from xsp.advise.advisor import _of_one_trial
from xsp.advise.combinedgain import plan


def piece(what: str, once_ms: float = 0.0, trial: str | None = None, at_most: bool = False, **calls: float) -> Advice:
    by_call = {int(name[1:]): ms for name, ms in calls.items()}
    gain = sum(by_call.values()) - once_ms or 1.0
    ends = Interval(gain, gain, gain)
    return Advice("choice", what, (), ends, at_most, 10.0, (), "do", trial=trial, by_call=by_call, once_ms=once_ms)


def told(*pieces: Advice) -> list[tuple[str, float]]:
    found = plan(pieces)
    return [] if found is None else [(part.piece.what, pytest.approx(part.adds_ms)) for part in found.parts]


def test_calls_of_different_pieces_add_up_and_the_largest_comes_first() -> None:
    assert told(piece("a", c1=1.0), piece("b", c2=3.0)) == [("b", 3.0), ("a", 1.0)]


def test_a_call_that_two_pieces_change_gains_what_the_better_one_gains() -> None:
    assert told(piece("a", c1=4.0, c2=2.0), piece("b", c1=3.0, c3=1.0)) == [("a", 6.0), ("b", 1.0)]


def test_a_piece_that_adds_next_to_nothing_is_not_in_the_plan() -> None:
    assert told(piece("a", c1=4.0), piece("b", c1=3.9)) == [("a", 4.0)]


def test_what_a_piece_makes_slower_and_what_it_costs_once_are_taken_off() -> None:
    assert told(piece("a", c1=4.0), piece("b", once_ms=0.5, c2=3.0, c1=-1.0)) == [("a", 4.0), ("b", 1.5)]


def test_one_piece_alone_and_pieces_that_do_not_tell_their_calls_make_no_plan() -> None:
    assert plan([piece("a", c1=4.0), piece("b")]) is None
    found = plan([piece("a", c1=4.0), piece("b"), piece("c", c2=1.0)])
    assert found is not None
    assert (found.unknown, found.ms) == (1, 5.0)


def test_a_bound_is_not_shown_beside_the_expectation_of_the_same_setting() -> None:
    bound, expected = piece("bound", trial="threads=2", at_most=True), piece("expected", trial="threads=1", c1=1.0)
    assert [each.what for each in _of_one_trial([bound, expected])] == ["expected"]
    other = piece("other", trial="channels_last", at_most=True)
    assert len(_of_one_trial([other, expected])) == 2
