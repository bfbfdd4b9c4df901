"""A2 to A7: the layers of a model, one by one and by type; `layers`: the calls of a module together.

A layer is a call of a module. Modules nest, and a module may compute between the calls of its children (an addition,
an attention); so each row has the latency of the whole call and its self time, `self_ms`, without the calls inside it.
Sums and shares use self times, which add up to the time of the model.
"""

from __future__ import annotations

from xsp.analyses.contract import Table, analysis
from xsp.analyses.kernel import at_work
from xsp.schema import Kind, Level, Rule
from xsp.store.trace import Trace
from xsp.store.views import FULL_NAME, LAYERS, NS, kernels


@analysis("A2", "Layer information", Level.LAYER)
def layer_information(trace: Trace) -> Table:
    """Each executed layer: index, name, type, input shapes, latency on the host with its interval, memory.

    `kernel_ms` is the time of the device kernels that the layer itself launched in its forward pass; if the host does
    not wait for them, they are not in `latency_ms` (see A13). `backward_ms` is the time of the backward operators of
    the layer's own forward operators; null without the op level. Memory is MiB allocated by the layer itself, null if
    no describing step was recorded.
    """
    return trace.sql(
        f"""
        WITH {LAYERS}, {_LAYER_WORK}
        SELECT layer_index, layers.name, type, depth, leaf, input_shapes AS shape,
               layers.ns / 1e6 AS latency_ms, self_ns / 1e6 AS self_ms,
               true_lo_ns / 1e6 AS latency_low_ms, true_hi_ns / 1e6 AS latency_high_ms,
               device_work.ns / 1e6 AS kernel_ms, backward.ns / 1e6 AS backward_ms,
               self_alloc_bytes / 1048576 AS alloc_mib, param_bytes / 1048576 AS param_mib,
               activation_bytes / 1048576 AS activation_mib
        FROM layers LEFT JOIN backward ON backward.parent_id = layers.span_id
        LEFT JOIN device_work ON device_work.layer_id = layers.span_id
        ORDER BY layer_index
        """
    )


_LAYER_WORK = f"""
    backward AS (
        SELECT parent_id, sum({NS}) AS ns FROM merged
        WHERE parent_rule = '{Rule.SEQUENCE}' GROUP BY parent_id
    ), device_work AS (
        SELECT layer_id, sum({NS}) AS ns FROM merged
        WHERE level = {int(Level.KERNEL)} AND kind = '{Kind.KERNEL}' AND phase IS DISTINCT FROM 'backward'
        GROUP BY layer_id
    )
"""
"""Times of the backward operators and of the device kernels of each layer."""


@analysis("layers", "Layers by their own time on the host", Level.LAYER)
def layers(trace: Trace) -> Table:
    """The calls of each module together: their number in a step, and their times and memory, summed.

    A module is called several times in a step if gradients are accumulated over several batches, in a recurrent loop,
    or if a model uses it twice. A2 has a row for each call. `percent_of_host_time` is a percentage of the host's time
    in all layers together, which is the forward pass of the model; `host_self_ms` excludes the layers inside, `host_ms`
    includes them. `kernel_ms` is device time of the forward pass. `modules` has the device time of all instances
    together. `shape` is that of the first call. If a program calls several models, the names in all but the first begin
    with the model's class, so that layers of the same name are distinguished.
    """
    return trace.sql(
        f"""
        WITH {LAYERS}, {_LAYER_WORK}, modules AS (
            SELECT {FULL_NAME.format("layers")} AS name, type, count(*) AS calls, min(layer_index) AS first_index,
                   arg_min(input_shapes, layer_index) AS shape, sum(self_ns) AS self_ns, sum(layers.ns) AS ns,
                   sum(device_work.ns) AS device_ns, sum(backward.ns) AS backward_ns,
                   sum(self_alloc_bytes) AS alloc_bytes, max(param_bytes) AS param_bytes
            FROM layers LEFT JOIN backward ON backward.parent_id = layers.span_id
            LEFT JOIN device_work ON device_work.layer_id = layers.span_id
            GROUP BY {FULL_NAME.format("layers")}, type
        )
        SELECT name, type, calls, shape, self_ns / 1e6 AS host_self_ms,
               100.0 * self_ns / nullif(sum(self_ns) OVER (), 0) AS percent_of_host_time,
               ns / 1e6 AS host_ms, device_ns / 1e6 AS kernel_ms, backward_ns / 1e6 AS backward_ms,
               alloc_bytes / 1048576 AS alloc_mib, param_bytes / 1048576 AS param_mib
        FROM modules ORDER BY host_self_ms DESC, first_index
        """
    )


@analysis("A3", "Layer latency on the host", Level.LAYER)
def layer_latency(trace: Trace) -> Table:
    """Latency of each layer on the host, in execution order, without the layers inside it."""
    return trace.sql(
        f"WITH {LAYERS} SELECT layer_index, name, type, self_ns / 1e6 AS latency_ms FROM layers ORDER BY layer_index"
    )


@analysis("A4", "Layer memory allocation", Level.LAYER)
def layer_memory(trace: Trace) -> Table:
    """MiB that each layer allocates, in execution order, without the layers inside it."""
    return trace.sql(
        f"WITH {LAYERS} SELECT layer_index, name, type, self_alloc_bytes / 1048576 AS alloc_mib "
        "FROM layers ORDER BY layer_index"
    )


@analysis("A5", "Layer type distribution", Level.LAYER)
def layer_types(trace: Trace) -> Table:
    """The number of layers of each type; only leaves count, since containers consist of them."""
    return trace.sql(
        f"""
        WITH {LAYERS}
        SELECT type, count(*) AS layers, 100.0 * count(*) / sum(count(*)) OVER () AS percent_of_layers
        FROM layers WHERE leaf GROUP BY type ORDER BY layers DESC, type
        """
    )


@analysis("A6", "Host time by type of layer", Level.LAYER)
def layer_latency_by_type(trace: Trace) -> Table:
    """Self time on the host by type of layer; for a container it is the time between the calls of its children.

    If a device works asynchronously, `module-classes` has the device time.
    """
    return _by_type(trace, "sum(self_ns) / 1e6", "host_ms", "percent_of_host_time")


@analysis("A7", "Layer memory allocation by type", Level.LAYER)
def layer_memory_by_type(trace: Trace) -> Table:
    """MiB allocated by type of layer; for a container, without the layers inside it."""
    return _by_type(trace, "sum(self_alloc_bytes) / 1048576", "alloc_mib", "percent_of_memory")


def _by_type(trace: Trace, metric: str, name: str, percent: str) -> Table:
    return trace.sql(
        f"""
        WITH {LAYERS}, summed AS (
            SELECT type, count(*) AS layers, {metric} AS {name} FROM layers GROUP BY type
        )
        SELECT type, layers, {name}, 100.0 * {name} / nullif(sum({name}) OVER (), 0) AS {percent}
        FROM summed ORDER BY {name} DESC NULLS LAST, type
        """
    )


# --- stages ------------------------------------------------------------------------------------------------------
# The stages of a model: its layers in three equal intervals by index, and which stage dominates which figure.
#
# XSP, section IV-A: where in a model its time, memory, operations and memory traffic go.


NAMES = ("begin", "middle", "end")
METRICS = ("latency_ms", "alloc_mib", "flops", "dram_bytes")


@analysis("stages", "Stages of the model", Level.LAYER)
def stages(trace: Trace) -> Table:
    """Latency, allocated memory, operations and memory traffic of each third of the layers, by index.

    Latency is as in A13, operations and traffic are as in A12; the latter are null without the op level. `dominates`
    names the columns in which the stage has the largest value.
    """
    dominant = ", ".join(f"CASE WHEN {name} > 0 AND {name} = max({name}) OVER () THEN '{name}' END" for name in METRICS)
    latency = "kernel_ns + other_ns" if trace.has(Level.KERNEL) or trace.has(Level.OP) else "self_ns"
    names = " ".join(f"WHEN {index} THEN '{name}'" for index, name in enumerate(NAMES))
    return trace.sql(
        f"""
        WITH {LAYERS}, {kernels(trace)}, {at_work(trace)}, layer_work AS (
            SELECT layer_id AS layer, sum(whole_flops) AS work,
                   sum(whole_dram_read_bytes + whole_dram_write_bytes) AS moved
            FROM kernels GROUP BY layer_id
        ), indexed AS (
            SELECT *, 3 * (row_number() OVER (ORDER BY layer_index) - 1) // count(*) OVER () AS third
            FROM at_work
        ), thirds AS (
            SELECT third, count(*) AS layers, min(layer_index) AS first_index, max(layer_index) AS last_index,
                   sum({latency}) / 1e6 AS latency_ms, sum(self_alloc_bytes) / 1048576 AS alloc_mib,
                   round(sum(work))::BIGINT AS flops, round(sum(moved))::BIGINT AS dram_bytes
            FROM indexed LEFT JOIN layer_work ON layer = span_id GROUP BY third
        )
        SELECT CASE third {names} END AS stage, thirds.* EXCLUDE (third), concat_ws(', ', {dominant}) AS dominates
        FROM thirds ORDER BY third
        """
    )
