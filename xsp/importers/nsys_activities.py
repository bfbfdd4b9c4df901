"""The CUPTI records of an nsys export: device work, runtime calls, overhead; and the library calls that nsys traced.

A correlation id joins device work to its call within a process. Identifiers of processes and threads are packed into
one number, 24 bits each.
"""

from __future__ import annotations

import duckdb

from xsp import callnames
from xsp.importers.contract import MAX_TIME_NS, Losses
from xsp.importers.nsys_tables import Export
from xsp.schema import Kind, Level

_TIMES = {"start": "BIGINT", "end": "BIGINT"}
_ON_DEVICE = dict.fromkeys(
    ("deviceId", "contextId", "streamId", "correlationId", "globalPid", "graphNodeId", "graphId"), "BIGINT"
)
_CALL = dict.fromkeys(("globalTid", "nameId", "textId", "correlationId"), "BIGINT")
_LAUNCH = dict.fromkeys(
    (
        "demangledName shortName name registersPerThread gridX gridY gridZ blockX blockY blockZ "
        "staticSharedMemory dynamicSharedMemory"
    ).split(),
    "BIGINT",
)

TABLES = {
    "CUPTI_ACTIVITY_KIND_KERNEL": ("nsys_kernels", _TIMES | _ON_DEVICE | _LAUNCH),
    "CUPTI_ACTIVITY_KIND_GRAPH_TRACE": ("nsys_graphs", _TIMES | _ON_DEVICE),
    "CUPTI_ACTIVITY_KIND_MEMCPY": (
        "nsys_copies",
        _TIMES
        | _ON_DEVICE
        | dict.fromkeys(("bytes", "copyKind", "srcKind", "dstKind", "srcDeviceId", "dstDeviceId"), "BIGINT"),
    ),
    "CUPTI_ACTIVITY_KIND_MEMSET": ("nsys_memsets", _TIMES | _ON_DEVICE | {"bytes": "BIGINT"}),
    "CUPTI_ACTIVITY_KIND_RUNTIME": ("nsys_runtime", _TIMES | _CALL),
    "CUPTI_ACTIVITY_KIND_DRIVER": ("nsys_driver", _TIMES | _CALL),
    "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION": (
        "nsys_waits",
        _TIMES | dict.fromkeys(("correlationId", "globalPid", "syncType", "deprecatedSyncType", "streamId"), "BIGINT"),
    ),
    "CUPTI_ACTIVITY_KIND_OVERHEAD": ("nsys_cupti_overhead", _TIMES | _CALL | {"overheadType": "BIGINT"}),
    "PROFILER_OVERHEAD": ("nsys_profiler_overhead", _TIMES | _CALL | {"overheadType": "BIGINT"}),
}
"""Tables of the export: their names in the engine, and the columns that are read."""

LIBRARIES = (
    "CUDNN_EVENTS CUBLAS_EVENTS NCCL_EVENTS MPI_COLLECTIVES_EVENTS MPI_P2P_EVENTS MPI_START_WAIT_EVENTS "
    "MPI_OTHER_EVENTS"
).split()
"""Tables of library calls."""

COPIES = {1: "HtoD", 2: "DtoH", 3: "HtoA", 4: "AtoH", 5: "AtoA", 6: "AtoD", 7: "DtoA", 8: "DtoD", 9: "HtoH",
          10: "PtoP", 11: "HtoD", 12: "DtoH", 13: "DtoD"}  # fmt: skip
"""Directions of copies by CUPTI's number (CUpti_ActivityMemcpyKind); from 11 on nsys's numbers, of unified memory."""

WAITS = {1: "event", 3: "stream", 4: "context"}
"""The object that a synchronisation waits for, by CUPTI's number; with 2 a stream waits, not the host."""

CUDA_OVERHEADS = (2, 6, 7, 8)
"""Kinds of overhead of CUDA, not of the profiler: compiling, loading code, a full command buffer."""

WHOLE_GRAPHS_NOTE = (
    "{} replays of CUDA graphs are recorded as a whole and count as one kernel each: profile with "
    "`nsys profile --cuda-graph-trace=node` to see what is in them"
)


def copy(con: duckdb.DuckDBPyConnection, export: Export) -> None:
    """Copy the tables of CUPTI records into the engine, and make `nsys_calls` of the library calls."""
    for name, (target, columns) in TABLES.items():
        export.copy(con, name, target, columns)
    con.execute(f"CREATE OR REPLACE TABLE nsys_calls ({_column_definitions(_TIMES | _CALL)})")
    for name in filter(export.tables.__contains__, LIBRARIES):
        export.copy(con, name, "nsys_library", _TIMES | _CALL)
        con.execute("INSERT INTO nsys_calls SELECT * FROM nsys_library")


def _column_definitions(columns: dict[str, str]) -> str:
    return ", ".join(f'"{name}" {kind}' for name, kind in columns.items())


def names() -> str:
    """Return the SQL of the ids of all needed strings."""
    calls = ("nsys_runtime", "nsys_driver", "nsys_cupti_overhead", "nsys_profiler_overhead", "nsys_calls")
    parts = [f"SELECT {column} AS id FROM nsys_kernels" for column in ("demangledName", "shortName", "name")]
    parts += [f"SELECT {column} FROM {name}" for name in calls for column in ("nameId", "textId")]
    return " UNION ".join(parts)


def fill(con: duckdb.DuckDBPyConnection, losses: Losses) -> None:
    """Append the CUPTI records and the library calls to `raw_spans`.

    Args:
        con: holds the tables that `copy` makes, `nsys_strings`, `nsys_devices` (process, ordinal, device, sms) and
            `nsys_kinds` (kinds of memory: id, label).
        losses: counts what is left out.
    """
    _delete_untimed(con, losses)
    _fill_missing_ids(con, losses)
    for part in (_KERNELS, _GRAPHS, _COPY_SPANS, _MEMSETS):
        con.execute(f"INSERT INTO raw_spans BY NAME {part}")
    con.execute(f"CREATE OR REPLACE TEMP TABLE nsys_all_calls AS {_ALL_CALLS}")
    con.execute(f"INSERT INTO raw_spans BY NAME {_RUNTIME}")
    con.execute(f"INSERT INTO raw_spans BY NAME {_OVERHEAD}")
    con.execute(f"INSERT INTO raw_spans BY NAME {_LIBRARY}")
    _count(con, losses)


def _delete_untimed(con: duckdb.DuckDBPyConnection, losses: Losses) -> None:
    """Delete rows without a start, or without an end after it."""
    for name, target in [
        *((name, target) for name, (target, _) in TABLES.items()),
        ("calls of libraries", "nsys_calls"),
    ]:
        unusable = f'coalesce("start" > "end" OR "start" < -{MAX_TIME_NS} OR "end" >= {MAX_TIME_NS}, true)'
        ((deleted,),) = con.execute(f"DELETE FROM {target} WHERE {unusable}").fetchall()
        if deleted:
            losses.skipped[f"{name}: no time, or an end before the start"] += deleted


def _fill_missing_ids(con: duckdb.DuckDBPyConnection, losses: Losses) -> None:
    """Set the process of device work, if there is only one, and device 0, where early versions omit them."""
    only = "SELECT any_value(globalTid) FROM nsys_runtime HAVING count(DISTINCT pid_of(globalTid)) = 1"
    for name in ("nsys_kernels", "nsys_graphs", "nsys_copies", "nsys_memsets"):
        con.execute(f"UPDATE {name} SET globalPid = ({only}) WHERE globalPid IS NULL")
        ((changed,),) = con.execute(f"UPDATE {name} SET deviceId = 0 WHERE deviceId IS NULL").fetchall()
        if changed:
            losses.changed["device work without a device, taken as that of device 0"] += changed


def _count(con: duckdb.DuckDBPyConnection, losses: Losses) -> None:
    ((graphs,),) = con.execute("SELECT count(*) FROM nsys_graphs").fetchall()
    if graphs:
        losses.note(WHOLE_GRAPHS_NOTE.format(graphs))
    ((duplicates,),) = con.execute("SELECT count(*) FROM nsys_all_calls WHERE place > 1").fetchall()
    if duplicates:
        losses.changed["correlation ids of a driver's call inside a runtime's, left to the outer one"] += duplicates
    ((unmatched,),) = con.execute(
        "SELECT count(*) FROM nsys_waits w ANTI JOIN nsys_all_calls c "
        "ON c.process = pid_of(w.globalPid) AND c.correlation_id = w.correlationId"
    ).fetchall()
    if unmatched:
        losses.skipped["CUPTI_ACTIVITY_KIND_SYNCHRONIZATION: its call is not in the file"] += unmatched
    ((cuda,),) = con.execute(
        f"SELECT count(*) FROM nsys_cupti_overhead WHERE overheadType IN ({sql_list(CUDA_OVERHEADS)})"
    ).fetchall()
    if cuda:
        losses.note(
            f"{cuda} overhead records are CUDA's own waits (a full command buffer, loading), not the profiler's"
        )


def sql_list(values: tuple[int, ...]) -> str:
    """Return numbers as a list in SQL."""
    return ", ".join(map(str, values))


def _case_of(column: str, names: dict[int, str], otherwise: str) -> str:
    return f"CASE {column} {' '.join(f'WHEN {key} THEN {name!r}' for key, name in names.items())} ELSE {otherwise} END"


_LOCATION = """
    pid_of(w.globalPid) AS process, coalesce(d.device, w.deviceId)::INTEGER AS device, w.streamId AS stream,
    w.correlationId AS correlation_id, w."start" AS start_ns, w."end" - w."start" AS dur_ns,
    w.graphNodeId IS NOT NULL AS replayed
"""
_ON = "LEFT JOIN nsys_devices d ON d.process = pid_of(w.globalPid) AND d.ordinal = w.deviceId"

_KERNELS = f"""
    SELECT {int(Level.KERNEL)} AS level, '{Kind.KERNEL}' AS kind,
           coalesce(full_name.value, short.value, plain.value, 'unnamed kernel') AS name, {_LOCATION},
           json_merge_patch('{{}}', json_object(
               'grid', [w.gridX, w.gridY, w.gridZ], 'block', [w.blockX, w.blockY, w.blockZ],
               'registers', w.registersPerThread, 'shared_bytes', w.staticSharedMemory + w.dynamicSharedMemory,
               'blocks_per_sm', round(w.gridX * w.gridY * w.gridZ / d.sms, 2),
               'warps_per_sm', round(w.gridX * w.gridY * w.gridZ * ceil(w.blockX * w.blockY * w.blockZ / 32)
                                     / d.sms, 2),
               'context', w.contextId, 'graph', CASE WHEN w.graphNodeId IS NOT NULL THEN true END
           )) AS attributes
    FROM nsys_kernels w {_ON}
    LEFT JOIN nsys_strings full_name ON full_name.id = w.demangledName
    LEFT JOIN nsys_strings short ON short.id = w.shortName
    LEFT JOIN nsys_strings plain ON plain.id = w.name
"""

_GRAPHS = f"""
    SELECT {int(Level.KERNEL)} AS level, '{Kind.KERNEL}' AS kind, 'CUDA graph' AS name,
           {_LOCATION.replace("w.graphNodeId IS NOT NULL AS replayed", "true AS replayed")},
           json_object('graph', true) AS attributes
    FROM nsys_graphs w {_ON}
"""

_COPY_SPANS = f"""
    SELECT {int(Level.KERNEL)} AS level, '{Kind.COPY}' AS kind, {_LOCATION},
           CASE WHEN w.srcDeviceId <> w.dstDeviceId THEN 'PtoP'
                ELSE {_case_of("w.copyKind", COPIES, "'unknown'")} END AS direction,
           'Memcpy ' || direction || CASE WHEN source.label IS NULL OR target.label IS NULL THEN ''
               ELSE ' (' || source.label || ' -> ' || target.label || ')' END AS name,
           json_object('bytes', w.bytes, 'copy', direction) AS attributes
    FROM nsys_copies w {_ON}
    LEFT JOIN nsys_kinds source ON source.id = w.srcKind LEFT JOIN nsys_kinds target ON target.id = w.dstKind
"""
_COPY_SPANS = f"SELECT * EXCLUDE (direction) FROM ({_COPY_SPANS})"

_MEMSETS = f"""
    SELECT {int(Level.KERNEL)} AS level, '{Kind.COPY}' AS kind, 'Memset' AS name, {_LOCATION},
           json_object('bytes', w.bytes, 'copy', 'memset') AS attributes
    FROM nsys_memsets w {_ON}
"""

_ALL_CALLS = """
    SELECT *, CASE WHEN correlation_id IS NOT NULL THEN row_number() OVER (
        PARTITION BY process, correlation_id ORDER BY "start", "end" DESC) END AS place
    FROM (
        SELECT pid_of(c.globalTid) AS process, tid_of(c.globalTid) AS thread, c.correlationId AS correlation_id,
               c."start", c."end", regexp_replace(coalesce(s.value, 'unnamed call'), '_v[0-9]+$', '') AS name
        FROM (SELECT * FROM nsys_runtime UNION ALL SELECT * FROM nsys_driver) c
        LEFT JOIN nsys_strings s ON s.id = c.nameId
    )
"""

_RUNTIME = f"""
    WITH waits AS (
        SELECT pid_of(globalPid) AS process, correlationId AS correlation_id,
               any_value({_case_of("coalesce(syncType, deprecatedSyncType)", WAITS, "NULL")}) AS awaited
        FROM nsys_waits GROUP BY ALL
    ), started AS (
        SELECT DISTINCT process, correlation_id FROM raw_spans WHERE device IS NOT NULL
    ), calls AS (
        SELECT c.*, CASE WHEN NOT contains(c.name, 'Query')
                         THEN coalesce({callnames.AWAITED}, waits.awaited) END AS awaited,
               started.process IS NOT NULL OR {callnames.STARTS_WORK} AS starts
        FROM nsys_all_calls c
        LEFT JOIN waits USING (process, correlation_id) LEFT JOIN started USING (process, correlation_id)
    )
    SELECT {int(Level.RUNTIME)} AS level, name, process, thread, "start" AS start_ns, "end" - "start" AS dur_ns,
           CASE WHEN place = 1 THEN correlation_id END AS correlation_id,
           CASE WHEN starts THEN '{Kind.LAUNCH}' WHEN awaited IS NULL THEN '{Kind.CALL}' ELSE '{Kind.SYNC}' END AS kind,
           CASE WHEN awaited IS NOT NULL THEN json_object('sync', awaited) END AS attributes
    FROM calls
"""

_OVERHEAD = f"""
    SELECT {int(Level.RUNTIME)} AS level, '{Kind.OVERHEAD}' AS kind, coalesce(s.value, l.label, 'overhead') AS name,
           l.label AS type, pid_of(o.globalTid) AS process, tid_of(o.globalTid) AS thread, o."start" AS start_ns,
           o."end" - o."start" AS dur_ns,
           json_object('by', CASE WHEN o.overheadType IN ({sql_list(CUDA_OVERHEADS)}) THEN 'cuda' ELSE 'profiler' END)
               AS attributes
    FROM (SELECT * FROM nsys_cupti_overhead UNION ALL SELECT * FROM nsys_profiler_overhead) o
    LEFT JOIN nsys_strings s ON s.id = o.nameId LEFT JOIN nsys_overheads l ON l.id = o.overheadType
"""

_LIBRARY = f"""
    SELECT {int(Level.LIBRARY)} AS level, '{Kind.CALL}' AS kind, coalesce(s.value, t.value, 'unnamed call') AS name,
           pid_of(c.globalTid) AS process, tid_of(c.globalTid) AS thread, c."start" AS start_ns,
           c."end" - c."start" AS dur_ns
    FROM nsys_calls c LEFT JOIN nsys_strings s ON s.id = c.nameId LEFT JOIN nsys_strings t ON t.id = c.textId
"""
