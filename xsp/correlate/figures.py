"""Operations and memory traffic of spans, from counters or else from shapes, each counted for one of nested spans."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import islice

import duckdb

from xsp.cost.flops import flops
from xsp.cost.traffic import traffic
from xsp.schema import Kind

BATCH = 1 << 16
"""Maximum number of rows that are held in Python at a time."""


def create_operator_figures(con: duckdb.DuckDBPyConnection) -> None:
    """Make the table `operator_figures`: operations and traffic from shapes, computed once per distinct operator."""
    counted = f"kind = '{Kind.OP}' AND name IS NOT NULL AND input_shapes IS NOT NULL AND flops IS NULL"
    if not con.execute(f"SELECT 1 FROM raw_spans WHERE {counted} LIMIT 1").fetchall():  # shapes were not recorded
        con.execute(
            "CREATE OR REPLACE TABLE operator_figures "
            "(number BIGINT, flops BIGINT, read_bytes BIGINT, write_bytes BIGINT)"
        )
        return
    con.execute(f"CREATE OR REPLACE TEMP TABLE output_shapes AS {_OUTPUT_SHAPES}")
    identity = "name, input_shapes, dtypes, scalars, output_shape"
    rows = con.execute(
        f"SELECT DISTINCT {identity} FROM raw_spans LEFT JOIN output_shapes USING (number) WHERE {counted}"
    ).fetchall()
    con.execute(
        "CREATE OR REPLACE TABLE distinct_figures (name VARCHAR, input_shapes VARCHAR, dtypes VARCHAR, "
        "scalars VARCHAR, output_shape VARCHAR, flops BIGINT, read_bytes BIGINT, write_bytes BIGINT)"
    )
    distinct_figures = (row + figures for row, figures in ((row, _figures(*row)) for row in rows) if any(figures))
    while batch := list(islice(distinct_figures, BATCH)):
        columns = [list(column) for column in zip(*batch, strict=True)]
        con.execute(
            "INSERT INTO distinct_figures SELECT unnest($1::VARCHAR[]), unnest($2::VARCHAR[]), unnest($3::VARCHAR[]), "
            "unnest($4::VARCHAR[]), unnest($5::VARCHAR[]), unnest($6::BIGINT[]), unnest($7::BIGINT[]), "
            "unnest($8::BIGINT[])",
            columns,
        )
    con.execute(
        f"""
        CREATE OR REPLACE TABLE operator_figures AS
        SELECT raw_spans.number, distinct_figures.flops, distinct_figures.read_bytes, distinct_figures.write_bytes
        FROM raw_spans LEFT JOIN output_shapes USING (number)
        JOIN distinct_figures ON raw_spans.name = distinct_figures.name
            AND raw_spans.input_shapes = distinct_figures.input_shapes
            AND raw_spans.dtypes IS NOT DISTINCT FROM distinct_figures.dtypes
            AND raw_spans.scalars IS NOT DISTINCT FROM distinct_figures.scalars
            AND output_shapes.output_shape IS NOT DISTINCT FROM distinct_figures.output_shape
        WHERE raw_spans.kind = '{Kind.OP}' AND raw_spans.flops IS NULL
        """
    )
    for name in ("distinct_figures", "output_shapes"):
        con.execute(f"DROP TABLE {name}")


_CONVOLUTION = (
    f"kind = '{Kind.OP}' AND input_shapes IS NOT NULL AND coalesce(scalars, '[]') NOT LIKE '%[%[%' "
    "AND thread IS NOT NULL"
)
_BACKWARD = r"^aten::\w+_convolution_backward$"

_OUTPUT_SHAPES = rf"""
    WITH convolutions AS (
        SELECT number, name, process, thread, start_ns, start_ns + dur_ns AS end_ns, sequence_nr,
               input_shapes
        FROM raw_spans WHERE {_CONVOLUTION} AND contains(name, 'conv')
    ), forward AS (
        SELECT name, process, thread, sequence_nr, any_value(number) AS number FROM convolutions
        WHERE sequence_nr IS NOT NULL AND NOT contains(name, 'ackward') GROUP BY ALL HAVING count(*) = 1
    ), gradients AS (
        SELECT process, forward_thread AS thread, sequence_nr, any_value(input_shapes) AS input_shapes
        FROM raw_spans WHERE kind = '{Kind.OP}' AND phase = 'backward' AND sequence_nr IS NOT NULL
            AND forward_thread IS NOT NULL AND regexp_matches(name, '^\w*Conv\w*Backward\d*$')
            AND input_shapes IS NOT NULL
        GROUP BY ALL HAVING count(*) = 1
    ), outer_ops AS (
        SELECT process, thread, start_ns, end_ns, input_shapes FROM convolutions
        WHERE regexp_matches(name, '{_BACKWARD}')
    ), inner_ops AS (
        SELECT number, name, process, thread, start_ns, end_ns FROM convolutions
        WHERE regexp_matches(name, '^aten::\w+_convolution_backward_(input|weights?)$')
    )
    SELECT number, CAST(json_extract(gradients.input_shapes, '$[0]') AS VARCHAR) AS output_shape
    FROM forward JOIN gradients USING (process, thread, sequence_nr)
    UNION ALL
    SELECT number, CAST(json_extract(outer_ops.input_shapes,
               CASE WHEN contains(name, 'weight') THEN '$[2]' ELSE '$[0]' END) AS VARCHAR)
    FROM inner_ops ASOF JOIN outer_ops ON outer_ops.process = inner_ops.process AND outer_ops.thread = inner_ops.thread
        AND outer_ops.start_ns <= inner_ops.start_ns
    WHERE inner_ops.end_ns <= outer_ops.end_ns
"""
"""Output shapes of convolutions that state no options, taken from other operators (before 2022 PyTorch's profiler wrote
no options). The output of a forward convolution has the shape of the gradient that enters the backward node with the
same sequence number; the gradients of input and weight have the shapes of input and weight in the operator around."""


def _figures(
    name: str, shapes: str, dtypes: str | None, scalars: str | None, output_shape: str | None
) -> tuple[int | None, ...]:
    """Return operations, bytes read and bytes written of an operator; None for values that its inputs do not give."""
    try:
        arguments = [json.loads(text) if text else [] for text in (shapes, dtypes, scalars)]
    except (ValueError, RecursionError):
        return None, None, None
    if not all(isinstance(argument, list) for argument in arguments):
        return None, None, None
    shape = json.loads(output_shape) if output_shape else None
    byte_counts = traffic(name, arguments[0], arguments[1], arguments[2], shape)
    read_bytes, write_bytes = byte_counts if byte_counts is not None else (None, None)
    # A count if it fits the table's column, else None: shapes from a file may be arbitrarily large.
    return tuple(
        figure if figure is not None and 0 <= figure < 2**63 else None
        for figure in (flops(name, arguments[0], arguments[2], arguments[1], shape), read_bytes, write_bytes)
    )


def assign_figures(con: duckdb.DuckDBPyConnection) -> None:
    """Make the table `figures`, which assigns figures to spans; of nested spans the innermost one gets them."""
    con.execute(
        f"""
        CREATE OR REPLACE TABLE figures AS
        WITH candidates AS (
            SELECT raw_spans.*, operator_figures.flops AS counted_flops, read_bytes, write_bytes
            FROM raw_spans LEFT JOIN operator_figures USING (number)
            WHERE raw_spans.flops IS NOT NULL OR dram_read_bytes IS NOT NULL OR dram_write_bytes IS NOT NULL
                OR operator_figures.number IS NOT NULL
        ), launchers AS (
            SELECT DISTINCT parent AS number FROM derived JOIN raw_spans USING (number)
            WHERE raw_spans.kind = '{Kind.KERNEL}' AND parent IN (SELECT number FROM candidates)
        )
        SELECT number, {", ".join(f"{value} AS {name}" for name, value in FIGURES.items())}
        FROM candidates JOIN derived USING (number) LEFT JOIN launchers USING (number)
        """
    )
    con.execute("DROP TABLE operator_figures")


def _from_shapes(sort: str, columns: Mapping[str, str]) -> dict[str, str]:
    """Return the SQL of figures, from counters or else from shapes, and of the column that states their source.

    A figure counts for the innermost operator that has it, and for an operator that launched kernels itself, whatever
    other operators it called.

    Args:
        sort: flops or bytes.
        columns: the figures from shapes, by the columns of the table that they are for.
    """
    first, estimate = next(iter(columns.items()))
    counts = f"(NOT derived.{sort} OR launchers.number IS NOT NULL)"
    return {
        **{
            name: f"CASE WHEN {counts} THEN coalesce(candidates.{name}, {estimate}) END"
            for name, estimate in columns.items()
        },
        f"{sort}_source": f"CASE WHEN {counts} THEN CASE WHEN candidates.{first} IS NULL AND {estimate} IS NOT NULL "
        f"THEN 'shapes' ELSE candidates.{sort}_source END END",
    }


FIGURES = {
    **_from_shapes("flops", {"flops": "counted_flops"}),
    **_from_shapes("bytes", {"dram_read_bytes": "read_bytes", "dram_write_bytes": "write_bytes"}),
}
