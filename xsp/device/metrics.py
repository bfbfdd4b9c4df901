"""The metrics of Nsight Compute that yield operations, memory traffic and occupancy, with their weights.

Names are those of `ncu --query-metrics`, see NVIDIA's Nsight Compute Profiling Guide. Weights:

- fp32, fp64: an instruction of a thread is one operation, a fused multiply-add two, as in nvprof's `flop_count_sp`.
- fp16: the instructions are packed, two lanes each, so the weights are doubled, as in the half precision roofline
  that comes with Nsight Compute (`derived__…_hfma_pred_on_x4`). bfloat16 outside tensor cores counts like fp16.
- packed fp32 (compute capability 10 and later): the weights are doubled likewise.
- tensor cores: `sm__ops_path_tensor_*` counts operations, a multiply-add as two: a product of 1024×1024×1024 gives
  2·1024³. Integers are left out. Before compute capability 8.0 only instructions are counted; on 7.0 each is 512
  operations (Yang, Kurth, Williams: Hierarchical Roofline Analysis for GPUs, 2020). For 7.2 and 7.5 no figure was
  found, so the operations of a kernel that used tensor cores are unknown.

Unknown values stay None: operations without those of the tensor cores would be far too few.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from xsp.stats import known_sum

Values = Mapping[str, float]
"""Counter values by the name of the metric, without unavailable metrics."""

_EXECUTED = "smsp__sass_thread_inst_executed_op_{}_pred_on.sum"
_TENSOR = "sm__ops_path_tensor_{}.sum"

_WEIGHTS = {"fadd": 1, "fmul": 1, "ffma": 2, "dadd": 1, "dmul": 1, "dfma": 2, "hadd": 2, "hmul": 2, "hfma": 4}

INSTRUCTIONS = {_EXECUTED.format(operation): weight for operation, weight in _WEIGHTS.items()}
"""Instructions of threads → operations per instruction; all nine must be known."""

PACKED = {_EXECUTED.format(operation): weight for operation, weight in (("fadd2", 2), ("fmul2", 2), ("ffma2", 4))}
"""Packed single precision instructions, which exist on compute capability 10 and later → operations of each."""

PIPE = "sm__inst_executed_pipe_tensor.sum"
"""Tensor core instructions per warp; 0 if tensor cores were not used."""

PIPE_OPERATIONS = {(7, 0): 512}
"""Operations per tensor core instruction, by compute capability."""

_HALVES = ("src_fp16_dst_fp16", "src_fp16_dst_fp32")


def _by_sparsity(*names: str) -> tuple[str, ...]:
    return tuple(f"{name}_sparsity_{state}" for name in names for state in ("off", "on"))


REQUIRED = (
    (("src_fp16",), _HALVES, _by_sparsity(*_HALVES)),
    (("src_bf16_dst_fp32",), _by_sparsity("src_bf16_dst_fp32")),
    (("src_tf32_dst_fp32",), _by_sparsity("src_tf32_dst_fp32")),
)
"""Tensor core operations that every device from compute capability 8.0 on counts: for each, alternative sums. A device
may count them as a whole, by the type of the sum, or with and without sparsity."""

OPTIONAL = (
    (("src_fp64",),),
    (("src_fp8",), _by_sparsity("src_fp8")),
    (("src_fp4_dst_fp32",),),
    (("src_fp4_fp6_dst_fp16",),),
    (("src_fp4_fp6_dst_fp32",),),
    (("src_fp4_fp6_fp8_dst_fp16",),),
    (("src_fp4_fp6_fp8_dst_fp32",),),
)
"""Tensor core operations that only some devices have; if a metric is unknown, the device has no such operations."""

READ_BYTES = ("dram__bytes_read.sum", "dram__bytes_op_read.sum")
"""Bytes read from the device's memory; the second name is that of compute capability 12."""

WRITTEN_BYTES = ("dram__bytes_write.sum", "dram__bytes_op_write.sum")

OCCUPANCY = ("sm__warps_active.avg.pct_of_peak_sustained_active", "Achieved Occupancy")
"""Active warps in percent of those that a multiprocessor can hold; the second name is that of the page `details`."""


class KernelFigures(NamedTuple):
    """The figures of one kernel from its counters; None is unknown."""

    flops: int | None = None
    dram_read_bytes: int | None = None
    dram_write_bytes: int | None = None
    occupancy: float | None = None
    """Active warps as a share of the possible maximum, 0 to 1."""


def requested(available: Collection[str] | None = None) -> list[str]:
    """Return the names of the metrics to request from ncu.

    Args:
        available: names, up to the first dot, of the metrics of the devices here; None if they are unknown, and then
            all are requested.
    """
    groups = [
        [_TENSOR.format(name) for name in way]
        for ways in (*REQUIRED, *OPTIONAL)
        for way in _alternatives(ways, available)
    ]
    tensor = [name for group in groups for name in group]
    names = [*INSTRUCTIONS, *PACKED, PIPE, *tensor, *READ_BYTES, *WRITTEN_BYTES, OCCUPANCY[0]]
    return [name for name in names if available is None or name.partition(".")[0] in available]


def _alternatives(
    alternatives: tuple[tuple[str, ...], ...], available: Collection[str] | None
) -> tuple[tuple[str, ...], ...]:
    """Return the first alternative of which a device has all metrics: each further metric may need another replay."""
    if available is None:
        return alternatives
    complete = [
        names for names in alternatives if all(_TENSOR.format(name).partition(".")[0] in available for name in names)
    ]
    return tuple(complete[:1])


NAMES = frozenset({*requested(), *OCCUPANCY})
"""All metrics that this module interprets."""


def figures(values: Values, capability: tuple[int, int] | None) -> KernelFigures:
    """Return operations, bytes and occupancy of one kernel.

    Args:
        values: values of its metrics, in bytes, instructions, operations and percent.
        capability: compute capability of the device, (9, 0) for instance; None if the report does not state it.
    """
    occupancy = _first(values, OCCUPANCY)
    regular, tensor = non_tensor_flops(values), _tensor(values, capability)
    return KernelFigures(
        flops=None if regular is None or tensor is None else round(regular + tensor),
        dram_read_bytes=_rounded(_first(values, READ_BYTES)),
        dram_write_bytes=_rounded(_first(values, WRITTEN_BYTES)),
        occupancy=None if occupancy is None else occupancy / 100,
    )


def missing(values: Values) -> list[str]:
    """Return the names of the metrics that are needed for operations and missing in a report."""
    tensor = [_TENSOR.format(name) for alternatives in REQUIRED for name in alternatives[0]]
    instructions = [name for name in INSTRUCTIONS if name not in values]
    return instructions + ([] if _required_sum(values) is not None or PIPE in values else tensor)


def non_tensor_flops(values: Values) -> int | None:
    """Return the operations of one kernel outside tensor cores; None unless all its instructions were counted."""
    if not INSTRUCTIONS.keys() <= values.keys():
        return None
    return round(sum(weight * values.get(name, 0) for name, weight in {**INSTRUCTIONS, **PACKED}.items()))


def _tensor(values: Values, capability: tuple[int, int] | None) -> float | None:
    """Return the operations of the tensor cores; None if they were not counted."""
    operations = _required_sum(values)
    if operations is not None:
        return operations + sum(_sum(values, alternatives) or 0 for alternatives in OPTIONAL)
    instructions = values.get(PIPE)
    if instructions is None:
        return 0 if capability is not None and capability < (7, 0) else None
    weight = PIPE_OPERATIONS.get(capability) if capability is not None else None
    return 0 if not instructions else None if weight is None else instructions * weight


def _required_sum(values: Values) -> float | None:
    return known_sum(_sum(values, ways) for ways in REQUIRED)


def _sum(values: Values, alternatives: Iterable[tuple[str, ...]]) -> float | None:
    """Return the sum of the first alternative whose metrics are all known; None if there is none."""
    for alternative in alternatives:
        names = [_TENSOR.format(name) for name in alternative]
        if all(name in values for name in names):
            return sum(values[name] for name in names)
    return None


def _first(values: Values, names: Iterable[str]) -> float | None:
    return next((values[name] for name in names if name in values), None)


def _rounded(value: float | None) -> int | None:
    return None if value is None else round(value)
