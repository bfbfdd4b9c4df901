"""The runtime `transfers`: transfers in memory, between processes, and to and from storage.

Transfers to and from devices are in `xsp.bench.devicemoves`. Imports torch: import it where it is needed. Buffers are
written before they are timed, so that no page is fresh, except for `first-touch`, which measures fresh pages.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import mmap
import os
import tempfile
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from xsp.bench import devicemoves, numanodes, transfers
from xsp.bench.inputs import NotTimeable
from xsp.bench.partner import Partner
from xsp.bench.spec import Spec
from xsp.bench.torchcalls import Prepared, self_timed
from xsp.bench.transfers import DEVICE, DIRECTORY, FAMILIES, MEMORY, PROCESSES, ROOM, ROW
from xsp.processes import system_text
from xsp.texts import size_text

PAGE = mmap.PAGESIZE
MESSAGE_BYTES = 64 << 20


class Transfers:
    """The runtime that prepares specs of `xsp.bench.transfers`."""

    name = transfers.TRANSFERS

    def prepare(self, spec: Spec, rotated_bytes: int, limit_bytes: int) -> Prepared:
        """Return a transfer ready to be timed.

        Raises:
            NotTimeable: the transfer is not possible on this machine; the message is the reason.
            MemoryError: the buffers exceed the limit, or the folder has too little room.
        """
        name, arguments = transfers.arguments(spec)
        family, size = FAMILIES.get(name), int(arguments.get("bytes", 0))
        if family is None or size < (4 * ROW if family.most else 0):
            raise NotTimeable(f"there is no transfer {name} of {size} bytes")
        if 4 * size > limit_bytes:
            raise MemoryError(f"its buffers take {size_text(4 * size)} of {size_text(limit_bytes)} allowed")
        if family.group == MEMORY:
            return _memory(name, size)
        if family.group == PROCESSES:
            if size > MESSAGE_BYTES:
                raise NotTimeable(f"messages are limited to {MESSAGE_BYTES >> 20} MiB")
            return self_timed(_partner(directory() if family.in_folder else None).timer(name, size))
        return devicemoves.prepare(name, size) if family.group == DEVICE else _storage(name, size)


def _memory(name: str, size: int) -> Prepared:
    if name.startswith("first-touch"):
        return self_timed(_first_touch(size, name.endswith("huge")), most_calls=64)
    if FAMILIES[name].nodes:
        try:
            return self_timed(numanodes.copy_timer(size, is_far=name == "copy-far-node"))
        except OSError as error:
            raise NotTimeable(error.strerror or str(error)) from error
    first, second, third = (torch.ones(size // 4) for _ in range(3))
    if name == "memcpy":
        move, target, source = ctypes.memmove, first.data_ptr(), second.data_ptr()
        # the arguments keep both tensors alive
        return Prepared(lambda a, b: move(target, source, size), [(first, second)])
    if name == "strided":
        rows = [torch.ones(2 * size // ROW, ROW // 4)[::2] for _ in range(2)]
        return Prepared(torch.Tensor.copy_, [(rows[0], rows[1])])
    if name == "strided-3d":
        planes = [torch.ones(2 * size // (4 * ROW), 8, ROW // 4)[::2, ::2] for _ in range(2)]
        return Prepared(torch.Tensor.copy_, [(planes[0], planes[1])])
    if name == "triad":
        return Prepared(lambda a, b, c: torch.add(b, c, alpha=3.0, out=a), [(first, second, third)])
    if name == "read":
        return Prepared(torch.Tensor.sum, [(first,)])
    if name == "write":
        return Prepared(lambda a: a.fill_(2.0), [(first,)])
    return Prepared(torch.Tensor.copy_, [(first, second)])


def _first_touch(size: int, is_huge: bool) -> Callable[[int], int]:
    advice = getattr(mmap, "MADV_HUGEPAGE" if is_huge else "MADV_NOHUGEPAGE", None)
    if advice is None:
        raise NotTimeable("this system has no huge pages")
    if is_huge and "[never]" in (system_text("/sys/kernel/mm/transparent_hugepage/enabled") or "[never]"):
        raise NotTimeable("huge pages are switched off")

    def batch(calls: int) -> int:
        elapsed_ns = 0
        for _ in range(calls):
            mapping = mmap.mmap(-1, size)
            try:
                mapping.madvise(advice)
            except OSError as error:
                raise NotTimeable(f"huge pages cannot be requested ({error.strerror})") from error
            view = np.frombuffer(mapping, np.uint8)
            start = time.perf_counter_ns()
            view[::PAGE] = 1
            elapsed_ns += time.perf_counter_ns() - start
            del view
            mapping.close()
        return elapsed_ns

    return batch


_partners: dict[Path | None, Partner] = {}


def _partner(folder: Path | None) -> Partner:
    """Return the partner process that receives messages; with a folder, the memory that both map is a file in it."""
    partner = _partners.pop(folder, None)
    if partner is not None and partner.has_failed:
        partner.end()
        partner = None
    try:
        return _partners.setdefault(folder, partner or Partner(MESSAGE_BYTES, folder))
    except OSError as error:
        raise _refusal(error, f"the other process cannot be started ({error.strerror or error})") from error


def _refusal(error: OSError, message: str) -> NotTimeable | MemoryError:
    """Return an error for a lack of room, which may end, as for a lack of memory: such transfers are tried again."""
    return MemoryError(message) if error.errno in (errno.ENOSPC, errno.EDQUOT) else NotTimeable(message)


# --- storage -----------------------------------------------------------------------------------------------------


def directory() -> Path:
    """Return the folder in which storage is timed."""
    return Path(os.environ.get(DIRECTORY) or tempfile.gettempdir())


class _OpenFile:
    """An open file, which is closed when neither the cache nor a prepared transfer refers to it."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        weakref.finalize(self, os.close, descriptor)


@functools.lru_cache(maxsize=3)  # one for reading, and two sizes for writing: those of the families
def _file(purpose: str, size: int) -> _OpenFile:
    """Return an unnamed file that is filled and synced to storage."""
    folder = directory()
    try:
        free = os.statvfs(folder)
        if free.f_bavail * free.f_frsize < ROOM * size:
            raise MemoryError(f"{folder} has too little room: {ROOM * size >> 20} MiB are needed")
        with tempfile.TemporaryFile(dir=folder) as file:
            noise = np.random.default_rng(0).bytes(min(size, 1 << 20))
            for _ in range(-(-size // len(noise))):
                file.write(noise)
            file.flush()
            os.fsync(file.fileno())
            return _OpenFile(os.dup(file.fileno()))
    except OSError as error:
        raise _refusal(error, f"{folder}: no file can be created there ({error.strerror})") from error


def _storage(name: str, size: int) -> Prepared:
    largest = FAMILIES[name].most
    file = _file("written" if name.startswith("write") else "read", max(size, largest))
    buffer = mmap.mmap(-1, size)
    buffer[:] = np.random.default_rng(1).bytes(size)
    view = memoryview(buffer)
    if name.endswith("direct"):
        file = _open_direct(file)
    if name == "read-cold":
        return self_timed(_cold_read_timer(file, view), most_calls=16)
    if name == "read-mapped":
        return Prepared(lambda: _read_mapped(file.descriptor, size), [()])
    descriptor = file.descriptor

    def transfer(a: memoryview, opened: _OpenFile = file) -> None:  # the default keeps the file open
        transferred = os.preadv(descriptor, [a], 0) if name.startswith("read") else os.pwritev(descriptor, [a], 0)
        if transferred != size:
            raise OSError(f"only {transferred} of {size} bytes were transferred")
        if name == "write-fsync":
            os.fsync(descriptor)

    return Prepared(transfer, [(view,)])


def _read_mapped(descriptor: int, size: int) -> None:
    """Map a file, touch each page, and unmap it again: mapped pages would not be dropped from the page cache."""
    with mmap.mmap(descriptor, size, prot=mmap.PROT_READ) as mapping:
        view = np.frombuffer(mapping, np.uint8)
        view[::PAGE].sum()
        del view


def _open_direct(file: _OpenFile) -> _OpenFile:
    """Return the same file, opened for direct I/O."""
    try:
        return _OpenFile(os.open(f"/proc/self/fd/{file.descriptor}", os.O_RDWR | os.O_DIRECT))
    except (OSError, AttributeError) as error:
        raise NotTimeable("this file system does not support direct I/O") from error


def _cold_read_timer(file: _OpenFile, buffer: memoryview) -> Callable[[int], int]:
    if not hasattr(os, "posix_fadvise"):
        raise NotTimeable("this system does not drop cached pages on request")
    size = len(buffer)

    def batch(calls: int) -> int:
        elapsed_ns = 0
        descriptor = file.descriptor
        for _ in range(calls):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            start = time.perf_counter_ns()
            transferred = os.preadv(descriptor, [buffer], 0)
            elapsed_ns += time.perf_counter_ns() - start
            if transferred != size:
                raise OSError(f"only {transferred} of {size} bytes were transferred")
        return elapsed_ns

    return batch
