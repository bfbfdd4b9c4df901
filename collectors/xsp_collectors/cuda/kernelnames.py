"""Names of kernels: demangled by the C++ library that torch brings along, and the library that a name identifies.

The name is the last evidence of a kernel's library, if no library call was recorded. cuFFT marks no calls, and Triton,
PyTorch and FlashAttention launch kernels without a library in between. Names that several libraries use (CUTLASS's,
xmma's) identify none.
"""

from __future__ import annotations

import ctypes
import functools
import re
from typing import Any

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
