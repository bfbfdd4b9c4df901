"""Questions register themselves, what is worth saying is said, and the best stands first."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from xsp import advise, sections
from xsp.advise import Advice, AdviceContext, Advised, Interval, Needs, Place, pictures, registry, text
from xsp.cli import main
from xsp.errors import AnalysisError, UsageError
from xsp.sections import Text
from xsp.testing import spans, trace_of


def piece(name: str, low: float, high: float, **others: object) -> Advice:
    mean = (low + high) / 2
    given = {"at_most": False, "of_step_percent": 10 * mean, "why": ("figures",), "do": "that", **others}
    return Advice(
        name, f"{name} is wrong", (Place("net.0", "aten::mm", ("ab",), 3),), Interval(low, mean, high), **given
    )  # type: ignore[arg-type]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> AdviceContext:
    registry.questions()
    monkeypatch.setattr(registry, "QUESTIONS", {})

    @advise.question("small", "small?")
    def small(asked: AdviceContext) -> Iterator[Advice]:
        yield piece("small", 1, 2)
        yield piece("small", -1, 2)
        yield piece("small", 0.01, 0.02)

    @advise.question("large", "large?", number="Q3")
    def large(asked: AdviceContext) -> Iterator[Advice]:
        yield piece("large", 2, 4, changes_numbers="rounding to 8 bits")
        yield piece("large", 2.5, 2.5, at_most=True)

    @advise.question("none", "none?", needs=Needs.BOUND)
    def none(asked: AdviceContext) -> Iterator[Advice]:
        raise AnalysisError("no timings: `xsp bench` takes them")

    return AdviceContext(trace_of(spans("step s 0-100")))


def test_the_best_stands_first_and_a_bound_counts_less_than_an_expectation(asked: AdviceContext) -> None:
    found = advise.of(asked)
    assert [(each.question, each.at_most) for each in found.advice] == [
        ("large", False), ("small", False), ("large", True)
    ]  # fmt: skip
    assert [each.number for each in found.advice] == ["Q3", None, "Q3"]
    assert found.unanswered == {"none": "no timings: `xsp bench` takes them"}
    assert found.left_out == {"may gain nothing": 1, "gain less than 1 %": 1}


def test_options_stand_last_under_a_heading_of_their_own_and_are_no_fault(asked: AdviceContext) -> None:
    @advise.question("precise", "less precise?")
    def precise(asked: AdviceContext) -> Iterator[Advice]:
        yield piece("precise", 8, 9, changes_numbers="bfloat16", option=True)

    found = advise.of(asked)
    assert [each.question for each in found.advice] == ["large", "small", "large", "precise"]
    assert text.page(found).index("4. 8.50 ms") > text.page(found).index("faster with less accurate")
    alone = text.page(advise.of(asked, only=["precise"]))
    assert alone.index("Nothing to advise") < alone.index("faster with less accurate") < alone.index("1. 8.50 ms")


def test_questions_can_be_chosen_by_name_by_need_and_by_what_they_change(asked: AdviceContext) -> None:
    assert advise.of(asked, only=["small"]).asked == ("small",)
    assert advise.of(asked, most=Needs.TRACE).unanswered == {}
    same = advise.of(asked, same_numbers=True)
    assert all(each.changes_numbers is None for each in same.advice)
    assert same.left_out["change results"] == 1
    with pytest.raises(UsageError, match="did you mean small"):
        advise.of(asked, only=["smal"])


def test_the_page_fits_a_terminal_and_says_what_was_left_out(asked: AdviceContext) -> None:
    page = text.page(advise.of(asked), 1)
    assert all(len(line) <= 80 for line in page.splitlines())
    said = (
        "1. 3.00 ms [2.00 ms … 4.00 ms]",
        "Q3, large",
        "net.0, aten::mm, 3 calls (span ab, …)",
        "it changes results",
    )
    for words in (*said, "2 more: --limit 3", "no timings"):
        assert words in page


def test_a_part_is_made_once_even_if_it_cannot_be(asked: AdviceContext) -> None:
    calls = []

    def fails(_: AdviceContext) -> None:
        calls.append(1)
        raise AnalysisError("no graph")

    about = AdviceContext(asked.trace, providers={"graph": fails})
    for _ in range(2):
        with pytest.raises(AnalysisError, match="no graph"):
            about.graph  # noqa: B018
    assert len(calls) == 1
    with pytest.raises(AnalysisError, match="no installed plugin"):
        about.bound  # noqa: B018


@pytest.mark.parametrize("source", ["nothing-there", "torchvision:no_such_model"])
def test_a_source_that_is_none_is_one_clear_line(source: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["advise", source]) == 2
    said = capsys.readouterr().err
    assert said.startswith("xsp: error: ")
    assert said.count("\n") == 1


def test_two_questions_of_one_name_are_refused(asked: AdviceContext) -> None:
    def other(asked: AdviceContext) -> Iterator[Advice]:
        yield from ()

    with pytest.raises(UsageError, match="already is a question 'small'"):
        advise.question("small", "another")(other)


def test_of_two_pieces_with_one_trial_the_expectation_is_kept(asked: AdviceContext) -> None:
    @advise.question("threads", "threads?")
    def threads(asked: AdviceContext) -> Iterator[Advice]:
        yield piece("threads", 5, 5, at_most=True, trial="threads=2")
        yield piece("threads", 3, 4, trial="threads=2")

    (kept,) = advise.of(asked, only=["threads"]).advice
    assert not kept.at_most


def test_the_section_of_the_report_has_gains_and_bounds_as_bars(asked: AdviceContext, tmp_path: Path) -> None:
    made = pictures.section(advise.of(asked))
    chart = next(part for part in made.parts if isinstance(part, sections.Chart))
    assert [(each.name, each.values) for each in chart.series] == [
        ("expected", (3.0, 1.5, None)),
        ("at most", (None, None, 2.5)),
    ]
    assert sections.of({"xsp_section": 1, **sections.plain(made)}) == made
    assert pictures.keep(advise.of(asked), tmp_path) is None  # no run


def test_a_gain_that_only_a_trial_tells_has_no_bar_and_no_figure(asked: AdviceContext) -> None:
    @advise.question("threads", "threads?")
    def threads(asked: AdviceContext) -> Iterator[Advice]:
        yield piece("threads", 8, 9, at_most=True, gain_known=False)

    made = pictures.section(advise.of(asked, only=["threads"]))
    assert not any(isinstance(part, sections.Chart) for part in made.parts)
    (table,) = (part for part in made.parts if isinstance(part, sections.Table))
    assert table.rows[0][3:6] == (None, None, None)
    assert sections.of({"xsp_section": 1, **sections.plain(made)}) == made
    said = text.page(advise.of(asked))
    assert said.index("gain not known before it is tried") > said.index("1.50 ms")


def test_the_section_of_a_long_list_says_a_command_that_is_taken() -> None:
    pieces = tuple(piece(f"q{number}", 1, 30 - number) for number in range(pictures.MOST + 2))
    found = Advised("r", None, pieces, ("q0",), {}, {})
    texts = [part.text for part in pictures.section(found).parts if isinstance(part, Text)]
    assert texts[-1] == "2 more: xsp advise RUN --limit 22"
