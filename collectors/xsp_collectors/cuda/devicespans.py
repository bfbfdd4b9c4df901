"""Kernels, copies and memsets as spans (KERNEL)."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from xsp.span import Kind, Level, Span
from xsp_collectors.cuda.activities import Copy, Kernel, Memset
from xsp_collectors.cuda.demangling import demangled

_COPIES = {
    1: "HtoD",
    2: "DtoH",
    3: "HtoA",
    4: "AtoH",
    5: "AtoA",
    6: "AtoD",
    7: "DtoA",
    8: "DtoD",
    9: "HtoH",
    10: "PtoP",
}
"""CUPTI's numbers of what is copied where: host, device, array, peer."""


def is_finished(work: Kernel | Copy | Memset) -> bool:
    """Return whether it had begun and ended when the records were flushed."""
    return 0 < work.start <= work.end


def kernel(work: Kernel) -> Span:
    """Return the span of a kernel, with what it was launched with."""
    shared = [part for part in (work.static_shared_memory, work.dynamic_shared_memory) if part is not None]
    launched = {
        "grid": [work.grid_x, work.grid_y, work.grid_z],
        "block": [work.block_x, work.block_y, work.block_z],
        "registers": work.registers_per_thread,
        "shared_bytes": sum(shared) if shared else None,
        **_in_graph(work),
        "context": work.context_id,
    }
    return _span(work, Kind.KERNEL, demangled(work.name or "kernel without a name"), launched)


def copy(work: Copy) -> Span:
    """Return the span of a copy."""
    direction = _COPIES.get(work.copy_kind)
    told = {"bytes": work.bytes, "copy": direction, **_in_graph(work), "context": work.context_id}
    return _span(work, Kind.COPY, f"Memcpy {direction}" if direction else "Memcpy", told)


def memset(work: Memset) -> Span:
    """Return the span of a memset."""
    told = {"bytes": work.bytes, "copy": "memset", **_in_graph(work), "context": work.context_id}
    return _span(work, Kind.COPY, "Memset", told)


def _in_graph(work: Kernel | Copy | Memset) -> dict[str, Any]:
    """Return the node of a CUDA graph that was replayed, if it was one."""
    return {"graph": True, "graph_node": work.graph_node_id} if work.graph_node_id else {}


def _span(work: Kernel | Copy | Memset, kind: Kind, name: str, told: dict[str, Any]) -> Span:
    return Span(
        level=Level.KERNEL,
        kind=kind.value,
        name=name,
        start_ns=work.start,
        dur_ns=work.end - work.start,
        device=work.device_id,
        stream=work.stream_id,
        correlation_id=work.correlation_id or None,
        attributes=json.dumps({key: value for key, value in told.items() if value is not None}),
    )


MAKERS: dict[type, Callable[[Any], Span]] = {Kernel: kernel, Copy: copy, Memset: memset}
