"""The tables that several analyses start from, as SQL for a WITH clause."""

from __future__ import annotations

from xsp.cost.flops import PRODUCTS
from xsp.device.ceilings import PRECISIONS
from xsp.device.kernelnames import COMMUNICATION, NAMES, WITHOUT_PRODUCTS
from xsp.schema import MAX_NESTING, ROOT, Kind, Level
from xsp.store import selftimes
from xsp.store.selftimes import NS as NS
from xsp.store.trace import Trace

LAYERS = f"""
    layers AS (
        WITH layer_calls AS (
            SELECT *, {NS} AS ns FROM merged WHERE level = {int(Level.LAYER)}
        ), inner_calls AS (
            SELECT parent.layer_id AS outer_id, sum(ns) AS ns, sum(layer_calls.alloc_bytes) AS alloc_bytes,
                   count(*) AS calls
            FROM layer_calls JOIN merged parent ON parent.span_id = layer_calls.parent_id GROUP BY parent.layer_id
        )
        SELECT layer_calls.*,
               inner_calls.calls IS NULL AS leaf,
               greatest(layer_calls.ns - coalesce(inner_calls.ns, 0), 0) AS self_ns,
               CASE WHEN layer_calls.alloc_bytes IS NOT NULL
                    THEN greatest(layer_calls.alloc_bytes - coalesce(inner_calls.alloc_bytes, 0), 0)
                    END AS self_alloc_bytes
        FROM layer_calls LEFT JOIN inner_calls ON inner_calls.outer_id = layer_calls.span_id
    )
"""
"""Module calls with self time and self memory: `self_ns` and `self_alloc_bytes` exclude the calls inside, so that they
add up to the totals; for a leaf, a call with no call inside, they equal its totals."""

FULL_NAME = f"""CASE WHEN json_extract_string({{0}}.attributes, '$.{ROOT}') IS NULL THEN {{0}}.name
    WHEN {{0}}.depth = 0 AND {{0}}.name = {{0}}.type THEN json_extract_string({{0}}.attributes, '$.{ROOT}')
    ELSE json_extract_string({{0}}.attributes, '$.{ROOT}') || '.' || {{0}}.name END"""
"""SQL of a layer's name, prefixed with its outermost module if that is not the program's first; a format string for
the name of the table."""

DISPATCH = "(dispatch and bookkeeping)"
"""Name of the row for the time in which operators dispatch other operators, or only create views."""


def kernel_names(trace: Trace) -> None:
    """Make the table `kernel_names`, once: that of `xsp.device.kernelnames.NAMES`.

    The engine matches many regular expressions for it; and it knows the size of a table, so joins hash these few names
    instead of the device work.
    """
    trace.create_temp_table("kernel_names", f"WITH {NAMES}, {_OF_PRODUCTS} {_WITH_PRODUCTS}")


_PRODUCT = "^aten::(_scaled_|_int_|_grouped_|add|badd|b)?mm(_v2)?$"
_OF_PRODUCTS = f"""
    of_products AS (
        SELECT work.name FROM spans work LEFT JOIN (
            SELECT rank, trace_id, span_id FROM spans WHERE kind = '{Kind.OP}' AND regexp_matches(name, '{_PRODUCT}')
        ) op ON op.rank = work.rank AND op.trace_id = work.trace_id AND op.span_id = work.parent_id
        WHERE work.level = {int(Level.KERNEL)} AND work.kind = '{Kind.KERNEL}'
            AND work.name IN (SELECT name FROM names WHERE class = 'other')
        GROUP BY work.name HAVING count(op.span_id) = count(*)
    )
"""
"""Kernels whose names say nothing, and that only operators launch that are matrix products."""

_WITH_PRODUCTS = """
    SELECT name, CASE WHEN name IN (SELECT name FROM of_products) THEN 'gemm' ELSE class END AS class,
           tensor_cores, precision, collective FROM names
"""


def library_calls(trace: Trace, table: str = "merged") -> str:
    """Make a table of the library calls of `spans` or `merged`, with what called them, and return its name.

    Libraries call each other: a convolution of cuDNN may be a product of cuBLAS. `op_id` is the span of the operator
    around the outermost of such calls; if there is none, of the outermost call. So the operator of device work is
    `coalesce(op_id, parent_id)`, joined by rank, trace and parent. `called` is the call's library.
    """
    name = f"library_calls_of_{table}"
    if trace.has_temp_table(name):
        return name
    is_call = f"kind = '{Kind.CALL}' AND level = {int(Level.LIBRARY)}"
    if not trace.con.execute(f"SELECT 1 FROM {table} WHERE {is_call} LIMIT 1").fetchall():
        columns = "rank, trace_id, span_id, NULL::VARCHAR AS called, span_id AS op_id"
        trace.create_temp_table(name, f"SELECT {columns} FROM {table} LIMIT 0")
        return name
    trace.create_temp_table(
        name,
        f"""
        WITH RECURSIVE ancestors(rank, trace_id, span_id, called, outermost, outer_id, calls) AS (
            SELECT rank, trace_id, span_id, json_extract_string(attributes, '$.library'), span_id, parent_id, 0
            FROM {table} WHERE {is_call}
            UNION ALL
            SELECT ancestors.rank, ancestors.trace_id, ancestors.span_id, ancestors.called, call.span_id,
                   call.parent_id, calls + 1
            FROM ancestors JOIN {table} call ON call.rank = ancestors.rank AND call.trace_id = ancestors.trace_id
                 AND call.span_id = ancestors.outer_id AND call.kind = '{Kind.CALL}'
                 AND call.level = {int(Level.LIBRARY)}
            WHERE calls < {MAX_NESTING}
        ), outermost_calls AS (
            SELECT rank, trace_id, span_id, any_value(called) AS called,
                   arg_max(outermost, calls) AS outermost, arg_max(outer_id, calls) AS outer_id
            FROM ancestors GROUP BY ALL
        )
        SELECT outermost_calls.rank, outermost_calls.trace_id, outermost_calls.span_id, called,
               coalesce(op.span_id, outermost) AS op_id
        FROM outermost_calls LEFT JOIN {table} op
             ON op.rank = outermost_calls.rank AND op.trace_id = outermost_calls.trace_id
             AND op.span_id = outermost_calls.outer_id AND op.level = {int(Level.OP)} AND op.kind = '{Kind.OP}'
        """,
    )
    return name


_ON_DEVICE = f"""
    calls AS (
        SELECT span_id, name, kind, type, merged.phase, start_ns, dur_ns, {NS} AS ns, 1 AS calls, true AS computes,
               true_lo_ns, true_hi_ns, layer_id, coalesce(library_call.op_id, parent_id) AS op_id, true AS carries,
               class IS NULL OR class NOT IN {WITHOUT_PRODUCTS} AS multiplies,
               coalesce(called, json_extract_string(attributes, '$.library'), 'device') AS library,
               flops AS own_flops, dram_read_bytes AS own_read, dram_write_bytes AS own_write, flops_source,
               bytes_source, occupancy, occupancy_source, class = '{COMMUNICATION}' AS communication, tensor_cores,
               names.precision AS named_precision, dtype AS own_dtype, class AS work_class
        FROM merged LEFT JOIN kernel_names names USING (name)
        LEFT JOIN (
            SELECT rank AS on_rank, trace_id AS trace, span_id AS call_id, op_id, called FROM library_calls_of_merged
        ) library_call ON on_rank = merged.rank AND trace = merged.trace_id AND call_id = merged.parent_id
        WHERE level = {int(Level.KERNEL)} AND kind = '{Kind.KERNEL}'
    )
"""

_NOT_COUNTED = """
    NULL::BIGINT AS own_flops, NULL::BIGINT AS own_read, NULL::BIGINT AS own_write, NULL::VARCHAR AS flops_source,
    NULL::VARCHAR AS bytes_source, NULL::DOUBLE AS occupancy, NULL::VARCHAR AS occupancy_source,
    false AS communication, NULL::VARCHAR AS tensor_cores, NULL::VARCHAR AS named_precision, NULL::VARCHAR AS own_dtype
"""

_ON_HOST = f"""
    operators AS (SELECT merged.*, own_ns, computes, counts_bytes
                  FROM own_times JOIN merged USING (span_id)),
    calls AS (
        SELECT merged.span_id, name, kind, type, phase, start_ns, dur_ns, {NS} * coalesce(scale, 1.0) AS ns, 1 AS calls,
               true AS computes, true_lo_ns * coalesce(scale, 1.0) AS true_lo_ns,
               true_hi_ns * coalesce(scale, 1.0) AS true_hi_ns, layer_id, parent_id AS op_id,
               type IS DISTINCT FROM 'reorder' AS carries, true AS multiplies,
               json_extract_string(attributes, '$.library') AS library,
               {_NOT_COUNTED}, type AS work_class
        FROM merged LEFT JOIN own_times ON own_times.span_id = merged.parent_id WHERE kind = '{Kind.PRIMITIVE}'
        UNION ALL
        SELECT span_id, name, kind, type, phase, start_ns, dur_ns, own_ns, 1, true,
               CASE WHEN own_ns = {NS} THEN true_lo_ns END, CASE WHEN own_ns = {NS} THEN true_hi_ns END,
               layer_id, span_id, true, true, 'unknown', {_NOT_COUNTED}, NULL
        FROM operators WHERE computes
        UNION ALL
        SELECT NULL, '{DISPATCH}', '{Kind.OP}', NULL, phase, min(start_ns), NULL, sum(own_ns), count(*), false,
               NULL, NULL, layer_id, NULL, false, true, 'framework', {_NOT_COUNTED}, NULL
        FROM operators WHERE NOT computes GROUP BY layer_id, phase
    )
"""

TOTAL_NS = f"""(
    SELECT sum({NS})::DOUBLE FROM merged LEFT JOIN own_times USING (span_id)
    WHERE own_times.span_id IS NOT NULL AND outer_id IS NULL
       OR kind = '{Kind.PRIMITIVE}' AND coalesce(parent_id, '') NOT IN (SELECT span_id FROM own_times)
)"""
"""Time of the outermost operators, and of primitives outside all operators: the sum of kernels without a device."""

_PRECISION = f"""CASE WHEN coalesce(own_dtype, op.dtype) = 'float' AND tensor_cores = 'yes' THEN 'tf32'
    {" ".join(f"WHEN coalesce(own_dtype, op.dtype) = '{dtype}' THEN '{kind}'" for dtype, kind in PRECISIONS.items())}
    ELSE named_precision END"""
"""The operator's element type, else the precision in the kernel's name; null if neither is known."""

_OTHER_PRIMITIVES = tuple(
    "reorder eltwise binary sum concat softmax pooling resampling reduction batch_normalization layer_normalization "
    "group_normalization lrn shuffle prelu".split()
)

_NONE_COUNTED = f"""coalesce(
    work_class IN {WITHOUT_PRODUCTS} OR work_class IN {_OTHER_PRIMITIVES}
    OR (work_class IS NULL OR work_class = 'other') AND starts_with(caller.name, 'aten::')
       AND NOT regexp_matches(caller.name, '{PRODUCTS}'), false)"""
"""Whether a kernel does none of the counted operations, according to its class, oneDNN's kind of primitive, or the
operator that launched it."""


def _figure(counter: str, column: str, counted_column: str, carries: str = "carries", prefix: str = "") -> str:
    """Return the SQL of a figure's three columns: for the call, for calls of its name, for all of its operator."""
    share = f"CASE WHEN {carries} THEN op.{column} / work.{prefix}kernels END"
    is_counted = f"{counter} IS NOT NULL OR work.{counted_column}"
    return f"""
        CASE WHEN {is_counted} THEN {counter} WHEN {carries} AND work.{prefix}kernels = 1 THEN op.{column} END
            AS {column},
        CASE WHEN {is_counted} THEN {counter} WHEN work.{prefix}names = 1 THEN {share} END AS name_{column},
        CASE WHEN {is_counted} THEN {counter} WHEN carries THEN coalesce({share}, 0 * op.{column}) END AS whole_{column}
    """


_MULTIPLIES = "carries AND (multiplies OR work.multiplying_kernels = 0)"
"""Whether a kernel has a part in its operator's operations: a convolution's kernels may only convert its layout."""


_OPS = f"""
    ops AS (
        SELECT span_id, dtype, flops, flops_source, dram_read_bytes, dram_write_bytes, bytes_source
        FROM merged WHERE device IS NULL AND level >= {int(Level.OP)}
            AND (flops IS NOT NULL OR dram_read_bytes IS NOT NULL OR dtype IS NOT NULL)
    )
"""

_OPS_ON_HOST = """
    ops AS (
        SELECT span_id, dtype, flops, flops_source, bytes_source,
               CASE WHEN counts_bytes THEN dram_read_bytes END AS dram_read_bytes,
               CASE WHEN counts_bytes THEN dram_write_bytes END AS dram_write_bytes
        FROM operators
    )
"""

_KERNELS = f"""
    work AS (
        SELECT op_id, count(*) AS kernels, count(DISTINCT name) AS names,
               count(*) FILTER (multiplies) AS multiplying_kernels,
               count(DISTINCT name) FILTER (multiplies) AS multiplying_names,
               count(own_flops) > 0 AS counted_flops, count(own_read) + count(own_write) > 0 AS counted_bytes
        FROM calls WHERE carries AND op_id IS NOT NULL GROUP BY op_id
    ),
    kernels AS (
        SELECT calls.span_id, calls.name, calls.kind, calls.type, calls.phase, calls.start_ns, calls.dur_ns, calls.ns,
               calls.calls, calls.computes, true_lo_ns, true_hi_ns, calls.layer_id,
               layer.layer_index, layer.name AS layer_name, library, communication, {_PRECISION} AS precision,
               {_figure("own_flops", "flops", "counted_flops", _MULTIPLIES, "multiplying_")},
               {_figure("own_read", "dram_read_bytes", "counted_bytes")},
               {_figure("own_write", "dram_write_bytes", "counted_bytes")},
               CASE WHEN own_flops IS NOT NULL THEN coalesce(calls.flops_source, 'counter')
                    WHEN carries AND NOT work.counted_flops THEN op.flops_source END AS flops_source,
               CASE WHEN own_read IS NOT NULL THEN coalesce(calls.bytes_source, 'counter')
                    WHEN carries AND NOT work.counted_bytes THEN op.bytes_source END AS bytes_source,
               calls.occupancy, calls.occupancy_source, {_NONE_COUNTED} AS none_counted
        FROM calls
        LEFT JOIN work USING (op_id)
        LEFT JOIN ops op ON op.span_id = calls.op_id
        LEFT JOIN (SELECT span_id, name FROM merged WHERE device IS NULL AND level >= {int(Level.OP)}) caller
            ON caller.span_id = calls.op_id
        LEFT JOIN (SELECT span_id, layer_index, name FROM merged WHERE level = {int(Level.LAYER)}) layer
            ON layer.span_id = calls.layer_id
    )
"""


def kernels(trace: Trace) -> str:
    """Return the SQL of `kernels`: each kernel with its layer, operations, memory traffic and precision.

    Without a device the kernels are the primitives and the self times of operators (see `xsp.store.selftimes`).
    Operators that do not compute are summed up in a row for each layer and phase, in which `computes` is false and
    `calls` is the number of operators. So no time is left out.

    `none_counted` is true for a kernel that does none of the operations that `xsp.cost.flops` counts, such as
    element-wise work. The precision is null if neither the operator's type nor the kernel's name gives it. A kernel of
    a single-precision operator computes in `tf32` if its name shows that it uses tensor cores. Figures from a counter
    belong to the kernel. Figures from shapes belong to the operator; how its kernels share them is not known. So a
    kernel has them (`flops`) only if it is its operator's only kernel; the kernels of one name have them (`name_flops`,
    shares that are meaningful only as a sum) if all kernels of the operator have that name; layers and the model always
    have them (`whole_flops`, likewise shares).
    """
    if trace.has(Level.KERNEL):
        library_calls(trace)
        kernel_names(trace)
        ctes = f"{_ON_DEVICE}, {_OPS}, {_KERNELS}"
    else:
        selftimes.create_table(trace)
        ctes = f"{_ON_HOST}, {_OPS_ON_HOST}, {_KERNELS}"
    trace.create_temp_table("attributed_kernels", f"WITH {ctes} SELECT * FROM kernels")
    return "kernels AS (SELECT * FROM attributed_kernels)"


def has_shapes(trace: Trace) -> bool:
    """Return whether any operator or inner layer of `merged` has the shapes of its inputs, as a describing step records
    them; those of outermost calls are always recorded."""
    is_inner = f"(level = {int(Level.OP)} OR level = {int(Level.LAYER)} AND depth IS DISTINCT FROM 0)"
    query = f"SELECT 1 FROM merged WHERE {is_inner} AND device IS NULL AND input_shapes IS NOT NULL LIMIT 1"
    return bool(trace.con.execute(query).fetchall())
