"""Tables of ROCm's Remote Profile Data (`.rpd`, SQLite, schemas 1 and 2), as rows of `xsp.importers.rocprof`.

`rocpd_op` has the work of devices, `rocpd_api` the calls of HIP and ranges of roctx, `rocpd_api_ops` which call started
which work, and `rocpd_string` all names. A file names no products; the number of a GPU is its `gpuId`.
"""

from __future__ import annotations

import duckdb

from xsp.importers.contract import Losses
from xsp.importers.nsys_tables import Export

OPS = "rocpd_op"
"""The table that other formats of ROCm's profilers lack."""

_COLUMNS = {
    OPS: dict.fromkeys(("id", "gpuId", "queueId", "start", "end", "description_id", "opType_id"), "BIGINT"),
    "rocpd_api": dict.fromkeys(("id", "pid", "tid", "start", "end", "apiName_id", "args_id"), "BIGINT"),
    "rocpd_api_ops": {"api_id": "BIGINT", "op_id": "BIGINT"},
    "rocpd_copyapi": {"api_ptr_id": "BIGINT", "size": "BIGINT"},
    "rocpd_kernelapi": dict.fromkeys(
        ("api_ptr_id", "groupSegmentSize", "gridX", "gridY", "gridZ", "workgroupX", "workgroupY", "workgroupZ"),
        "BIGINT"),
    "rocpd_string": {"id": "BIGINT", "string": "VARCHAR"},
}  # fmt: skip

_TIMES = 'r."start" AS start_ns, r."end" AS end_ns'
_IS_OWN = "(contains(n.string, '::') OR n.string = 'hcc_activity_callback')"
_WORK = f"""
    SELECT r.*, {_TIMES}, t.string AS type, nullif(d.string, '') AS description, a.pid AS process, a.id AS correlation
    FROM rocpd_op r LEFT JOIN rocpd_string t ON t.id = r.opType_id LEFT JOIN rocpd_string d ON d.id = r.description_id
    LEFT JOIN (SELECT op_id, min(api_id) AS api_id FROM rocpd_api_ops GROUP BY op_id) started ON started.op_id = r.id
    LEFT JOIN rocpd_api a ON a.id = started.api_id
"""
_IS_COPY = "starts_with(type, 'Copy')"
_IS_BARRIER = "contains(type, 'Barrier')"

_ROWS = {
    "roc_kernels": f"""
        SELECT coalesce(description, type, 'unnamed kernel') AS name, gpuId AS agent, queueId AS stream,
               [k.workgroupX, k.workgroupY, k.workgroupZ] AS block, k.groupSegmentSize AS shared,
               [k.gridX, k.gridY, k.gridZ] AS grid, process, correlation, start_ns, end_ns
        FROM ({_WORK}) LEFT JOIN rocpd_kernelapi k ON k.api_ptr_id = correlation
        WHERE NOT coalesce({_IS_COPY} OR {_IS_BARRIER}, false)
    """,
    "roc_copies": f"""
        SELECT type AS name, CASE WHEN NOT contains(type, 'ToHost') THEN gpuId END AS target,
               CASE WHEN NOT contains(type, 'HostTo') THEN gpuId END AS source, queueId AS stream, c.size AS bytes,
               process, correlation, start_ns, end_ns
        FROM ({_WORK}) LEFT JOIN rocpd_copyapi c ON c.api_ptr_id = correlation WHERE {_IS_COPY}
    """,
    "roc_calls": f"""
        SELECT CASE WHEN n.string = 'UserMarker' THEN 'roctxRange' ELSE coalesce(n.string, 'unnamed call') END AS name,
               CASE WHEN n.string = 'UserMarker' THEN 'MARKER' ELSE '' END AS category,
               CASE WHEN n.string = 'UserMarker' THEN t.string END AS text, r.tid AS thread, r.pid AS process,
               r.id AS correlation, {_TIMES}
        FROM rocpd_api r LEFT JOIN rocpd_string n ON n.id = r.apiName_id LEFT JOIN rocpd_string t ON t.id = r.args_id
        WHERE NOT coalesce({_IS_OWN}, false)
    """,
}


def fill(con: duckdb.DuckDBPyConnection, export: Export, losses: Losses) -> list[int]:
    """Fill the intermediate tables of `xsp.importers.rocprof`, and return the numbers of the GPUs.

    Raises:
        TraceError: a table cannot be read.
    """
    for name, columns in _COLUMNS.items():
        export.copy(con, name, name, columns)
    for target, query in _ROWS.items():
        con.execute(f"INSERT INTO {target} BY NAME {query}")
    left_out = {
        "barriers on devices": f"SELECT count(*) FROM ({_WORK}) WHERE {_IS_BARRIER}",
        "the profiler's own work": "SELECT count(*) FROM rocpd_api r JOIN rocpd_string n ON n.id = r.apiName_id "
        f"WHERE {_IS_OWN}",
    }
    for reason, query in left_out.items():
        ((count,),) = con.execute(query).fetchall()
        if count:
            losses.skipped[reason] += count
    gpus = [gpu for (gpu,) in con.execute("SELECT DISTINCT gpuId FROM rocpd_op ORDER BY gpuId").fetchall()]
    for name in _COLUMNS:
        con.execute(f"DROP TABLE {name}")
    return gpus
