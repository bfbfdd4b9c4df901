"""Operations and traffic of spans: from counters, else from shapes, and for which of nested ones they count."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import islice

import duckdb

from xsp.flops import flops
from xsp.span import Kind
from xsp.traffic import traffic

BATCH = 1 << 16
"""Rows that are in Python at a time."""


def count(con: duckdb.DuckDBPyConnection) -> None:
    """Count operations and traffic of operators from their shapes, once for all that are alike: table `priced`."""
    alike = "name, input_shapes, dtypes, scalars"
    rows = con.execute(
        f"SELECT DISTINCT {alike} FROM seen WHERE kind = '{Kind.OP}' AND input_shapes IS NOT NULL AND flops IS NULL"
    ).fetchall()
    con.execute(
        "CREATE OR REPLACE TABLE counted (name VARCHAR, input_shapes VARCHAR, dtypes VARCHAR, scalars VARCHAR, "
        "flops BIGINT, read_bytes BIGINT, write_bytes BIGINT)"
    )
    counted = (row + figures for row, figures in ((row, _figures(*row)) for row in rows) if any(figures))
    while batch := list(islice(counted, BATCH)):
        columns = [list(column) for column in zip(*batch, strict=True)]
        con.execute(
            "INSERT INTO counted SELECT unnest($1::VARCHAR[]), unnest($2::VARCHAR[]), unnest($3::VARCHAR[]), "
            "unnest($4::VARCHAR[]), unnest($5::BIGINT[]), unnest($6::BIGINT[]), unnest($7::BIGINT[])",
            columns,
        )
    con.execute(
        f"""
        CREATE OR REPLACE TABLE priced AS
        SELECT seen.number, counted.flops, counted.read_bytes, counted.write_bytes
        FROM seen JOIN counted ON seen.name = counted.name AND seen.input_shapes = counted.input_shapes
            AND seen.dtypes IS NOT DISTINCT FROM counted.dtypes AND seen.scalars IS NOT DISTINCT FROM counted.scalars
        WHERE seen.kind = '{Kind.OP}' AND seen.flops IS NULL
        """
    )
    con.execute("DROP TABLE counted")


def _figures(name: str, shapes: str, dtypes: str | None, scalars: str | None) -> tuple[int | None, ...]:
    """Return operations, bytes read and bytes written of an operator; None for what its inputs do not tell."""
    try:
        given = [json.loads(text) if text else [] for text in (shapes, dtypes, scalars)]
    except (ValueError, RecursionError):
        return None, None, None
    if not all(isinstance(each, list) for each in given):
        return None, None, None
    moved = traffic(name, *given)
    read, written = moved if moved is not None else (None, None)
    return tuple(_held(each) for each in (flops(name, given[0], given[2]), read, written))


def _held(value: int | None) -> int | None:
    """Return a count if the table holds such numbers: shapes are what a file says they are."""
    return value if value is not None and 0 <= value < 2**63 else None


def choose(con: duckdb.DuckDBPyConnection) -> None:
    """Decide for whom figures count: table `figures`. Of spans inside one another one alone has them."""
    con.execute(
        f"""
        CREATE OR REPLACE TABLE figures AS
        WITH known AS (
            SELECT seen.*, priced.flops AS counted_flops, read_bytes, write_bytes
            FROM seen LEFT JOIN priced USING (number)
            WHERE seen.flops IS NOT NULL OR dram_read_bytes IS NOT NULL OR dram_write_bytes IS NOT NULL
                OR priced.number IS NOT NULL
        ), launching AS (
            SELECT DISTINCT parent AS number FROM down JOIN seen USING (number)
            WHERE seen.kind = '{Kind.KERNEL}' AND parent IN (SELECT number FROM known)
        )
        SELECT number, {", ".join(f"{value} AS {name}" for name, value in FIGURES.items())}
        FROM known LEFT JOIN up USING (number) LEFT JOIN launching USING (number)
        """
    )
    con.execute("DROP TABLE priced")


def _from_shapes(sort: str, columns: Mapping[str, str]) -> dict[str, str]:
    """Return the SQL of what is counted from shapes where the source has no counter, and of how it is known.

    It counts for the innermost operator that has it, and for one that launched kernels itself, whatever it called
    besides.

    Args:
        sort: flops or bytes.
        columns: what is counted, by the columns of the table that they are for.
    """
    first, price = next(iter(columns.items()))
    counts = f"(NOT coalesce(up.{sort}, false) OR launching.number IS NOT NULL)"
    return {
        **{name: f"CASE WHEN {counts} THEN coalesce(known.{name}, {each}) END" for name, each in columns.items()},
        f"{sort}_source": f"CASE WHEN {counts} THEN CASE WHEN known.{first} IS NULL AND {price} IS NOT NULL "
        f"THEN 'shapes' ELSE known.{sort}_source END END",
    }


FIGURES = {
    **_from_shapes("flops", {"flops": "counted_flops"}),
    **_from_shapes("bytes", {"dram_read_bytes": "read_bytes", "dram_write_bytes": "write_bytes"}),
}
