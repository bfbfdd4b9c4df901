"""A8 and A10 to A13: kernels, one by one, by name and by layer.

On a machine without a device, kernels are the self times of operators (see `xsp.store.views.kernels`), so they add up
to the time of the outermost operators. Operations and memory traffic come from a hardware counter, else from the shapes
of the operator's inputs; the columns `flops_source` and `bytes_source` name the source. A value without a source is
null. The `…_known_percent` columns of a sum are the share of the time of computing kernels for which the value is
known; below `MIN_KNOWN_PERCENT`, the arithmetic intensity and the throughput of the sum are null. Kernels without
counted operations by the convention of `xsp.cost.flops` (element-wise work) count as known.
"""

from __future__ import annotations

from xsp.analyses.contract import Table, analysis
from xsp.device import ceilings
from xsp.device.ceilings import PRECISIONS, Ceiling
from xsp.errors import AnalysisError
from xsp.schema import Kind, Level
from xsp.store.trace import Trace
from xsp.store.views import LAYERS, NS, kernels
from xsp.table import literal

# --- formulas ----------------------------------------------------------------------------------------------------
# The formulas of XSP, section III-D, as SQL over any figures: those of a kernel, a sum, or a published table.
#
# Times are nanoseconds, so that operations over time are GFLOP/s and bytes over time are GB/s.


def intensity(flops: str, read_bytes: str, write_bytes: str) -> str:
    """Return the SQL of operations per byte."""
    return f"({flops} / nullif({read_bytes} + {write_bytes}, 0)::DOUBLE)"


def throughput(amount: str, ns: str) -> str:
    """Return the SQL of operations or bytes per nanosecond, which are GFLOP/s and GB/s."""
    return f"({amount} / nullif({ns}, 0)::DOUBLE)"


def value_at_maximum(value: str, figure: str) -> str:
    """Return the SQL of the value in the row with the largest figure; among equal figures, of the largest value.

    Nulls are ignored. Without an order among equal rows, the result would depend on the engine and its threads.
    """
    return f"arg_max({value}, ({figure}, {value})) FILTER ({value} IS NOT NULL AND {figure} IS NOT NULL)"


def memory_bound(flop_per_byte: str, ideal: str) -> str:
    """Return the SQL of whether memory is the bound: the intensity is below the ideal one, peak over bandwidth."""
    return f"({flop_per_byte} < {ideal})"


def attainable(flop_per_byte: str, peak_gflop_per_s: str, gbyte_per_s: str) -> str:
    """Return the SQL of the height of the roof at an intensity, in GFLOP/s; null if the intensity is null."""
    return f"CASE WHEN {flop_per_byte} IS NOT NULL THEN least({peak_gflop_per_s}, {flop_per_byte} * {gbyte_per_s}) END"


def occupancy(value: str, ns: str) -> str:
    """Return the SQL of the occupancy of several kernels: the mean weighted by time, over known occupancies."""
    return f"(sum({ns} * {value}) / nullif(sum({ns}) FILTER ({value} IS NOT NULL), 0))"


def share(part: str, total: str) -> str:
    """Return the SQL of a part of a whole in percent."""
    return f"(100.0 * {part} / nullif({total}, 0))"


def roofs(ceiling: Ceiling | None) -> str:
    """Return the SQL of `roofs` for a WITH clause: peak and ideal intensity by precision; empty without a ceiling."""
    precisions = sorted({*ceiling.precisions(), *PRECISIONS.values()}) if ceiling is not None else []
    rows = [
        f"({literal(kind)}, {_or_null(ceiling.peak(kind))} / 1e9, {ceiling.bytes_per_s} / 1e9, "
        f"{_or_null(ceiling.ideal_intensity(kind))})"
        for kind in precisions
        if ceiling is not None
    ]
    source = f"VALUES {', '.join(rows)}" if rows else f"SELECT NULL::VARCHAR{', NULL::DOUBLE' * 3} WHERE false"
    return f"roofs(precision, peak_gflop_per_s, bandwidth_gbyte_per_s, ideal) AS ({source})"


def _or_null(value: float | None) -> str:
    return "NULL" if value is None else repr(value)


# --------------------------------------------------------------------------------------------------------


MIN_KNOWN_PERCENT = 90
"""Percent of the kernels' time with known traffic (communication excluded) or operations that the intensity and the
throughput of a sum require."""

HOST_NS = f"(SELECT max({NS}) FROM merged WHERE kind = '{Kind.STEP}')"
MODEL_NS = f"""greatest({HOST_NS}, (
    SELECT max(start_ns + dur_ns) FILTER (level = {int(Level.KERNEL)} AND kind = '{Kind.KERNEL}')
           - min(start_ns) FILTER (kind = '{Kind.STEP}') FROM merged))"""
"""Latency of the model: until the step has ended on the host, or until its last kernel has ended if that is later."""


def ceiling(trace: Trace) -> Ceiling | None:
    """Return the ceiling of the device or host that ran the trace's kernels, or None if it is not known."""
    try:
        return ceilings.of_run(trace.run, trace.has(Level.KERNEL))
    except AnalysisError:
        return None


def common_tables(trace: Trace) -> str:
    """Return the SQL of `kernels` and `roofs` for a WITH clause."""
    return f"{kernels(trace)}, {roofs(ceiling(trace))}"


def sum_columns(kind: str = "whole") -> str:
    """Return the columns of a sum of kernels; `kind` selects the share of figures in `xsp.store.views.kernels`."""
    flops, read_bytes, write_bytes = (f"{kind}_{figure}" for figure in ("flops", "dram_read_bytes", "dram_write_bytes"))
    ratio = intensity(f"sum({flops}) FILTER ({read_bytes} IS NOT NULL)", f"sum({read_bytes})", f"sum({write_bytes})")
    with_traffic = f"computes AND (NOT communication OR {read_bytes} IS NOT NULL)"
    bytes_percent = share(f"sum(ns) FILTER ({read_bytes} IS NOT NULL)", f"sum(ns) FILTER ({with_traffic})")
    flops_percent = share(f"sum(ns) FILTER ({flops} IS NOT NULL OR none_counted)", "sum(ns) FILTER (computes)")
    flops_percent = f"coalesce({flops_percent}, 0)"
    precision = "coalesce(precision, 'unknown')"
    main_precision = f"coalesce({value_at_maximum(precision, flops)}, {value_at_maximum(precision, 'ns')})"
    return f"""
        coalesce(sum(calls) FILTER (computes), sum(calls))::BIGINT AS calls, sum(ns) AS ns,
        round(sum({flops}))::BIGINT AS flops,
        round(sum({read_bytes}))::BIGINT AS dram_read_bytes, round(sum({write_bytes}))::BIGINT AS dram_write_bytes,
        {occupancy("occupancy", "ns")} AS occupancy,
        CASE WHEN {bytes_percent} >= {MIN_KNOWN_PERCENT} THEN {ratio} END AS flop_per_byte,
        nullif({main_precision}, 'unknown') AS precision,
        {flops_percent} AS flops_known_percent,
        {bytes_percent} AS bytes_known_percent
    """


GFLOP_PER_S = f"CASE WHEN flops_known_percent >= {MIN_KNOWN_PERCENT} THEN {throughput('flops', 'ns')} END"
"""Throughput of a sum of kernels; null if too few of their operations are known."""

FIGURES = f"""
    flops, {GFLOP_PER_S} AS gflop_per_s, dram_read_bytes, dram_write_bytes, occupancy, flop_per_byte,
    {memory_bound("flop_per_byte", "ideal")} AS memory_bound, precision, flops_known_percent, bytes_known_percent
"""
"""Columns of a sum of kernels that is joined with `roofs`."""


@analysis("A8", "Kernel information", Level.OP)
def kernel_information(trace: Trace) -> Table:
    """Each kernel call: name, layer, latency, operations, memory traffic, occupancy, and the sources of these figures.

    Without a device, a kernel is a primitive, or the self time of an operator: without the operators and primitives
    inside it. `library` of a GPU's kernel is that of the call that launched it, else the one that its name identifies,
    else `device`; it is oneDNN for primitives, and `unknown` for operators computed by MKL or by PyTorch itself on a
    processor, which report no spans. The time of operators that only call others, or only make a view of memory, is in
    one row per layer and phase, with library `framework`.

    Figures from shapes belong to an operator: if it has several kernels, they are in the sums (A10 to A15) and null
    here. `memory_bound` is null without a ceiling of the device (see docs/understand/rooflines.md).
    """
    ratio = intensity("flops", "dram_read_bytes", "dram_write_bytes")
    return trace.sql(
        f"""
        WITH {common_tables(trace)}
        SELECT name, layer_index, layer_name, phase, library, ns / 1e3 AS latency_us,
               true_lo_ns / 1e3 AS low_us, true_hi_ns / 1e3 AS high_us,
               flops, CASE WHEN flops IS NOT NULL THEN flops_source END AS flops_source,
               {throughput("flops", "ns")} AS gflop_per_s, dram_read_bytes, dram_write_bytes,
               CASE WHEN dram_read_bytes IS NOT NULL THEN bytes_source END AS bytes_source, occupancy,
               occupancy_source, {ratio} AS flop_per_byte, {memory_bound(ratio, "ideal")} AS memory_bound
        FROM kernels LEFT JOIN roofs USING (precision) ORDER BY start_ns
        """
    )


@analysis("A10", "Kernels by name", Level.OP)
def kernels_by_name(trace: Trace) -> Table:
    """Kernels of the same name together: calls, time, its shares, throughput.

    `latency_ms` is the time on all devices together, and `percent_of_kernel_time` its share of the time of all kernels.
    `percent_of_wall` is the share of the wall time, until the last kernel has ended, in which any of them ran; with
    several devices it is a mean over them. With several devices, the rows of all devices together come first and name
    no `device`; the rows of each device follow, with shares of its own time. Without a device, one row sums up the time
    of operators that only call others, `percent_of_host_time` is a percentage of the time of all rows, and
    `covered_percent` of A15 is the share of the operators' time that the rows hold.
    """
    columns = "any_value(library) AS library"
    return _grouped(
        trace, "name", "name", columns, "name", "latency_ms DESC, name", by_device=True, extra_columns="library, "
    )


@analysis("A11", "Kernels by layer", Level.LAYER, Level.OP)
def kernels_by_layer(trace: Trace) -> Table:
    """Kernels of the same layer together; kernels without a layer are in a row without one. Shares are as in A10."""
    columns = "any_value(layer_index) AS layer_index, any_value(layer_name) AS layer_name"
    return _grouped(trace, "whole", "layer_id", columns, "layer_index, layer_name", "layer_index NULLS LAST")


def _grouped(
    trace: Trace,
    kind: str,
    group: str,
    columns: str,
    selected: str,
    order: str,
    by_device: bool = False,
    extra_columns: str = "",
) -> Table:
    """Return figures of kernels by group; by device, rows of all devices together precede the rows of each."""
    on_device, has_several = trace.has(Level.KERNEL), devices(trace) > 1 and by_device
    figures = f"{group}, {columns}, {sum_columns(kind)}, sum(exclusive_ns) AS exclusive_ns FROM spread"
    device_column = "NULL::INTEGER AS device, " if by_device else ""
    per_device = f"UNION ALL SELECT device, {figures} GROUP BY device, {group}" if has_several else ""
    over = "OVER (PARTITION BY device)" if by_device else "OVER ()"
    total_ns = f"CASE WHEN device IS NULL THEN {wall(trace)} ELSE {MODEL_NS} END" if has_several else wall(trace)
    device_share, host_share = (share("ns", f"sum(ns) {over}"), "NULL::DOUBLE")[:: 1 if on_device else -1]
    return trace.sql(
        f"""
        WITH {common_tables(trace)}, {spread(trace, group)},
        groups AS (SELECT {device_column}{figures} GROUP BY {group} {per_device})
        SELECT {selected}, {"device, " if by_device else ""}calls, ns / 1e6 AS latency_ms,
               {device_share} AS percent_of_kernel_time, {host_share} AS percent_of_host_time,
               {share("exclusive_ns", total_ns)} AS percent_of_wall, {extra_columns}{FIGURES}
        FROM groups LEFT JOIN roofs USING (precision) ORDER BY {"device NULLS FIRST, " if by_device else ""}{order}
        """
    )


def spread(trace: Trace, *group: str) -> str:
    """Return the SQL of `spread`: `kernels` with `exclusive_ns`, the time in which no earlier kernel of its group ran.

    The sum over a group is the time in which any of its kernels ran, for each device separately. Kernels of the host
    are assumed to run one after the other.
    """
    if not trace.has(Level.KERNEL):
        return "spread AS (SELECT *, ns AS exclusive_ns FROM kernels)"
    return f"""
        spread AS (
            SELECT *, coalesce(ns * greatest(0, start_ns + dur_ns - greatest(start_ns, coalesce(until_ns, start_ns)))
                               / nullif(dur_ns, 0), 0) AS exclusive_ns
            FROM (
                SELECT kernels.*, kernel_devices.device, max(start_ns + dur_ns) OVER (
                           PARTITION BY {", ".join((*group, "device"))} ORDER BY start_ns, kernels.span_id
                           ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS until_ns
                FROM kernels JOIN (SELECT span_id, device FROM merged WHERE level = {int(Level.KERNEL)}) kernel_devices
                ON kernel_devices.span_id = kernels.span_id
            )
        )
    """


def wall(trace: Trace) -> str:
    """Return the SQL of the wall time of all devices together: the model's latency times the number of devices."""
    return f"({MODEL_NS} * {devices(trace)})"


def devices(trace: Trace) -> int:
    """Return the number of devices on which the kernels of the merged step ran; 1 without a device."""
    ((count,),) = trace.con.execute(
        f"SELECT count(DISTINCT device) FROM merged WHERE level = {int(Level.KERNEL)}"
    ).fetchall()
    return max(1, int(count))


@analysis("A12", "Metrics by layer", Level.LAYER, Level.OP)
def layer_metrics(trace: Trace) -> Table:
    """Operations and memory traffic of each layer's kernels, in execution order."""
    return trace.sql(
        f"""
        WITH {common_tables(trace)}, groups AS (
            SELECT any_value(layer_index) AS layer_index, any_value(layer_name) AS layer_name, {sum_columns()}
            FROM kernels WHERE layer_id IS NOT NULL GROUP BY layer_id
        )
        SELECT layer_index, layer_name, flops, dram_read_bytes, dram_write_bytes,
               dram_read_bytes / 1048576 AS dram_read_mib, dram_write_bytes / 1048576 AS dram_write_mib,
               flops_known_percent, bytes_known_percent
        FROM groups ORDER BY layer_index
        """
    )


_AT_WORK_ON_DEVICE = """
    running AS (  -- a layer's kernels, and the end of its earlier ones, to count time in which they overlap once
        SELECT layer_id, start_ns AS from_ns, start_ns + dur_ns AS to_ns, ns::DOUBLE / nullif(dur_ns, 0) AS scale,
               max(start_ns + dur_ns) OVER (PARTITION BY layer_id ORDER BY start_ns, span_id
                   ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS before_ns
        FROM kernels WHERE layer_id IS NOT NULL AND phase IS DISTINCT FROM 'backward'
    ),
    busy AS (
        SELECT layer_id, greatest(from_ns, coalesce(before_ns, from_ns)) AS from_ns, to_ns, scale
        FROM running WHERE to_ns > coalesce(before_ns, from_ns)
    ),
    nested AS (
        SELECT outer_call.layer_id, inner_call.start_ns AS from_ns, inner_call.start_ns + inner_call.dur_ns AS to_ns
        FROM layers inner_call JOIN merged outer_call ON outer_call.span_id = inner_call.parent_id
        WHERE outer_call.layer_id IS NOT NULL
    ),
    marks AS (
        SELECT layer_id, from_ns, to_ns FROM nested
        UNION ALL SELECT span_id, start_ns + dur_ns, start_ns + dur_ns FROM layers
    ),
    pieces AS (  -- intervals of the host's time in a layer, without the layers inside it
        SELECT marks.layer_id, marks.from_ns AS to_ns, coalesce(
                   max(marks.to_ns) OVER (PARTITION BY marks.layer_id ORDER BY marks.from_ns, marks.to_ns
                       ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING), layers.start_ns) AS from_ns
        FROM marks JOIN layers ON layers.span_id = marks.layer_id
    ),
    host_time AS (
        SELECT layer_id, sum(to_ns - from_ns) AS ns FROM pieces WHERE to_ns > from_ns GROUP BY layer_id
    ),
    overlap AS (
        SELECT layer_id, sum(least(busy.to_ns, pieces.to_ns) - greatest(busy.from_ns, pieces.from_ns)) AS ns
        FROM busy JOIN pieces USING (layer_id)
        WHERE busy.from_ns < pieces.to_ns AND pieces.from_ns < busy.to_ns GROUP BY layer_id
    ),
    kernel_time AS (SELECT layer_id, sum((to_ns - from_ns) * coalesce(scale, 1)) AS ns FROM busy GROUP BY layer_id),
    at_work AS (
        SELECT layers.*, coalesce(kernel_time.ns, 0) AS kernel_ns,
               self_ns * (1 - coalesce(overlap.ns / nullif(host_time.ns, 0), 0)) AS other_ns
        FROM layers LEFT JOIN kernel_time ON kernel_time.layer_id = layers.span_id
        LEFT JOIN host_time ON host_time.layer_id = layers.span_id
        LEFT JOIN overlap ON overlap.layer_id = layers.span_id
    )
"""

_AT_WORK_ON_HOST = """
    kernel_time AS (
        SELECT layer_id, sum(ns) AS ns FROM kernels
        WHERE computes AND layer_id IS NOT NULL AND phase IS DISTINCT FROM 'backward' GROUP BY layer_id
    ),
    at_work AS (
        SELECT layers.*, least(coalesce(kernel_time.ns, 0), self_ns) AS kernel_ns,
               self_ns - least(coalesce(kernel_time.ns, 0), self_ns) AS other_ns
        FROM layers LEFT JOIN kernel_time ON kernel_time.layer_id = layers.span_id
    )
"""


def at_work(trace: Trace) -> str:
    """Return the SQL of `at_work`, to follow `LAYERS` and `kernels`: each layer in the forward pass with `kernel_ns`,
    the time in which its kernels ran, and `other_ns`, the host time in which none of them ran.
    """
    return _AT_WORK_ON_DEVICE if trace.has(Level.KERNEL) else _AT_WORK_ON_HOST


@analysis("A13", "Kernel against other latency", Level.LAYER, Level.OP)
def kernel_share(trace: Trace) -> Table:
    """The time that each layer is active in the forward pass, split into the time of its kernels and other time.

    A layer is active while the host is in its call (and in no layer inside it) or one of its kernels runs. `kernel_ms`
    is the time in which its kernels run, `other_ms` the host time in which none of them runs, and `latency_ms` their
    sum; none of them includes waiting in a queue behind kernels of other layers. If the host waits for each kernel, as
    in XSP's recordings and on a CPU, `other_ms` is XSP's layer latency minus kernel latency; if it does not, the value
    is still never negative. `host_ms` is the host time in the call alone. The time of operators that only call other
    operators is in `other_ms`.
    """
    return trace.sql(
        f"""
        WITH {LAYERS}, {kernels(trace)}, {at_work(trace)}
        SELECT layer_index, name AS layer_name, type, (kernel_ns + other_ns) / 1e6 AS latency_ms,
               kernel_ns / 1e6 AS kernel_ms, other_ns / 1e6 AS other_ms,
               {share("kernel_ns", "(kernel_ns + other_ns)")} AS kernel_percent_of_wall, self_ns / 1e6 AS host_ms
        FROM at_work ORDER BY layer_index
        """
    )
