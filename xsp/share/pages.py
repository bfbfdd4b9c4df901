"""Mappings of shared memory at addresses where the system can use large pages, and large pages for what is there.

Memory of a memfd has pages of 4 KiB in most systems' settings (`shmem_enabled` is `never`), and a process that reads
it for the first time takes a page fault for every few of them. `MADV_COLLAPSE` asks for large pages for one range,
whatever that setting is but `deny`, without privileges; Linux has it since 6.1.
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

_SIZE = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")


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


def large() -> int:
    """Return the bytes of a large page; 0 where the system has none."""
    try:
        return int(_SIZE.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return 0


def mapped(memory: int, nbytes: int) -> int:
    """Map a descriptor for reading, shared, and return the address: a multiple of a large page, where there are any.

    Raises:
        OSError: it cannot be mapped.
    """
    size = large()
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
    for unused, until in ((start, address), (end, start + reserved)):
        if until > unused:
            _LIBC.munmap(unused, until - unused)
    return address


def _map(address: int | None, nbytes: int, protection: int, flags: int, memory: int) -> int:
    found: int | None = _LIBC.mmap(address, nbytes, protection, flags, memory, 0)
    if found in (None, _FAILED):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return found


def unmap(address: int, nbytes: int, munmap: Any = _LIBC.munmap) -> None:
    """End a mapping of `mapped`; it can be called while the interpreter ends."""
    munmap(address, nbytes)


def enlarge(memory: int, nbytes: int, goes_on: Callable[[], bool]) -> int:
    """Give a memfd that has no content yet large pages, as far as whole ones fit and the system has any.

    Done before anything is written it costs no more time than small pages do: none of them is made and copied.

    Args:
        memory: descriptor.
        nbytes: the size that it gets.
        goes_on: asked now and then; False ends it.

    Returns:
        The bytes that have large pages.
    """
    size = large()
    try:
        os.ftruncate(memory, nbytes)
        if not size or nbytes < size:
            return 0
        address = mapped(memory, nbytes)
    except OSError:
        return 0
    done = 0
    try:
        while done + size <= nbytes and goes_on():
            os.pwrite(memory, b"\0", done)  # of what has no page at all none is made
            if _LIBC.madvise(address + done, size, _MADV_COLLAPSE):
                break  # an older system, a setting, or no free memory in one piece: the rest has small pages
            done += size
    except OSError:
        pass  # memory is full: who writes what is to be there says so
    finally:
        unmap(address, nbytes)
    return done
