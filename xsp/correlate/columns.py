"""Assign identities, parents, steps, layers and keys to the spans of a table.

The columns that hold evidence leave the engine as arrays (`xsp.correlate.arrays`); the results come back as a table.
Everything else is SQL.
"""

from __future__ import annotations

from typing import Any, cast

import duckdb
import numpy as np
from numpy import ma

from xsp import table
from xsp.correlate import figures, parents, unmarked
from xsp.correlate.arrays import (
    BACKWARD,
    NONE,
    PHASES,
    RULES,
    Allocations,
    Array,
    Launches,
    Sequences,
    Spans,
    outer_first,
)
from xsp.correlate.figures import FIGURES
from xsp.correlate.inherited import StepTimes, inherit
from xsp.importers.contract import RAW_COLUMNS, SourceInfo
from xsp.schema import COLUMNS, MAX_NESTING, WINDOW, Grade, Kind, Level

_NONE = f"({NONE})::BIGINT"
_HOST = "(raw_spans.device IS NULL AND raw_spans.thread IS NOT NULL)"
_FLOPS, _BYTES = 1, 2
"""Bits of the sorts of figures in `Spans.counted`."""


MOST_IN_TABLE = 100_000
"""Most spans for which `correlated` is a table: a query of a view of all columns takes a millisecond more to plan."""


def correlate_table(con: duckdb.DuckDBPyConnection, info: SourceInfo, identity: str) -> bool:
    """Make `correlated`, with the columns of `COLUMNS`, from the table `raw_spans`.

    Args:
        con: holds `raw_spans`.
        info: the importer's description of the source; findings are noted in its losses.
        identity: text that identifies the source; trace ids are made from it.

    Returns:
        Whether it is a table; else it is a view of the table `varying`.
    """
    window = _number_steps(con, info)
    figures.create_operator_figures(con)
    if _correlate(con, info.tolerance_ns, window) >= MAX_NESTING:
        info.losses.note(f"spans nest deeper than {MAX_NESTING}: the deeper ones become children of the last one")
    figures.assign_figures(con)
    ((count,),) = con.execute("SELECT count(*) FROM raw_spans").fetchall()
    is_table = bool(count <= MOST_IN_TABLE)
    _create_correlated(con, identity, int(info.run.get("rank", 0)), is_table)
    return is_table


def _number_steps(con: duckdb.DuckDBPyConnection, info: SourceInfo) -> int | None:
    """Number the steps in the table `steps`. Without steps the whole trace becomes one step; return its `number`."""
    window = None
    has_steps = bool(con.execute(f"SELECT 1 FROM raw_spans WHERE kind = '{Kind.STEP}' LIMIT 1").fetchall())
    if not has_steps and not unmarked.insert_steps(con, info.losses):
        info.losses.note("it names no steps, and counts as one step")
        ((window,),) = con.execute(
            f"""
            INSERT INTO raw_spans BY NAME
            SELECT max(number) + 1 AS number, {int(Level.MODEL)} AS level, '{Kind.STEP}' AS kind, '{WINDOW}' AS name,
                   min(start_ns) AS start_ns, max(start_ns + dur_ns) - min(start_ns) AS dur_ns,
                   min(process) AS process, 'ok' AS status, any_value(collector) AS collector
            FROM raw_spans RETURNING number
            """
        ).fetchall()
    con.execute(
        f"""
        CREATE OR REPLACE TABLE steps AS
        SELECT number, (row_number() OVER (ORDER BY start_ns, number) - 1)::INTEGER AS step, start_ns,
               start_ns + dur_ns AS end_ns FROM raw_spans WHERE kind = '{Kind.STEP}'
        """
    )
    return window


def _correlate(con: duckdb.DuckDBPyConnection, tolerance: int, window: int | None) -> int:
    """Find parents and the values that follow from them: table `derived`. Return the depth of the deepest span.

    In a trace without steps, orphans become children of the step for the whole trace, except unlaunched device work.
    """
    _number_identities(con)
    con.execute(
        f"""
        CREATE OR REPLACE TABLE threads AS SELECT process, thread, row_number() OVER () - 1 AS thread_index
        FROM (SELECT DISTINCT process, thread FROM raw_spans WHERE {_HOST})
        """
    )
    codes = con.execute("SELECT DISTINCT identity, code FROM codes ORDER BY identity").fetchnumpy()["code"]
    spans = _spans_in_order(con, tolerance, window)
    con.execute("DROP TABLE threads")
    steps = con.execute("SELECT start_ns, end_ns FROM steps ORDER BY step").fetchnumpy()
    root = int(np.flatnonzero(spans.number == window)[0]) if window is not None else -1
    tree = parents.find(spans, tolerance, root)
    derived = inherit(spans, tree, codes, StepTimes(_fill_masked(steps["start_ns"]), _fill_masked(steps["end_ns"])))
    depth = int(parents.depths(tree.parent).max(initial=0)) - (root >= 0)
    columns = {
        "number": spans.number,
        "parent": _numbers(spans, tree.parent),
        "rule": tree.rule,
        "step": derived.step.astype(np.int32),
        "layer": _numbers(spans, derived.layer),
        "layers": derived.layers.astype(np.int16),
        "layer_index": derived.layer_index.astype(np.int32),
        "phase": derived.phase,
        "key": derived.key,
        "weak": derived.is_weak,
        "allocated": derived.allocated,
        "figure_bits": derived.inner_figure_bits.astype(np.int8),
    }
    del spans, tree, derived  # of a long trace they take more memory than all that is loaded of it
    _create_derived(con, columns)
    return depth


def _spans_in_order(con: duckdb.DuckDBPyConnection, tolerance: int, window: int | None) -> Spans:
    """Return the columns that evidence is in, of all spans, outer ones first; their first copy is gone then."""
    rows = con.execute(_query(con, window)).fetchnumpy()
    spans = _spans({name: _fill_masked(rows.pop(name)) for name in [*rows]})
    return spans.take(outer_first(spans, tolerance))


def _spans(columns: dict[str, Array]) -> Spans:
    """Return the columns that `_query` selected, as `Spans`."""

    def part(name: str) -> dict[str, Array]:
        return {column.partition(".")[2]: columns.pop(column) for column in [*columns] if column.startswith(f"{name}.")}

    launches, sequences, allocations = part("launches"), part("sequences"), part("allocations")
    return Spans(
        launches=Launches(**launches) if launches else None,
        sequences=Sequences(**sequences) if sequences else None,
        allocations=Allocations(**allocations) if allocations else None,
        **cast(Any, columns),
    )


def _fill_masked(values: Array) -> Array:
    return values.filled(NONE) if isinstance(values, ma.MaskedArray) else values


def _numbers(spans: Spans, indices: Array) -> Array:
    """Return the numbers of the spans at these indices; -1 for no span."""
    return np.where(indices >= 0, spans.number[indices], -1)


def _create_derived(con: duckdb.DuckDBPyConnection, columns: dict[str, Array]) -> None:
    """Make the temporary table `derived`; a database file would compress it although only two queries use it."""
    rules = ", ".join("NULL" if rule is None else f"'{rule}'" for rule in RULES)
    phases = ", ".join("NULL" if phase is None else f"'{phase}'" for phase in PHASES)
    con.register("derived_columns", columns)
    con.execute(
        f"""
        CREATE OR REPLACE TEMP TABLE derived AS
        SELECT number, nullif(parent, -1) AS parent, [{rules}][rule + 1] AS rule, nullif(step, -1) AS step,
               nullif(layer, -1) AS layer, layers, nullif(layer_index, -1) AS layer_index,
               [{phases}][phase + 1] AS phase, key, weak, allocated AS alloc_bytes,
               figure_bits & {_FLOPS} > 0 AS flops, figure_bits & {_BYTES} > 0 AS bytes
        FROM derived_columns
        """
    )
    con.unregister("derived_columns")


def _number_identities(con: duckdb.DuckDBPyConnection) -> None:
    """Number the identities of spans: table `codes` with level, kind, name, phase, code, and the index of the code."""
    con.execute(
        f"""
        CREATE OR REPLACE TABLE codes AS
        SELECT *, (dense_rank() OVER (ORDER BY code) - 1)::INTEGER AS identity FROM (
            SELECT level, kind, name, phase, md5_number_lower(concat_ws('/', level, kind,
                       CASE WHEN kind = '{Kind.STEP}' THEN 'step' ELSE name END,
                       CASE WHEN level >= {int(Level.OP)} THEN phase END)) AS code
            FROM (SELECT DISTINCT level, kind, name, phase FROM raw_spans))
        """
    )


def _query(con: duckdb.DuckDBPyConnection, window: int | None) -> str:
    """Return the SQL that selects the columns of `Spans`; columns that would be empty are left out."""
    phase = " ".join(f"WHEN '{name}' THEN {code}" for code, name in enumerate(PHASES) if name)
    ((allocations, sequences, operators),) = con.execute(
        f"SELECT count(*) FILTER (kind = '{Kind.ALLOC}'), count(sequence_nr), count(operator) FROM raw_spans"
    ).fetchall()
    figures, allocated = _figure_sql(con)
    has_thread = f"{_HOST} OR raw_spans.number IS NOT DISTINCT FROM {'NULL::BIGINT' if window is None else window}"
    columns = {
        "number": "raw_spans.number",
        "start": "start_ns",
        "end": "start_ns + dur_ns",
        "level": "raw_spans.level",
        "max_outer_level": f"CASE WHEN raw_spans.kind = '{Kind.USER}' "
        f"THEN greatest(raw_spans.level, {int(Level.LAYER)}) ELSE raw_spans.level END::SMALLINT",
        "thread_index": f"CASE WHEN {_HOST} THEN threads.thread_index ELSE -1 END::INTEGER",
        "nesting": f"CASE WHEN raw_spans.kind = '{Kind.STEP}' THEN -1 ELSE 0 END::TINYINT",
        "identity": "codes.identity",
        "phase": f"CASE raw_spans.phase {phase} ELSE 0 END::TINYINT",
        "process": f"coalesce(raw_spans.process, {_NONE})",
        "figure_bits": f"(CASE WHEN {has_thread} THEN {figures} ELSE 0 END)::TINYINT",
        "launches.seeks_launch": f"NOT ({has_thread})",
        "launches.may_launch": "raw_spans.device IS NULL",
        "launches.correlation": f"coalesce(correlation_id, {_NONE})",
        "launches.graph": "coalesce(raw_spans.replayed, false) "
        "OR (raw_spans.device IS NULL AND coalesce(raw_spans.name, '') LIKE '%GraphLaunch%')",
    }
    if operators:
        columns["launches.operator"] = f"coalesce(operator, {_NONE})"
    if allocations:
        columns |= {
            "allocations.is_allocation": f"raw_spans.kind = '{Kind.ALLOC}'",
            "allocations.size": f"coalesce({allocated}, 0)",
        }
    if sequences:
        columns |= {
            "sequences.number": f"coalesce(sequence_nr, {_NONE})",
            "sequences.backward": f"coalesce(raw_spans.phase = '{PHASES[BACKWARD]}', false)",
            "sequences.forward": "coalesce(forward.thread_index, -1)::INTEGER",
        }
    return f"""
        SELECT {", ".join(f'{value} AS "{name}"' for name, value in columns.items())}
        FROM raw_spans JOIN codes ON codes.level = raw_spans.level AND codes.kind = raw_spans.kind
            AND codes.name IS NOT DISTINCT FROM raw_spans.name AND codes.phase IS NOT DISTINCT FROM raw_spans.phase
        LEFT JOIN threads
            ON threads.thread = raw_spans.thread AND threads.process IS NOT DISTINCT FROM raw_spans.process
        LEFT JOIN threads forward
            ON forward.thread = forward_thread AND forward.process IS NOT DISTINCT FROM raw_spans.process
        LEFT JOIN operator_figures ON operator_figures.number = raw_spans.number
    """


def _figure_sql(con: duckdb.DuckDBPyConnection) -> tuple[str, str]:
    """Return the SQL of the bit mask of figures that are known for a span, and the SQL of the bytes of an allocation.

    In a trace with allocations on devices, allocations on the host do not count.
    """
    ((on_device,),) = con.execute(
        f"SELECT coalesce(bool_or({_ON_DEVICE}), false) FROM raw_spans WHERE kind = '{Kind.ALLOC}'"
    ).fetchall()
    return (
        f"CASE WHEN coalesce(raw_spans.flops, operator_figures.flops) IS NOT NULL THEN {_FLOPS} ELSE 0 END "
        "+ CASE WHEN coalesce(raw_spans.dram_read_bytes, operator_figures.read_bytes) IS NOT NULL "
        f"THEN {_BYTES} ELSE 0 END",
        f"CASE WHEN raw_spans.kind = '{Kind.ALLOC}' AND {_ON_DEVICE} = {str(on_device).lower()} "
        "THEN greatest(alloc_bytes, 0) ELSE 0 END",
    )


_ON_DEVICE = "(coalesce(TRY_CAST(attributes ->> '$.device_type' AS INTEGER), 0) <> 0)"


def _create_correlated(con: duckdb.DuckDBPyConnection, identity: str, rank: int, is_table: bool) -> None:
    """Make `correlated` as a table, or as a view of the table `varying` and of values that are the same for all spans.

    Most traces leave a third of the columns empty; of a long one, writing and reading only the others saves time.
    """
    con.execute(
        "CREATE OR REPLACE TABLE traces AS SELECT step, "
        f"md5(concat_ws('/', '{identity}', coalesce(step, -1))) AS trace_id FROM (SELECT DISTINCT step FROM derived)"
    )
    constants = _constant_columns(con, rank)
    values = {
        "trace_id": "traces.trace_id",
        "span_id": _id("raw_spans.number"),
        "parent_id": _id("derived.parent"),
        "parent_rule": "derived.rule",
        "step": "derived.step",
        "status": "coalesce(raw_spans.status, 'ok')",
        "phase": "derived.phase",
        "key": "printf('%016x', derived.key)",
        "layer_id": _id("derived.layer"),
        "layer_index": "derived.layer_index",
        "depth": f"CASE WHEN raw_spans.level = {int(Level.LAYER)} THEN derived.layers - 1 END",
        "grade": f"CASE WHEN raw_spans.device IS NULL THEN NULL WHEN derived.layer IS NULL THEN '{Grade.UNKNOWN}' "
        f"WHEN derived.weak THEN '{Grade.INFERRED}' ELSE '{Grade.EXACT}' END",
        "alloc_bytes": f"CASE WHEN raw_spans.kind = '{Kind.ALLOC}' THEN raw_spans.alloc_bytes "
        "WHEN allocating_threads.thread IS NOT NULL AND raw_spans.device IS NULL "
        "THEN nullif(derived.alloc_bytes, -1) END",
        **{figure: f"figures.{figure}" for figure in FIGURES},
        **constants,
    }
    varying = [column for column in COLUMNS if is_table or column.name not in constants]
    name = "correlated" if is_table else "varying"
    columns = ", ".join(
        f"{column.name} {column.type}{' USING COMPRESSION uncompressed' * (column.name in _IDS)}" for column in varying
    )
    con.execute(f"CREATE OR REPLACE TABLE {name} ({columns})")
    con.execute(
        f"""
        INSERT INTO {name}
        WITH allocating_threads AS (SELECT DISTINCT process, thread FROM raw_spans WHERE kind = '{Kind.ALLOC}')
        SELECT {", ".join(values.get(column.name, f"raw_spans.{column.name}") for column in varying)}
        FROM raw_spans JOIN derived USING (number) JOIN traces ON traces.step IS NOT DISTINCT FROM derived.step
        LEFT JOIN figures USING (number)
        LEFT JOIN allocating_threads
            ON allocating_threads.thread = raw_spans.thread
            AND allocating_threads.process IS NOT DISTINCT FROM raw_spans.process
        """
    )
    if not is_table:
        selected = ", ".join(
            f"CAST({constants.get(column.name, column.name)} AS {column.type}) AS {column.name}" for column in COLUMNS
        )
        con.execute(f"CREATE OR REPLACE VIEW correlated AS SELECT {selected} FROM varying")
    for used in ("steps", "codes", "derived", "figures", "traces"):
        con.execute(f"DROP TABLE {used}")


def _constant_columns(con: duckdb.DuckDBPyConnection, rank: int) -> dict[str, str]:
    """Return the SQL of the values that are the same for all spans, by column."""
    names = [name for name in _NULLABLE if name not in ("alloc_bytes", *FIGURES)]
    (counts,) = con.execute(f"SELECT {', '.join(f'count({name})' for name in names)} FROM raw_spans").fetchall()
    ((allocated, figures, deepest, first_status, last_status, first_collector, last_collector),) = con.execute(
        f"SELECT count(*) FILTER (kind = '{Kind.ALLOC}'), (SELECT count(*) FROM figures), max(level), min(status), "
        "max(status), min(collector), max(collector) FROM raw_spans"
    ).fetchall()
    empty = [name for name, count in zip(names, counts, strict=True) if not count]
    empty += [] if allocated else ["alloc_bytes"]
    empty += [] if figures else FIGURES
    constants = {
        **dict.fromkeys(("param_bytes", "activation_bytes", *empty), "NULL"),
        "rank": str(rank),
        "rung": str(max(deepest, int(Level.MODEL))),
        "timed": "true",
    }
    if first_status == last_status:
        constants["status"] = table.literal(first_status or "ok")
    if first_collector == last_collector:
        constants["collector"] = table.literal(first_collector) if first_collector else "NULL"
    return constants


_IDS = {"span_id", "parent_id", "layer_id", "key"}
"""Columns whose values mostly differ: compressing them takes a fifth of the total write time and saves little space."""

_NULLABLE = [column.name for column in RAW_COLUMNS if column.name in {span_column.name for span_column in COLUMNS}]


def _id(number: str) -> str:
    """Return the SQL of a span's id."""
    return f"lower(to_base({number} + 1, 16, 16))"  # in half the time of printf
