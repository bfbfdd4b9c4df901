"""A trace of a GPU of any size, made by the table engine: steps of layers of operators, each with launch and kernel."""

from __future__ import annotations

from xsp import table
from xsp.store.merge import true_trace
from xsp.store.trace import Trace

NAMES = [
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float> >(int)",
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1",
    "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float> >(int)",
    "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevComm*, unsigned long, ncclWork*)",
]


def generated(steps: int = 2, layers: int = 3, ops: int = 4, ranks: int = 1) -> Trace:
    """Return a trace of `ranks * steps * (1 + layers * (1 + 3 * ops))` spans as an importer leaves them.

    An operator takes 10 microseconds of the host and its kernel 8 of the device, which begins 15 after the launch.
    Of each four kernels one is a collective, on a stream of its own.
    """
    con = table.connect()
    table.create(con, "spans")
    con.execute(
        """
        CREATE TEMP TABLE ops AS
        SELECT rank, step, layer, op, (step * $layers + layer) * $ops + op AS number
        FROM range($ranks) r(rank), range($steps) s(step), range($layers) l(layer), range($ops) o(op)
        """,
        {"ranks": ranks, "steps": steps, "layers": layers, "ops": ops},
    )
    for kind, rows in _rows(layers * ops * 10_000, ops * 10_000).items():
        con.execute(f"INSERT INTO spans BY NAME SELECT '{kind}' AS kind, {rows}")
    con.execute(
        "UPDATE spans SET trace_id = format('{:032x}', step + 1), rung = 70, timed = true, status = 'ok', process = "
        "rank + 1, grade = CASE WHEN device IS NOT NULL THEN 'exact' END, "
        f"key = format('{{:016x}}', hash(kind, name, start_ns - step * {layers * ops * 10_000}))"
    )
    machine = {"devices": ["NVIDIA H100 80GB HBM3"] * ranks}
    return true_trace(con, {"name": "generated", "imported": {"sources": []}, "machine": machine})


def _rows(step: int, layer: int) -> dict[str, str]:
    """Return SQL for each kind of span; times are of an operator's number and of how long steps and layers are."""
    start, own = "number * 10000", "rank * 100000000 + number"
    names = ", ".join(f"'{name}'" for name in NAMES)
    layer_id, op_id = "'l' || rank || '-' || step || '-' || layer", f"'o' || ({own})"
    return {
        "step": f"20 AS level, 'train' AS name, 's' || rank || '-' || step AS span_id, {start} AS start_ns, {step} AS "
        "dur_ns, 1 AS thread, rank, step FROM ops WHERE layer = 0 AND op = 0",
        "module": f"30 AS level, 'layers.' || layer AS name, 'Linear' AS type, {layer_id} AS span_id, 's' || rank || "
        f"'-' || step AS parent_id, {layer_id} AS layer_id, layer AS layer_index, 0 AS depth, {start} AS start_ns, "
        f"{layer} AS dur_ns, 1 AS thread, rank, step FROM ops WHERE op = 0",
        "op": f"40 AS level, 'aten::op' || op % 20 AS name, {op_id} AS span_id, {layer_id} AS parent_id, {layer_id} AS "
        f"layer_id, {start} + 100 AS start_ns, 9800 AS dur_ns, 1 AS thread, rank, step FROM ops",
        "launch": f"60 AS level, 'cudaLaunchKernel' AS name, 'a' || ({own}) AS span_id, {op_id} AS parent_id, "
        f"{layer_id} AS layer_id, {start} + 2000 AS start_ns, 5000 AS dur_ns, 1 AS thread, number AS correlation_id, "
        "rank, step FROM ops",
        "kernel": f"70 AS level, [{names}][1 + op % 4] AS name, 'k' || ({own}) AS span_id, {op_id} AS parent_id, "
        f"{layer_id} AS layer_id, {start} + 17000 AS start_ns, 8000 AS dur_ns, 0 AS device, CASE op % 4 WHEN 3 THEN 20 "
        "ELSE 7 END AS stream, number AS correlation_id, 'correlation' AS parent_rule, rank, step, "
        '\'{"grid":[\' || (op % 50) || \',1,1],"block":[128,1,1],"registers":32}\' AS attributes FROM ops',
    }
