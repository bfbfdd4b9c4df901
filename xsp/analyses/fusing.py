"""What fusing kernels could save: attention that runs as products and a softmax, and kernels that only move memory.

Eager attention is recognised by the order of kernels on a stream: a batched product (`aten::bmm` or `aten::baddbmm`), a
softmax, a batched product, and between them only kernels that move memory (scale, mask, dropout, casts). Around the
backward of a softmax, the products before and after these two belong to it as well. The softmax of a loss is a
log-softmax and does not count.

Kernels of a replayed graph have no operators. There a product is batched if its grid has a third dimension, and the two
around a softmax must have the same one (batch × heads), with nothing but elementwise kernels and copies between them: a
softmax after a linear layer belongs to a router or a classifier. Libraries that put the batch into the first grid
dimension (hipBLASLt) do not show it, and attention is not recognised.
"""

from __future__ import annotations

from xsp.analyses.contract import Table, analysis
from xsp.device import ceilings
from xsp.errors import XspError
from xsp.schema import Kind, Level
from xsp.store.devicework import prepare
from xsp.store.trace import Trace

EAGER, FUSED = "eager", "fused"
PRODUCTS, SOFTMAX, BETWEEN, KERNELS = "products", "softmax", "between", "kernels"

MOVING_CLASSES = ("elementwise", "copy")
"""Classes of kernels that may run between the products of attention where no operator is known."""

CHAINED_CLASSES = ("elementwise", "copy", "reduction", "triton")
"""Classes of kernels that a compiler fuses with their neighbours. Normalisations read their input twice or more, for
the statistics and to apply them."""

FUSED_ALREADY = "_fused_|_foreach_|multi_tensor|fused_(adam|sgd|lamb)"
"""Pattern for operators and kernels of fused optimizers, which have no neighbours to be fused with."""

TWO_PASSES = "(batch|layer|group|instance|rms)_?norm"
"""Pattern for operators of normalisations, which read their input twice: for the statistics, and to apply them. Their
kernels may be called elementwise or reductions."""

LEAST_KERNEL_NS = 1_000
"""Nanoseconds that any kernel takes at least."""

FUSIBLE_CLASSES = ("elementwise", "copy", "normalisation", "reduction")
"""Classes of kernels that compute little for what they read and write."""

_OF_ATTENTION = """
    class = 'attention'
    OR class <> 'gemm' AND regexp_matches(name, 'softmax', 'i') AND NOT regexp_matches(name, 'log_?softmax', 'i')
"""
"""SQL of whether kernels of a name may be part of attention; a trace without any of them has none."""

_NO_ATTENTION = """
    SELECT NULL::VARCHAR AS form, NULL::VARCHAR AS part, NULL::VARCHAR AS class, NULL::BIGINT AS kernels,
           NULL::DOUBLE AS device_ms, NULL::DOUBLE AS percent_of_device_time LIMIT 0
"""

BATCHED = ("aten::bmm", "aten::baddbmm", "aten::baddbmm_")
_BOTH_NAMES = "name || ' ' || coalesce(op, '')"

_BLOCKS = "PARTITION BY rank, device, stream ORDER BY block"

_SHARED_BATCH = "CASE WHEN product THEN CASE WHEN has_operator THEN 0 ELSE batch END END"
"""For a block that begins with a product: the value that two blocks of one attention must share."""

_PARTS = f"""
    WITH grids AS (  -- of products: no other kernel's grid counts
        SELECT rank, trace_id, span_id, start_ns,
               TRY_CAST(json_extract_string(attributes, '$.grid[2]') AS BIGINT) AS batch
        FROM spans WHERE level = {int(Level.KERNEL)} AND name IN (SELECT name FROM kernel_names WHERE class = 'gemm')
    ),
    launched AS MATERIALIZED (
        SELECT w.rank, w.device, w.stream, w.span_id, w.op_id, w.start_ns, w.dur_ns, w.class, w.name, op.name AS op,
               op.key AS op_key, coalesce(op.kind = '{Kind.OP}', false) AS has_operator,
               coalesce(grids.batch, 1) AS batch
        FROM device_work w
        LEFT JOIN grids ON grids.rank = w.rank AND grids.trace_id = w.trace_id AND grids.span_id = w.span_id
                       AND grids.start_ns = w.start_ns
        LEFT JOIN spans op ON op.rank = w.rank AND op.trace_id = w.trace_id AND op.span_id = w.op_id
                AND op.level = {int(Level.OP)}
        WHERE w.kind = '{Kind.KERNEL}'
    ),
    pairs AS MATERIALIZED (  -- patterns are matched once for each kernel's name and operator's name
        SELECT name, op, class, regexp_matches(name, 'softmax', 'i') AND class NOT IN ('attention', 'gemm')
                                AND NOT regexp_matches({_BOTH_NAMES}, 'log_?softmax', 'i') AS softmax,
               regexp_matches({_BOTH_NAMES}, 'backward|bwd', 'i') AS backward,
               regexp_matches({_BOTH_NAMES}, '{FUSED_ALREADY}|{TWO_PASSES}', 'i') AS is_fused
        FROM (SELECT DISTINCT name, op, class FROM launched)
    ),
    ordered AS (
        SELECT launched.* EXCLUDE (name), softmax, backward, is_fused,
               launched.class = 'gemm'
               AND CASE WHEN has_operator THEN launched.op IN {BATCHED} ELSE batch > 1 END AS product,
               launched.class IN ('gemm', 'convolution', 'attention', 'communication')
               OR (launched.class = 'normalisation' AND NOT softmax) AS is_boundary,
               lag(op_id) OVER lane AS previous_op, row_number() OVER lane AS position
        FROM launched JOIN pairs ON pairs.name = launched.name AND pairs.op IS NOT DISTINCT FROM launched.op
                                AND pairs.class IS NOT DISTINCT FROM launched.class
        WINDOW lane AS (PARTITION BY rank, device, stream ORDER BY start_ns, span_id)
    ),
    blocks AS MATERIALIZED (  -- a kernel that bounds what may be fused, and all until the next one
        SELECT *, sum(CASE WHEN is_boundary AND (NOT has_operator OR previous_op IS NULL OR previous_op <> op_id)
                           THEN 1 ELSE 0 END)
                  OVER (PARTITION BY rank, device, stream ORDER BY position ROWS UNBOUNDED PRECEDING) AS block
        FROM ordered
    ),
    block_kinds AS (
        SELECT rank, device, stream, block, bool_or(product) AS product, bool_or(softmax) AS softmax,
               bool_or(softmax AND backward) AS backward, max(batch) FILTER (product) AS batch,
               bool_and(has_operator OR is_boundary OR softmax OR coalesce(class IN {MOVING_CLASSES}, false)) AS plain,
               bool_and(has_operator) AS has_operator
        FROM blocks GROUP BY ALL
    ),
    neighbours AS (
        SELECT *, lag({_SHARED_BATCH}) OVER ({_BLOCKS}) AS product_before,
               lead({_SHARED_BATCH}) OVER ({_BLOCKS}) AS product_next,
               lead({_SHARED_BATCH}, 2) OVER ({_BLOCKS}) AS product_second
        FROM block_kinds
    ),
    attention_blocks AS (
        SELECT rank, device, stream, block, backward,
               product_before = {_SHARED_BATCH} AS before, product_second = {_SHARED_BATCH} AS second
        FROM neighbours WHERE softmax AND plain AND product_next = {_SHARED_BATCH}
    ),
    members AS (
        SELECT rank, device, stream, block, bool_or(is_softmax_block) AS is_softmax_block FROM (
            SELECT rank, device, stream, block, true AS is_softmax_block FROM attention_blocks
            UNION ALL SELECT rank, device, stream, block + 1, false FROM attention_blocks
            UNION ALL SELECT rank, device, stream, block - 1, false FROM attention_blocks WHERE backward AND before
            UNION ALL SELECT rank, device, stream, block + 2, false FROM attention_blocks WHERE backward AND second
        ) GROUP BY ALL
    )
    SELECT blocks.rank, blocks.device, blocks.stream, blocks.position, blocks.class, blocks.op, blocks.op_key,
           blocks.dur_ns, blocks.is_fused,
           CASE WHEN blocks.class = 'attention' THEN '{KERNELS}' WHEN members.block IS NULL THEN NULL
                WHEN is_boundary THEN '{PRODUCTS}' WHEN NOT is_softmax_block THEN NULL
                WHEN softmax THEN '{SOFTMAX}' ELSE '{BETWEEN}' END AS part
    FROM blocks LEFT JOIN members
    ON members.rank = blocks.rank AND members.device IS NOT DISTINCT FROM blocks.device
       AND members.stream IS NOT DISTINCT FROM blocks.stream AND members.block = blocks.block
"""
"""Every kernel with its class, its operator, and its part in attention; null if it has none."""


def _prepare(trace: Trace) -> None:
    prepare(trace)
    trace.create_temp_table("kernel_parts", _PARTS)


@analysis("attention", "Attention by form", Level.KERNEL, everywhere=True)
def attention_by_form(trace: Trace) -> Table:
    """Device time of attention: fused kernels, and the products, softmax and other kernels of eager attention.

    The softmax and the kernels between the products write and read the whole matrix of scores, which a fused kernel
    does not; the arithmetic of the products remains. `class` is the class of the kernels in `kernel-classes`. The share
    is of the time of all kernels and copies. docs/understand/device-time.md explains how eager attention is recognised.
    """
    prepare(trace)
    if not trace.con.execute(f"SELECT 1 FROM kernel_names WHERE {_OF_ATTENTION} LIMIT 1").fetchall():
        return trace.sql(_NO_ATTENTION)
    _prepare(trace)
    return trace.sql(
        f"""
        SELECT CASE WHEN part = '{KERNELS}' THEN '{FUSED}' ELSE '{EAGER}' END AS form, part, class,
               count(*) AS kernels, sum(dur_ns) / 1e6 AS device_ms,
               100.0 * sum(dur_ns) / nullif(any_value(whole_ns), 0) AS percent_of_device_time
        FROM kernel_parts CROSS JOIN (SELECT sum(dur_ns) AS whole_ns FROM device_work)
        WHERE part IS NOT NULL GROUP BY ALL ORDER BY form, device_ms DESC, part, class
        """
    )


def _chains(bytes_per_s: float | None) -> str:
    """Return the SQL of kernels that follow each other on a stream and could be one, each with its share of the saving.

    The one kernel still reads what the first of them reads and writes what the last of them writes. Where these bytes
    or the bandwidth are unknown, it takes as long as the longest of them.
    """
    ns = "NULL::DOUBLE" if bytes_per_s is None else f"(first_bytes + last_bytes) * 1e9 / {bytes_per_s!r}"
    return f"""
    WITH traffic AS (  -- only steps that are described have shapes, and so bytes
        SELECT rank, key, any_value(dram_read_bytes) AS read_bytes, any_value(dram_write_bytes) AS write_bytes
        FROM spans WHERE level = {int(Level.OP)} AND dram_read_bytes IS NOT NULL AND key IS NOT NULL GROUP BY ALL
    ), members AS (
        SELECT kernel_parts.*, read_bytes, write_bytes,
               part IS NULL AND class IN {CHAINED_CLASSES} AND NOT is_fused AS is_member
        FROM kernel_parts LEFT JOIN traffic ON traffic.rank = kernel_parts.rank AND traffic.key = op_key
    ), numbered AS (
        SELECT *, sum(CASE WHEN is_member THEN 0 ELSE 1 END) OVER (
            PARTITION BY rank, device, stream ORDER BY position ROWS UNBOUNDED PRECEDING) AS chain
        FROM members
    ), chains AS (
        SELECT rank, device, stream, chain, count(*) AS length, sum(dur_ns) AS ns, max(dur_ns) AS most_ns,
               first(read_bytes ORDER BY position) AS first_bytes,
               last(write_bytes ORDER BY position) AS last_bytes
        FROM numbered WHERE is_member GROUP BY ALL
    ), floors AS (
        SELECT *, least(ns, CASE WHEN moving_ns IS NULL THEN most_ns ELSE greatest({LEAST_KERNEL_NS}, moving_ns) END)
                  AS floor_ns
        FROM (SELECT *, {ns} AS moving_ns FROM chains)
    )
    SELECT numbered.class, numbered.op, numbered.dur_ns,
           CASE WHEN length > 1 THEN numbered.dur_ns ELSE 0 END AS chained_ns,
           CASE WHEN length > 1 THEN numbered.dur_ns * (ns - floor_ns)::DOUBLE / ns ELSE 0 END AS saved_ns
    FROM numbered JOIN floors USING (rank, device, stream, chain) WHERE is_member AND ns > 0
    """


@analysis("fusible", "Kernels that only move memory, by operator", Level.KERNEL, everywhere=True)
def fusible_kernels(trace: Trace) -> Table:
    """Elementwise kernels, copies on the device, normalisations and reductions, by class and operator.

    They compute little for the bytes that they read and write. `chained_ms` is the time of kernels that follow others
    of them on their stream and could be fused with these, `saved_ms` the most that this would save: the fused kernel
    still reads what the first one of its chain reads and writes what the last one writes, at the bandwidth of the
    device, as measured or quoted; if bytes or bandwidth are unknown, it takes as long as the longest. Normalisations,
    which read their input more than once, and fused optimizers count in neither. Kernels of eager attention are in
    `attention` and left out here. The share is of the time of all kernels and copies.
    """
    _prepare(trace)
    try:
        bandwidth = ceilings.of_run(trace.run, True).bytes_per_s
    except XspError:  # neither measured nor quoted
        bandwidth = None
    trace.create_temp_table("kernel_chains", _chains(bandwidth))
    return trace.sql(
        f"""
        SELECT class, op, count(*) AS kernels, sum(dur_ns) / 1e6 AS device_ms,
               100.0 * sum(dur_ns) / nullif(any_value(whole_ns), 0) AS percent_of_device_time,
               any_value(chained_ms) AS chained_ms, any_value(saved_ms) AS saved_ms,
               median(dur_ns) / 1e3 AS median_us
        FROM kernel_parts CROSS JOIN (SELECT sum(dur_ns) AS whole_ns FROM device_work)
        LEFT JOIN (
            SELECT class AS of_class, op AS of_op, sum(chained_ns) / 1e6 AS chained_ms, sum(saved_ns) / 1e6 AS saved_ms
            FROM kernel_chains GROUP BY ALL
        ) ON of_class IS NOT DISTINCT FROM class AND of_op IS NOT DISTINCT FROM op
        WHERE part IS NULL AND class IN {FUSIBLE_CLASSES} GROUP BY class, op ORDER BY device_ms DESC, class, op
        """
    )
