"""The combined gain of pieces, and the choice between two pieces for the same setting."""

from __future__ import annotations

import pytest

from xsp.advise import Advice, Interval
from xsp.advise.advisor import _one_per_trial, combined_gain


def piece(what: str, once_ms: float = 0.0, trial: str | None = None, at_most: bool = False, **calls: float) -> Advice:
    by_call = {int(name[1:]): ms for name, ms in calls.items()}
    gain = sum(by_call.values()) - once_ms or 1.0
    interval = Interval(gain, gain, gain)
    return Advice("choice", what, (), interval, at_most, 10.0, (), "do", trial=trial, by_call=by_call, once_ms=once_ms)


def plan_of(*pieces: Advice) -> list[tuple[str, float]]:
    combined = combined_gain(pieces)
    return [] if combined is None else [(part.piece.what, pytest.approx(part.added_ms)) for part in combined.parts]


def test_calls_of_different_pieces_add_up_and_the_largest_comes_first() -> None:
    assert plan_of(piece("a", c1=1.0), piece("b", c2=3.0)) == [("b", 3.0), ("a", 1.0)]


def test_a_call_that_two_pieces_change_gains_what_the_better_one_gains() -> None:
    assert plan_of(piece("a", c1=4.0, c2=2.0), piece("b", c1=3.0, c3=1.0)) == [("a", 6.0), ("b", 1.0)]


def test_a_piece_that_adds_next_to_nothing_is_not_in_the_plan() -> None:
    assert plan_of(piece("a", c1=4.0), piece("b", c1=3.9)) == [("a", 4.0)]


def test_slower_calls_and_the_cost_of_a_change_are_subtracted() -> None:
    assert plan_of(piece("a", c1=4.0), piece("b", once_ms=0.5, c2=3.0, c1=-1.0)) == [("a", 4.0), ("b", 1.5)]


def test_one_piece_alone_and_pieces_without_calls_make_no_plan() -> None:
    assert combined_gain([piece("a", c1=4.0), piece("b")]) is None
    combined = combined_gain([piece("a", c1=4.0), piece("b"), piece("c", c2=1.0)])
    assert combined is not None
    assert (combined.unknown_count, combined.ms) == (1, 5.0)


def test_a_bound_is_not_shown_beside_the_expectation_of_the_same_setting() -> None:
    bound, expected = piece("bound", trial="threads=2", at_most=True), piece("expected", trial="threads=1", c1=1.0)
    assert [entry.what for entry in _one_per_trial([bound, expected])] == ["expected"]
    other_piece = piece("other", trial="channels_last", at_most=True)
    assert len(_one_per_trial([other_piece, expected])) == 2
