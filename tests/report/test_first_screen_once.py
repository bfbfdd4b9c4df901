"""The first screen computes what it shows, each thing once: counted, not timed."""

from __future__ import annotations

from typing import Any

import pytest
from devicetrace import generated

from xsp.advise import advisor
from xsp.advise.advice import Needs
from xsp.analyses.answers import Answers
from xsp.report import firstscreen
from xsp.store.trace import Limits
from xsp.testing import spans, trace_of


class _Counted:
    """An engine that keeps its statements."""

    def __init__(self, con: Any) -> None:
        self._con = con
        self.statements: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._con, name)

    def execute(self, statement: str, *parameters: Any) -> Any:
        self.statements.append(" ".join(statement.split()))
        return self._con.execute(statement, *parameters)


def statements_of_screen(trace: Any) -> list[str]:
    trace.con = counted = _Counted(trace.con)
    firstscreen.first_screen(trace)
    return counted.statements


@pytest.mark.parametrize("ranks", [1, 2])
def test_names_of_kernels_are_classified_once_and_operators_are_not_ranked(ranks: int) -> None:
    trace = generated(steps=3, ranks=ranks)
    statements = statements_of_screen(trace)
    assert sum("names AS MATERIALIZED" in each for each in statements) == 1
    assert not trace.has_temp_table("own_times"), "the table of operators is for advice that the screen does not show"


def test_calls_of_a_step_with_device_work_are_read_only_for_what_could_be_advised() -> None:
    trace = generated()
    assert not any("ORDER BY process, thread, start_ns, dur_ns DESC, level, depth" in each
                   for each in statements_of_screen(trace))  # fmt: skip


def test_without_samples_no_query_asks_for_them() -> None:
    statements = statements_of_screen(trace_of(spans("step s 0-1000")))
    assert sum("FROM samples" in each for each in statements) == 1


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_screen_has_the_advice_of_known_gain_that_all_of_it_has(ranks: int) -> None:
    trace = generated(steps=3, layers=6, ranks=ranks)
    every = advisor.of(trace, max_needs=Needs.TRACE).advice
    assert firstscreen.first_screen(trace).advice == firstscreen.first_screen(trace, pieces=every).advice


def test_an_empty_loop_and_missing_libraries_are_asked_for_once_and_no_more() -> None:
    statements = statements_of_screen(generated(steps=3))
    assert not [each for each in statements if "undisturbed" in each or "RECURSIVE ancestors" in each]


def test_tables_are_computed_once_for_all_who_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = generated(steps=3)
    first = Answers(trace)["kernel-classes"]
    assert first.rows

    def compute(*_: object) -> None:
        raise AssertionError("it is computed again")

    monkeypatch.setattr(Answers, "_compute", compute)
    assert Answers(trace)["kernel-classes"] is first
    trace.limits = Limits(ttft_ms=1.0)  # figures of requests depend on them
    with pytest.raises(AssertionError, match="again"):
        Answers(trace)["kernel-classes"]
