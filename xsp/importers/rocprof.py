"""Read files of rocprofv3: rocpd databases (SQLite, schema 3) and its own JSON; and `.rpd` files (schemas 1 and 2).

All have the same content: kernels, copies, calls of HIP, HSA and RCCL, and roctx ranges, joined by a correlation id
within a process. One file is one rank. Ranges are classified like NVTX ranges (`xsp.importers.nsys_ranges`). Data on
people and machines (command line, environment, host) is not imported.
"""

from __future__ import annotations

import json
import sqlite3
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import duckdb

from xsp import atomic, callnames, table
from xsp.errors import TraceError
from xsp.fields import is_count
from xsp.importers import contract, nsys_ranges, rpd
from xsp.importers.contract import (
    MAX_TIME_NS,
    RAW_COLUMNS,
    Losses,
    SourceInfo,
    TableImporter,
    check_values,
    open_bytes,
    read_error,
)
from xsp.importers.nsys_tables import SQLITE, Export, create_macros, drop_tables
from xsp.schema import Column, Kind, Level

KEY = "rocprofiler-sdk-tool"
MAX_JSON_BYTES = 1 << 30
"""Maximum bytes of a JSON document, which is read at once; a rocpd database is read in bounded memory."""

_TIMES = {"start": "BIGINT", "end": "BIGINT"}
_IDS = {"pid": "BIGINT", "tid": "BIGINT", "event_id": "BIGINT"}
_SIZES = [f"{dimension}_size_{axis}" for dimension in ("workgroup", "grid") for axis in "xyz"]
ROCPD_COLUMNS = {
    "rocpd_kernel_dispatch": _TIMES | _IDS | dict.fromkeys(
        ("agent_id", "kernel_id", "queue_id", "stream_id", "group_segment_size", *_SIZES), "BIGINT"),
    "rocpd_memory_copy": _TIMES | _IDS | dict.fromkeys(
        ("name_id", "dst_agent_id", "src_agent_id", "size", "queue_id", "stream_id"), "BIGINT"),
    "rocpd_region": _TIMES | _IDS | {"name_id": "BIGINT"},
    "rocpd_event": dict.fromkeys(("id", "category_id", "stack_id"), "BIGINT") | {"extdata": "VARCHAR"},
    "rocpd_string": {"id": "BIGINT", "string": "VARCHAR"},
    "rocpd_info_kernel_symbol": {"id": "BIGINT", "kernel_name": "VARCHAR", "display_name": "VARCHAR",
                                 "arch_vgpr_count": "BIGINT"},
    "rocpd_info_agent": {"id": "BIGINT", "type": "VARCHAR", "type_index": "BIGINT", "absolute_index": "BIGINT",
                         "product_name": "VARCHAR", "name": "VARCHAR", "extdata": "VARCHAR"},
    "rocpd_info_process": {"id": "BIGINT", "pid": "BIGINT"},
    "rocpd_info_thread": {"id": "BIGINT", "tid": "BIGINT"},
}  # fmt: skip
"""Tables of rocpd with the columns that are read. Each table exists once per process, with a suffix in its name."""

ROWS = {
    "roc_kernels": {"name": "VARCHAR", "agent": "BIGINT", "stream": "BIGINT", "grid": "BIGINT[]", "block": "BIGINT[]",
                    "registers": "BIGINT", "shared": "BIGINT"},
    "roc_copies": {"name": "VARCHAR", "target": "BIGINT", "source": "BIGINT", "stream": "BIGINT", "bytes": "BIGINT"},
    "roc_calls": {"name": "VARCHAR", "category": "VARCHAR", "text": "VARCHAR", "thread": "BIGINT"},
}  # fmt: skip
"""Intermediate tables for both formats; each also has the columns of `_COMMON_COLUMNS`."""

_COMMON_COLUMNS = {"process": "BIGINT", "correlation": "BIGINT", "start_ns": "BIGINT", "end_ns": "BIGINT"}
_MARKERS = "category LIKE 'MARKER%'"


class Rocprof(TableImporter):
    """rocprofv3's rocpd databases and JSON, and RPD files."""

    name = "rocprof"

    def recognises(self, head: bytes, source: str) -> bool:
        """Return whether the file is a rocpd database, or JSON of rocprofv3."""
        return (head.lstrip()[:1] == b"{" and f'"{KEY}"'.encode() in head) or is_rocpd(head, source)

    def fill(self, con: duckdb.DuckDBPyConnection, source: str) -> SourceInfo:
        """Make the table `raw_spans`, see `TableImporter.fill`.

        Raises:
            TraceError: the file is damaged, too large, or has an unknown schema.
        """
        losses = Losses(self.name)
        for name, columns in ROWS.items():
            table.create(con, name, _columns(columns | _COMMON_COLUMNS))
        with open(source, "rb") as file:
            is_database = file.read(len(SQLITE)) == SQLITE
        with check_values(source):
            agents = _from_database(con, source, losses) if is_database else _from_json(con, source)
            _fill(con, agents, losses)
        losses.note("times count from the start of the machine, not from 1970")
        run: dict[str, Any] = {"profiler": {"name": "RPD" if source.endswith(".rpd") else "rocprofv3"}}
        if agents:
            properties = [
                contract.device(agent.name, agent.multiprocessors, None, None, None, agent.warp_size)
                for agent in agents
            ]
            run["machine"] = {"devices": [agent.name for agent in agents], "device_properties": properties}
        return SourceInfo(run, losses)


def is_rocpd(head: bytes, source: str) -> bool:
    """Return whether a file is a rocpd database, as opposed to an SQLite export of nsys."""
    if not head.startswith(SQLITE):
        return False
    try:
        file = sqlite3.connect(f"{Path(source).absolute().as_uri()}?mode=ro&immutable=1", uri=True)
        try:
            tables = file.execute("SELECT 1 FROM sqlite_master WHERE name LIKE 'rocpd_%' LIMIT 1").fetchall()
        finally:
            file.close()
    except (sqlite3.Error, ValueError):
        return False
    return bool(tables)


def _columns(columns: Mapping[str, str]) -> list[Column]:
    return [Column(name, kind, "") for name, kind in columns.items()]


class _Agent:
    """A GPU; its index in the list is the number of the device."""

    def __init__(self, identity: Any, name: Any, properties: Mapping[str, Any]) -> None:
        self.id = identity if isinstance(identity, int) else -1
        self.name = name if isinstance(name, str) and name else "unknown"
        self.multiprocessors = properties.get("cu_count") if is_count(properties.get("cu_count")) else None
        self.warp_size = properties.get("wave_front_size") if is_count(properties.get("wave_front_size")) else None


# --- rocpd --------------------------------------------------------------------------------------------------


def _from_database(con: duckdb.DuckDBPyConnection, source: str, losses: Losses) -> list[_Agent]:
    with atomic.temporary_folder() as folder:
        export = Export(source, Path(folder), "record it again with rocprofv3")
        try:
            if rpd.OPS in export.tables:
                return [_Agent(gpu, None, {}) for gpu in rpd.fill(con, export, losses)]
            kernel_tables = [name for name in sorted(export.tables) if name.startswith("rocpd_kernel_dispatch")]
            if not kernel_tables:
                raise TraceError(
                    f"{source}: holds no kernels (no table rocpd_kernel_dispatch); record with --kernel-trace"
                )
            agents: list[_Agent] = []
            for name in kernel_tables:
                if not {"start", "end"} <= export.tables[name]:
                    raise TraceError(
                        f"{source}: has an unknown schema of rocpd; record with rocprofv3 --output-format json"
                    )
                suffix = name.removeprefix("rocpd_kernel_dispatch")
                for base_name, columns in ROCPD_COLUMNS.items():
                    export.copy(con, base_name + suffix, base_name, columns)
                agents = agents or _agents_of(con)
                for target, query in _FROM_ROCPD.items():
                    con.execute(f"INSERT INTO {target} BY NAME {query}")
        finally:
            export.close()
    for base_name in ROCPD_COLUMNS:
        con.execute(f"DROP TABLE IF EXISTS {base_name}")
    return agents


def _agents_of(con: duckdb.DuckDBPyConnection) -> list[_Agent]:
    rows = con.execute(
        "SELECT id, coalesce(nullif(product_name, ''), name), extdata FROM rocpd_info_agent WHERE type = 'GPU' "
        "ORDER BY coalesce(type_index, absolute_index, id), id"
    ).fetchall()
    return [_Agent(identity, name, _object(extra)) for identity, name, extra in rows]


def _object(text: Any) -> dict[str, Any]:
    try:
        parsed = json.loads(text) if isinstance(text, str) else {}
    except (ValueError, RecursionError):
        parsed = {}
    return parsed if isinstance(parsed, dict) else {}


_COMMON_VALUES = """
    coalesce(p.pid, r.pid) AS process, nullif(e.stack_id, 0) AS correlation, r."start" AS start_ns, r."end" AS end_ns
"""
_JOINS = "LEFT JOIN rocpd_event e ON e.id = r.event_id LEFT JOIN rocpd_info_process p ON p.id = r.pid"

_FROM_ROCPD = {
    "roc_kernels": f"""
        SELECT coalesce(nullif(k.display_name, ''), k.kernel_name, 'unnamed kernel') AS name, r.agent_id AS agent,
               coalesce(r.stream_id, r.queue_id) AS stream, k.arch_vgpr_count AS registers,
               r.group_segment_size AS shared, [r.workgroup_size_x, r.workgroup_size_y, r.workgroup_size_z] AS block,
               [ceil(r.grid_size_x / nullif(r.workgroup_size_x, 0)),
                ceil(r.grid_size_y / nullif(r.workgroup_size_y, 0)),
                ceil(r.grid_size_z / nullif(r.workgroup_size_z, 0))]::BIGINT[] AS grid, {_COMMON_VALUES}
        FROM rocpd_kernel_dispatch r {_JOINS} LEFT JOIN rocpd_info_kernel_symbol k ON k.id = r.kernel_id
    """,
    "roc_copies": f"""
        SELECT coalesce(n.string, 'MEMORY_COPY') AS name, r.dst_agent_id AS target, r.src_agent_id AS source,
               coalesce(r.stream_id, r.queue_id) AS stream, r.size AS bytes, {_COMMON_VALUES}
        FROM rocpd_memory_copy r {_JOINS} LEFT JOIN rocpd_string n ON n.id = r.name_id
    """,
    "roc_calls": f"""
        SELECT coalesce(n.string, 'unnamed call') AS name, coalesce(c.string, '') AS category,
               CASE WHEN json_valid(e.extdata) THEN json_extract_string(e.extdata, '$.message') END AS text,
               coalesce(t.tid, r.tid) AS thread, {_COMMON_VALUES}
        FROM rocpd_region r {_JOINS} LEFT JOIN rocpd_string n ON n.id = r.name_id
        LEFT JOIN rocpd_string c ON c.id = e.category_id LEFT JOIN rocpd_info_thread t ON t.id = r.tid
    """,
}


# --- JSON ---------------------------------------------------------------------------------------------------


def _from_json(con: duckdb.DuckDBPyConnection, source: str) -> list[_Agent]:
    try:
        with open_bytes(Path(source)) as file:
            text = file.read(MAX_JSON_BYTES + 1)
        if len(text) > MAX_JSON_BYTES:
            raise TraceError(f"{source}: is larger than 1 GiB; record with rocprofv3 --output-format rocpd")
        tools = json.loads(text)[KEY]
    except TraceError:
        raise
    except (EOFError, OSError, zlib.error, ValueError, KeyError, TypeError, RecursionError) as error:
        raise read_error(source, error) from error
    agents: list[_Agent] = []
    for tool in tools if isinstance(tools, list) else [tools]:
        try:
            agents = agents or _json_agents(tool)
            for target, rows in _json_rows(tool).items():
                table.insert(con, target, rows, _columns(ROWS[target] | _COMMON_COLUMNS))
        except (AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError) as error:
            raise TraceError(f"{source}: is not in rocprofv3's form ({type(error).__name__}: {error})") from error
    return agents


def _json_agents(tool: Mapping[str, Any]) -> list[_Agent]:
    gpus = [agent for agent in tool.get("agents", []) if agent.get("type") in (2, "GPU")]
    gpus.sort(key=lambda gpu: (gpu.get("logical_node_type_id", 0), gpu.get("node_id", 0)))
    return [_Agent(gpu["id"]["handle"], gpu.get("product_name") or gpu.get("name"), gpu) for gpu in gpus]


def _json_rows(tool: Mapping[str, Any]) -> dict[str, Iterator[tuple[Any, ...]]]:
    """Return rows in the order of the columns of `ROWS` and `_COMMON_COLUMNS`."""
    process = tool.get("metadata", {}).get("pid", 0)
    records = tool.get("buffer_records", {})
    names = {kind: (entry.get("kind", ""), entry.get("operations", []))
             for kind, entry in enumerate(tool.get("strings", {}).get("buffer_records", []))}  # fmt: skip
    texts = {marker.get("key"): marker.get("value") for marker in tool.get("strings", {}).get("marker_api", [])}
    symbols = {symbol.get("kernel_id"): symbol for symbol in tool.get("kernel_symbols", [])}

    def common_values(record: Mapping[str, Any]) -> tuple[Any, ...]:
        return process, _correlation_id(record), record["start_timestamp"], record["end_timestamp"]

    def kernels() -> Iterator[tuple[Any, ...]]:
        for record in records.get("kernel_dispatch", []):
            info = record["dispatch_info"]
            symbol = symbols.get(info.get("kernel_id"), {})
            candidates = (symbol.get(f"{prefix}kernel_name") for prefix in ("formatted_", "demangled_", ""))
            sizes = (info.get(f"{dimension}_size", {}) for dimension in ("workgroup", "grid"))
            block, threads = ([int(size.get(axis, 1)) for axis in "xyz"] for size in sizes)
            grid = [-(-total // size) if size else 0 for total, size in zip(threads, block, strict=True)]
            stream = _handle(record.get("stream_id")) or _handle(info.get("queue_id"))
            yield (next(filter(None, candidates), "unnamed kernel"), _handle(info["agent_id"]), stream, grid, block,
                   symbol.get("arch_vgpr_count"), info.get("group_segment_size"), *common_values(record))  # fmt: skip

    def copies() -> Iterator[tuple[Any, ...]]:
        for record in records.get("memory_copy", []):
            yield (_operation(names, record)[1], _handle(record.get("dst_agent_id")),
                   _handle(record.get("src_agent_id")), _handle(record.get("stream_id")), record.get("bytes"),
                   *common_values(record))  # fmt: skip

    def calls() -> Iterator[tuple[Any, ...]]:
        for api, entries in records.items():
            for record in entries if api.endswith("_api") else ():
                category, name = _operation(names, record)
                yield (
                    name,
                    category,
                    texts.get(_correlation_id(record)),
                    record.get("thread_id"),
                    *common_values(record),
                )

    return {"roc_kernels": kernels(), "roc_copies": copies(), "roc_calls": calls()}


def _operation(names: Mapping[int, tuple[str, list[str]]], record: Mapping[str, Any]) -> tuple[str, str]:
    """Return the kind and the name of a call."""
    kind, operations = names.get(record.get("kind", -1), ("", []))
    index = record.get("operation", -1)
    return kind, operations[index] if 0 <= index < len(operations) else "unnamed call"


def _correlation_id(record: Mapping[str, Any]) -> Any:
    return record.get("correlation_id", {}).get("internal")


def _handle(value: Any) -> Any:
    """Return an id, given directly or in an object, as a signed number, because columns hold signed 64-bit integers."""
    handle = value.get("handle") if isinstance(value, Mapping) else value
    return handle - (1 << 64) if isinstance(handle, int) and handle >= 1 << 63 else handle


# --- the table ----------------------------------------------------------------------------------------------


def _fill(con: duckdb.DuckDBPyConnection, agents: Iterable[_Agent], losses: Losses) -> None:
    table.create(con, "raw_spans", RAW_COLUMNS)
    device_rows = [
        (agent.id - (1 << 64) if agent.id >= 1 << 63 else agent.id, index) for index, agent in enumerate(agents)
    ]
    table.create(con, "roc_devices", _columns({"agent": "BIGINT", "device": "INTEGER"}))
    table.insert(con, "roc_devices", device_rows, _columns({"agent": "BIGINT", "device": "INTEGER"}))
    for name in ROWS:
        ((deleted,),) = con.execute(
            f"DELETE FROM {name} WHERE coalesce(start_ns < 0 OR end_ns < start_ns OR end_ns >= {MAX_TIME_NS}, true)"
        ).fetchall()
        if deleted:
            losses.skipped[f"{name.removeprefix('roc_')}: no time, or an end before the start"] += deleted
    ((unknown,),) = con.execute("SELECT count(*) FROM roc_kernels ANTI JOIN roc_devices USING (agent)").fetchall()
    if unknown:
        losses.changed["kernels of an unknown GPU, taken as those of device 0"] += unknown
    for query in (_KERNELS, _COPIES, _CALLS):
        con.execute(f"INSERT INTO raw_spans BY NAME {query}")
    _ranges(con, losses)
    con.execute(
        """
        CREATE OR REPLACE TABLE raw_spans AS SELECT * REPLACE (
            row_number() OVER (ORDER BY start_ns, level, dur_ns DESC) - 1 AS number, coalesce(status, 'ok') AS status,
            coalesce(replayed, false) AS replayed, 'rocprof' AS collector
        ) FROM raw_spans
        """
    )
    ((losses.spans,),) = con.execute("SELECT count(*) FROM raw_spans").fetchall()
    for name in (*ROWS, "roc_devices"):
        con.execute(f"DROP TABLE {name}")


def _ranges(con: duckdb.DuckDBPyConnection, losses: Losses) -> None:
    """Read roctx ranges like NVTX ranges: identifiers of process and thread are packed as in nsys."""
    create_macros(con)
    con.execute("CREATE OR REPLACE TABLE nsys_strings (id BIGINT, value VARCHAR)")
    con.execute(
        f"""
        CREATE OR REPLACE TABLE nsys_nvtx AS
        SELECT start_ns AS "start", end_ns AS "end",
               CASE WHEN name LIKE '%Mark%' THEN 34 WHEN name LIKE '%Start%' THEN 60 ELSE 59 END::BIGINT AS "eventType",
               coalesce(text, name) AS text, NULL::BIGINT AS "textId",
               ((process & 16777215) << 24) | (thread & 16777215) AS "globalTid", NULL::BIGINT AS "endGlobalTid",
               NULL::BIGINT AS "domainId", NULL::VARCHAR AS "binaryData"
        FROM roc_calls WHERE {_MARKERS} AND (text IS NOT NULL OR NOT starts_with(name, 'roctx'))
        """
    )
    nsys_ranges.fill(con, losses)
    drop_tables(con)


_ON_DEVICE = (
    f"{int(Level.KERNEL)} AS level, process, correlation AS correlation_id, start_ns, end_ns - start_ns AS dur_ns"
)

_KERNELS = f"""
    SELECT {_ON_DEVICE}, '{Kind.KERNEL}' AS kind, name, coalesce(device, 0) AS device, stream, json_merge_patch(
               '{{}}', json_object('grid', grid, 'block', block, 'registers', registers, 'shared_bytes', shared)
           ) AS attributes
    FROM roc_kernels LEFT JOIN roc_devices USING (agent)
"""

_COPIES = f"""
    SELECT {_ON_DEVICE}, '{Kind.COPY}' AS kind, coalesce(dst.device, src.device, 0) AS device,
           coalesce(stream, -1) AS stream,
           CASE WHEN dst.device IS NULL AND src.device IS NULL THEN 'HtoH' WHEN src.device IS NULL THEN 'HtoD'
                WHEN dst.device IS NULL THEN 'DtoH' WHEN dst.device = src.device THEN 'DtoD' ELSE 'PtoP'
                END AS direction,
           'Memcpy ' || direction AS name, json_object('bytes', bytes, 'copy', direction) AS attributes
    FROM roc_copies LEFT JOIN roc_devices dst ON dst.agent = target LEFT JOIN roc_devices src ON src.agent = source
"""
_COPIES = f"SELECT * EXCLUDE (direction) FROM ({_COPIES})"

_CALLS = f"""
    SELECT name, CASE WHEN category LIKE 'RCCL%' THEN {int(Level.LIBRARY)} ELSE {int(Level.RUNTIME)} END AS level,
           process, thread, start_ns, end_ns - start_ns AS dur_ns,
           CASE WHEN category LIKE 'RCCL%' THEN NULL ELSE correlation END AS correlation_id,
           CASE WHEN category LIKE 'RCCL%' THEN '{Kind.CALL}'
                WHEN started.correlation IS NOT NULL AND {callnames.AWAITED} IS NULL THEN '{Kind.LAUNCH}'
                ELSE {callnames.KIND} END AS kind,
           CASE WHEN {callnames.AWAITED} IS NOT NULL THEN json_object('sync', {callnames.AWAITED}) END AS attributes
    FROM roc_calls LEFT JOIN (
        SELECT DISTINCT process, correlation FROM (
            SELECT process, correlation FROM roc_kernels UNION ALL SELECT process, correlation FROM roc_copies)
    ) started USING (process, correlation)
    WHERE NOT ({_MARKERS})
"""
