"""A8 and A10 to A13: kernels, one by one, by name and by layer.

On a machine without a device the kernels are the leaves of what was recorded (see `KERNELS`). What needs a
device's counters (DRAM traffic, occupancy, and what follows from them) is null until a counter rung gives it.
"""

from __future__ import annotations

from xsp.analyses.contract import Table, analysis
from xsp.span import Kind, Level
from xsp.trace import Trace
from xsp.views import KERNELS, LAYERS, NS, UNDER

_MODEL = f"(SELECT max({NS}) FROM merged WHERE kind = '{Kind.STEP}')"

_COUNTERS = """
    CAST(NULL AS BIGINT) AS dram_read_bytes, CAST(NULL AS BIGINT) AS dram_write_bytes,
    CAST(NULL AS DOUBLE) AS occupancy, CAST(NULL AS DOUBLE) AS flop_per_byte,
    CAST(NULL AS BOOLEAN) AS memory_bound
"""


@analysis("A8", "Kernel information", Level.OP)
def A8(trace: Trace) -> Table:
    """Each kernel call: name, layer, latency, operations and where they are known from, throughput.

    `library` is oneDNN for its primitives, `device` for a GPU's kernels, and `unknown` for operators that
    went to MKL or to PyTorch's own code, which leave no trace.
    """
    return trace.sql(
        f"""
        WITH {UNDER}, {KERNELS}
        SELECT name, layer_index, layer_name, phase, library, ns / 1e3 AS latency_us,
               true_lo_ns / 1e3 AS low_us, true_hi_ns / 1e3 AS high_us,
               flops, CASE WHEN flops IS NOT NULL THEN 'shapes' END AS flops_source,
               flops / nullif(ns, 0) AS gflop_per_s, {_COUNTERS}
        FROM kernels ORDER BY start_ns
        """
    )


@analysis("A10", "Kernels by name", Level.OP)
def A10(trace: Trace) -> Table:
    """Kernels of the same name together: calls, time, share of the model's latency, throughput."""
    return _grouped(trace, "name, library", "name, any_value(library) AS library", "latency_ms DESC, name")


@analysis("A11", "Kernels by layer", Level.LAYER, Level.OP)
def A11(trace: Trace) -> Table:
    """Kernels of the same layer together; those of no layer stand in a row without one."""
    return _grouped(
        trace,
        "layer_id",
        "any_value(layer_index) AS layer_index, any_value(layer_name) AS layer_name",
        "layer_index",
    )


def _grouped(trace: Trace, group: str, shown: str, order: str) -> Table:
    return trace.sql(
        f"""
        WITH {UNDER}, {KERNELS}
        SELECT {shown}, count(*) AS calls, sum(ns) / 1e6 AS latency_ms,
               100.0 * sum(ns) / {_MODEL} AS percent_of_model,
               sum(flops)::BIGINT AS flops, sum(flops) / nullif(sum(ns), 0) AS gflop_per_s, {_COUNTERS}
        FROM kernels GROUP BY {group} ORDER BY {order} NULLS LAST
        """
    )


@analysis("A12", "Metrics by layer", Level.LAYER, Level.OP)
def A12(trace: Trace) -> Table:
    """Operations and DRAM traffic of each layer's kernels, in execution order."""
    return trace.sql(
        f"""
        WITH {UNDER}, {KERNELS}
        SELECT any_value(layer_index) AS layer_index, any_value(layer_name) AS layer_name,
               sum(flops)::BIGINT AS flops, {_COUNTERS}
        FROM kernels WHERE layer_id IS NOT NULL GROUP BY layer_id ORDER BY layer_index
        """
    )


@analysis("A13", "Kernel against other latency", Level.LAYER, Level.OP)
def A13(trace: Trace) -> Table:
    """How much of each layer's own forward time its kernels take, and how much is spent around them."""
    return trace.sql(
        f"""
        WITH {UNDER}, {LAYERS}, {KERNELS}, busy AS (
            SELECT layer_id, sum(ns) AS ns FROM kernels WHERE phase IS DISTINCT FROM 'backward' GROUP BY layer_id
        )
        SELECT layers.layer_index, layers.name AS layer_name, layers.type, self_ns / 1e6 AS latency_ms,
               coalesce(busy.ns, 0) / 1e6 AS kernel_ms, (self_ns - coalesce(busy.ns, 0)) / 1e6 AS other_ms,
               100.0 * coalesce(busy.ns, 0) / nullif(self_ns, 0) AS kernel_percent
        FROM layers LEFT JOIN busy ON busy.layer_id = layers.span_id ORDER BY layers.layer_index
        """
    )
