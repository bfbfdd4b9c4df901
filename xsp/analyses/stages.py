"""The stages of a model: its layers in three equal intervals by index, and which of them dominates what.

XSP, section IV-A: where in a model its time, memory, operations and memory traffic go.
"""

from __future__ import annotations

from xsp.analyses.contract import Table, analysis
from xsp.analyses.kernel import at_work
from xsp.schema import Level
from xsp.store.trace import Trace
from xsp.store.views import LAYERS, kernels

NAMES = ("begin", "middle", "end")
METRICS = ("latency_ms", "alloc_mib", "flops", "dram_bytes")


def stage(place: str, count: str) -> str:
    """Return the SQL of which third something at a place, counted from 0, of so many is in: 0, 1 or 2."""
    return f"(3 * {place} // {count})"


@analysis("stages", "Stages of the model", Level.LAYER)
def STAGES(trace: Trace) -> Table:
    """Latency, allocated memory, operations and memory traffic of each third of the layers, by index.

    Latency is that of A13, operations and traffic are those of A12; both are null without the op level. `dominates`
    names the columns in which the stage has the most.
    """
    most = ", ".join(f"CASE WHEN {name} > 0 AND {name} = max({name}) OVER () THEN '{name}' END" for name in METRICS)
    latency = "kernel_ns + other_ns" if trace.has(Level.KERNEL) or trace.has(Level.OP) else "self_ns"
    names = " ".join(f"WHEN {place} THEN '{name}'" for place, name in enumerate(NAMES))
    return trace.sql(
        f"""
        WITH {LAYERS}, {kernels(trace)}, {at_work(trace)}, work_of AS (
            SELECT layer_id AS of_layer, sum(whole_flops) AS work,
                   sum(whole_dram_read_bytes + whole_dram_write_bytes) AS moved
            FROM kernels GROUP BY layer_id
        ), placed AS (
            SELECT *, {stage("(row_number() OVER (ORDER BY layer_index) - 1)", "count(*) OVER ()")} AS third
            FROM at_work
        ), thirds AS (
            SELECT third, count(*) AS layers, min(layer_index) AS first_index, max(layer_index) AS last_index,
                   sum({latency}) / 1e6 AS latency_ms, sum(self_alloc_bytes) / 1048576 AS alloc_mib,
                   round(sum(work))::BIGINT AS flops, round(sum(moved))::BIGINT AS dram_bytes
            FROM placed LEFT JOIN work_of ON of_layer = span_id GROUP BY third
        )
        SELECT CASE third {names} END AS stage, thirds.* EXCLUDE (third), concat_ws(', ', {most}) AS dominates
        FROM thirds ORDER BY third
        """
    )
