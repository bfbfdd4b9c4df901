"""The tables that several analyses start from, as SQL to put behind WITH."""

from __future__ import annotations

from xsp.device.ceilings import PRECISIONS, USUAL
from xsp.device.kernelnames import COMMUNICATION, NAMES
from xsp.span import Kind, Level

NS = "coalesce(true_ns, raw_ns, dur_ns)"
"""The best that a trace knows of a span's duration: true, else averaged, else as recorded."""

LAYERS = f"""
    layers AS (
        WITH called AS (
            SELECT *, {NS} AS ns FROM merged WHERE level = {int(Level.LAYER)}
        ), inner_calls AS (
            SELECT up.layer_id AS outer_id, sum(ns) AS ns, sum(called.alloc_bytes) AS alloc_bytes, count(*) AS calls
            FROM called JOIN merged up ON up.span_id = called.parent_id GROUP BY up.layer_id
        )
        SELECT called.*,
               inner_calls.calls IS NULL AS leaf,
               greatest(called.ns - coalesce(inner_calls.ns, 0), 0) AS self_ns,
               CASE WHEN called.alloc_bytes IS NOT NULL
                    THEN greatest(called.alloc_bytes - coalesce(inner_calls.alloc_bytes, 0), 0) END AS self_alloc_bytes
        FROM called LEFT JOIN inner_calls ON inner_calls.outer_id = called.span_id
    )
"""
"""Module calls with what they did themselves: `self_ns` and `self_alloc_bytes` are without the calls inside,
so that they add up to the whole; for a leaf, a call with no call inside, they are all of it."""

BOOKKEEPING = (
    "_reshape_alias alias as_strided as_strided_ chunk contiguous detach empty empty_like empty_strided expand "
    "expand_as flatten lift_fresh narrow permute reshape resize_ resize_as_ resolve_conj resolve_neg select set_ "
    "slice split split_with_sizes squeeze squeeze_ t to transpose transpose_ unbind unflatten unsafe_split unsqueeze "
    "unsqueeze_ view view_as"
).split()
"""Operators that allocate or look at memory differently, and compute nothing themselves; where one of them has
to copy, the copy is an operator of its own inside it."""

_COMPUTES = f"""(
    m.kind = '{Kind.PRIMITIVE}' OR m.kind = '{Kind.OP}' AND m.name NOT LIKE 'autograd::%' AND m.name <> 'detach'
    AND replace(m.name, 'aten::', '') NOT IN ({", ".join(f"'{name}'" for name in BOOKKEEPING)})
)"""

_ON_DEVICE = f"""
    {NAMES},
    calls AS (
        SELECT merged.*, parent_id AS op_id, true AS carries, 'device' AS library,
               flops AS own_flops, dram_read_bytes AS own_read, dram_write_bytes AS own_write,
               class = '{COMMUNICATION}' AS communication, tensor_cores
        FROM merged LEFT JOIN names USING (name) WHERE level = {int(Level.KERNEL)} AND kind = '{Kind.KERNEL}'
    )
"""

_ON_HOST = f"""
    around AS (
        WITH RECURSIVE up(span_id) AS (
            SELECT m.parent_id FROM merged m WHERE {_COMPUTES}
            UNION
            SELECT m.parent_id FROM merged m JOIN up USING (span_id) WHERE m.level >= {int(Level.OP)}
        )
        SELECT span_id FROM up WHERE span_id IS NOT NULL
    ),
    calls AS (
        SELECT m.*, CASE WHEN kind = '{Kind.PRIMITIVE}' THEN parent_id ELSE span_id END AS op_id,
               type IS DISTINCT FROM 'reorder' AS carries,
               CASE WHEN kind = '{Kind.PRIMITIVE}' THEN json_extract_string(attributes, '$.library')
                    ELSE 'unknown' END AS library,
               NULL::BIGINT AS own_flops, NULL::BIGINT AS own_read, NULL::BIGINT AS own_write,
               false AS communication, NULL AS tensor_cores
        FROM merged m WHERE {_COMPUTES} AND m.span_id NOT IN (SELECT span_id FROM around)
    )
"""

_PRECISION = f"""CASE WHEN op.dtype = 'float' AND tensor_cores = 'yes' THEN 'tf32'
    {" ".join(f"WHEN op.dtype = '{dtype}' THEN '{kind}'" for dtype, kind in PRECISIONS.items())}
    ELSE '{USUAL}' END"""


def _figure(own: str, ops: str, counted: str) -> str:
    """Return a figure's three columns: of the call, of calls of its name, and of all calls of its operator."""
    share = f"CASE WHEN carries THEN op.{ops} / work.kernels END"
    known = f"{own} IS NOT NULL OR work.{counted}"
    return f"""
        CASE WHEN {known} THEN {own} WHEN carries AND work.kernels = 1 THEN op.{ops} END AS {ops},
        CASE WHEN {known} THEN {own} WHEN work.names = 1 THEN {share} END AS name_{ops},
        CASE WHEN {known} THEN {own} ELSE {share} END AS whole_{ops}
    """


_KERNELS = f"""
    work AS (
        SELECT op_id, count(*) AS kernels, count(DISTINCT name) AS names,
               count(own_flops) > 0 AS counted_flops, count(own_read) + count(own_write) > 0 AS counted_bytes
        FROM calls WHERE carries AND op_id IS NOT NULL GROUP BY op_id
    ),
    ops AS (
        SELECT span_id, dtype, flops, flops_source, dram_read_bytes, dram_write_bytes, bytes_source
        FROM merged WHERE device IS NULL AND level >= {int(Level.OP)}
            AND (flops IS NOT NULL OR dram_read_bytes IS NOT NULL OR dtype IS NOT NULL)
    ),
    kernels AS (
        SELECT calls.span_id, calls.name, calls.kind, calls.type, calls.phase, calls.start_ns, calls.dur_ns,
               coalesce(true_ns, raw_ns, calls.dur_ns) AS ns, true_lo_ns, true_hi_ns, calls.layer_id,
               layer.layer_index, layer.name AS layer_name, library, communication, {_PRECISION} AS precision,
               {_figure("own_flops", "flops", "counted_flops")},
               {_figure("own_read", "dram_read_bytes", "counted_bytes")},
               {_figure("own_write", "dram_write_bytes", "counted_bytes")},
               CASE WHEN own_flops IS NOT NULL THEN coalesce(calls.flops_source, 'counter')
                    WHEN carries AND NOT work.counted_flops THEN op.flops_source END AS flops_source,
               CASE WHEN own_read IS NOT NULL THEN coalesce(calls.bytes_source, 'counter')
                    WHEN carries AND NOT work.counted_bytes THEN op.bytes_source END AS bytes_source,
               calls.occupancy, calls.occupancy_source
        FROM calls
        LEFT JOIN work USING (op_id)
        LEFT JOIN ops op ON op.span_id = calls.op_id
        LEFT JOIN (SELECT span_id, layer_index, name FROM merged WHERE level = {int(Level.LAYER)}) layer
            ON layer.span_id = calls.layer_id
    )
"""


def kernels(on_device: bool) -> str:
    """Return the SQL of `kernels`: each kernel with its layer, operations, memory traffic and precision.

    Without a device, the innermost spans that compute are the kernels: the primitives, and the operators that hold
    no primitive and no computing operator.

    A single-precision operator's kernel that uses tensor cores, as far as its name tells, computes in `tf32`.
    Figures are a kernel's own where a counter gave them. Figures from shapes are an operator's, and which of its
    kernels did how much of it is not known. So a kernel has them (`flops`) where it is its operator's only one; the
    kernels of a name (`name_flops`, shares that only mean something summed) where all of the operator's have that
    name; and layers and the model (`whole_flops`, likewise) always.

    Args:
        on_device: whether the merged step holds device work.
    """
    return f"{_ON_DEVICE if on_device else _ON_HOST}, {_KERNELS}"
