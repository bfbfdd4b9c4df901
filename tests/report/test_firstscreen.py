"""The lines of the first screen: whole clauses, no advice without what to type."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from devicetrace import generated

from xsp.account.sentences import Line
from xsp.advise import advisor
from xsp.advise.advice import Advice, Interval, Needs
from xsp.analyses.answers import Answers
from xsp.report import firstscreen
from xsp.report.firstscreen import FirstScreen, phrased
from xsp.run import Budget
from xsp.store.trace import Limits
from xsp.testing import spans, trace_of


def advice(what: str, do: str) -> Advice:
    return Advice("q", what, (), Interval(1, 2, 3), True, 20.0, (), do)


LONG = (
    "the device is idle 35.5 ms of an iteration because the host issues its work too late: 2,288 gaps, 2,347 launches "
    "whose calls take 12.1 ms"
)
DO = (
    "fewer launches (CUDA graphs, torch.compile, a larger batch), or less Python between them; `launch-bound` names "
    "the layers (see the page on devices, which explains each of them and how it was measured)"
)


@pytest.mark.parametrize("width", [60, 80, 100, 200])
@pytest.mark.parametrize("rows", [1, 4, 8])
def test_a_full_screen_fits_and_cuts_no_clause(width: int, rows: int) -> None:
    lines = tuple(Line(f"part {number}", 10.0, 12.5) for number in range(rows))
    screen = FirstScreen(
        "a name of a program that is long enough, NVIDIA H200: 41.9 ms an iteration [37.0 ms … 46.8 ms]",
        "The host limits: the device works 6.22 of 41.9 ms (15 %). The largest part of an iteration is the optimizer.",
        ("Each 15th iteration takes 255 ms instead of 21.1 ms, between steps, in train.py:30, save: 14.3 of 35.2 ms.",),
        lines,
        lines,
        "device",
        (advice(LONG, DO), advice(LONG, DO), advice(LONG, DO)),
        ("layers: device time by layer: 70.4 % exact, 0 % inferred, 29.6 % unknown", "loop: one", "samples: two"),
        "B",
        "xsp advise runs/x (all advice), xsp report … (a page), xsp analyze … ops phases (tables)",
    )
    shown = firstscreen.text(screen, width, stored="runs/a/long/path/of/a/run").splitlines()
    assert len(shown) <= firstscreen.MOST_LINES
    assert all(len(line) <= min(width, firstscreen.MAX_WIDTH) for line in shown)
    joined = " ".join(line.strip() for line in shown)
    assert joined.count("do: fewer launches") == joined.count(" save at most ") >= 1
    if width >= 80:
        assert joined.count("(CUDA graphs, torch.compile, a larger batch)") == joined.count(" save at most ")
        assert not any(line.endswith("…") for line in shown)


def test_a_text_is_shortened_by_clauses() -> None:
    assert phrased("one two", 10, 1) == ["one two"]
    assert phrased("first part: second part; third part", 24, 1) == ["first part: second part"]
    assert phrased("first part (a remark that is long), second", 12, 1) == ["first part"]
    assert phrased("3. save about 5 ms (4 %): Adam updates 240 parameters: one by one", 55, 1) == [
        "3. save about 5 ms (4 %): Adam updates 240 parameters"
    ]


def test_a_shortened_text_is_the_beginning_of_the_whole_and_its_brackets_close() -> None:
    draw = random.Random(1)
    for _ in range(300):
        words = ["word" * draw.randint(1, 3) + draw.choice(["", "", ",", ";", ":"]) for _ in range(draw.randint(1, 40))]
        if len(words) > 8:
            words[3], words[6] = f"({words[3]}", f"{words[6].rstrip(',;:')})"
        content = " ".join(words)
        lines = phrased(content, 40, draw.randint(1, 3))
        joined = " ".join(lines)
        assert content.startswith(joined.removesuffix(" …"))
        if not joined.endswith("…"):
            assert joined.count("(") == joined.count(")")


def test_what_xsp_added_is_the_sum_of_its_parts_and_of_the_time_since_the_program_ended() -> None:
    seconds = {"spent_ns": 0.4, "idle_ns": 0.1, "start_ns": 0.2, "end_ns": 0.3, "wall_ns": 10.8}
    budget = Budget.of({"program_percent": 10.0, **{name: s * 1e9 for name, s in seconds.items()}})
    assert budget.added_ns == pytest.approx(1e9)
    screen = FirstScreen("a", "b", (), (), (), "", (), (), "A", "c", cost=budget)
    assert "; xsp added 1 s (10 %)" in firstscreen.text(screen, 100)
    shown = budget.with_screen(500_000_000)
    assert (shown.added_ns, shown.program_percent) == (pytest.approx(1.5e9), pytest.approx(15.0))
    assert "; xsp added 1.5 s (15 %)" in firstscreen.text(replace(screen, cost=shown), 100)
    assert "added" not in firstscreen.text(replace(screen, cost=budget | {"program_percent": None}), 100)


# --- the first screen computes what it shows, each thing once: counted, not timed -------------------------------------


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
