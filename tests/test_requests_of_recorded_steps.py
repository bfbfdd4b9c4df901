"""What recording adds to engine steps is not in the times of requests: they are those of a run without it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from engines import MS, trace

from xsp import analyses
from xsp.account.requests import figures, gaps, kinds, token_gaps
from xsp.account.served import Request, as_measured, requests, steps
from xsp.account.serving import flaws
from xsp.schema import Span
from xsp.serving import PARTS
from xsp.store.trace import Trace
from xsp.testing import spans


def recorded(start: int, end: int) -> Span:
    """Return a step of the model that was recorded; milliseconds."""
    span = spans("step s 0-9")[0]
    return span._replace(start_ns=start * MS, dur_ns=(end - start) * MS, span_id=f"{start:016x}")


def engine(added: dict[int, int], after: int = 0) -> tuple[list[tuple[Any, ...]], list[Span]]:
    """Return an engine that serves `b` while `a` waits, then both, and what was recorded of it.

    Args:
        added: by number of the step what recording added to it, in milliseconds.
        after: what recording added to the time after each of them.
    """
    plan: list[tuple[int, tuple[tuple[str, str, int], ...]]] = [
        (20, (("b", "prefill", 10),)),
        *[(10, (("b", "decode", 1),))] * 6,
        (200, (("b", "decode", 1), ("a", "prefill", 30))),
        *[(12, (("b", "decode", 1), ("a", "decode", 1)))] * 8,
    ]
    statements: list[tuple[Any, ...]] = [("arrive", "b", 0, 10), ("arrive", "a", 21, 30)]
    marks, at = [], 1
    for number, (ms, parts) in enumerate(plan):
        end = at + ms + added.get(number, 0)
        statements.append(("step", at, end, *parts))
        if number in added:
            marks.append(recorded(at, end))
            end += after
        at = end + 1
    return [*statements, ("finish", "a", at, "ok"), ("finish", "b", at, "ok")], marks


def found(added: dict[int, int], after: int = 0) -> Trace:
    statements, marks = engine(added, after)
    return trace(statements, marks, step=None)


def times(each: Request) -> tuple[Any, ...]:
    return each.latency_ns, each.parts, each.ttft_ns, each.first_parts, each.last_token_ns


@pytest.mark.parametrize("added", [{2: 30}, {9: 24}, {2: 30, 4: 5, 10: 600, 12: 1}])
@pytest.mark.parametrize("after", [0, 7])
def test_a_request_has_the_times_that_it_has_without_recording(added: dict[int, int], after: int) -> None:
    plain, measured = found({}), found(added, after)
    for each, without in zip(requests(measured), requests(plain), strict=True):
        assert times(each) == times(without), "the queue of `a` and the shares of both, part by part"
        assert sum(each.parts.values()) == each.latency_ns
        assert sum((each.first_parts or {}).values()) == each.ttft_ns
        assert each.is_corrected
    for each, stored in zip(requests(measured), as_measured(measured), strict=True):
        assert stored.latency_ns == each.latency_ns + each.recording_ns
        assert stored.start_ns + stored.latency_ns == each.end_ns
    total = {each.request: each.recording_ns / MS for each in requests(measured)}
    assert total["b"] == sum(added.values()) + after * len(added)
    assert token_gaps(measured) == token_gaps(plain)
    assert gaps(measured) == gaps(plain)
    assert kinds(measured) == kinds(plain)
    assert [each.dur_ns for each in steps(measured)] == [each.dur_ns for each in steps(plain)]
    rows: Sequence[Any] = analyses.requests(measured).select("request, recording_ms").fetchall()
    assert dict(rows) == total
    shown = {each.name: each.value for each in figures(measured) if each.unit == "ms"}
    assert shown == {each.name: each.value for each in figures(plain) if each.unit == "ms"}


def test_a_step_unlike_all_others_has_what_recording_added_to_the_others() -> None:
    plain, measured = found({}), found({2: 30, 7: 30, 9: 30})
    for each, without in zip(requests(measured), requests(plain), strict=True):
        assert times(each) == times(without)


def test_the_first_step_of_a_kind_is_slow_by_itself() -> None:
    """The first decode step takes 500 ms to load libraries, and 5 ms to be recorded, as the next ones."""
    plain, measured = found({}), found({1: 505, 3: 5, 4: 5})
    for each, without in zip(requests(measured), requests(plain), strict=True):
        kept_ns = 500 * MS
        assert each.latency_ns == without.latency_ns + kept_ns
        assert each.recording_ns <= 15 * MS


def test_where_nothing_tells_what_recording_added_it_is_not_zero() -> None:
    statements, _ = engine({})
    measured = trace(statements, [recorded(0, 1000)], step=None)
    assert {each.recording_ns for each in requests(measured)} == {0}
    assert {row[0] for row in analyses.requests(measured).select("recording_ms").fetchall()} == {None}
    assert {row[0] for row in analyses.engine_steps(measured).select("recording_ms").fetchall()} == {None}
    assert {row[0] for row in analyses.requests(found({})).select("recording_ms").fetchall()} == {0}


def test_a_recorded_step_that_takes_long_is_no_stall() -> None:
    plain, measured = found({}), found({2: 400, 7: 400})
    assert "stalled" in [flaw.name for flaw in flaws(plain)]
    assert [flaw._replace(why=()) for flaw in flaws(measured)] == [flaw._replace(why=()) for flaw in flaws(plain)]


def test_a_long_prompt_that_was_recorded_stays_the_reason() -> None:
    statements: list[tuple[Any, ...]] = []
    for number in range(20):
        at = 1000 * number
        statements += [
            ("arrive", f"r{number}", at, 10), ("step", at, at + 10, (f"r{number}", "prefill", 10)),
            ("step", at + 11, at + 21, (f"r{number}", "decode", 1)), ("finish", f"r{number}", at + 22, "ok"),
        ]  # fmt: skip
    both = ("hit", "prefill", 10), ("long", "prefill", 3000)
    statements += [("arrive", "hit", 30_000, 10), ("step", 30_000, 30_900, *both), ("finish", "hit", 30_901, "ok")]
    measured = trace(statements, [recorded(5011, 5021), recorded(30_000, 30_900)], step=None)
    [hit] = [each for each in requests(measured) if each.request == "hit"]
    assert hit.recording_ns == 0, "the other recorded step was as long as its like, and this one has none"
    assert hit.neighbour == "long"
    assert hit.latency_ns == 901 * MS
    assert all(name in hit.parts for name in PARTS)
