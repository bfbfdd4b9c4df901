"""Read SQLite files that Nsight Systems exported.

One file is one rank. It may contain several processes, each with its own correlation ids, and several devices. Of the
data on the machine only the devices and the version of nsys are imported: the other tables contain the environment,
the command line, and names of hosts and users.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import duckdb

from xsp import atomic, table
from xsp.errors import TraceError
from xsp.importers import contract, nsys_activities, nsys_ranges
from xsp.importers.contract import (
    CPU_SAMPLES,
    CUDA_BACKTRACES,
    GZIP,
    MAX_TIME_NS,
    OS_BACKTRACES,
    RAW_COLUMNS,
    SAMPLES,
    Losses,
    SourceInfo,
    TableImporter,
    check_values,
)
from xsp.importers.nsys_tables import SQLITE, Export, create_macros, drop_tables
from xsp.importers.rocprof import is_rocpd
from xsp.schema import SAMPLE_COLUMNS, Level

REPORTS = (".nsys-rep", ".qdrep", ".qdstrm")

EXPORT = "nsys export --type sqlite {}"
OVERHEADS = {
    1: "Unknown", 2: "Driver JIT compiler (CUDA)", 3: "Buffer flush (Profiler)", 4: "Instrumentation (Profiler)",
    5: "Resource creation/destruction (Profiler)", 6: "Runtime module loading (CUDA)",
    7: "Lazy function loading (CUDA)", 8: "Command buffer full (CUDA)",
}  # fmt: skip
"""Nsys's names for kinds of overhead, for files without the table of these names."""

IGNORED = ("ANALYSIS_", "ENUM_", "META_DATA_", "TARGET_INFO_", "NVTX_PAYLOAD_", "sqlite_")
CALLCHAINS = {
    "CUDA_CALLCHAINS": CUDA_BACKTRACES, "OSRT_CALLCHAINS": OS_BACKTRACES, "SAMPLING_CALLCHAINS": CPU_SAMPLES,
}  # fmt: skip
"""Tables of stacks, which are not read; they are counted, because recording them slows the host down."""

METRIC_TABLES = ("GPU_METRICS", "TARGET_INFO_GPU_METRICS")

METADATA_TABLES = {"NVTX_EVENTS", "StringIds", "PROCESSES", "ProcessStreams", "ThreadNames", "MODULES",
                   "EXPORT_META_DATA", "CUDA_GRAPH_NODE_EVENTS", "CUDA_GRAPH_EVENTS",
                   *METRIC_TABLES}  # fmt: skip
"""Tables that hold no spans."""

_GPU = {"id": "BIGINT", "name": "VARCHAR", "smCount": "BIGINT", "totalMemory": "BIGINT", "computeMajor": "BIGINT",
        "computeMinor": "BIGINT", "threadsPerWarp": "BIGINT"}  # fmt: skip


class Nsys(TableImporter):
    """Nsight Systems' export to SQLite."""

    name = "nsys"

    def recognises(self, head: bytes, source: str) -> bool:
        """Return whether the file is an SQLite file, or a report of nsys that must be exported first."""
        return (head.startswith(SQLITE) and not is_rocpd(head, source)) or source.lower().endswith(REPORTS)

    def fill(self, con: duckdb.DuckDBPyConnection, source: str) -> SourceInfo:
        """Make the table `raw_spans`, see `TableImporter.fill`.

        Raises:
            TraceError: the file is a report instead of an export, not SQLite, damaged, or not from nsys.
        """
        _check(source)
        losses = Losses(self.name)
        with atomic.temporary_folder() as folder:
            export = Export(source, Path(folder))
            try:
                if not {"StringIds", "NVTX_EVENTS", *nsys_activities.TABLES} & set(export.tables):
                    raise TraceError(
                        f"{source}: is an SQLite file, but not from Nsight Systems: it has none of its tables; "
                        f"export a report ({EXPORT.format('REPORT.nsys-rep')}), or record with rocprofv3 "
                        "--output-format rocpd"
                    )
                run = _run(export, losses)
                _copy(con, export)
                _count_others(export, losses)
            finally:
                export.close()
        with check_values(source):
            _fill(con, losses, int(run.pop("session_start_ns", 0)))
        return SourceInfo(run, losses)


# --- the file ---------------------------------------------------------------------------------------------


def _check(source: str) -> None:
    """Raise TraceError for a file that must be converted to SQLite first."""
    name = Path(source).name
    with open(source, "rb") as file:
        head = file.read(len(SQLITE))
    if head.startswith(GZIP):
        raise TraceError(f"{source}: is compressed; decompress it first (gunzip)")
    if not head.startswith(SQLITE):
        raise TraceError(
            f"{source}: is a report of Nsight Systems; export it first: {EXPORT.format(shlex.quote(name))}"
        )


def _run(export: Export, losses: Losses) -> dict[str, Any]:
    """Return the file's data on the machine and on nsys."""
    metadata = dict(export.rows("META_DATA_EXPORT", {"name": "VARCHAR", "value": "VARCHAR"}))
    version, schema = metadata.get("EXPORT_PRODUCT_VERSION"), metadata.get("EXPORT_SCHEMA_VERSION")
    run: dict[str, Any] = {"profiler": {"name": "Nsight Systems", "version": version, "schema": schema}}
    start_rows = export.rows("TARGET_INFO_SESSION_START_TIME", {"utcEpochNs": "BIGINT"})
    epoch = start_rows[0][0] if start_rows else None
    if epoch is None or not 0 <= epoch < MAX_TIME_NS:
        losses.note("the file does not say when the recording began: times count from its start")
    else:
        run["session_start_ns"] = epoch
    devices = export.rows("TARGET_INFO_GPU", _GPU)
    if devices:
        ordered = sorted(devices, key=lambda row: row[0] if row[0] is not None else 0)
        properties = [contract.device(*row[1:]) for row in ordered]
        run["machine"] = {
            "devices": [device["name"] or "unknown" for device in properties],
            "device_properties": properties,
        }
    else:
        losses.note("the file does not say what its devices are (no TARGET_INFO_GPU)")
    return run


def _count_others(export: Export, losses: Losses) -> None:
    """Count the rows of tables with timestamps that are not read, and the frames of stacks."""
    for name, reason in CALLCHAINS.items():
        if name in export.tables and (count := export.count(name)):
            losses.skipped[reason] += count
    imported_tables = {*nsys_activities.TABLES, *nsys_activities.LIBRARIES, *METADATA_TABLES}
    for name, columns in sorted(export.tables.items()):
        if (
            name in imported_tables
            or name in CALLCHAINS
            or name.startswith(IGNORED)
            or not columns & {"start", "timestamp", "rawTimestamp"}
        ):
            continue
        count = export.count(name)
        if count:
            losses.skipped[f"rows of {name}"] += count


# --- the table --------------------------------------------------------------------------------------------


def _copy(con: duckdb.DuckDBPyConnection, export: Export) -> None:
    """Copy all needed tables into the engine."""
    create_macros(con)
    nsys_activities.copy(con, export)
    nsys_ranges.copy(con, export)
    copy_metrics(con, export)
    export.copy_strings(
        con, f"SELECT DISTINCT id FROM ({nsys_activities.names()} UNION {nsys_ranges.names()}) WHERE id IS NOT NULL"
    )
    label_columns = {"id": "BIGINT", "label": "VARCHAR"}
    export.copy(con, "ENUM_CUDA_MEM_KIND", "nsys_kinds", label_columns)
    if not export.copy(con, "ENUM_CUPTI_OVERHEAD_TYPE", "nsys_overheads", label_columns):
        con.executemany("INSERT INTO nsys_overheads VALUES (?, ?)", list(OVERHEADS.items()))
    export.copy(con, "TARGET_INFO_GPU", "nsys_gpus", _GPU)
    ordinals = {"pid": "BIGINT", "cudaId": "BIGINT", "gpuId": "BIGINT", "numMultiprocessors": "BIGINT"}
    export.copy(con, "TARGET_INFO_CUDA_DEVICE", "nsys_ordinals", ordinals)
    con.execute(_DEVICES)


_DEVICES = """
    CREATE OR REPLACE TEMP TABLE nsys_devices AS
    SELECT o.pid AS process, o.cudaId AS ordinal, any_value(o.gpuId) AS device,
           nullif(any_value(coalesce(o.numMultiprocessors, g.smCount)), 0) AS sms
    FROM nsys_ordinals o LEFT JOIN nsys_gpus g ON g.id = o.gpuId
    WHERE o.pid IS NOT NULL AND o.cudaId IS NOT NULL AND o.gpuId BETWEEN 0 AND 65535 GROUP BY ALL
"""
"""Device of the machine for each process and ordinal: device 0 of a process may be any device of the machine."""


def _fill(con: duckdb.DuckDBPyConnection, losses: Losses, epoch: int) -> None:
    table.create(con, "raw_spans", RAW_COLUMNS)
    nsys_activities.fill(con, losses)
    nsys_ranges.fill(con, losses)
    fill_metrics(con, losses, epoch)
    ((deleted,),) = con.execute(
        f"DELETE FROM raw_spans WHERE start_ns NOT BETWEEN {-epoch} AND {MAX_TIME_NS - epoch} OR dur_ns > {MAX_TIME_NS}"
    ).fetchall()
    if deleted:
        losses.skipped["a time before the epoch or in the far future"] += deleted
    con.execute(
        """
        CREATE OR REPLACE TABLE raw_spans AS SELECT * REPLACE (
            row_number() OVER (ORDER BY start_ns, level, dur_ns DESC) - 1 AS number, start_ns + $1::BIGINT AS start_ns,
            coalesce(status, 'ok') AS status, coalesce(replayed, false) AS replayed, 'nsys' AS collector
        ) FROM raw_spans
        """,
        [epoch],
    )
    _find_forward(con, losses)
    ((losses.spans,),) = con.execute("SELECT count(*) FROM raw_spans").fetchall()
    drop_tables(con)


def _find_forward(con: duckdb.DuckDBPyConnection, losses: Losses) -> None:
    """Set the thread on which the forward operator of each backward operator ran.

    Sequence numbers count per thread, so this is known only if operators of a single thread of the process have them.
    """
    con.execute(
        f"""
        UPDATE raw_spans SET forward_thread = forward.thread FROM (
            SELECT process, min(thread) AS thread FROM raw_spans
            WHERE level = {int(Level.OP)} AND sequence_nr IS NOT NULL AND phase IS NULL
            GROUP BY process HAVING min(thread) = max(thread)
        ) forward
        WHERE raw_spans.phase = 'backward' AND raw_spans.sequence_nr IS NOT NULL AND raw_spans.process = forward.process
        """
    )
    ((unmatched,),) = con.execute(
        "SELECT count(*) FROM raw_spans WHERE phase = 'backward' AND forward_thread IS NULL"
    ).fetchall()
    if unmatched:
        losses.note(f"{unmatched} backward operators whose forward operator is unknown")


# --- metrics ----------------------------------------------------------------------------------------------------------
# The samples of a device's hardware metrics in an nsys export (`--gpu-metrics-devices`), as samples beside the
# spans.
#
# `GPU_METRICS` has a row for each metric at each moment; `TARGET_INFO_GPU_METRICS` has their names, with the unit
# in brackets. The lowest byte of `typeId` is the number of the GPU on the machine.


def copy_metrics(con: duckdb.DuckDBPyConnection, export: Export) -> None:
    """Copy the tables of metrics into the engine.

    Raises:
        TraceError: one cannot be read.
    """
    ids = {"typeId": "BIGINT", "metricId": "BIGINT"}
    export.copy(con, METRIC_TABLES[0], "nsys_metrics", {"timestamp": "BIGINT", **ids, "value": "DOUBLE"})
    export.copy(con, METRIC_TABLES[1], "nsys_metric_names", {**ids, "metricName": "VARCHAR"})


def fill_metrics(con: duckdb.DuckDBPyConnection, losses: Losses, epoch_ns: int) -> None:
    """Make the table of samples from the tables that `copy_metrics` made, if there are metrics.

    Args:
        con: the engine.
        losses: counts metrics that have no name, and values without a usable time.
        epoch_ns: the moment from which times count.
    """
    ((count,),) = con.execute("SELECT count(*) FROM nsys_metrics").fetchall()
    if not count:
        return
    table.create(con, SAMPLES, SAMPLE_COLUMNS)
    con.execute(f"INSERT INTO {SAMPLES} BY NAME {_SAMPLES}", [epoch_ns])
    ((kept,),) = con.execute(f"SELECT count(*) FROM {SAMPLES}").fetchall()
    if kept < count:
        losses.skipped["values of GPU metrics without a name, a number or a time"] += count - kept


_SAMPLES = f"""
    SELECT timestamp + $1::BIGINT AS time_ns, (m.typeId & 255)::INTEGER AS device,
           trim(regexp_replace(metricName, '\\[[^\\]]*\\]\\s*$', '')) AS name,
           coalesce(CASE WHEN contains(metricName, '%') THEN '%' END,
                    nullif(regexp_extract(metricName, '\\[([^\\]]*)\\]\\s*$', 1), ''), '') AS unit, value
    FROM nsys_metrics m JOIN (
        SELECT typeId, metricId, any_value(metricName) AS metricName FROM nsys_metric_names
        WHERE metricName IS NOT NULL GROUP BY ALL
    ) n ON n.typeId = m.typeId AND n.metricId = m.metricId
    WHERE value IS NOT NULL AND timestamp BETWEEN 0 AND {MAX_TIME_NS // 2}
"""
