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
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from xsp.bench import devicemoves, numanodes, transfers
from xsp.bench.inputs import NotTimeable
from xsp.bench.partner import Partner
from xsp.bench.spec import Spec
from xsp.bench.torchcalls import Prepared, timed_by_itself
from xsp.bench.transfers import DEVICE, DIRECTORY, FAMILIES, MEMORY, PROCESSES, ROOM, ROW

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
        name, given = transfers.arguments(spec)
        family, size = FAMILIES.get(name), int(given.get("bytes", 0))
        if family is None or size < (4 * ROW if family.most else 0):
            raise NotTimeable(f"there is no transfer {name} of {size} bytes")
        if 4 * size > limit_bytes:
            raise MemoryError(f"its buffers take {4 * size / 2**30:.1f} GiB")
        if family.group == MEMORY:
            return _memory(name, size)
        if family.group == PROCESSES:
            if size > MESSAGE_BYTES:
                raise NotTimeable(f"messages are limited to {MESSAGE_BYTES >> 20} MiB")
            return timed_by_itself(_partner(directory() if family.in_folder else None).timed(name, size))
        return devicemoves.prepared(name, size) if family.group == DEVICE else _storage(name, size)


def _memory(name: str, size: int) -> Prepared:
    if name.startswith("first-touch"):
        return timed_by_itself(_first_touch(size, name.endswith("huge")), most_calls=64)
    if FAMILIES[name].nodes:
        try:
            return timed_by_itself(numanodes.copying(size, far=name == "copy-far-node"))
        except OSError as error:
            raise NotTimeable(error.strerror or str(error)) from error
    one, other, third = (torch.ones(size // 4) for _ in range(3))
    if name == "memcpy":
        move, there, here = ctypes.memmove, one.data_ptr(), other.data_ptr()
        return Prepared(lambda a, b: move(there, here, size), [(one, other)])  # the arguments keep both tensors alive
    if name == "strided":
        rows = [torch.ones(2 * size // ROW, ROW // 4)[::2] for _ in range(2)]
        return Prepared(torch.Tensor.copy_, [(rows[0], rows[1])])
    if name == "strided-3d":
        planes = [torch.ones(2 * size // (4 * ROW), 8, ROW // 4)[::2, ::2] for _ in range(2)]
        return Prepared(torch.Tensor.copy_, [(planes[0], planes[1])])
    if name == "triad":
        return Prepared(lambda a, b, c: torch.add(b, c, alpha=3.0, out=a), [(one, other, third)])
    if name == "read":
        return Prepared(torch.Tensor.sum, [(one,)])
    if name == "write":
        return Prepared(lambda a: a.fill_(2.0), [(one,)])
    return Prepared(torch.Tensor.copy_, [(one, other)])


def _first_touch(size: int, huge: bool) -> Callable[[int], int]:
    advice = getattr(mmap, "MADV_HUGEPAGE" if huge else "MADV_NOHUGEPAGE", None)
    if advice is None:
        raise NotTimeable("this system has no huge pages")
    if huge and "[never]" in _setting("/sys/kernel/mm/transparent_hugepage/enabled"):
        raise NotTimeable("huge pages are switched off")

    def batch(calls: int) -> int:
        took = 0
        for _ in range(calls):
            fresh = mmap.mmap(-1, size)
            try:
                fresh.madvise(advice)
            except OSError as error:
                raise NotTimeable(f"huge pages cannot be requested ({error.strerror})") from error
            view = np.frombuffer(fresh, np.uint8)
            began = time.perf_counter_ns()
            view[::PAGE] = 1
            took += time.perf_counter_ns() - began
            del view
            fresh.close()
        return took

    return batch


_partners: dict[Path | None, Partner] = {}


def _partner(folder: Path | None) -> Partner:
    """Return the partner process that receives messages; with a folder, the memory that both map is a file in it."""
    known = _partners.pop(folder, None)
    if known is not None and known.failed:
        known.end()
        known = None
    try:
        return _partners.setdefault(folder, known or Partner(MESSAGE_BYTES, folder))
    except OSError as error:
        raise _refusal(error, f"the other process cannot be started ({error.strerror or error})") from error


def _setting(path: str) -> str:
    try:
        return Path(path).read_text(encoding="ascii")
    except OSError:
        return "[never]"


def _refusal(error: OSError, said: str) -> NotTimeable | MemoryError:
    """Return an error for a lack of room, which may end, as for a lack of memory: such transfers are tried again."""
    return MemoryError(said) if error.errno in (errno.ENOSPC, errno.EDQUOT) else NotTimeable(said)


# --- storage -----------------------------------------------------------------------------------------------------


def directory() -> Path:
    """Return the folder in which storage is timed."""
    return Path(os.environ.get(DIRECTORY) or tempfile.gettempdir())


@functools.lru_cache(maxsize=2)
def _file(purpose: str, size: int) -> int:
    """Return the descriptor of an unnamed file that is filled and synced to storage."""
    place = directory()
    try:
        free = os.statvfs(place)
        if free.f_bavail * free.f_frsize < ROOM * size:
            raise MemoryError(f"{place} has too little room: {ROOM * size >> 20} MiB are needed")
        with tempfile.TemporaryFile(dir=place) as file:
            noise = np.random.default_rng(0).bytes(min(size, 1 << 20))
            for _ in range(-(-size // len(noise))):
                file.write(noise)
            file.flush()
            os.fsync(file.fileno())
            return os.dup(file.fileno())
    except OSError as error:
        raise _refusal(error, f"{place}: no file can be created there ({error.strerror})") from error


def _storage(name: str, size: int) -> Prepared:
    largest = FAMILIES[name].most
    number = _file("written" if name.startswith("write") else "read", max(size, largest))
    buffer = mmap.mmap(-1, size)
    buffer[:] = np.random.default_rng(1).bytes(size)
    view = memoryview(buffer)
    if name.endswith("direct"):
        number = _direct(number)
    if name == "read-cold":
        return timed_by_itself(_cold(number, view), most_calls=16)
    if name == "read-mapped":
        return Prepared(lambda: _mapped(number, size), [()])

    def moved(a: memoryview) -> None:
        done = os.preadv(number, [a], 0) if name.startswith("read") else os.pwritev(number, [a], 0)
        if done != size:
            raise OSError(f"only {done} of {size} bytes were transferred")
        if name == "write-fsync":
            os.fsync(number)

    return Prepared(moved, [(view,)])


def _mapped(number: int, size: int) -> None:
    """Map a file, touch each page, and unmap it again: mapped pages would not be dropped from the page cache."""
    with mmap.mmap(number, size, prot=mmap.PROT_READ) as whole:
        view = np.frombuffer(whole, np.uint8)
        view[::PAGE].sum()
        del view


def _direct(number: int) -> int:
    try:
        return os.open(f"/proc/self/fd/{number}", os.O_RDWR | os.O_DIRECT)
    except (OSError, AttributeError) as error:
        raise NotTimeable("this file system does not support direct I/O") from error


def _cold(number: int, into: memoryview) -> Callable[[int], int]:
    if not hasattr(os, "posix_fadvise"):
        raise NotTimeable("this system does not drop cached pages on request")
    size = len(into)

    def batch(calls: int) -> int:
        took = 0
        for _ in range(calls):
            os.posix_fadvise(number, 0, 0, os.POSIX_FADV_DONTNEED)
            began = time.perf_counter_ns()
            done = os.preadv(number, [into], 0)
            took += time.perf_counter_ns() - began
            if done != size:
                raise OSError(f"only {done} of {size} bytes were transferred")
        return took

    return batch
