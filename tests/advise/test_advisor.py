"""Registration of questions, and the selection and order of advice."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from xsp import advise, sections
from xsp.advise import Advice, AdviceContext, AdviceReport, Interval, Needs, Place, pictures, registry, text
from xsp.cli import main
from xsp.errors import AnalysisError, UsageError
from xsp.sections import Text
from xsp.testing import spans, trace_of


def piece(name: str, low: float, high: float, **changes: object) -> Advice:
    mean = (low + high) / 2
    fields = {"at_most": False, "of_step_percent": 10 * mean, "why": ("figures",), "do": "that", **changes}
    return Advice(
        name, f"{name} is wrong", (Place("net.0", "aten::mm", ("ab",), 3),), Interval(low, mean, high), **fields
    )  # type: ignore[arg-type]


@pytest.fixture
def context(monkeypatch: pytest.MonkeyPatch) -> AdviceContext:
    registry.questions()
    monkeypatch.setattr(registry, "QUESTIONS", {})

    @advise.question("small", "small?")
    def small(context: AdviceContext) -> Iterator[Advice]:
        yield piece("small", 1, 2)
        yield piece("small", -1, 2)
        yield piece("small", 0.01, 0.02)

    @advise.question("large", "large?", number="Q3")
    def large(context: AdviceContext) -> Iterator[Advice]:
        yield piece("large", 2, 4, changes_numbers="rounding to 8 bits")
        yield piece("large", 2.5, 2.5, at_most=True)

    @advise.question("none", "none?", needs=Needs.BOUND)
    def none(context: AdviceContext) -> Iterator[Advice]:
        raise AnalysisError("no timings: `xsp bench` takes them")

    return AdviceContext(trace_of(spans("step s 0-100000")))


def test_the_best_is_first_and_a_bound_counts_less_than_an_expectation(context: AdviceContext) -> None:
    report = advise.of(context)
    assert [(entry.question, entry.at_most) for entry in report.advice] == [
        ("large", False), ("small", False), ("large", True)
    ]  # fmt: skip
    assert [entry.number for entry in report.advice] == ["Q3", None, "Q3"]
    assert report.unanswered == {"none": "no timings: `xsp bench` takes them"}
    assert report.left_out == {"may gain nothing": 1, "gain less than 1 %": 1}


def test_no_piece_promises_a_larger_share_of_a_step_than_its_gain_is(context: AdviceContext) -> None:
    @advise.question("whole", "all of it?")
    def whole(context: AdviceContext) -> Iterator[Advice]:
        yield piece("whole", 0.02, 0.02, of_step_percent=118.0)

    (found,) = advise.of(AdviceContext(trace_of(spans("step s 0-40"))), only=["whole"]).advice
    assert found.of_step_percent == pytest.approx(50)


def test_options_are_last_under_their_own_heading_and_are_not_faults(context: AdviceContext) -> None:
    @advise.question("precise", "less precise?")
    def precise(context: AdviceContext) -> Iterator[Advice]:
        yield piece("precise", 8, 9, changes_numbers="bfloat16", option=True)

    report = advise.of(context)
    assert [entry.question for entry in report.advice] == ["large", "small", "large", "precise"]
    assert text.page(report).index("4. 8.50 ms") > text.page(report).index("faster with less accurate")
    alone = text.page(advise.of(context, only=["precise"]))
    assert alone.index("Nothing to advise") < alone.index("faster with less accurate") < alone.index("1. 8.50 ms")


def test_questions_are_selected_by_name_by_needs_and_by_effect_on_results(context: AdviceContext) -> None:
    assert advise.of(context, only=["small"]).answered == ("small",)
    assert advise.of(context, max_needs=Needs.TRACE).unanswered == {}
    same = advise.of(context, same_numbers=True)
    assert all(entry.changes_numbers is None for entry in same.advice)
    assert same.left_out["change results"] == 1
    with pytest.raises(UsageError, match="did you mean small"):
        advise.of(context, only=["smal"])


def test_the_page_fits_a_terminal_and_counts_omitted_pieces(context: AdviceContext) -> None:
    page = text.page(advise.of(context), 1)
    assert all(len(line) <= 80 for line in page.splitlines())
    output = (
        "1. 3.00 ms [2.00 ms … 4.00 ms]",
        "Q3, large",
        "net.0, aten::mm, 3 calls (span ab, …)",
        "it changes results",
    )
    for words in (*output, "2 more: --limit 3"):
        assert words in page
    assert "could not be answered" not in page


def test_questions_that_could_not_be_answered_are_listed_where_they_were_asked_by_name(context: AdviceContext) -> None:
    report = advise.of(context, only=["small", "none"])
    assert "could not be answered:\n  none: no timings" in text.page(report, 1, unanswered=True)
    assert "could not be answered:\n  none: no timings" in text.page(advise.of(context, only=["none"]))


def test_a_provider_is_called_once_even_if_it_fails(context: AdviceContext) -> None:
    calls = []

    def fails(_: AdviceContext) -> None:
        calls.append(1)
        raise AnalysisError("no graph")

    subject = AdviceContext(context.trace, providers={"graph": fails})
    for _ in range(2):
        with pytest.raises(AnalysisError, match="no graph"):
            subject.graph  # noqa: B018
    assert len(calls) == 1
    with pytest.raises(AnalysisError, match="no installed plugin"):
        subject.bound  # noqa: B018


@pytest.mark.parametrize("source", ["nothing-there", "torchvision:no_such_model"])
def test_an_unknown_source_is_reported_in_one_line(source: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["advise", source]) == 2
    output = capsys.readouterr().err
    assert output.startswith("xsp: error: ")
    assert output.count("\n") == 1


def test_two_questions_of_one_name_are_refused(context: AdviceContext) -> None:
    def other(context: AdviceContext) -> Iterator[Advice]:
        yield from ()

    with pytest.raises(UsageError, match="already is a question 'small'"):
        advise.question("small", "another")(other)


def test_of_two_pieces_with_the_same_trial_the_expectation_is_shown(context: AdviceContext) -> None:
    @advise.question("threads", "threads?")
    def threads(context: AdviceContext) -> Iterator[Advice]:
        yield piece("threads", 5, 5, at_most=True, trial="threads=2")
        yield piece("threads", 3, 4, trial="threads=2")

    (selected,) = advise.of(context, only=["threads"]).advice
    assert not selected.at_most


def test_the_section_of_the_report_has_gains_and_bounds_as_bars(context: AdviceContext, tmp_path: Path) -> None:
    section = pictures.section(advise.of(context))
    chart = next(part for part in section.parts if isinstance(part, sections.Chart))
    assert [(entry.name, entry.values) for entry in chart.series] == [
        ("expected", (3.0, 1.5, None)),
        ("at most", (None, None, 2.5)),
    ]
    assert sections.of({"xsp_section": 1, **sections.plain(section)}) == section
    assert pictures.save(advise.of(context), tmp_path) is None  # no run


def test_an_unknown_gain_has_no_bar_and_no_figure(context: AdviceContext) -> None:
    @advise.question("threads", "threads?")
    def threads(context: AdviceContext) -> Iterator[Advice]:
        yield piece("threads", 8, 9, at_most=True, gain_known=False)

    section = pictures.section(advise.of(context, only=["threads"]))
    assert not any(isinstance(part, sections.Chart) for part in section.parts)
    (table,) = (part for part in section.parts if isinstance(part, sections.Table))
    assert table.rows[0][3:6] == (None, None, None)
    assert sections.of({"xsp_section": 1, **sections.plain(section)}) == section
    output = text.page(advise.of(context))
    assert output.index("gain not known before it is tried") > output.index("1.50 ms")


def test_the_section_of_a_long_list_names_a_valid_command() -> None:
    pieces = tuple(piece(f"q{number}", 1, 30 - number) for number in range(pictures.MOST_PIECES + 2))
    report = AdviceReport("r", None, pieces, ("q0",), {}, {})
    texts = [part.text for part in pictures.section(report).parts if isinstance(part, Text)]
    assert texts[-1] == "2 more: xsp advise RUN --limit 22"
