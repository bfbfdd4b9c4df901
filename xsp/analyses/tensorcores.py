"""Tensor cores: which layers use them, as far as the names of their kernels tell."""

from __future__ import annotations

from xsp.analyses.contract import Table, analysis
from xsp.analyses.devicework import LEVEL_NAMES, NAMED, TENSOR_TIMES, prepare
from xsp.device.kernelnames import MATRIX
from xsp.schema import Level
from xsp.store.trace import Trace


@analysis("tensor-cores", "Tensor cores by layer", Level.KERNEL, everywhere=True)
def TENSOR_CORES(trace: Trace) -> Table:
    """Device time of each layer's matrix products, convolutions and attention, with and without tensor cores.

    Over all steps and ranks, layers of one name together; what is of no layer stands under its operator.
    `untold_ms` is the time of kernels whose names do not tell; `tensor_core_percent` is of the time that is
    told, and null where none is. Longest first. Which names tell what stands in `xsp.device.kernelnames`.
    """
    prepare(trace)
    return trace.sql(
        f"""
        WITH within AS (
            SELECT rank, trace_id, coalesce(layer_id, parent_id) AS span_id, class, tensor_cores, dur_ns
            FROM device_work WHERE class IN {MATRIX}
        ),
        {NAMED}
        SELECT CASE named.level {LEVEL_NAMES} END AS level, name, type, count(*) AS kernels, {TENSOR_TIMES}
        FROM named GROUP BY ALL ORDER BY matrix_ms DESC, name
        """
    )
