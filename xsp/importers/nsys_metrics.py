"""The samples of a device's hardware metrics in an nsys export (`--gpu-metrics-devices`), as samples beside the spans.

`GPU_METRICS` has a row for each metric at each moment; `TARGET_INFO_GPU_METRICS` has their names, with the unit in
brackets. The lowest byte of `typeId` is the number of the GPU on the machine.
"""

from __future__ import annotations

import duckdb

from xsp import table
from xsp.importers.contract import MAX_TIME_NS, SAMPLES, Losses
from xsp.importers.nsys_tables import Export
from xsp.schema import SAMPLE_COLUMNS

TABLES = ("GPU_METRICS", "TARGET_INFO_GPU_METRICS")


def copy(con: duckdb.DuckDBPyConnection, export: Export) -> None:
    """Copy the tables of metrics into the engine.

    Raises:
        TraceError: one cannot be read.
    """
    ids = {"typeId": "BIGINT", "metricId": "BIGINT"}
    export.copy(con, TABLES[0], "nsys_metrics", {"timestamp": "BIGINT", **ids, "value": "DOUBLE"})
    export.copy(con, TABLES[1], "nsys_metric_names", {**ids, "metricName": "VARCHAR"})


def fill(con: duckdb.DuckDBPyConnection, losses: Losses, epoch_ns: int) -> None:
    """Make the table of samples from the tables that `copy` made, if there are metrics.

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
