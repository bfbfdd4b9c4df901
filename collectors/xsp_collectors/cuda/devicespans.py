"""Kernels, copies and memsets as spans (KERNEL)."""

from __future__ import annotations

import ctypes
import functools
import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from xsp.schema import Kind, Level, Span, spans_of
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


Work = Kernel | Copy | Memset


def is_finished(work: Work) -> bool:
    """Return whether the work had begun and ended when the records were flushed."""
    return 0 < work.start <= work.end


Description = tuple[str, str, str]
"""Kind, name and attributes of device work."""


def spans(work: Sequence[Work]) -> Iterator[Span]:
    """Yield the spans of device work, in its order."""
    if not work:
        return iter(())
    kinds, names, attributes = zip(*(_DESCRIPTIONS[type(record)](record) for record in work), strict=True)
    columns = {
        "kind": kinds,
        "name": names,
        "start_ns": [record.start for record in work],
        "dur_ns": [record.end - record.start for record in work],
        "device": [record.device_id for record in work],
        "stream": [record.stream_id for record in work],
        "correlation_id": [record.correlation_id or None for record in work],
        "attributes": attributes,
    }
    return spans_of(columns, level=Level.KERNEL, collector=COLLECTOR)


_LAUNCH = Kernel._fields.index("name")
"""Position from which on a kernel's fields, without times and ids, are those of its launch."""


@functools.lru_cache(maxsize=4096)
def _kernel(launch: tuple[Any, ...], context: int) -> Description:
    """Return the description of a kernel, with its launch parameters."""
    symbol, *sizes, registers, static, dynamic, node = launch
    name = demangle(symbol or "kernel without a name")
    shared = [part for part in (static, dynamic) if part is not None]
    attributes: dict[str, Any] = {
        "grid": sizes[:3],
        "block": sizes[3:],
        "registers": registers,
        "shared_bytes": sum(shared) if shared else None,
    }
    library = library_by_name(name)
    attributes |= {"library": library, "evidence": "name"} if library is not None else {}
    return Kind.KERNEL.value, name, _json(attributes, node, context)


def _copy(work: Copy) -> Description:
    direction = _COPIES.get(work.copy_kind)
    attributes = _copy_attributes(work.bytes, direction, work.graph_node_id, work.context_id)
    return Kind.COPY.value, f"Memcpy {direction}" if direction else "Memcpy", attributes


def _memset(work: Memset) -> Description:
    attributes = _copy_attributes(work.bytes, "memset", work.graph_node_id, work.context_id)
    return Kind.COPY.value, "Memset", attributes


_DESCRIPTIONS: dict[type, Callable[[Any], Description]] = {
    Kernel: lambda work: _kernel(work[_LAUNCH:], work.context_id),
    Copy: _copy,
    Memset: _memset,
}


@functools.lru_cache(maxsize=4096)
def _copy_attributes(size: int, direction: str | None, node: int | None, context: int) -> str:
    return _json({"bytes": size, "copy": direction}, node, context)


def _json(attributes: dict[str, Any], node: int | None, context: int) -> str:
    """Return the known attributes as JSON, with the node if the work belongs to a replayed CUDA graph."""
    attributes |= {"graph": True, "graph_node": node} if node else {}
    return json.dumps({key: value for key, value in (attributes | {"context": context}).items() if value is not None})


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
