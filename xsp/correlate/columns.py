"""Spans of a table get identities, parents, steps, layers and keys, in bulk.

The rules are those of `xsp.correlate`. The host's spans find their parents in one sweep (`xsp.correlate.sweep`), in
which they get what follows from them too (`xsp.correlate.inherited`); device work takes the parent of its launch, in
SQL.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import duckdb

from xsp import table
from xsp.correlate import figures
from xsp.correlate.figures import BATCH, FIGURES
from xsp.correlate.inherited import Down, Handing, Steps, Up
from xsp.correlate.sweep import CONTAINED, FOLLOWED, PHASES, sweep
from xsp.importers.contract import SEEN, Seen
from xsp.schema import COLUMNS, DEEPEST, WEAK, Grade, Kind, Level, Rule

WINDOW = "window"
"""Name of the step that a trace without steps is as a whole."""

_HOST = "(seen.device IS NULL AND seen.thread IS NOT NULL)"
_FLOPS, _BYTES = 1, 2
"""Bits of the sorts of figures."""


def place(con: duckdb.DuckDBPyConnection, seen: Seen, identity: str) -> None:
    """Make the table `placed`, with the columns of `COLUMNS`, of the table `seen`.

    Args:
        con: holds `seen`.
        seen: what the importer says of it; what is found out is noted in its losses.
        identity: of the source: what ids are made of.
    """
    whole = _steps(con, seen)
    figures.count(con)
    _name(con)
    deepest = _host(con, seen.tolerance_ns, whole)
    if deepest >= DEEPEST:
        seen.losses.note(f"spans nest deeper than {DEEPEST}: the ones inside hang on the last of them")
    _device(con)
    figures.choose(con)
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


# --- the host ---------------------------------------------------------------------------------------------


def _name(con: duckdb.DuckDBPyConnection) -> None:
    """Give a number to what spans are: table `codes` of level, kind, name, phase and code."""
    con.execute(
        f"""
        CREATE OR REPLACE TABLE codes AS
        SELECT level, kind, name, phase, md5_number_lower(concat_ws('/', level, kind,
                   CASE WHEN kind = '{Kind.STEP}' THEN 'step' ELSE name END,
                   CASE WHEN level >= {int(Level.OP)} THEN phase END)) AS code
        FROM (SELECT DISTINCT level, kind, name, phase FROM seen)
        """
    )


_CODED = (
    "codes ON codes.level = seen.level AND codes.kind = seen.kind AND codes.name IS NOT DISTINCT FROM seen.name "
    "AND codes.phase IS NOT DISTINCT FROM seen.phase"
)


def _host(con: duckdb.DuckDBPyConnection, tolerance: int, whole: int | None) -> int:
    """Place the spans on threads: tables `down` and `up`. Return how deep the deepest lies.

    What has no parent hangs under the step that the trace is as a whole; device work without a launch stays alone.
    """
    con.execute(
        f"""
        CREATE OR REPLACE TABLE lines AS SELECT process, thread, row_number() OVER () - 1 AS line
        FROM (SELECT DISTINCT process, thread FROM seen WHERE {_HOST})
        """
    )
    phase = " ".join(f"WHEN '{name}' THEN {code}" for code, name in enumerate(PHASES, 1))
    query = f"""
        SELECT seen.number, coalesce(lines.line, -1), seen.level,
               CASE WHEN seen.kind = '{Kind.USER}' THEN greatest(seen.level, {int(Level.LAYER)}) ELSE seen.level END,
               start_ns, start_ns + dur_ns, sequence_nr, forward.line, code, CASE seen.phase {phase} ELSE 0 END,
               {_counted(con)}
        FROM seen JOIN {_CODED}
        LEFT JOIN lines ON lines.thread = seen.thread AND lines.process IS NOT DISTINCT FROM seen.process
        LEFT JOIN lines forward ON forward.thread = forward_thread AND forward.process IS NOT DISTINCT FROM seen.process
        LEFT JOIN priced ON priced.number = seen.number
        WHERE {_HOST} OR seen.number IS NOT DISTINCT FROM {"NULL::BIGINT" if whole is None else whole}
        ORDER BY lines.line IS NOT NULL, start_ns + CASE WHEN seen.level >= {int(Level.OP)} THEN {tolerance} ELSE 0 END,
                 seen.level, -(start_ns + dur_ns), seen.kind <> '{Kind.STEP}', seen.number
    """
    steps = con.execute("SELECT start_ns, end_ns FROM steps ORDER BY step").fetchall()
    processes = con.execute("SELECT coalesce(process, 0) FROM lines ORDER BY line").fetchall()
    handing = Handing(Steps([start for start, _ in steps], [end for _, end in steps]), rooted=whole is not None)
    with table.cursor(con) as reading:
        reading.execute(query)
        placed = sweep(_rows(reading), tolerance, [process for (process,) in processes], handing.close)
        _store(con, "down", _DOWN, Down, handing.down(placed))
    _store(con, "up", _UP, Up, handing.up())
    con.execute("DROP TABLE lines")
    return handing.deepest


_DOWN = f"""
    SELECT number, nullif(parent, -1) AS parent, CASE evidence & 3 WHEN {CONTAINED} THEN '{Rule.CONTAINMENT}'
                WHEN {FOLLOWED} THEN '{Rule.SEQUENCE}' END AS rule,
           nullif(step, -1)::INTEGER AS step, nullif(layer, -1) AS layer, layers::INTEGER AS layers,
           nullif(layer_index, -1)::INTEGER AS layer_index, ['{"', '".join(PHASES)}'][evidence >> 2] AS phase, key,
           false AS weak
    FROM swept
"""

_UP = f"""
    SELECT number, allocated AS alloc_bytes, counted & {_FLOPS} > 0 AS flops, counted & {_BYTES} > 0 AS bytes
    FROM swept
"""


def _counted(con: duckdb.DuckDBPyConnection) -> str:
    """Return the SQL of which sorts of figures are known of a span, and of the bytes of an allocation.

    Of a trace that tells the allocations of a device, those on the host do not count.
    """
    ((on_device,),) = con.execute(
        f"SELECT coalesce(bool_or({_ON_DEVICE}), false) FROM seen WHERE kind = '{Kind.ALLOC}'"
    ).fetchall()
    return f"""
        CASE WHEN coalesce(seen.flops, priced.flops) IS NOT NULL THEN {_FLOPS} ELSE 0 END
            + CASE WHEN coalesce(seen.dram_read_bytes, priced.read_bytes) IS NOT NULL THEN {_BYTES} ELSE 0 END,
        CASE WHEN seen.kind = '{Kind.ALLOC}' THEN
            CASE WHEN {_ON_DEVICE} = {str(on_device).lower()} THEN greatest(alloc_bytes, 0) ELSE 0 END END
    """


_ON_DEVICE = "(coalesce(TRY_CAST(attributes ->> '$.device_type' AS INTEGER), 0) <> 0)"


def _rows(reading: duckdb.DuckDBPyConnection) -> Iterator[tuple[Any, ...]]:
    while batch := reading.fetchmany(BATCH):
        yield from batch


def _store(con: duckdb.DuckDBPyConnection, name: str, select: str, row: type[Down | Up], rows: Iterable[Any]) -> None:
    """Make a table by a query over rows of integers, which it calls `swept`.

    They go through a text file: handed over as lists, each value would become an object of the engine's first.
    """
    line = (",".join(["%d"] * len(row._fields)) + "\n").__mod__
    columns = ", ".join(f"'{field}': '{'UBIGINT' if field == 'key' else 'BIGINT'}'" for field in row._fields)
    rows = iter(rows)
    with tempfile.NamedTemporaryFile("w", prefix="xsp-", suffix=".csv") as file:
        while text := "".join(map(line, islice(rows, BATCH))):
            file.write(text)
        file.flush()
        con.execute(
            f"CREATE OR REPLACE TABLE {name} AS WITH swept AS (FROM read_csv({table.literal(file.name)}, "
            f"header = false, auto_detect = false, delim = ',', columns = {{{columns}}})) {select}"
        )


# --- devices ----------------------------------------------------------------------------------------------


def _device(con: duckdb.DuckDBPyConnection) -> None:
    """Give device work the parent of its launch, else the operator that the source names; append it to `down`.

    What has neither begins a tree of its own, in the step in whose time it began.
    """
    weak = ", ".join(f"'{rule}'" for rule in WEAK)
    con.execute(
        f"""
        INSERT INTO down
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
            SELECT seen.number, seen.start_ns, seen.phase, code, operators.number AS operator,
                   coalesce(launches.number, certain.number) AS launch, coalesce(seen.replayed, false)
                       OR coalesce(launches.name, certain.name, '') LIKE '%GraphLaunch%' AS replayed
            FROM seen JOIN {_CODED}
            LEFT JOIN launches ON launches.process = seen.process AND launches.correlation_id = seen.correlation_id
            LEFT JOIN certain ON seen.process IS NULL AND certain.correlation_id = seen.correlation_id
            LEFT JOIN operators ON operators.operator = seen.operator AND operators.start_ns <= seen.start_ns
            WHERE NOT {_HOST} AND seen.number NOT IN (SELECT number FROM down)
        ), above AS (
            SELECT joined.*, coalesce(launch.parent, operator) AS parent,
                   CASE WHEN launch.parent IS NOT NULL AND replayed THEN '{Rule.GRAPH}'
                        WHEN launch.parent IS NOT NULL THEN '{Rule.CORRELATION}'
                        WHEN operator IS NOT NULL THEN '{Rule.EXTERNAL}' END AS rule
            FROM joined LEFT JOIN down launch ON launch.number = joined.launch
        ), rooted AS (
            SELECT above.*, CASE WHEN parent IS NULL AND above.start_ns < steps.end_ns THEN steps.step END AS step
            FROM above ASOF LEFT JOIN steps ON above.start_ns >= steps.start_ns
        )
        SELECT own.number, own.parent, own.rule, coalesce(up.step, own.step), up.layer, coalesce(up.layers, 0), NULL,
               coalesce(own.phase, up.phase), md5_number_lower(concat_ws('/', coalesce(up.key, 0), code, row_number()
                   OVER (PARTITION BY coalesce(own.parent, -1 - own.step), code ORDER BY start_ns, own.number))),
               coalesce(own.rule IN ({weak}), false)
        FROM rooted own LEFT JOIN down up ON up.number = own.parent
        """
    )


def _finish(con: duckdb.DuckDBPyConnection, identity: str, rank: int) -> None:
    """Make the view `placed`, of the table `varying` and of what is the same for all spans.

    Most traces leave a third of the columns empty; it saves time to write and to read only the others.
    """
    con.execute(
        "CREATE OR REPLACE TABLE traces AS SELECT DISTINCT step, "
        f"md5(concat_ws('/', '{identity}', coalesce(step, -1))) AS trace_id FROM down"
    )
    same = _same(con, rank)
    values = {
        "trace_id": "traces.trace_id",
        "span_id": _id("seen.number"),
        "parent_id": _id("down.parent"),
        "parent_rule": "down.rule",
        "step": "down.step",
        "status": "coalesce(seen.status, 'ok')",
        "phase": "down.phase",
        "key": "printf('%016x', down.key)",
        "layer_id": _id("down.layer"),
        "layer_index": "down.layer_index",
        "depth": f"CASE WHEN seen.level = {int(Level.LAYER)} THEN down.layers - 1 END",
        "grade": f"CASE WHEN seen.device IS NULL THEN NULL WHEN down.layer IS NULL THEN '{Grade.UNKNOWN}' "
        f"WHEN down.weak THEN '{Grade.INFERRED}' ELSE '{Grade.EXACT}' END",
        "alloc_bytes": f"CASE WHEN seen.kind = '{Kind.ALLOC}' THEN seen.alloc_bytes "
        "WHEN remembering.thread IS NOT NULL AND seen.device IS NULL THEN nullif(coalesce(up.alloc_bytes, 0), -1) END",
        **{name: f"figures.{name}" for name in FIGURES},
    }
    varying = {c.name: values.get(c.name, f"seen.{c.name}") for c in COLUMNS if c.name not in same}
    con.execute(
        f"""
        CREATE OR REPLACE TABLE varying AS
        WITH remembering AS (SELECT DISTINCT process, thread FROM seen WHERE kind = '{Kind.ALLOC}')
        SELECT {", ".join(f"{value} AS {name}" for name, value in varying.items())}
        FROM seen JOIN down USING (number) JOIN traces ON traces.step IS NOT DISTINCT FROM down.step
        LEFT JOIN up USING (number) LEFT JOIN figures USING (number)
        LEFT JOIN remembering
            ON remembering.thread = seen.thread AND remembering.process IS NOT DISTINCT FROM seen.process
        """
    )
    columns = ", ".join(f"CAST({same.get(c.name, c.name)} AS {c.type}) AS {c.name}" for c in COLUMNS)
    con.execute(f"CREATE OR REPLACE VIEW placed AS SELECT {columns} FROM varying")
    for name in ("steps", "codes", "down", "up", "figures", "traces"):
        con.execute(f"DROP TABLE {name}")


def _same(con: duckdb.DuckDBPyConnection, rank: int) -> dict[str, str]:
    """Return the SQL of what is the same for all spans, by column."""
    names = [name for name in _MAY_BE_EMPTY if name not in ("alloc_bytes", *FIGURES)]
    (counts,) = con.execute(f"SELECT {', '.join(f'count({name})' for name in names)} FROM seen").fetchall()
    ((allocated, figures, deepest, status, statuses, collector, collectors),) = con.execute(
        f"SELECT count(*) FILTER (kind = '{Kind.ALLOC}'), (SELECT count(*) FROM figures), max(level), min(status), "
        "max(status), min(collector), max(collector) FROM seen"
    ).fetchall()
    empty = [name for name, count in zip(names, counts, strict=True) if not count]
    empty += [] if allocated else ["alloc_bytes"]
    empty += [] if figures else FIGURES
    same = {
        **dict.fromkeys(("param_bytes", "activation_bytes", *empty), "NULL"),
        "rank": str(rank),
        "rung": str(max(deepest, int(Level.MODEL))),
        "timed": "true",
    }
    if status == statuses:
        same["status"] = table.literal(status or "ok")
    if collector == collectors:
        same["collector"] = table.literal(collector) if collector else "NULL"
    return same


_MAY_BE_EMPTY = [column.name for column in SEEN if column.name in {each.name for each in COLUMNS}]


def _id(number: str) -> str:
    """Return the SQL of a span's id."""
    return f"CASE WHEN {number} IS NOT NULL THEN printf('%016x', {number} + 1) END"
