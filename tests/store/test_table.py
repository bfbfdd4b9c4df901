"""Rows to and from the table engine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import duckdb
import pytest

from xsp import table
from xsp.schema import COLUMNS, Column

MIXED = [
    Column("whole", "BIGINT", ""),
    Column("small", "SMALLINT", ""),
    Column("real", "DOUBLE", ""),
    Column("yes", "BOOLEAN", ""),
    Column("text", "VARCHAR", ""),
]


def inserted(rows: list[tuple[object, ...]]) -> list[tuple[object, ...]]:
    con = table.connect()
    table.create(con, "rows_", MIXED)
    table.insert(con, "rows_", rows, MIXED)
    return con.execute("SELECT * FROM rows_").fetchall()


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [(1, 2, 0.5, True, "a"), (None, None, None, None, None), (-(2**63), -1, float("inf"), False, "a\x00b 😀")],
        [(None, None, None, None, None)],
        [(None, None, None, None, None), (2**63 - 1, None, None, None, None)],
        [(1, 1, 1, True, None)] * 3000 + [(1, 1, 1, True, "late")],
    ],
)
def test_rows_come_back_as_they_went_in(rows: list[tuple[object, ...]]) -> None:
    assert inserted(rows) == rows


def test_names_of_columns_may_be_quoted() -> None:
    columns = [Column('"1"', "BIGINT", ""), Column('"count(1)"', "BIGINT", ""), Column('"a ""b"""', "VARCHAR", "")]
    con = table.connect()
    table.create(con, "rows_", columns)
    rows = [(1, None, "x"), (None, 2, None)]
    table.insert(con, "rows_", rows, columns)
    assert con.execute("SELECT * FROM rows_").fetchall() == rows


def test_what_has_another_type_is_converted_by_the_engine() -> None:
    assert inserted([(2.0, "3", "0.5", 1, 7)]) == [(2, 3, 0.5, True, "7")]


def test_what_does_not_fit_is_refused() -> None:
    for value in (2**63, "nothing"):
        with pytest.raises(duckdb.Error):
            inserted([(value, 1, 1.0, True, "a")])
    with pytest.raises(duckdb.Error):
        inserted([(1, 2**15, 1.0, True, "a")])


def test_a_file_of_columns_is_as_one_of_a_table(tmp_path: Path) -> None:
    con = table.connect_storing()
    values = {"BIGINT": 7, "INTEGER": 7, "SMALLINT": 7, "DOUBLE": 7.5, "BOOLEAN": True, "VARCHAR": "seven"}
    full = [values[column.type] for column in COLUMNS]
    half = [value if place % 2 else None for place, value in enumerate(full)]
    for name, rows in (("full", [full, half]), ("half", [half]), ("converted", [[str(value) for value in full]])):
        table.create(con, "rows_")
        table.insert(con, "rows_", rows)
        table.write_parquet(con, "rows_", tmp_path / "table.parquet")
        table.write_columns(list(zip(*rows, strict=True)), tmp_path / f"{name}.parquet", con)
        both = [con.execute(f"SELECT * FROM '{tmp_path / each}.parquet'") for each in ("table", name)]
        assert both[0].description == both[1].description
        assert con.execute(f"SELECT * FROM '{tmp_path}/table.parquet'").fetchall() == (
            con.execute(f"SELECT * FROM '{tmp_path / name}.parquet'").fetchall()
        )


@pytest.mark.slow
def test_objects_of_a_user_are_read_as_before() -> None:
    pandas = pytest.importorskip("pandas")
    con = table.connect()
    table.create(con, "rows_", MIXED)
    table.insert(con, "rows_", [(1, 2, 0.5, True, "a")], MIXED)
    frame = pandas.DataFrame({"lists": [[1, 2], [3]]})
    assert con.execute("SELECT sum(len(lists)) FROM frame").fetchall() == [(3,)]
    assert frame.shape == (2, 1)


FORGOTTEN_IN_A_CHILD = """
import gc, os
from xsp import table
gc.disable()
def forget():
    engine = table.connect(threads=2)
    result = engine.sql("SELECT sum(range) FROM range(3000000)")
    result.fetchall()
    loop = [engine, result]
    loop.append(loop)  # only a garbage collection ends it
forget()
child = os.fork()
if not child:
    gc.collect()
    os._exit(0)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_a_child_that_collects_its_parents_engines_goes_on():
    """As a worker of a loader does, after an analysis in a notebook."""
    subprocess.run([sys.executable, "-c", FORGOTTEN_IN_A_CHILD], check=True, timeout=60)
