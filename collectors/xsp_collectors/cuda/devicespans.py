"""Kernels, copies and memsets as spans (KERNEL)."""

from __future__ import annotations

import ctypes
import functools
import json
import re
from collections.abc import Callable
from typing import Any

from xsp.schema import Kind, Level, Span
from xsp_collectors.cuda.activities import COLLECTOR, Copy, Kernel, Memset

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
"""CUPTI's numbers of the source and target of a copy: host, device, array, peer."""


def is_finished(work: Kernel | Copy | Memset) -> bool:
    """Return whether the work had begun and ended when the records were flushed."""
    return 0 < work.start <= work.end


def kernel(work: Kernel) -> Span:
    """Return the span of a kernel, with its launch parameters."""
    name = demangle(work.name or "kernel without a name")
    attributes = _launch_attributes(
        library_by_name(name),
        (work.grid_x, work.grid_y, work.grid_z),
        (work.block_x, work.block_y, work.block_z),
        work.registers_per_thread,
        (work.static_shared_memory, work.dynamic_shared_memory),
        work.graph_node_id,
        work.context_id,
    )
    return _span(work, Kind.KERNEL, name, attributes)


def copy(work: Copy) -> Span:
    """Return the span of a copy."""
    direction = _COPIES.get(work.copy_kind)
    attributes = _copy_attributes(work.bytes, direction, work.graph_node_id, work.context_id)
    return _span(work, Kind.COPY, f"Memcpy {direction}" if direction else "Memcpy", attributes)


def memset(work: Memset) -> Span:
    """Return the span of a memset."""
    return _span(work, Kind.COPY, "Memset", _copy_attributes(work.bytes, "memset", work.graph_node_id, work.context_id))


@functools.lru_cache(maxsize=4096)
def _launch_attributes(
    library: str | None,
    grid: tuple[int, int, int],
    block: tuple[int, int, int],
    registers: int | None,
    shared: tuple[int | None, int | None],
    node: int | None,
    context: int,
) -> str:
    sizes = [part for part in shared if part is not None]
    shared_bytes = sum(sizes) if sizes else None
    attributes: dict[str, Any] = {"grid": grid, "block": block, "registers": registers, "shared_bytes": shared_bytes}
    attributes |= {"library": library, "evidence": "name"} if library is not None else {}
    return _json(attributes, node, context)


@functools.lru_cache(maxsize=4096)
def _copy_attributes(size: int, direction: str | None, node: int | None, context: int) -> str:
    return _json({"bytes": size, "copy": direction}, node, context)


def _json(attributes: dict[str, Any], node: int | None, context: int) -> str:
    """Return the known attributes as JSON, with the node if the work belongs to a replayed CUDA graph."""
    attributes |= {"graph": True, "graph_node": node} if node else {}
    return json.dumps({key: value for key, value in (attributes | {"context": context}).items() if value is not None})


def _span(work: Kernel | Copy | Memset, kind: Kind, name: str, attributes: str) -> Span:
    return Span(
        level=Level.KERNEL,
        kind=kind.value,
        name=name,
        start_ns=work.start,
        dur_ns=work.end - work.start,
        device=work.device_id,
        stream=work.stream_id,
        correlation_id=work.correlation_id or None,
        collector=COLLECTOR,
        attributes=attributes,
    )


MAKERS: dict[type, Callable[[Any], Span]] = {Kernel: kernel, Copy: copy, Memset: memset}


# --- names of kernels -------------------------------------------------------------------------------------------------
# Names of kernels: demangled by the C++ library that torch brings along, and the library that a name identifies.
#
# The name is the last evidence of a kernel's library, if no library call was recorded. cuFFT marks no calls, and
# Triton, PyTorch and FlashAttention launch kernels without a library in between. Names that several libraries use
# (CUTLASS's, xmma's) identify none.

_RULES = tuple(
    (re.compile(pattern), library)
    for pattern, library in (
        (r"^nccl|ncclDevKernel|ncclKernel", "NCCL"),
        (r"nvshmem", "NVSHMEM"),
        (r"cudnn", "cuDNN"),
        (r"cublas|^nvjet_|^gemmSN|^gemv\w*_kernel|internal::gemvx", "cuBLAS"),
        (r"cusparse", "cuSPARSE"),
        (r"cusolver", "cuSOLVER"),
        (r"cufft|^(vector|regular|multi)_fft|^(dp|sp)Radix", "cuFFT"),
        (r"flash::|flash_fwd|flash_bwd", "FlashAttention"),
        (r"^triton_", "Triton"),
        (r"at::native|at::cuda|at_cuda_detail", "PyTorch"),
        (r"^(void )?(cub|thrust)::", "CCCL"),
    )
)
"""Patterns of demangled names, in the order in which they are tried."""


@functools.lru_cache(maxsize=16384)
def library_by_name(name: str) -> str | None:
    """Return the library that a kernel's name identifies, or None."""
    return next((library for pattern, library in _RULES if pattern.search(name)), None)


@functools.lru_cache(maxsize=16384)
def demangle(name: str) -> str:
    """Return the C++ name of a symbol; other names (Triton's, C's) are returned unchanged."""
    library = _library() if name.startswith("_Z") else None
    if library is None:
        return name
    status = ctypes.c_int()
    text = library.__cxa_demangle(name.encode(), None, None, ctypes.byref(status))
    if status.value != 0 or not text:
        return name
    try:
        return ctypes.string_at(text).decode("utf-8", "replace")
    finally:
        library.free(text)


@functools.cache
def _library() -> Any:
    """Return the C++ library, or None if there is none: names then stay unchanged."""
    try:
        library = ctypes.CDLL("libstdc++.so.6")
    except OSError:
        return None
    library.__cxa_demangle.restype = ctypes.c_void_p
    library.__cxa_demangle.argtypes = [ctypes.c_char_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
    library.free.restype = None
    library.free.argtypes = [ctypes.c_void_p]
    return library
