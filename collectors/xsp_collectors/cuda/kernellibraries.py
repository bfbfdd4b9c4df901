"""The library of a kernel according to its name: the last evidence, if no library call was recorded.

cuFFT marks no calls, and Triton, PyTorch and FlashAttention launch kernels without a library in between. Names that
several libraries use (CUTLASS's, xmma's) identify none.
"""

from __future__ import annotations

import functools
import re

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
