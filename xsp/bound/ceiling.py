"""The ceiling of a call: the longer of its operations at the peak rate and its bytes at the bandwidth of a device.

Operations and bytes are from `xsp.graph.work`; the bandwidth is that of the memory level into which the bytes fit.
No software can be faster if the ceilings are right. A call with unknown operations or bytes has no ceiling.
"""

from __future__ import annotations

from collections.abc import Sequence

from xsp.bound.totals import Figure
from xsp.device.ceilings import Ceiling
from xsp.device.contract import Device
from xsp.device.processor import Processor
from xsp.graph import work
from xsp.graph.node import Graph, Node, NodeKind

PRECISIONS = {
    "float64": "fp64", "complex128": "fp64", "float32": "fp32", "complex64": "fp32", "float16": "fp16",
    "bfloat16": "bf16", "int8": "int8", "uint8": "int8", "qint8": "int8", "quint8": "int8",
    **dict.fromkeys(("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"), "fp8"),
}  # fmt: skip
"""Element type of an input → precision of `xsp.device.ceilings`."""


COMMUNICATION = ("c10d::", "_c10d_functional::", "record_param_comms")
"""Name prefixes of operators that exchange values between ranks, for which a device has no ceiling."""

NO_SHAPES = "no shapes"


def of_machine(may_measure: bool, again: bool = False, device: Device | None = None) -> Ceiling | str:
    """Return the ceilings of a device of this machine; a reason if they are unknown.

    Args:
        may_measure: measure them now if that was never done.
        again: measure them now in any case; the highest rates of all measurements count.
        device: default: the processor.
    """
    return (device or Processor()).ceiling(may_measure, again)


def figures(
    graph: Graph, ceiling: Ceiling, precisions: Sequence[str | None] | None = None
) -> tuple[list[Figure | None], list[str]]:
    """Return the ceiling of each node, and for each the reason why it has none; the reason is empty if it has one.

    Args:
        graph: any graph.
        ceiling: ceilings of the device.
        precisions: precision of each node, or None, where its kernels show another one than its types (`tf32`).
    """
    results: list[Figure | None] = []
    reasons = []
    for index, node in enumerate(graph.nodes):
        ns = least_ns(node, ceiling, precisions[index] if precisions is not None else None)
        results.append(None if isinstance(ns, str) else Figure(ns, key=node.key))
        reasons.append(ns if isinstance(ns, str) else "")
    return results, reasons


def least_ns(node: Node, ceiling: Ceiling, precision: str | None = None) -> float | str:
    """Return the minimum nanoseconds of a node on a device; a reason if they are unknown."""
    if not node.computes:
        return 0.0
    flops, traffic = work.flops_of(node), work.bytes_of(node)
    if node.kind is NodeKind.COMMUNICATION or node.call.op.startswith(COMMUNICATION):
        return "exchanges values with other ranks"
    if traffic is None and not node.call.inputs:
        return NO_SHAPES
    if traffic is None:
        return "bytes unknown"
    if flops is None:
        return "FLOPs unknown"
    seconds = compute_seconds(node, ceiling, precision)
    return seconds if isinstance(seconds, str) else max(seconds, traffic / ceiling.bandwidth(traffic)) * 1e9


def compute_seconds(node: Node, ceiling: Ceiling, precision: str | None = None) -> float | str:
    """Return the minimum seconds of the operations of a node, without its bytes; a reason if they are unknown."""
    flops = work.flops_of(node)
    if not flops:
        return "FLOPs unknown" if flops is None else 0.0
    kind = precision or precision_of(node)
    if kind is None:
        return "precision unknown"
    peak = ceiling.peak(kind)
    return f"the peak rate in {kind} is unknown" if peak is None else flops / peak


def precision_of(node: Node) -> str | None:
    """Return the precision of the first input of a node that has one; None if no input has one."""
    return next((PRECISIONS[tensor.dtype] for tensor in node.call.inputs if tensor.dtype in PRECISIONS), None)
