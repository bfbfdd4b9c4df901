"""Memory of the host that a GPU of CUDA reads in place: pinned by its address, managed through the runtime's library.

torch takes either by `__cuda_array_interface__`.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch


class Pinned:
    """Pinned host memory as a GPU sees it, at the same address."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.__cuda_array_interface__ = {
            "shape": (tensor.nbytes // 4,), "typestr": "<f4", "data": (tensor.data_ptr(), False), "version": 3
        }  # fmt: skip


class Opened:
    """Memory of another process that was opened on the GPU; it lives as long as a tensor of this."""

    def __init__(self, memory: Any) -> None:
        self.memory = memory
        self.__cuda_array_interface__ = {  # torch requires what it may write
            "shape": (memory.nbytes,), "typestr": "|u1", "data": (memory.address, False), "strides": None, "version": 3
        }  # fmt: skip


class _Pages:
    """Managed pages, freed with this object."""

    def __init__(self, size: int, runtime: ctypes.CDLL) -> None:
        address = ctypes.c_void_p()
        status = runtime.cudaMallocManaged(ctypes.byref(address), ctypes.c_size_t(size), ctypes.c_uint(1))
        if status or not address.value:
            raise NotImplementedError(f"managed memory cannot be allocated (CUDA error {status})")
        self.runtime, self.address = runtime, address.value
        self.__cuda_array_interface__ = {
            "shape": (size // 4,), "typestr": "<f4", "data": (self.address, False), "version": 3
        }  # fmt: skip

    def __del__(self) -> None:
        if getattr(self, "address", 0):
            self.runtime.cudaFree(ctypes.c_void_p(self.address))


class ManagedMemory:
    """Managed memory of a GPU, see `xsp.device.contract.Managed`."""

    def __init__(self, size: int, index: int) -> None:
        """Allocate it.

        Raises:
            NotImplementedError: CUDA's runtime cannot be called, or it allocates none.
        """
        self._size, self._index, self._runtime = size, index, _runtime()
        self._pages = _Pages(size, self._runtime)
        self.tensor: Any = torch.as_tensor(self._pages, device=f"cuda:{index}")

    def to_host(self) -> None:
        """Write all pages from the host, so that they are there."""
        ctypes.memset(self._pages.address, 0, self._size)

    def prefetch(self) -> None:
        """Prefetch the pages to the GPU, in the current stream."""
        stream = ctypes.c_void_p(torch.cuda.current_stream(self._index).cuda_stream)
        address, size = ctypes.c_void_p(self._pages.address), ctypes.c_size_t(self._size)
        if int((torch.version.cuda or "0").partition(".")[0]) >= 13:  # takes a location, not a number, and flags
            place = _Location(1, self._index)
            status = self._runtime.cudaMemPrefetchAsync(address, size, place, ctypes.c_uint(0), stream)
        else:
            status = self._runtime.cudaMemPrefetchAsync(address, size, ctypes.c_int(self._index), stream)
        if status:
            raise NotImplementedError(f"managed memory cannot be prefetched (CUDA error {status})")


class _Location(ctypes.Structure):
    """`cudaMemLocation`; kind 1 is a device."""

    _fields_ = (("kind", ctypes.c_int), ("number", ctypes.c_int))


def _runtime() -> ctypes.CDLL:
    """Return the runtime library that torch has loaded."""
    major = (torch.version.cuda or "").partition(".")[0]
    torch.cuda.init()
    try:
        return ctypes.CDLL(f"libcudart.so.{major}")
    except OSError as error:
        raise NotImplementedError(f"CUDA's runtime library cannot be called: {error}") from error
