"""Sections of the report: what is written is read again, and what is no section is named and stops nothing."""

from __future__ import annotations

import contextlib
import json
import math
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xsp import rundir, sections
from xsp.errors import OutputError, UsageError
from xsp.sections import Branch, Chart, Section, Series, Table, Text, Tree

FULL = Section(
    "Bound <b>",
    (
        Text("What layers cost by themselves."),
        Table(("rung", "ms"), (("best", 4.4), ("as run", None)), "The ladder"),
        Chart("bars", "Rungs", "ms", ("best", "as run"), (Series("step", (4.4, None), (4.0, None), (4.9, None)),)),
        Chart("points", "FLOPs", "ms", (1e9, 2e9), (Series("n", (1.0, 2.5)),), "FLOPs", ("at",), ("a", "b")),
        Tree(("ms",), (Branch("layer1", (2.0,), True, (Branch("conv", (None,)),)),), "Modules", "on the longest path"),
    ),
)


@pytest.fixture
def run(tmp_path):
    rundir.write_run(tmp_path, {"name": "run"})
    return tmp_path


def damaged(run, content) -> str:
    """Return what is said of a file with this content, beside which another section is whole."""
    sections.write(run, "whole", FULL)
    text = content if isinstance(content, str) else json.dumps(content)
    (run / "sections" / "bad.json").write_text(text, encoding="utf-8")
    result = sections.read(run)
    assert list(result.sections) == ["whole"]
    (line,) = result.damaged
    assert line.startswith("bad.json: ")
    return line


def test_what_is_written_is_read_again(run):
    path = sections.write(run, "bound", FULL)
    assert path == run / "sections" / "bound.json"
    assert sections.read(run) == sections.SectionFiles({"bound": FULL}, ())


def test_a_run_without_sections_has_none(run):
    assert sections.read(run) == sections.SectionFiles({}, ())


def test_the_section_of_a_name_takes_the_place_of_the_one_before(run):
    sections.write(run, "bound", FULL)
    sections.write(run, "bound", Section("Later", ()))
    assert sections.read(run).sections == {"bound": Section("Later", ())}
    assert [entry.name for entry in (run / "sections").iterdir()] == ["bound.json"]


def test_numbers_that_are_not_finite_are_unknown(run):
    sections.write(run, "x", Section("X", (Table(("a",), ((math.nan,), (math.inf,), (1.5,))),)))
    (table,) = sections.read(run).sections["x"].parts
    assert table.rows == ((None,), (None,), (1.5,))


@pytest.mark.parametrize(
    ("part", "why"),
    [
        (Table(("a", "b"), ((1,),)), "a row has 1 cells, and 2 columns"),
        (Chart("pie", "t", "ms", (), ()), "there is no chart 'pie'"),
        (Chart("bars", "t", "ms", ("a",), (Series("s", (1.0, 2.0)),)), "values has 2 figures, and the chart 1 places"),
        (Chart("bars", "t", "ms", ("a",), (Series("s", (1.0,), (0.5,)),)), "low and high must be given together"),
        (Chart("lines", "t", "ms", ("a",), (Series("s", (1.0,)),)), "a chart of lines needs numbers"),
        (Tree(("ms",), (Branch("a", (1, 2)),)), "a branch has 2 cells, and 1 columns"),
    ],
)
def test_a_section_that_does_not_hold_together_is_not_written(run, part, why):
    with pytest.raises(UsageError, match=why):
        sections.write(run, "x", Section("X", (part,)))
    assert not (run / "sections").exists()


@pytest.mark.parametrize("name", ["", "../x", "A", "a b", "x" * 61, "-a", "a\n"])
def test_a_name_that_is_none_is_refused(run, name):
    with pytest.raises(UsageError, match="not a name of a section"):
        sections.write(run, name, FULL)


def test_what_is_no_run_takes_no_section(tmp_path):
    with pytest.raises(OutputError, match="not a run directory"):
        sections.write(tmp_path, "x", FULL)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("", "Expecting value"),
        ("[" * 100_000, ""),
        ([], "a section must be an object"),
        ({"xsp_section": 2, "title": "t", "parts": []}, "this xsp reads version 1"),
        ({"xsp_section": True, "title": "t", "parts": []}, "xsp_section is True"),
        ({"xsp_section": 1, "parts": []}, "title must be a text"),
        ({"xsp_section": 1, "title": "t", "parts": [{"html": "<b>"}]}, "a part has one key of text, table"),
        ({"xsp_section": 1, "title": "t", "parts": [{"text": 4}]}, "text must be a text"),
        ({"xsp_section": 1, "title": "t", "parts": [{"table": {"columns": ["a"], "rows": [[{}]]}}]}, "must be a list"),
    ],
)
def test_a_file_that_is_no_section_is_named_with_the_reason(run, content, why):
    assert why in damaged(run, content)


def test_a_tree_without_end_is_named(run):
    branch: dict = {"name": "a"}
    for _ in range(sections.MAX_LEVELS):
        branch = {"name": "a", "inside": [branch]}
    content = {"xsp_section": 1, "title": "t", "parts": [{"tree": {"columns": [], "branches": [branch]}}]}
    assert "up to 60 levels" in damaged(run, content)


def test_a_link_that_leads_out_is_not_followed(run, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "secret.json"
    elsewhere.write_text("{}", encoding="utf-8")
    (run / "sections").mkdir()
    os.symlink(elsewhere, run / "sections" / "out.json")
    result = sections.read(run)
    assert result.sections == {}
    assert result.damaged == ("out.json: a link that leads out of its directory",)
    with pytest.raises(OutputError):
        sections.write(run, "out", FULL)
    assert elsewhere.read_text(encoding="utf-8") == "{}"


def test_too_many_files_are_counted(run):
    sections.write(run, "a", FULL)
    for number in range(sections.MAX_SECTIONS + 2):
        (run / "sections" / f"x{number:03}.json").write_text("{}", encoding="utf-8")
    result = sections.read(run)
    assert list(result.sections) == ["a"]
    assert result.damaged[-1] == "3 more files: a page has up to 50 sections"


def test_a_run_that_is_replaced_takes_its_sections_with_it(run):
    sections.write(run, "bound", FULL)
    (run / "sections" / "mine.txt").write_text("mine", encoding="utf-8")
    rundir.create(run, overwrite=True)
    assert [entry.name for entry in (run / "sections").iterdir()] == ["mine.txt"]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from("title parts text table chart tree columns rows at series".split()), inner)
    ),
    max_leaves=12,
)


@given(st.fixed_dictionaries({"xsp_section": st.just(1) | JSON, "title": st.just("t") | JSON, "parts": JSON}))
def test_whatever_a_file_says_it_is_a_section_or_a_value_error(content):
    with contextlib.suppress(ValueError):
        assert isinstance(sections.of(content), Section)
