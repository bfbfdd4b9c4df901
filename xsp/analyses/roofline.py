"""A9, A14 and A15: the roofline of kernels, layers and the model.

The roof is the peak of the device in the precision of the work, and its memory bandwidth: quoted from `devices.toml`,
or measured (see `xsp.device.ceilings`). Work whose element type is stated neither by its operator nor by the name of
its kernel has no peak; its share of the bandwidth is still known.
"""

from __future__ import annotations

from xsp.analyses.contract import Table, analysis
from xsp.analyses.kernel import (
    FIGURES,
    GFLOP_PER_S,
    HOST_NS,
    MODEL_NS,
    attainable,
    common_tables,
    devices,
    intensity,
    memory_bound,
    share,
    spread,
    sum_columns,
    throughput,
    wall,
)
from xsp.device import ceilings
from xsp.errors import AnalysisError
from xsp.schema import Kind, Level
from xsp.store.trace import Trace
from xsp.store.views import TOTAL_NS, kernels


def _reason_without_points(trace: Trace) -> str | None:
    """Return why no kernel of a trace has a point under a roof, or None if one has."""
    try:
        ceilings.of_run(trace.run, trace.has(Level.KERNEL))
    except AnalysisError as error:
        return str(error)
    ((count,),) = trace.con.execute(
        f"WITH {kernels(trace)} "
        "SELECT count(*) FROM kernels WHERE whole_flops IS NOT NULL AND whole_dram_read_bytes IS NOT NULL"
    ).fetchall()
    if count:
        return None
    return (
        "there is no kernel whose operations and memory traffic are both known: record shapes (torch.profiler's "
        "record_shapes), or counters"
    )


_BANDWIDTH = "(SELECT max(bandwidth_gbyte_per_s) FROM roofs)"

_POINT = f"""
    precision, peak_gflop_per_s, {_BANDWIDTH} AS bandwidth_gbyte_per_s,
    {attainable("flop_per_byte", "peak_gflop_per_s", "bandwidth_gbyte_per_s")} AS roof_gflop_per_s,
    {share("gflop_per_s", attainable("flop_per_byte", "peak_gflop_per_s", "bandwidth_gbyte_per_s"))} AS roof_percent,
    {share("gbyte_per_s", _BANDWIDTH)} AS bandwidth_percent,
    {memory_bound("flop_per_byte", "ideal")} AS memory_bound
"""


@analysis("A9", "Kernel roofline", Level.OP, unless=_reason_without_points)
def kernel_roofline(trace: Trace) -> Table:
    """Arithmetic intensity and throughput of each kernel, and the roof at that intensity.

    `roof_gflop_per_s` is the height of the roof at the intensity of the kernel, `roof_percent` the share of it that is
    reached, and `bandwidth_percent` the share of the memory bandwidth. They are null for kernels without counted
    operations (element-wise work, see docs/understand/rooflines.md) or without known traffic.
    """
    return trace.sql(
        f"""
        WITH {common_tables(trace)}, points AS (
            SELECT *, {intensity("flops", "dram_read_bytes", "dram_write_bytes")} AS flop_per_byte,
                   {throughput("flops", "ns")} AS gflop_per_s,
                   {throughput("(dram_read_bytes + dram_write_bytes)", "ns")} AS gbyte_per_s
            FROM kernels LEFT JOIN roofs USING (precision) WHERE computes
        )
        SELECT name, layer_index, layer_name, ns / 1e3 AS latency_us, flop_per_byte, gflop_per_s, gbyte_per_s, {_POINT},
               CASE WHEN flops IS NOT NULL THEN flops_source END AS flops_source,
               CASE WHEN dram_read_bytes IS NOT NULL THEN bytes_source END AS bytes_source
        FROM points ORDER BY start_ns
        """
    )


@analysis("A14", "Layer roofline", Level.LAYER, Level.OP, unless=_reason_without_points)
def layer_roofline(trace: Trace) -> Table:
    """Arithmetic intensity and throughput of the kernels of each layer together, and the roof at that intensity.

    The precision is that of the layer's largest operation, null if that is unknown. Throughput is null if less than
    90 % of the time of the layer's kernels has known operations (`flops_known_percent`).
    """
    return trace.sql(
        f"""
        WITH {common_tables(trace)}, groups AS (
            SELECT any_value(layer_index) AS layer_index, any_value(layer_name) AS layer_name, {sum_columns()}
            FROM kernels WHERE layer_id IS NOT NULL GROUP BY layer_id
        ), points AS (
            SELECT *, {GFLOP_PER_S} AS gflop_per_s,
                   {throughput("(dram_read_bytes + dram_write_bytes)", "ns")} AS gbyte_per_s
            FROM groups LEFT JOIN roofs USING (precision)
        )
        SELECT layer_index, layer_name, ns / 1e6 AS latency_ms, flop_per_byte, gflop_per_s, gbyte_per_s, {_POINT},
               flops_known_percent, bytes_known_percent
        FROM points ORDER BY layer_index
        """
    )


@analysis("A15", "Kernels by model", Level.OP)
def kernels_by_model(trace: Trace) -> Table:
    """All kernels of the model together: time, operations, memory traffic, and whether memory bounds the model.

    `latency_ms` is the time from the start of the step to the end of its last kernel, `host_ms` the step's time on the
    host. `kernel_ms` is the sum over the kernels of a device, `kernel_percent_of_wall` the share of `latency_ms` in
    which any of them ran: XSP's GPU latency percentage. With several devices both are means. Over the runs of a sweep
    this is the model roofline, see `xsp.analyses.model_roofline`.

    Without a device, `operators_ms` is the time of the outermost operators, and `covered_percent` the kernels' sum in
    percent of it: 100, or more if primitives ran at the same time. The rest of the step is Python and waiting.
    """
    operators_ns = "NULL::DOUBLE" if trace.has(Level.KERNEL) else TOTAL_NS
    return trace.sql(
        f"""
        WITH {common_tables(trace)}, {spread(trace)},
        groups AS (SELECT {sum_columns()}, sum(exclusive_ns) AS exclusive_ns FROM spread)
        SELECT (SELECT max(batch_size) FROM merged WHERE kind = '{Kind.STEP}') AS batch_size,
               {MODEL_NS} / 1e6 AS latency_ms, {HOST_NS} / 1e6 AS host_ms, ns / {devices(trace)} / 1e6 AS kernel_ms,
               {share("exclusive_ns", wall(trace))} AS kernel_percent_of_wall, {operators_ns} / 1e6 AS operators_ms,
               {share("ns", operators_ns)} AS covered_percent, calls,
               {FIGURES}
        FROM groups LEFT JOIN roofs USING (precision)
        """
    )
