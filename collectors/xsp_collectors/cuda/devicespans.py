"""Kernels, copies and memsets as spans (KERNEL)."""

from __future__ import annotations

import ctypes
import functools
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from xsp.schema import Kind, Level, Span, spans_of
from xsp_collectors.cuda.activities import COLLECTOR, UNKNOWN, Copy, Kernel, Memset, Table, distinct

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


Description = tuple[str, str, str]
"""Kind, name and attributes of device work."""


def is_finished(work: Table) -> npt.NDArray[np.bool_]:
    """Return for each kernel or copy whether it had begun and ended when the records were flushed."""
    return (work["start"] > 0) & (work["start"] <= work["end"])


def spans(tables: Sequence[Table], texts: Sequence[str | None]) -> list[Span]:
    """Return the spans of device work, in the order of its records.

    Args:
        tables: records of `Kernel`, `Copy` and `Memset`.
        texts: the texts of their batch.
    """
    used = [table for table in tables if len(table)]
    made = [span for table in used for span in _spans(table, texts)]
    if len(used) < 2:
        return made
    order = np.argsort(np.concatenate([table.number for table in used]), kind="stable")
    return [made[position] for position in order.tolist()]


def _spans(work: Table, texts: Sequence[str | None]) -> Iterator[Span]:
    fields = _DESCRIBING[work.row_type]
    keys, examples = distinct([work[field] for field in fields])
    descriptions = {
        key: _description(work.row_type, dict(zip(fields, np.frombuffer(key, np.int64).tolist(), strict=True)), texts)
        for key in examples
    }
    kinds, names, attributes = zip(*map(descriptions.__getitem__, keys), strict=True)
    columns = {
        "kind": kinds,
        "name": names,
        "start_ns": work["start"].tolist(),
        "dur_ns": (work["end"] - work["start"]).tolist(),
        "device": work["device_id"].tolist(),
        "stream": work["stream_id"].tolist(),
        "correlation_id": [number or None for number in work["correlation_id"].tolist()],
        "attributes": attributes,
    }
    return spans_of(columns, level=Level.KERNEL, collector=COLLECTOR)


_DESCRIBING: dict[Any, tuple[str, ...]] = {
    Kernel: (*Kernel._fields[Kernel._fields.index("name") :], "context_id"),
    Copy: ("bytes", "copy_kind", "graph_node_id", "context_id"),
    Memset: ("bytes", "graph_node_id", "context_id"),
}
"""The fields that determine the description of device work."""


def _description(row_type: Any, values: dict[str, int], texts: Sequence[str | None]) -> Description:
    """Return the description of device work with these values of the describing fields."""
    known = {field: None if value == UNKNOWN else value for field, value in values.items()}
    node, context = known["graph_node_id"], known["context_id"]
    if row_type is Kernel:
        return _kernel(texts[values["name"]], tuple(known[field] for field in _DESCRIBING[Kernel][1:-2]), node, context)
    direction = "memset" if row_type is Memset else _COPIES.get(values["copy_kind"])
    name = "Memset" if row_type is Memset else f"Memcpy {direction}" if direction else "Memcpy"
    return Kind.COPY.value, name, _copy_attributes(known["bytes"], direction, node, context)


@functools.lru_cache(maxsize=4096)
def _kernel(symbol: str | None, launch: tuple[Any, ...], node: int | None, context: int | None) -> Description:
    """Return the description of a kernel, with its launch parameters."""
    *sizes, registers, static, dynamic = launch
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


@functools.lru_cache(maxsize=4096)
def _copy_attributes(size: int | None, direction: str | None, node: int | None, context: int | None) -> str:
    return _json({"bytes": size, "copy": direction}, node, context)


def _json(attributes: dict[str, Any], node: int | None, context: int | None) -> str:
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
