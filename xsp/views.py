"""The tables that several analyses start from, as SQL to put behind WITH; `LAYERS` and `KERNELS` need `UNDER`."""

from __future__ import annotations

from xsp.span import Kind, Level

NS = "coalesce(true_ns, raw_ns, dur_ns)"
"""The best that a trace knows of a span's duration: true, else averaged, else as recorded."""

UNDER = """
    under AS (SELECT span_id, layer_id FROM merged)
"""
"""Each span's nearest layer: itself, or the innermost layer above it; null where there is none."""

LAYERS = f"""
    layers AS (
        WITH called AS (
            SELECT *, {NS} AS ns FROM merged WHERE level = {int(Level.LAYER)}
        ), inner_calls AS (
            SELECT under.layer_id AS outer_id, sum(ns) AS ns, sum(alloc_bytes) AS alloc_bytes, count(*) AS calls
            FROM called JOIN under ON under.span_id = called.parent_id GROUP BY under.layer_id
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

KERNELS = f"""
    on_device AS (SELECT count(*) > 0 AS found FROM merged WHERE level = {int(Level.KERNEL)}),
    around AS (
        WITH RECURSIVE up(span_id) AS (
            SELECT m.parent_id FROM merged m WHERE {_COMPUTES}
            UNION
            SELECT m.parent_id FROM merged m JOIN up USING (span_id) WHERE m.level >= {int(Level.OP)}
        )
        SELECT span_id FROM up WHERE span_id IS NOT NULL
    ),
    work AS (
        SELECT parent_id, count(*) AS primitives FROM merged
        WHERE kind = '{Kind.PRIMITIVE}' AND type <> 'reorder' GROUP BY parent_id
    ),
    kernels AS (
        SELECT m.* EXCLUDE (flops, layer_index), coalesce(m.true_ns, m.raw_ns, m.dur_ns) AS ns, under.layer_id,
               layer.layer_index, layer.name AS layer_name,
               CASE WHEN m.kind <> '{Kind.PRIMITIVE}' THEN m.flops
                    WHEN m.type <> 'reorder' AND work.primitives = 1 THEN parent.flops END AS flops,
               CASE WHEN m.kind = '{Kind.PRIMITIVE}' THEN json_extract_string(m.attributes, '$.library')
                    WHEN m.level = {int(Level.KERNEL)} THEN 'device' ELSE 'unknown' END AS library
        FROM merged m
        CROSS JOIN on_device
        JOIN under USING (span_id)
        LEFT JOIN merged layer ON layer.span_id = under.layer_id
        LEFT JOIN merged parent ON parent.span_id = m.parent_id
        LEFT JOIN work ON work.parent_id = m.parent_id
        WHERE CASE WHEN on_device.found THEN m.level = {int(Level.KERNEL)} AND m.kind = '{Kind.KERNEL}'
                   ELSE {_COMPUTES} AND m.span_id NOT IN (SELECT span_id FROM around) END
    )
"""
"""Kernels with the layer that they belong to. Without a device, the innermost spans that compute are the
kernels: the primitives, and the operators that hold no primitive and no computing operator."""
