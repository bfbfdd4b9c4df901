"""Operators by the time of the device work that they launched, and by their own time on the host."""

from __future__ import annotations

from xsp.analyses.contract import Table, analysis
from xsp.analyses.kernel import attainable, common_tables, devices, memory_bound, share, throughput, value_at_maximum
from xsp.device.ceilings import PRECISIONS
from xsp.schema import Kind, Level
from xsp.store import selftimes
from xsp.store.trace import Trace
from xsp.store.views import NS

NO_OPERATOR = "(no operator)"
"""Name of the row of device work that no operator in the trace launched: replayed graphs, work whose launch is missing,
kernels that a program launches directly."""

_DTYPE = f"""CASE {" ".join(f"WHEN dtype = '{dtype}' THEN '{kind}'" for dtype, kind in PRECISIONS.items())}
    WHEN dtype NOT LIKE '%List' THEN dtype END"""
"""Element type of an operator's first tensor; unknown for a list of tensors."""


def _complete_sum(figure: str) -> str:
    """Return the SQL of the sum of a figure over kernels; null unless all of them have it."""
    return f"CASE WHEN count({figure}) = count(kernels.span_id) THEN sum({figure}) END"


_LAUNCHED = f"""
    launched AS (  -- each kernel and copy, with the operator around its launch, else the library's call
        SELECT work.span_id, work.kind, work.device, work.ns,
               CASE WHEN parent.kind = '{Kind.OP}' THEN parent.span_id ELSE library_call.op_id END AS caller_id
        FROM (SELECT rank, trace_id, span_id, parent_id, kind, device, {NS} AS ns FROM merged
              WHERE level = {int(Level.KERNEL)} AND kind IN ('{Kind.KERNEL}', '{Kind.COPY}')) work
        LEFT JOIN merged parent ON parent.span_id = work.parent_id
        LEFT JOIN library_calls_of_merged library_call
            ON library_call.rank = work.rank AND library_call.trace_id = work.trace_id
               AND library_call.span_id = work.parent_id
    )
"""


_PRECISION = (
    f"coalesce({value_at_maximum('precision', 'nullif(whole_flops, 0)')}, "
    f"{value_at_maximum('precision', 'kernels.ns')})"
)
"""That of the kernel with most operations: a longer one may only convert the layout."""


def _device_times(device: str, groups: str) -> str:
    """Return the SQL of each caller's device time; rates are of kernels alone, since a copy's speed is the link's.

    Args:
        device: SQL of the device of a row; null for all devices together.
        groups: columns to group by.
    """
    return f"""
        SELECT {device} AS device, caller_id, sum(launched.ns)::DOUBLE AS device_ns,
               count(kernels.span_id) AS kernel_count, count(*) - count(kernels.span_id) AS copy_count,
               sum(kernels.ns)::DOUBLE AS work_ns, {_complete_sum("whole_flops")} AS work_flops,
               {_complete_sum("whole_dram_read_bytes")} + {_complete_sum("whole_dram_write_bytes")} AS work_bytes,
               {_PRECISION} AS precision,
               {value_at_maximum("kernels.name", "kernels.ns")} AS longest_kernel
        FROM launched LEFT JOIN kernels ON kernels.span_id = launched.span_id GROUP BY {groups}
    """


def _on_device(has_several: bool) -> str:
    """Return the SQL of `spent`: on all devices together, and, with several devices, also on each."""
    per_device = f"UNION ALL {_device_times('launched.device', 'launched.device, caller_id')}" if has_several else ""
    return f"{_LAUNCHED}, spent AS ({_device_times('NULL::INTEGER', 'caller_id')} {per_device})"


_ON_HOST = f"""
    spent AS (  -- without a device the work is what the operator did itself
        SELECT NULL::INTEGER AS device, span_id AS caller_id, NULL::DOUBLE AS device_ns, NULL::BIGINT AS kernel_count,
               NULL::BIGINT AS copy_count, without_ops_ns AS work_ns, flops AS work_flops,
               CASE WHEN counts_bytes THEN dram_read_bytes + dram_write_bytes END AS work_bytes,
               {_DTYPE} AS precision, NULL::VARCHAR AS longest_kernel
        FROM own_times JOIN merged USING (span_id) WHERE flops IS NOT NULL OR counts_bytes
    )
"""


def _rate(amount: str, name: str) -> str:
    """Return the columns of a rate in 10^12 per second: of all calls together, of the slowest and of the fastest."""
    rate = throughput(amount, "work_ns")
    return f"""
        {throughput(f"sum({amount})", f"sum(work_ns) FILTER ({amount} IS NOT NULL)")} / 1e3 AS {name}_per_s,
        min({rate}) / 1e3 AS least_{name}_per_s, max({rate}) / 1e3 AS most_{name}_per_s
    """


_BOTH = "work_flops IS NOT NULL AND work_bytes IS NOT NULL"
_ROOF = attainable("flop_per_byte", "peak_gflop_per_s", "bandwidth_gbyte_per_s")


_SHARE_OF_DEVICE = share("device_ns", "sum(device_ns) OVER (PARTITION BY device)")
_SHARE_OF_HOST = share("self_ns", "sum(self_ns) OVER (PARTITION BY device)")
_DEVICE = f"device_ns / 1e6 AS device_ms, {_SHARE_OF_DEVICE} AS percent_of_device_time"
_NO_DEVICE = "NULL::DOUBLE AS device_ms, NULL::DOUBLE AS percent_of_device_time"
_SELF = "self_ns / 1e6 AS host_self_ms"
_SHARE = f"{_SHARE_OF_HOST} AS percent_of_host_time"
_HOST = f"{_SELF}, {_SHARE}"
_RATES = f"""
    tflop_per_s,
    coalesce({share("gflop_per_s", _ROOF)}, CASE WHEN tflop_per_s IS NULL
             THEN {share("tb_per_s * 1e3", "bandwidth_gbyte_per_s")} END) AS roof_percent
"""
_ABOVE_ROOF = """
    CASE WHEN roof_percent <= 105 OR roof_percent IS NULL THEN NULL
         WHEN gflop_per_s IS NULL OR gflop_per_s <= peak_gflop_per_s
         THEN 'from caches: memory was read less than the shapes say'
         WHEN regexp_matches(longest_kernel, 'winograd', 'i') THEN 'Winograd: fewer products than are counted'
         WHEN regexp_matches(longest_kernel, 'sparse|spmma|sp24', 'i') THEN 'sparsity: fewer products than are counted'
         WHEN regexp_matches(longest_kernel, 'fft', 'i') THEN 'Fourier transforms: fewer products than are counted'
         ELSE 'doubtful: more than the device can do' END
"""
"""Why a rate is above the roof, which is no error where less was done than is counted."""

_RATE_COLUMNS = f"""
    tb_per_s, flop_per_byte, {memory_bound("flop_per_byte", "ideal")} AS memory_bound, precision,
    least_tflop_per_s, most_tflop_per_s, least_tb_per_s, most_tb_per_s
"""
"""Columns of rates. The most important columns of the table come first, since the last ones are dropped if there is no
room. On a host they are those that distinguish rows: the same few names occur in all phases and with many shapes."""


@analysis("ops", "Operators by GPU time, else by host time", Level.OP)
def operators(trace: Trace) -> Table:
    """Operators of the same name, shapes, element type and phase together: device time, rates, host time.

    The figures are those of one step, with true times where they are known. `device_ms` is the time of the kernels and
    copies that the operator itself launched, and `percent_of_device_time` its share of all device work, so that the
    rows add up to 100 %. With several GPUs, the rows of all GPUs together name no `device`; the rows of each GPU
    follow, with shares of its own time and the calls that launched work on it, without host time. Work that no operator
    of the trace launched (replayed graphs, for instance) is in the row `(no operator)`; work that a library launched
    outside every operator is listed under the call of the library. `dtype` is that of the first tensor.

    `tflop_per_s` and `tb_per_s` are of the kernels of all calls together, over the time of those whose operations and
    bytes are known; `least_` and `most_` are of the slowest and the fastest call. `roof_percent` is their share of the
    roof at this arithmetic intensity or, if only the bytes are known, of the bandwidth. Bytes derived from shapes may
    have come from a cache, which gives more than 100 %; `above_roof` names the reason for more than 105 %.

    `host_self_ms` is the operator's time on the host without the operators inside, as in
    `key_averages(group_by_input_shape=True)` of torch.profiler; it adds up to the time of the outermost operators, and
    `percent_of_host_time` is a percentage of that sum. Primitives of a library inside an operator are included.
    `host_ms` is the time of the whole calls. An operator that only calls another operator of its name counts once.
    Without a device, the columns of device time are null, and rates are over `host_self_ms`, by which the rows are
    sorted. `flops` are those of the operators themselves, over all calls. Shapes are null if no step was described.
    """
    selftimes.create_table(trace)
    on_device = trace.has(Level.KERNEL)
    spent = _on_device(devices(trace) > 1) if on_device else _ON_HOST
    rate_columns = f"kernels, {_RATE_COLUMNS}, copies"
    columns = f"phase, calls, {_SELF}, input_shapes AS shapes, {_SHARE}, dtype, {_RATES}, {rate_columns}, {_NO_DEVICE}"
    if on_device:
        columns = f"calls, {_DEVICE}, {_RATES}, input_shapes AS shapes, dtype, {rate_columns}, phase, {_HOST}"
    return trace.sql(
        f"""
        WITH {common_tables(trace)}, {spent},
        called AS (  -- an operator that only calls another of its name is one with it
            SELECT spent.device, coalesce(within_id, merged.span_id) AS called_id,
                   sum(without_ops_ns) FILTER (spent.device IS NULL) AS self_ns,
                   sum(flops) FILTER (spent.device IS NULL)::BIGINT AS flops,
                   sum(device_ns) AS device_ns, sum(kernel_count) AS kernel_count,
                   sum(copy_count) AS copy_count, sum(work_ns) AS work_ns, sum(work_flops) AS work_flops,
                   sum(work_bytes) AS work_bytes, {value_at_maximum("precision", "work_ns")} AS precision,
                   {value_at_maximum("longest_kernel", "work_ns")} AS longest_kernel
            FROM own_times JOIN merged ON merged.span_id = own_times.span_id
            LEFT JOIN spent ON caller_id = merged.span_id
            GROUP BY spent.device, coalesce(within_id, merged.span_id)
        ), each_call AS (
            SELECT called.device, name, phase, input_shapes, {_DTYPE} AS dtype, 1 AS calls,
                   CASE WHEN called.device IS NULL THEN {NS} END AS ns, called.self_ns, called.flops, device_ns,
                   kernel_count, copy_count, work_ns, work_flops, work_bytes, precision, longest_kernel
            FROM called JOIN merged ON span_id = called_id
            UNION ALL
            SELECT spent.device, coalesce(name, '{NO_OPERATOR}'), phase, NULL, NULL,
                   CASE WHEN merged.span_id IS NOT NULL THEN 1 END, NULL, NULL, NULL, device_ns, kernel_count,
                   copy_count, work_ns, work_flops, work_bytes, precision, longest_kernel
            FROM spent LEFT JOIN own_times ON own_times.span_id = caller_id
            LEFT JOIN merged ON merged.span_id = caller_id WHERE own_times.span_id IS NULL
        ), grouped AS (
            SELECT device, name, input_shapes, dtype, phase, sum(calls)::BIGINT AS calls, sum(device_ns) AS device_ns,
                   sum(kernel_count)::BIGINT AS kernels, sum(copy_count)::BIGINT AS copies,
                   {_rate("work_flops", "tflop")}, {_rate("work_bytes", "tb")},
                   sum(work_flops) FILTER ({_BOTH}) / nullif(sum(work_bytes) FILTER ({_BOTH}), 0)::DOUBLE
                       AS flop_per_byte,
                   {throughput(f"sum(work_flops) FILTER ({_BOTH})", f"sum(work_ns) FILTER ({_BOTH})")} AS gflop_per_s,
                   {value_at_maximum("precision", "work_ns")} AS precision,
                   {value_at_maximum("longest_kernel", "work_ns")} AS longest_kernel,
                   sum(self_ns) AS self_ns, sum(ns) AS ns, sum(flops)::BIGINT AS flops
            FROM each_call GROUP BY device, name, input_shapes, dtype, phase
        )
        SELECT name, device, {columns}, ns / 1e6 AS host_ms, flops, longest_kernel, {_ABOVE_ROOF} AS above_roof
        FROM grouped LEFT JOIN roofs USING (precision)
        ORDER BY device NULLS FIRST, device_ms DESC NULLS LAST, host_self_ms DESC NULLS LAST, name, shapes, dtype, phase
        """
    )
