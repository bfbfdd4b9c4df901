"""Spans of a table get identities, parents, steps, layers and keys, in bulk.

The rules are those of `xsp.correlate`. The host's spans find their parents in one sweep (`xsp.intake.sweep`); device
work takes the parent of its launch; what follows from the parents is handed down, and sums are handed up, one depth of
the tree at a time, in SQL.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import duckdb

from xsp.flops import flops
from xsp.importers.contract import Seen
from xsp.intake.sweep import CONTAINED, DEEPEST, FOLLOWED, sweep
from xsp.span import COLUMNS, WEAK, Grade, Kind, Level, Rule
from xsp.traffic import traffic

BATCH = 1 << 16
"""Rows that are in Python at a time."""

WINDOW = "window"
"""Name of the step that a trace without steps is as a whole."""

_HOST = "(seen.device IS NULL AND seen.thread IS NOT NULL)"
_RULES = f"CASE packed & 15 WHEN {CONTAINED} THEN '{Rule.CONTAINMENT}' WHEN {FOLLOWED} THEN '{Rule.SEQUENCE}' END"


def place(con: duckdb.DuckDBPyConnection, seen: Seen, identity: str) -> None:
    """Make the table `placed`, with the columns of `COLUMNS`, of the table `seen`.

    Args:
        con: holds `seen`.
        seen: what the importer says of it; what is found out is noted in its losses.
        identity: of the source: what ids are made of.
    """
    whole = _steps(con, seen)
    _host(con, seen.tolerance_ns, whole)
    _device(con)
    _nodes(con)
    ((deepest,),) = con.execute("SELECT coalesce(max(depth), 0) FROM nodes").fetchall()
    if deepest >= DEEPEST:
        seen.losses.note(f"spans nest deeper than {DEEPEST}: the ones inside hang on the last of them")
    _hand_down(con, deepest)
    _count(con)
    _hand_up(con, deepest)
    _finish(con, identity, int(seen.run.get("rank", 0)))


def _steps(con: duckdb.DuckDBPyConnection, seen: Seen) -> int | None:
    """Number the steps: table `steps`. Where there is none, the trace as a whole becomes one; return its number."""
    whole = None
    if not con.execute(f"SELECT 1 FROM seen WHERE kind = '{Kind.STEP}' LIMIT 1").fetchall():
        seen.losses.note("it names no step: all of it counts as one")
        ((whole,),) = con.execute(
            f"""
            INSERT INTO seen BY NAME
            SELECT max(number) + 1 AS number, {int(Level.MODEL)} AS level, '{Kind.STEP}' AS kind, '{WINDOW}' AS name,
                   min(start_ns) AS start_ns, max(start_ns + dur_ns) - min(start_ns) AS dur_ns,
                   min(process) AS process, 'ok' AS status, any_value(collector) AS collector
            FROM seen RETURNING number
            """
        ).fetchall()
    con.execute(
        f"""
        CREATE OR REPLACE TABLE steps AS
        SELECT number, (row_number() OVER (ORDER BY start_ns, number) - 1)::INTEGER AS step, start_ns,
               start_ns + dur_ns AS end_ns FROM seen WHERE kind = '{Kind.STEP}'
        """
    )
    return whole


# --- parents ----------------------------------------------------------------------------------------------


def _host(con: duckdb.DuckDBPyConnection, tolerance: int, whole: int | None) -> None:
    """Find the parents of spans on threads: table `tree` of number, parent, rule and depth.

    What has none hangs under the step that the trace is as a whole; device work without a launch stays alone.
    """
    con.execute(
        f"""
        CREATE OR REPLACE TABLE lines AS SELECT process, thread, row_number() OVER () - 1 AS line
        FROM (SELECT DISTINCT process, thread FROM seen WHERE {_HOST})
        """
    )
    con.execute(
        f"""
        CREATE OR REPLACE TABLE hosts AS
        SELECT seen.number, lines.line, coalesce(seen.process, 0) AS process, level,
               CASE WHEN kind = '{Kind.USER}' THEN greatest(level, {int(Level.LAYER)}) ELSE level END AS deepest,
               start_ns, start_ns + dur_ns AS end_ns, kind = '{Kind.ALLOC}' AS leaf, sequence_nr,
               coalesce(phase = 'backward', false) AS backward, forward.line AS forward_line
        FROM seen JOIN lines ON lines.thread = seen.thread AND lines.process IS NOT DISTINCT FROM seen.process
        LEFT JOIN lines forward ON forward.thread = forward_thread AND forward.process IS NOT DISTINCT FROM seen.process
        WHERE {_HOST}
        ORDER BY start_ns + CASE WHEN level >= {int(Level.OP)} THEN {tolerance} ELSE 0 END, level,
                 -(start_ns + dur_ns), kind <> '{Kind.STEP}', seen.number
        """
    )
    con.execute("CREATE OR REPLACE TABLE swept (packed BIGINT)")
    ((here,),) = con.execute("SELECT current_database()").fetchall()
    with con.cursor() as reading:
        reading.execute(f"USE {here}")
        reading.execute("SELECT * EXCLUDE (number) FROM hosts ORDER BY rowid")
        packed = ((up + 1) << 24 | depth << 4 | rule for up, rule, depth in sweep(_rows(reading), tolerance))
        while batch := list(islice(packed, BATCH)):
            con.execute("INSERT INTO swept SELECT unnest(?::BIGINT[])", [batch])
    above, rule, down = ("NULL", "NULL", 0) if whole is None else (str(whole), f"'{Rule.CONTAINMENT}'", 1)
    con.execute(
        f"""
        CREATE OR REPLACE TABLE tree AS
        SELECT hosts.number, coalesce(up.number, {above}) AS parent, coalesce({_RULES}, {rule}) AS rule,
               (packed >> 4 & 1048575)::INTEGER + {down} AS depth
        FROM swept JOIN hosts ON hosts.rowid = swept.rowid LEFT JOIN hosts up ON up.rowid = (packed >> 24) - 1
        """
    )
    for name in ("lines", "hosts", "swept"):
        con.execute(f"DROP TABLE {name}")


def _rows(reading: duckdb.DuckDBPyConnection) -> Iterator[tuple[Any, ...]]:
    while batch := reading.fetchmany(BATCH):
        yield from batch


def _device(con: duckdb.DuckDBPyConnection) -> None:
    """Give device work the parent of its launch, else the operator that the source names; append it to `tree`."""
    con.execute(
        f"""
        INSERT INTO tree
        WITH launches AS (
            SELECT process, correlation_id, arg_min(number, start_ns) AS number, arg_min(name, start_ns) AS name
            FROM seen WHERE device IS NULL AND correlation_id IS NOT NULL GROUP BY ALL
        ), certain AS (  -- device work whose process is not told, of an id that one process alone has used
            SELECT correlation_id, any_value(number) AS number, any_value(name) AS name
            FROM launches GROUP BY correlation_id HAVING count(*) = 1
        ), operators AS (
            SELECT operator, any_value(number) AS number, any_value(start_ns) AS start_ns
            FROM seen WHERE level = {int(Level.OP)} AND operator IS NOT NULL GROUP BY operator HAVING count(*) = 1
        ), joined AS (
            SELECT seen.number, coalesce(launches.number, certain.number) AS launch, operators.number AS operator,
                   coalesce(seen.replayed, false)
                       OR coalesce(launches.name, certain.name, '') LIKE '%GraphLaunch%' AS replayed
            FROM seen
            LEFT JOIN launches ON launches.process = seen.process AND launches.correlation_id = seen.correlation_id
            LEFT JOIN certain ON seen.process IS NULL AND certain.correlation_id = seen.correlation_id
            LEFT JOIN operators ON operators.operator = seen.operator AND operators.start_ns <= seen.start_ns
            WHERE NOT {_HOST}
        )
        SELECT joined.number, coalesce(launch.parent, named.number) AS parent,
               CASE WHEN launch.parent IS NOT NULL AND replayed THEN '{Rule.GRAPH}'
                    WHEN launch.parent IS NOT NULL THEN '{Rule.CORRELATION}'
                    WHEN named.number IS NOT NULL THEN '{Rule.EXTERNAL}' END AS rule,
               coalesce(launch.depth, named.depth + 1, 0) AS depth
        FROM joined LEFT JOIN tree launch ON launch.number = joined.launch
        LEFT JOIN tree named ON named.number = joined.operator
        """
    )


# --- what follows from them -------------------------------------------------------------------------------


def _nodes(con: duckdb.DuckDBPyConnection) -> None:
    """Sort the tree by depth: table `nodes`, with what a span is, and its number among siblings that are alike.

    A root's step is the one in whose time it began.
    """
    con.execute(
        f"""
        CREATE OR REPLACE TABLE nodes AS
        WITH coded AS (
            SELECT tree.*, seen.level, seen.kind, seen.phase, seen.start_ns, seen.start_ns + seen.dur_ns AS end_ns,
                   md5_number_lower(concat_ws('/', seen.level, seen.kind,
                       CASE WHEN seen.kind = '{Kind.STEP}' THEN 'step' ELSE seen.name END,
                       CASE WHEN seen.level >= {int(Level.OP)} THEN seen.phase END)) AS code
            FROM tree JOIN seen USING (number)
        ), rooted AS (
            SELECT coded.*, CASE WHEN parent IS NULL AND coded.start_ns < steps.end_ns THEN steps.step END AS step
            FROM coded ASOF LEFT JOIN steps ON coded.start_ns >= steps.start_ns
        )
        SELECT number, parent, rule, depth, level, kind, phase, step, code,
               CASE WHEN kind = '{Kind.STEP}' THEN 1 ELSE
                    row_number() OVER (PARTITION BY coalesce(parent, -1 - step), code ORDER BY start_ns, number)
               END AS ordinal
        FROM rooted ORDER BY depth, number
        """
    )
    con.execute("DROP TABLE tree")


_KEY = "md5_number_lower(concat_ws('/', {above}, node.code, node.ordinal))"


def _hand_down(con: duckdb.DuckDBPyConnection, deepest: int) -> None:
    """Hand down steps, layers, phases and keys: table `down`."""
    weak = ", ".join(f"'{rule}'" for rule in WEAK)
    layer = f"node.level = {int(Level.LAYER)}"
    con.execute(
        f"""
        CREATE OR REPLACE TABLE down AS
        SELECT number, parent, rule, depth, step, CASE WHEN {layer} THEN number END AS layer,
               ({layer})::INTEGER AS layers,
               phase, false AS weak, {_KEY.format(above="0")} AS key
        FROM nodes node WHERE depth = 0
        """
    )
    for depth in range(1, deepest + 1):
        con.execute(
            f"""
            INSERT INTO down
            SELECT node.number, node.parent, node.rule, node.depth, up.step,
                   CASE WHEN {layer} THEN node.number ELSE up.layer END,
                   up.layers + ({layer})::INTEGER, coalesce(node.phase, up.phase),
                   NOT ({layer}) AND (up.weak OR coalesce(node.rule IN ({weak}), false)),
                   {_KEY.format(above="up.key")}
            FROM nodes node JOIN down up ON up.number = node.parent
            WHERE node.depth = {depth} AND up.depth = {depth - 1}
            """
        )


def _count(con: duckdb.DuckDBPyConnection) -> None:
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


def _hand_up(con: duckdb.DuckDBPyConnection, deepest: int) -> None:
    """Hand up what was allocated inside, and whether operations and traffic are counted inside: table `up`.

    Of a trace that tells the allocations of a device, those on the host do not count.
    """
    con.execute(
        f"""
        CREATE OR REPLACE TABLE own AS
        SELECT number, greatest(alloc_bytes, 0)::HUGEINT AS alloc_bytes, false AS flops, false AS bytes
        FROM seen WHERE kind = '{Kind.ALLOC}'
            AND {_ON_DEVICE} = (SELECT bool_or({_ON_DEVICE}) FROM seen WHERE kind = '{Kind.ALLOC}')
        UNION ALL
        SELECT number, 0, coalesce(seen.flops, priced.flops) IS NOT NULL,
               coalesce(seen.dram_read_bytes, priced.read_bytes) IS NOT NULL
        FROM seen LEFT JOIN priced USING (number)
        WHERE device IS NULL
            AND (seen.flops IS NOT NULL OR seen.dram_read_bytes IS NOT NULL OR priced.number IS NOT NULL)
        """
    )
    con.execute("CREATE OR REPLACE TABLE up (number BIGINT, alloc_bytes HUGEINT, flops BOOLEAN, bytes BOOLEAN)")
    for depth in range(deepest, 0, -1):
        con.execute(
            f"""
            INSERT INTO up
            SELECT node.parent,
                   sum(CASE WHEN node.rule = '{Rule.CONTAINMENT}'
                       THEN coalesce(own.alloc_bytes, 0) + coalesce(up.alloc_bytes, 0) ELSE 0 END),
                   bool_or(coalesce(own.flops, false) OR coalesce(up.flops, false)),
                   bool_or(coalesce(own.bytes, false) OR coalesce(up.bytes, false))
            FROM nodes node LEFT JOIN own USING (number) LEFT JOIN up USING (number)
            WHERE node.depth = {depth} AND (own.number IS NOT NULL OR up.number IS NOT NULL) GROUP BY node.parent
            """
        )


_ON_DEVICE = "(coalesce(TRY_CAST(attributes ->> '$.device_type' AS INTEGER), 0) <> 0)"


def _finish(con: duckdb.DuckDBPyConnection, identity: str, rank: int) -> None:
    """Make the table `placed`."""
    values = {
        "trace_id": f"md5(concat_ws('/', '{identity}', coalesce(down.step, -1)))",
        "span_id": _id("seen.number"),
        "parent_id": _id("down.parent"),
        "parent_rule": "down.rule",
        "step": "down.step",
        "rank": f"{rank}",
        "rung": f"(SELECT greatest(max(level), {int(Level.MODEL)}) FROM seen)",
        "timed": "true",
        "status": "coalesce(seen.status, 'ok')",
        "phase": "down.phase",
        "key": "lpad(lower(hex(down.key)), 16, '0')",
        "layer_id": _id("down.layer"),
        "layer_index": "indexed.layer_index",
        "depth": f"CASE WHEN seen.level = {int(Level.LAYER)} THEN down.layers - 1 END",
        "grade": f"CASE WHEN seen.device IS NULL THEN NULL WHEN down.layer IS NULL THEN '{Grade.UNKNOWN}' "
        f"WHEN down.weak THEN '{Grade.INFERRED}' ELSE '{Grade.EXACT}' END",
        "alloc_bytes": f"CASE WHEN seen.kind = '{Kind.ALLOC}' THEN seen.alloc_bytes "
        "WHEN remembering.thread IS NOT NULL AND seen.device IS NULL "
        "THEN TRY_CAST(coalesce(up.alloc_bytes, 0) AS BIGINT) END",
        **_from_shapes("flops", {"flops": "flops"}),
        **_from_shapes("bytes", {"dram_read_bytes": "read_bytes", "dram_write_bytes": "write_bytes"}),
        "param_bytes": "NULL",
        "activation_bytes": "NULL",
    }
    columns = ", ".join(f"CAST({values.get(c.name, f'seen.{c.name}')} AS {c.type}) AS {c.name}" for c in COLUMNS)
    con.execute(
        f"""
        CREATE OR REPLACE TABLE placed AS
        WITH remembering AS (SELECT DISTINCT process, thread FROM seen WHERE kind = '{Kind.ALLOC}'),
        launching AS (
            SELECT DISTINCT parent AS number FROM down JOIN seen USING (number)
            WHERE seen.kind = '{Kind.KERNEL}' AND parent IS NOT NULL
        ), indexed AS (
            SELECT number, (row_number() OVER (PARTITION BY step ORDER BY start_ns, down.depth, number) - 1)::INTEGER
                AS layer_index
            FROM seen JOIN down USING (number) WHERE level = {int(Level.LAYER)}
        )
        SELECT {columns}
        FROM seen JOIN down USING (number) LEFT JOIN indexed USING (number)
        LEFT JOIN launching USING (number)
        LEFT JOIN up USING (number) LEFT JOIN priced USING (number)
        LEFT JOIN remembering
            ON remembering.thread = seen.thread AND remembering.process IS NOT DISTINCT FROM seen.process
        """
    )
    for name in ("steps", "nodes", "down", "priced", "own", "up"):
        con.execute(f"DROP TABLE {name}")


def _from_shapes(sort: str, columns: Mapping[str, str]) -> dict[str, str]:
    """Return the SQL of what is counted from shapes where the source has no counter, and of how it is known.

    It counts for the innermost operator that has it, and for one that launched kernels itself, whatever it called
    besides.

    Args:
        sort: flops or bytes.
        columns: of `priced`, by the columns of the table that they are for.
    """
    first, price = next(iter(columns.items()))
    counts = f"(NOT coalesce(up.{sort}, false) OR launching.number IS NOT NULL)"
    return {
        **{name: f"CASE WHEN {counts} THEN coalesce(seen.{name}, priced.{each}) END" for name, each in columns.items()},
        f"{sort}_source": f"CASE WHEN {counts} THEN CASE WHEN seen.{first} IS NULL AND priced.{price} IS NOT NULL "
        f"THEN 'shapes' ELSE seen.{sort}_source END END",
    }


def _id(number: str) -> str:
    """Return the SQL of a span's id."""
    return f"CASE WHEN {number} IS NOT NULL THEN printf('%016x', {number} + 1) END"
