"""The meaning of what the profiler of XLA records, for JAX, TensorFlow and PyTorch/XLA.

The XSpace (`xsp.importers.xplane`) and the trace events that are exported beside it (`xsp.importers.chrome`) fill the
same table `xla_events`, so both give the same spans.

| in the file | becomes |
|---|---|
| a block with `step_num` (`StepTraceAnnotation`); on a device without launches, its line "Steps" | a step |
| a block of the host with the name of a module and no operator | a layer of type `compiled` |
| a block of the host with `hlo_op`, or with the name of an HLO operator that ran on a device | an operator |
| a block of the host with a correlation id | a launch, a synchronisation or another call |
| other blocks of the host | blocks of the application |
| events of a stream, or of the line "XLA Ops" of a device without streams | device work |

Other lines of a device repeat work of its streams, under the names of modules, operators and scopes; they are counted.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping
from typing import Any

import duckdb

from xsp import callnames, table
from xsp.errors import TraceError
from xsp.frameworks import JAX, TENSORFLOW, TORCH_XLA
from xsp.importers.contract import RAW_COLUMNS, Losses
from xsp.schema import Column, Kind, Level

COLUMNS = {
    "process": "BIGINT", "plane": "VARCHAR", "line": "BIGINT", "line_name": "VARCHAR", "name": "VARCHAR",
    "start_ns": "BIGINT", "dur_ns": "BIGINT", "correlation": "BIGINT", "step": "BIGINT", "op": "VARCHAR",
    "module": "VARCHAR", "scope": "VARCHAR", "details": "VARCHAR", "flops": "BIGINT", "bytes": "BIGINT",
    "replayed": "BOOLEAN",
}  # fmt: skip
"""Columns of the table `xla_events`: what XLA's profiler says of an event."""

PLANE = r"^/(device:[A-Z]+:\d|host:)"
"""Pattern for the names of planes, which are those of processes among trace events."""

_DEVICE = r"^/device:[A-Z]+:(\d{1,4})\b"
_MAX_DEVICES = 1024
_LIMIT = 1 << 62
_BATCH = 1 << 15


def device_of(plane: str) -> int | None:
    """Return the number of the device that a plane is of; None for other planes."""
    found = re.match(_DEVICE, plane)
    return int(found.group(1)) if found and int(found.group(1)) < _MAX_DEVICES else None


def create(con: duckdb.DuckDBPyConnection) -> None:
    """Make the empty tables `xla_events`, and `xla_programs` of operators with their FLOPs."""
    table.create(con, "xla_events", _columns())
    table.create(con, "xla_programs", _PROGRAM_COLUMNS)


def insert(con: duckdb.DuckDBPyConnection, rows: Iterable[tuple[Any, ...]]) -> None:
    """Append rows to `xla_events`, some at a time."""
    remaining = iter(rows)
    while batch := list(itertools.islice(remaining, _BATCH)):
        table.insert(con, "xla_events", batch, _columns())


def insert_programs(con: duckdb.DuckDBPyConnection, rows: Iterable[tuple[str, str, int]]) -> None:
    """Append operators of programs: module, operator, FLOPs."""
    table.insert(con, "xla_programs", list(rows), _PROGRAM_COLUMNS)


_PROGRAM_COLUMNS = (Column("module", "VARCHAR", ""), Column("op", "VARCHAR", ""), Column("flops", "BIGINT", ""))


def _columns() -> list[Column]:
    return [Column(name, kind, "") for name, kind in COLUMNS.items()]


def values(stats: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the columns of an event from `correlation` on, from its statistics by their names in the file."""
    scope = next((stats[key] for key in ("tf_op", "name") if _is_scope(stats.get(key))), None)
    details = next((stats[key] for key in _DETAILS if isinstance(stats.get(key), str)), None)
    return (
        _count(stats.get("correlation_id")),
        _count(stats.get("step_num")),
        _text(stats.get("hlo_op")),
        _text(stats.get("hlo_module")) or _text(stats.get("module_name")),
        scope.rstrip(":") if scope is not None else None,
        details,
        _count(stats.get("flops")),
        _count(stats.get("bytes_accessed")),
        any(key in stats for key in _GRAPH),
    )


_DETAILS = ("kernel_details", "memcpy_details", "memset_details")
_GRAPH = ("cuda_graph_id", "cuda_graph_exec_id", "cuda_graph_orig_id")
_NO_SCOPE = "XlaModule"


def _is_scope(value: Any) -> bool:
    return isinstance(value, str) and "/" in value and not value.startswith(_NO_SCOPE)


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def _count(value: Any) -> int | None:
    """Return a number that a column holds, given as a number or as text; None for anything else."""
    try:
        number = int(value) if isinstance(value, (int, str, float)) and not isinstance(value, bool) else -1
    except (ValueError, OverflowError):
        return None
    return number if 0 <= number < _LIMIT else None


def fill(con: duckdb.DuckDBPyConnection, source: str, losses: Losses, collector: str) -> dict[str, Any]:
    """Make the table `raw_spans` from `xla_events`, and drop that table.

    Args:
        con: the engine.
        source: path of the file, for errors.
        losses: counts what is left out.
        collector: name of the importer, for the column `collector`.

    Returns:
        The content of `run.json`: the framework.

    Raises:
        TraceError: there is no event.
    """
    table.create(con, "raw_spans", RAW_COLUMNS)
    con.execute(f"CREATE OR REPLACE TEMP TABLE xla_lines AS {_LINES}")
    con.execute(f"CREATE OR REPLACE TEMP TABLE xla_work AS {_WORK}")
    ((has_own_steps,),) = con.execute(f"SELECT {_OWN_STEPS}").fetchall()
    con.execute(f"CREATE OR REPLACE TEMP TABLE xla_host AS {_HOST.replace(_IS_STEP, str(not has_own_steps))}")
    if has_own_steps:
        con.execute(f"INSERT INTO xla_host BY NAME {_DEVICE_STEPS}")
    con.execute(_PLACE_CALLS)
    con.execute(f"INSERT INTO xla_host BY NAME {_OPERATORS_OF_CALLS}")
    ((own,),) = con.execute(_DELETE_OWN).fetchall()
    if own:
        losses.skipped["the profiler's own work"] += own
    ((marks,),) = con.execute(_DELETE_MARKS).fetchall()
    if marks:
        losses.skipped["marks of XLA's threads and of ends of operators"] += marks
    con.execute(_NAME_EXECUTIONS)
    for part in (_HOST_SPANS, _DEVICE_SPANS):
        con.execute(f"INSERT INTO raw_spans BY NAME {part}")
    con.execute(
        f"""
        CREATE OR REPLACE TABLE raw_spans AS SELECT * REPLACE (
            row_number() OVER (ORDER BY start_ns, level, dur_ns DESC, name) - 1 AS number, 'ok' AS status,
            coalesce(replayed, false) AS replayed, {table.literal(collector)} AS collector
        ) FROM raw_spans
        """
    )
    for reason, query in _LEFT_OUT.items():
        ((count,),) = con.execute(query).fetchall()
        if count:
            losses.skipped[reason] += count
    ((losses.spans, steps, jax, torch),) = con.execute(_SUMMARY).fetchall()
    for name in ("xla_lines", "xla_work", "xla_host", "xla_events", "xla_programs"):
        con.execute(f"DROP TABLE {name}")
    if not losses.spans:
        raise TraceError(
            "; ".join(
                [f"{source}: an XSpace without events of a host or a device: was anything run before stop_trace?",
                 *losses.sentences()]
            )
        )  # fmt: skip
    framework = JAX if jax else TORCH_XLA if torch else TENSORFLOW
    if not steps and framework == JAX:
        losses.note('to see steps: with jax.profiler.StepTraceAnnotation("train", step_num=i): around each')
    return {"framework": framework}


_SUMMARY = f"""
    SELECT (SELECT count(*) FROM raw_spans), (SELECT count(*) FROM raw_spans WHERE kind = '{Kind.STEP}'),
           coalesce(bool_or(regexp_matches(name, '^(PjitFunction|pjit|jit_|\\$.*\\bjax\\b)')
                            OR regexp_matches(coalesce(module, ''), '^(jit|pmap|xmap|shard_map)_')
                            OR regexp_matches(coalesce(scope, ''), '^(jit|pmap|xmap|shard_map)\\(')), false),
           coalesce(bool_or(starts_with(coalesce(module, ''), 'SyncTensorsGraph')
                            OR regexp_matches(coalesce(scope, ''), '^(aten|xla)__')), false)
    FROM xla_events
"""

_PROJECTED = "^(Steps|XLA Modules|XLA TraceMe|Framework|Source|TensorFlow|Launch Stats|TC Overlay|Host Offload)"
_LINES = rf"""
    SELECT *, device IS NOT NULL AND (regexp_matches(line_name, '{_PROJECTED}')
              OR has_streams AND regexp_matches(line_name, '^(XLA |Async XLA )')) AS projected
    FROM (
        SELECT process, plane, line, any_value(coalesce(line_name, '')) AS line_name,
               TRY_CAST(nullif(regexp_extract(plane, '{_DEVICE}', 1), '') AS INTEGER) AS number,
               CASE WHEN number < {_MAX_DEVICES} THEN number END AS device,
               coalesce(TRY_CAST(nullif(regexp_extract(any_value(line_name), '#(\d+)', 1), '') AS BIGINT), line, 0)
               AS stream,
               starts_with(plane, '/device:') AND NOT regexp_matches(plane, '^/device:[A-Z]+:\d') AS is_other,
               coalesce(bool_or(bool_or(starts_with(line_name, 'Stream'))) OVER (PARTITION BY process, plane), false)
               AS has_streams
        FROM xla_events GROUP BY process, plane, line
    )
"""
"""The lines, with device and stream. A device without streams is one whose line "XLA Ops" is the work itself."""

_ON_LINE = "l.process IS NOT DISTINCT FROM e.process AND l.plane = e.plane AND l.line IS NOT DISTINCT FROM e.line"

_WORK = f"""
    SELECT * EXCLUDE (next_end), coalesce(NOT has_streams AND next_end <= start_ns + dur_ns AND dur_ns > 0, false)
           AS is_container
    FROM (
        SELECT e.*, device, stream, has_streams, lead(e.start_ns + e.dur_ns) OVER (
                   PARTITION BY device, stream, l.line ORDER BY e.start_ns, e.dur_ns DESC, e.name) AS next_end
        FROM xla_events e JOIN xla_lines l ON {_ON_LINE} WHERE device IS NOT NULL AND NOT projected
    )
"""
"""Device work. In a line of operators a loop or a branch is around its own operators, which are the work."""

_OWN_STEPS = """(EXISTS (FROM xla_lines WHERE line_name = 'Steps' AND device IS NOT NULL)
                 AND NOT EXISTS (FROM xla_work WHERE correlation IS NOT NULL))"""
"""Whether steps are those of the devices: no launch joins their work with the host, which runs ahead of them."""

_IS_STEP = "IS_STEP"
"""Placeholder in the SQL for whether numbered blocks of the host are the steps."""

_HOST = f"""
    WITH named AS (SELECT DISTINCT op FROM xla_work WHERE op IS NOT NULL)
    SELECT e.process, e.line AS thread, e.start_ns, e.dur_ns, e.correlation, e.op, e.module, e.scope,
           CASE WHEN e.step IS NOT NULL AND {_IS_STEP} THEN {int(Level.MODEL)}
                WHEN e.correlation IS NOT NULL THEN {int(Level.RUNTIME)}
                WHEN e.op IS NOT NULL OR named.op IS NOT NULL THEN {int(Level.OP)}
                WHEN e.module IS NOT NULL THEN {int(Level.LAYER)} ELSE {int(Level.APPLICATION)} END AS level,
           CASE level WHEN {int(Level.MODEL)} THEN '{Kind.STEP}' WHEN {int(Level.OP)} THEN '{Kind.OP}'
                WHEN {int(Level.RUNTIME)} THEN {callnames.KIND} ELSE '{Kind.USER}' END AS kind,
           CASE level WHEN {int(Level.LAYER)} THEN e.module WHEN {int(Level.OP)} THEN coalesce(e.op, e.name)
                ELSE e.name END AS name
    FROM xla_events e JOIN xla_lines l ON {_ON_LINE} LEFT JOIN named ON named.op = e.name
    WHERE device IS NULL AND NOT is_other
"""

_DEVICE_STEPS = f"""
    SELECT NULL::BIGINT AS process, NULL::BIGINT AS thread, start_ns, dur_ns, {int(Level.MODEL)} AS level,
           '{Kind.STEP}' AS kind, 'step ' || e.name AS name
    FROM xla_events e JOIN xla_lines l ON {_ON_LINE}
    WHERE l.line_name = 'Steps' AND device = (SELECT min(device) FROM xla_lines WHERE line_name = 'Steps')
"""

_DELETE_OWN = f"""
    DELETE FROM xla_host USING (
        SELECT process, thread, start_ns, start_ns + dur_ns AS end_ns FROM xla_host
        WHERE regexp_matches(name, '^\\$profiler\\.py:\\d+ (start|stop)_(trace|server)$')
    ) own WHERE xla_host.process = own.process AND xla_host.thread = own.thread AND xla_host.start_ns >= own.start_ns
                AND xla_host.start_ns + xla_host.dur_ns <= own.end_ns AND xla_host.level = {int(Level.APPLICATION)}
"""
"""Starting and stopping a recording takes seconds and is recorded itself, with what happens in it on its thread."""

_DELETE_MARKS = f"""
    DELETE FROM xla_host
    WHERE level = {int(Level.APPLICATION)} AND regexp_matches(name, '^(ThreadpoolListener::|end: )')
"""

_NAME_EXECUTIONS = f"""
    UPDATE xla_host SET level = {int(Level.LAYER)}, name = inside.module, module = inside.module FROM (
        SELECT e.process, e.thread, e.start_ns, e.dur_ns, o.module
        FROM (FROM xla_host WHERE name = 'ThunkExecutor::Execute') e
        ASOF JOIN (FROM xla_host WHERE level = {int(Level.OP)} AND module IS NOT NULL) o
            ON o.process = e.process AND o.thread = e.thread AND o.start_ns >= e.start_ns
        WHERE o.start_ns + o.dur_ns <= e.start_ns + e.dur_ns
    ) inside
    WHERE xla_host.name = 'ThunkExecutor::Execute' AND xla_host.process = inside.process
          AND xla_host.thread = inside.thread AND xla_host.start_ns = inside.start_ns
"""
"""On a processor the executor's block does not name its module, but the operators in it do."""

_PLACE_CALLS = f"""
    UPDATE xla_host SET process = around.process, thread = around.thread FROM (
        SELECT c.correlation, c.start_ns, o.process, o.thread
        FROM (FROM xla_host WHERE level = {int(Level.RUNTIME)} AND op IS NOT NULL) c
        ASOF JOIN (FROM xla_host WHERE level = {int(Level.OP)}) o ON o.name = c.op AND o.start_ns <= c.start_ns
        WHERE c.start_ns + c.dur_ns <= o.start_ns + o.dur_ns
    ) around
    WHERE xla_host.level = {int(Level.RUNTIME)} AND xla_host.correlation = around.correlation
          AND xla_host.start_ns = around.start_ns
"""
"""A call whose operator is around it in time ran on that operator's thread: some recorders of calls (ROCm's) number
threads in their own way."""

_OPERATORS_OF_CALLS = f"""
    WITH calls AS (
        SELECT c.*, s.start_ns AS step_ns FROM (
            FROM xla_host c WHERE level = {int(Level.RUNTIME)} AND op IS NOT NULL AND NOT EXISTS (
                FROM xla_host o WHERE o.level = {int(Level.OP)} AND o.name = c.op
                     AND o.process IS NOT DISTINCT FROM c.process AND o.thread IS NOT DISTINCT FROM c.thread)
        ) c ASOF LEFT JOIN (FROM xla_host WHERE level = {int(Level.MODEL)}) s ON s.start_ns <= c.start_ns
    ), islands AS (
        SELECT *, row_number() OVER (PARTITION BY process, thread ORDER BY start_ns, correlation)
                  - row_number() OVER (PARTITION BY process, thread, step_ns, module, op
                                       ORDER BY start_ns, correlation) AS island
        FROM calls
    )
    SELECT process, thread, min(start_ns) AS start_ns, max(start_ns + dur_ns) - min(start_ns) AS dur_ns, op, module,
           any_value(scope) AS scope, {int(Level.OP)} AS level, '{Kind.OP}' AS kind, op AS name
    FROM islands GROUP BY process, thread, step_ns, module, op, island
"""
"""Operators of calls on threads without blocks of operators: from the first to the last of consecutive calls of one."""

_ATTRIBUTES = "nullif(json_merge_patch('{}', json_object('hlo_module', h.module, 'op_name', scope))::VARCHAR, '{}')"

_FLOPS_OF_MODULES = """
    SELECT module, op, any_value(flops) AS flops FROM xla_programs GROUP BY ALL HAVING min(flops) = max(flops)
"""
_FLOPS_OF_NAMES = """
    SELECT op, any_value(flops) AS flops FROM xla_programs GROUP BY op HAVING min(flops) = max(flops)
"""
"""FLOPs of operators; several programs may have one name, and are told apart only if they agree."""

_HOST_SPANS = f"""
    SELECT h.* EXCLUDE (inner_module, correlation, op, module, scope), correlation AS correlation_id,
           CASE WHEN level = {int(Level.OP)} THEN coalesce(own.flops, named.flops) END AS flops,
           CASE WHEN level = {int(Level.OP)} AND coalesce(own.flops, named.flops) IS NOT NULL THEN 'shapes' END
           AS flops_source,
           CASE WHEN level = {int(Level.LAYER)} THEN 'compiled' END AS type,
           CASE WHEN kind = '{Kind.SYNC}' THEN json_object('sync', CASE WHEN contains(name, 'Stream') THEN 'stream'
                WHEN contains(name, 'Event') THEN 'event' ELSE 'device' END)::VARCHAR
                WHEN level = {int(Level.OP)} THEN {_ATTRIBUTES} END AS attributes
    FROM (
        SELECT *, level = {int(Level.LAYER)} AND coalesce(max(start_ns + dur_ns) OVER (
                   PARTITION BY level, name, process, thread ORDER BY start_ns, dur_ns DESC
                   ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) >= start_ns + dur_ns, false) AS inner_module
        FROM xla_host
    ) h LEFT JOIN ({_FLOPS_OF_MODULES}) own ON own.module = h.module AND own.op = h.name
    LEFT JOIN ({_FLOPS_OF_NAMES}) named ON named.op = h.name AND h.module IS NULL WHERE NOT inner_module
"""
"""Blocks of the host; of nested blocks of one execution of a module only the outermost is a layer."""


def _detail(key: str) -> str:
    return rf"nullif(regexp_extract(details, '\b{key}:([\d,]+)', 1), '')"


_DEVICE_SPANS = rf"""
    SELECT w.start_ns, w.dur_ns, device, stream, {int(Level.KERNEL)} AS level, coalesce(w.name, 'unnamed') AS name,
           CASE WHEN regexp_matches(w.name, '(?i)^mem(cpy|set)|^copy[HDP]2[HDP]') THEN '{Kind.COPY}'
                ELSE '{Kind.KERNEL}' END AS kind,
           w.correlation AS correlation_id, w.replayed,
           coalesce(w.flops, CASE WHEN NOT w.has_streams THEN own.flops END) AS work_flops,
           CASE WHEN work_flops IS NOT NULL THEN 'shapes' END AS flops_source,
           nullif(TRY_CAST({_detail("occ_pct")} AS DOUBLE), 0) / 100 AS occupancy,
           CASE WHEN occupancy IS NOT NULL THEN 'estimate' END AS occupancy_source,
           nullif(json_merge_patch('{{}}', json_object(
               'grid', TRY_CAST('[' || {_detail("grid")} || ']' AS BIGINT[]),
               'block', TRY_CAST('[' || {_detail("block")} || ']' AS BIGINT[]),
               'registers', TRY_CAST({_detail("regs")} AS BIGINT),
               'shared_bytes', coalesce(TRY_CAST({_detail("static_shared")} AS BIGINT)
                               + TRY_CAST({_detail("dynamic_shared")} AS BIGINT),
                               TRY_CAST({_detail("group_mem")} AS BIGINT)),
               'bytes', TRY_CAST({_detail("size")} AS BIGINT), 'accessed_bytes', w.bytes,
               'copy', CASE WHEN w.name ILIKE 'memset%' THEN 'memset' ELSE nullif(replace(
                   regexp_extract(w.name, '(?i)^(?:memcpy|copy)([HDP]2[HDP])', 1), '2', 'to'), '') END,
               'hlo_op', w.op, 'hlo_module', coalesce(w.module, CASE WHEN around.end_ns >= w.start_ns + w.dur_ns
                                                             THEN around.name END),
               'sources', CASE WHEN w.scope IS NOT NULL THEN [w.scope] END
           ))::VARCHAR, '{{}}') AS attributes
    FROM xla_work w ASOF LEFT JOIN (
        SELECT e.start_ns, e.start_ns + e.dur_ns AS end_ns, regexp_replace(e.name, '\(\d+\)$', '') AS name, e.process
        FROM xla_events e JOIN xla_lines l ON {_ON_LINE} WHERE device IS NOT NULL AND l.line_name = 'XLA Modules'
    ) around ON around.process = w.process AND around.start_ns <= w.start_ns
    LEFT JOIN ({_FLOPS_OF_MODULES}) own
        ON own.op = coalesce(w.op, w.name)
           AND own.module = coalesce(w.module, CASE WHEN around.end_ns >= w.start_ns + w.dur_ns THEN around.name END)
    WHERE NOT is_container
"""
_DEVICE_SPANS = f"SELECT * RENAME (work_flops AS flops) FROM ({_DEVICE_SPANS})"

_LEFT_OUT = {
    "projections of host spans onto the device": f"SELECT count(*) FROM xla_events e JOIN xla_lines l ON {_ON_LINE} "
    f"WHERE projected AND NOT (l.line_name = 'Steps' AND {_OWN_STEPS})",
    "loops and branches on the device, whose operators are recorded": "SELECT count(*) FROM xla_work "
    "WHERE is_container",
    "of planes that are neither host nor device": f"SELECT count(*) FROM xla_events e JOIN xla_lines l ON {_ON_LINE} "
    "WHERE is_other",
}
