"""Mappings of shared memory, aligned so that the system can use large pages, and large pages for that memory.

With most systems' settings (`shmem_enabled` is `never`), a memfd has pages of 4 KiB, and the first process to read it
takes a page fault for every few of them. `MADV_COLLAPSE` requests large pages for one range, under any setting except
`deny`, without privileges; Linux has it since 6.1.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

_PROT_NONE, _PROT_READ = 0, 1
_MAP_SHARED, _MAP_PRIVATE, _MAP_FIXED, _MAP_ANONYMOUS, _MAP_NORESERVE = 0x01, 0x02, 0x10, 0x20, 0x4000
_FAILED = ctypes.c_void_p(-1).value
_MADV_COLLAPSE = 25

_SIZE_FILE = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")


def _library() -> Any:
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = [
        ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64,
    ]  # fmt: skip
    library.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    library.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return library


_LIBC = _library()


def large_page_bytes() -> int:
    """Return the bytes of a large page; 0 if the system has none."""
    try:
        return int(_SIZE_FILE.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return 0


def map_shared(memory: int, nbytes: int) -> int:
    """Map a descriptor for reading, shared, and return the address, aligned to a large page if the system has any.

    Raises:
        OSError: it cannot be mapped.
    """
    size = large_page_bytes()
    if not size or nbytes < size:
        return _map(None, nbytes, _PROT_READ, _MAP_SHARED, memory)
    reserved = nbytes + size
    start = _map(None, reserved, _PROT_NONE, _MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_NORESERVE, -1)
    address = -(-start // size) * size
    try:
        _map(address, nbytes, _PROT_READ, _MAP_SHARED | _MAP_FIXED, memory)
    except OSError:
        _LIBC.munmap(start, reserved)
        raise
    page = os.sysconf("SC_PAGE_SIZE")
    end = address + -(-nbytes // page) * page
    for gap_start, gap_end in ((start, address), (end, start + reserved)):
        if gap_end > gap_start:
            _LIBC.munmap(gap_start, gap_end - gap_start)
    return address


def _map(address: int | None, nbytes: int, protection: int, flags: int, memory: int) -> int:
    result: int | None = _LIBC.mmap(address, nbytes, protection, flags, memory, 0)
    if result in (None, _FAILED):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


def unmap(address: int, nbytes: int, munmap: Any = _LIBC.munmap) -> None:
    """Unmap memory from `map_shared`; safe to call at interpreter shutdown."""
    munmap(address, nbytes)


def enlarge(memory: int, nbytes: int, keep_going: Callable[[], bool]) -> int:
    """Give an empty memfd as many large pages as fit and the system provides.

    Before the first write this costs no more time than small pages, because no small page is allocated and then copied.

    Args:
        memory: descriptor.
        nbytes: new size of the memfd.
        keep_going: polled before each large page; False stops the loop.

    Returns:
        The number of bytes that have large pages.
    """
    size = large_page_bytes()
    try:
        os.ftruncate(memory, nbytes)
        if not size or nbytes < size:
            return 0
        address = map_shared(memory, nbytes)
    except OSError:
        return 0
    large_bytes = 0
    try:
        while large_bytes + size <= nbytes and keep_going():
            os.pwrite(memory, b"\0", large_bytes)  # a range without any page is not collapsed
            if _LIBC.madvise(address + large_bytes, size, _MADV_COLLAPSE):
                break  # an old kernel, a setting, or no contiguous free memory: the rest gets small pages
            large_bytes += size
    except OSError:
        pass  # memory is full: the caller's writes report it
    finally:
        unmap(address, nbytes)
    return large_bytes
