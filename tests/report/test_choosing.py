"""`--where`, `--sort` and `--limit`: which rows of a table are shown, and in which order."""

from __future__ import annotations

import json
from pathlib import Path

import duckdb
import pytest

from xsp.cli import main
from xsp.errors import UsageError
from xsp.report.choosing import select_rows, sort_columns
from xsp.testing import spans, trace_of

ROWS = """
    SELECT * FROM (VALUES ('aten::mm', 4, 2.5, true), ('aten::mul', 9, 0.5, NULL), ('it''s', 1, NULL, false))
    t(name, calls, device_ms, memory_bound)
"""


@pytest.fixture
def con() -> duckdb.DuckDBPyConnection:
    return duckdb.connect()


@pytest.mark.parametrize(
    ("where", "kept"),
    [
        ("device_ms > 1", ["aten::mm"]),
        ("DEVICE_MS<=2.5 and calls >= 5", ["aten::mul"]),
        ('"device ms" > 1 or calls = 1', ["aten::mm", "it's"]),
        ("name ~ 'M[MU]'", ["aten::mm", "aten::mul"]),
        ("name !~ aten", ["it's"]),
        ("name like '%mul'", ["aten::mul"]),
        ("name not like '%mul'", ["aten::mm", "it's"]),
        ("name = 'it''s'", ["it's"]),
        ("name = aten::mm", ["aten::mm"]),
        ("device_ms is null", ["it's"]),
        ("device_ms is not null and not (name ~ mm)", ["aten::mul"]),
        ("memory_bound = yes", ["aten::mm"]),
        ("not memory_bound = yes", ["aten::mul", "it's"]),
        ("calls != 4", ["aten::mul", "it's"]),
        ("name = '; drop table x'", []),
    ],
)
def test_a_condition_keeps_the_rows_that_meet_it(con: duckdb.DuckDBPyConnection, where: str, kept: list[str]) -> None:
    assert [row[0] for row in select_rows(con.sql(ROWS), "ops", [where]).fetchall()] == kept


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ("devicems > 1", "ops has no column 'devicems'; did you mean device_ms?; its columns: name, calls, device_ms"),
        ("1=1; drop table x", "ops has no column '1'"),
        ("calls > (select 1)", "a value is missing"),
        ("calls > 1; drop table x", "calls holds numbers, and '1;' is none"),
        ("calls > 1 drop", "'drop' is not understood there"),
        ("calls > many", "calls holds numbers, and 'many' is none"),
        ("calls ~ 4", "calls holds no text"),
        ("memory_bound = maybe", "is yes or no, and 'maybe' is neither"),
        ("name ~ '('", "'(' is no regular expression"),
        ("(calls > 1", "a parenthesis is not closed"),
        ("calls", "after calls a comparison is missing: ="),
        ("calls is 1", "`is` is followed by null or not null"),
        ("'name' = 1", "is no column"),
        ("", "a column is missing"),
    ],
)
def test_what_is_no_condition_is_one_error_that_says_what_to_type(
    con: duckdb.DuckDBPyConnection, where: str, said: str
) -> None:
    with pytest.raises(UsageError) as raised:
        select_rows(con.sql(ROWS), "ops", [where])
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)


def test_several_conditions_must_all_be_met(con: duckdb.DuckDBPyConnection) -> None:
    assert [row[0] for row in select_rows(con.sql(ROWS), "ops", ["calls > 1", "calls < 9"]).fetchall()] == ["aten::mm"]


@pytest.mark.parametrize(
    ("sort", "order"),
    [
        ("calls", [9, 4, 1]),
        ("calls:asc", [1, 4, 9]),
        ("device ms:asc", [9, 4, 1]),
        ("name", [4, 9, 1]),
        ("name:DESC", [1, 9, 4]),
        ("memory_bound,calls", [4, 1, 9]),
    ],
)
def test_numbers_begin_with_the_largest_text_with_a_and_what_is_missing_comes_last(
    con: duckdb.DuckDBPyConnection, sort: str, order: list[int]
) -> None:
    assert [row[1] for row in select_rows(con.sql(ROWS), "ops", sort=sort).fetchall()] == order


def test_the_sorted_column_is_named_as_the_table_names_it(con: duckdb.DuckDBPyConnection) -> None:
    assert sort_columns(con.sql(ROWS), "ops", "Device ms:asc, calls") == ["device_ms", "calls"]
    for sort, said in (
        ("calls:up", "followed by :asc or :desc"),
        ("1", "ops has no column '1'"),
        ("calls,", "column ''"),
    ):
        with pytest.raises(UsageError, match=said):
            select_rows(con.sql(ROWS), "ops", sort=sort)


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    rows = "\n".join(f"op aten::op{number} {100 * number}-{101 * number}" for number in range(1, 60))
    path = tmp_path / "spans.parquet"
    trace_of(spans(f"step s 0-9000\n{rows}")).spans.write_parquet(str(path))
    return path


def test_the_command_prints_what_is_asked_for(stored: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["analyze", str(stored), "ops", "--where", "host_self_ms < 0.01", "--sort", "name:desc", "--limit", "2"]
    assert main(asked) == 0
    out = capsys.readouterr().out
    assert out.index("aten::op9") < out.index("aten::op8")
    assert "aten::op7" not in out
    assert "7 more rows" in out
    assert main([*asked, "--format", "json"]) == 0
    assert [row["name"] for row in json.loads(capsys.readouterr().out)] == ["aten::op9", "aten::op8"]
    assert main(["analyze", str(stored), "ops", "--format", "json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == 59, "a file has all rows unless told otherwise"


def test_the_command_says_in_one_line_what_is_wrong(stored: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for asked, said in (
        (["ops", "--sort", "nothing"], "--sort: ops has no column 'nothing'; its columns: name, device"),
        (["ops", "--where", "1=1"], "--where: ops has no column '1'"),
        (["--sort", "calls"], "--sort, --where and --limit need the name of an analysis"),
    ):
        assert main(["analyze", str(stored), *asked]) == 2
        error = capsys.readouterr().err
        assert said in error
        assert error.count("\n") == 1
