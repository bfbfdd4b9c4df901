"""The runtime `transfers`: what is moved in memory, between processes, to and from storage and devices.

Imports torch: import it where it is needed. Buffers are filled before they are timed, so that none has fresh pages, but
for `first-touch`, which is about those.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from xsp.bench import transfers
from xsp.bench.inputs import NotTimeable
from xsp.bench.partner import Partner
from xsp.bench.spec import Spec
from xsp.bench.torchcalls import Prepared
from xsp.bench.transfers import DEVICE, DIRECTORY, FAMILIES, MEMORY, PROCESSES

PAGE = mmap.PAGESIZE
ROW = 256
MESSAGE_BYTES = 64 << 20
ROOM = 4
"""Times the bytes of a file must be free on its disk."""

SPIN_CYCLES = 2_000_000
"""For which a device waits while transfers are queued."""


class Transfers:
    """Prepares specs of `xsp.bench.transfers`."""

    name = transfers.TRANSFERS

    def prepare(self, spec: Spec, rotated_bytes: int, limit_bytes: int) -> Prepared:
        """Return a transfer ready to be timed.

        Raises:
            NotTimeable: it cannot be done here; the message says why.
            MemoryError: it takes more than it may.
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
                raise NotTimeable(f"messages have up to {MESSAGE_BYTES >> 20} MiB")
            return _self_timed(_partner().timed(name, size))
        return _device(name, size) if family.group == DEVICE else _storage(name, size)


def _self_timed(timed: Callable[[int], int], most: int | None = None) -> Prepared:
    return Prepared(lambda: None, [()], timed=timed, most_calls=most)


def _memory(name: str, size: int) -> Prepared:
    if name.startswith("first-touch"):
        return _self_timed(_first_touch(size, name.endswith("huge")), most=64)
    one, other, third = (torch.ones(size // 4) for _ in range(3))
    if name == "memcpy":
        move, there, here = ctypes.memmove, one.data_ptr(), other.data_ptr()
        return Prepared(lambda a, b: move(there, here, size), [(one, other)])  # keeps both alive
    if name == "strided":
        rows = [torch.ones(2 * size // ROW, ROW // 4)[::2] for _ in range(2)]
        return Prepared(torch.Tensor.copy_, [(rows[0], rows[1])])
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
        raise NotTimeable("this system has no huge pages to ask for")
    if huge and "[never]" in _setting("/sys/kernel/mm/transparent_hugepage/enabled"):
        raise NotTimeable("huge pages are switched off")

    def batch(calls: int) -> int:
        took = 0
        for _ in range(calls):
            fresh = mmap.mmap(-1, size)
            try:
                fresh.madvise(advice)
            except OSError as error:
                raise NotTimeable(f"huge pages cannot be asked for ({error.strerror})") from error
            view = np.frombuffer(fresh, np.uint8)
            began = time.perf_counter_ns()
            view[::PAGE] = 1
            took += time.perf_counter_ns() - began
            del view
            fresh.close()
        return took

    return batch


@functools.lru_cache(maxsize=1)
def _partner() -> Partner:
    try:
        return Partner(MESSAGE_BYTES)
    except OSError as error:
        raise NotTimeable(f"the other process cannot be started ({error.strerror or error})") from error


def _setting(path: str) -> str:
    try:
        return Path(path).read_text(encoding="ascii")
    except OSError:
        return "[never]"


# --- storage -----------------------------------------------------------------------------------------------------


def directory() -> Path:
    """Return where storage is timed."""
    return Path(os.environ.get(DIRECTORY) or tempfile.gettempdir())


@functools.lru_cache(maxsize=2)
def _file(purpose: str, size: int) -> int:
    """Return a file without a name, filled, stored, as a descriptor."""
    place = directory()
    try:
        free = os.statvfs(place)
        if free.f_bavail * free.f_frsize < ROOM * size:
            raise NotTimeable(f"{place} has too little room: {ROOM * size >> 20} MiB are needed")
        with tempfile.TemporaryFile(dir=place) as file:
            noise = np.random.default_rng(0).bytes(min(size, 1 << 20))
            for _ in range(-(-size // len(noise))):
                file.write(noise)
            file.flush()
            os.fsync(file.fileno())
            return os.dup(file.fileno())
    except OSError as error:
        raise NotTimeable(f"{place}: no file can be made there ({error.strerror})") from error


def _storage(name: str, size: int) -> Prepared:
    largest = FAMILIES[name].most
    number = _file("written" if name.startswith("write") else "read", max(size, largest))
    buffer = mmap.mmap(-1, size)
    buffer[:] = np.random.default_rng(1).bytes(size)
    view = memoryview(buffer)
    if name.endswith("direct"):
        number = _direct(number)
    if name == "read-cold":
        return _self_timed(_cold(number, view), most=16)
    if name == "read-mapped":
        return Prepared(lambda: _mapped(number, size), [()])

    def moved(a: memoryview) -> None:
        done = os.preadv(number, [a], 0) if name.startswith("read") else os.pwritev(number, [a], 0)
        if done != size:
            raise OSError(f"{done} of {size} bytes")
        if name == "write-fsync":
            os.fsync(number)

    return Prepared(moved, [(view,)])


def _mapped(number: int, size: int) -> None:
    """Map a file, touch each page, and take the mapping back: pages that are mapped are not dropped from the cache."""
    with mmap.mmap(number, size, prot=mmap.PROT_READ) as whole:
        view = np.frombuffer(whole, np.uint8)
        view[::PAGE].sum()
        del view


def _direct(number: int) -> int:
    try:
        return os.open(f"/proc/self/fd/{number}", os.O_RDWR | os.O_DIRECT)
    except (OSError, AttributeError) as error:
        raise NotTimeable("this file system does not let the page cache be passed by") from error


def _cold(number: int, into: memoryview) -> Callable[[int], int]:
    if not hasattr(os, "posix_fadvise"):
        raise NotTimeable("this system does not drop pages when asked to")
    size = len(into)

    def batch(calls: int) -> int:
        took = 0
        for _ in range(calls):
            os.posix_fadvise(number, 0, 0, os.POSIX_FADV_DONTNEED)
            began = time.perf_counter_ns()
            done = os.preadv(number, [into], 0)
            took += time.perf_counter_ns() - began
            if done != size:
                raise OSError(f"{done} of {size} bytes")
        return took

    return batch


# --- devices -----------------------------------------------------------------------------------------------------


def _device(name: str, size: int) -> Prepared:
    """Return a transfer of a device: timed by its own clock, but where pageable memory keeps the host busy."""
    if not torch.cuda.is_available():
        raise NotTimeable("there is no device here")
    if name == "peer-copy" and torch.cuda.device_count() < 2:
        raise NotTimeable("there is one device here, and a peer is another one")
    if not FAMILIES[name].most:
        return _self_timed(_of_no_bytes(name), most=500)
    if name == "zero-copy" or name.startswith("managed-"):
        return _self_timed(_of_host_pages(name, size), most=100)
    host = [torch.ones(size, dtype=torch.uint8, pin_memory="pinned" in name) for _ in range(2)]
    there = [torch.ones(size, dtype=torch.uint8, device="cuda:0") for _ in range(2)]
    if name == "peer-copy":
        there[1] = there[1].to("cuda:1")
    pairs: dict[str, tuple[Any, Any]] = {
        "host-to-device": (there[0], host[0]), "device-to-host": (host[0], there[0]),
        "device-copy": (there[0], there[1]), "peer-copy": (there[1], there[0]),
    }  # fmt: skip
    if name == "both-ways-pinned":
        ways = [(there[0], host[0]), (host[1], there[1])]
        streams = [torch.cuda.Stream(), torch.cuda.Stream()]
        return _self_timed(lambda calls: _on_device(ways, streams, calls), most=100)
    if name in ("device-read", "device-write", "device-strided"):
        return _self_timed(_within(name, size), most=100)
    into, source = pairs[name.removesuffix("-pageable").removesuffix("-pinned")]
    if name.endswith("pageable") or name == "peer-copy":
        return _self_timed(lambda calls: _by_the_host(into, source, calls))
    return _self_timed(lambda calls: _on_device([(into, source)], [torch.cuda.Stream()], calls), most=100)


def _within(name: str, size: int) -> Callable[[int], int]:
    """Return how calls within a device are timed, by its own clock."""
    if name == "device-strided":
        rows = [torch.ones(2 * size // ROW, ROW // 4, device="cuda:0")[::2] for _ in range(2)]
        return lambda calls: _on_device([(rows[0], rows[1])], [torch.cuda.Stream()], calls)
    whole = torch.ones(size // 4, device="cuda:0")

    def batch(calls: int) -> int:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        torch.cuda._sleep(SPIN_CYCLES)
        start.record()
        for _ in range(calls):
            if name == "device-read":
                whole.sum()
            else:
                whole.fill_(2.0)
        end.record()
        torch.cuda.synchronize()
        return max(1, round(float(start.elapsed_time(end)) * 1e6))

    return batch


def _of_no_bytes(name: str) -> Callable[[int], int]:
    """Return how launches and waits are timed, by the clock of the host; launches stay below what a device queues."""
    call: Callable[[], Any] = (
        torch.cuda.synchronize if name == "synchronize" else functools.partial(torch.cuda._sleep, 1)
    )
    if name == "graph-launch":
        one, graph = torch.zeros(1, device="cuda:0"), torch.cuda.CUDAGraph()
        one.add_(1)  # loads the kernel, which a capture must not do
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            one.add_(1)
        call = graph.replay

    def batch(calls: int) -> int:
        call()
        torch.cuda.synchronize()
        began = time.perf_counter_ns()
        for _ in range(calls):
            call()
        took = time.perf_counter_ns() - began
        torch.cuda.synchronize()
        return max(1, took)

    return batch


class _Pages:
    """Memory at an address, as torch takes it (`__cuda_array_interface__`); managed pages are freed with it."""

    def __init__(self, size: int, runtime: ctypes.CDLL) -> None:
        self.size, self.runtime, address = size, runtime, ctypes.c_void_p()
        status = runtime.cudaMallocManaged(ctypes.byref(address), ctypes.c_size_t(size), ctypes.c_uint(1))
        if status or not address.value:
            raise NotTimeable(f"the device gives no managed memory (CUDA error {status})")
        self.address: int = address.value
        self.__cuda_array_interface__ = {
            "shape": (size // 4,), "typestr": "<f4", "data": (self.address, False), "version": 3
        }  # fmt: skip

    def to_host(self) -> None:
        """Write all pages by the host, so that they lie there."""
        ctypes.memset(self.address, 0, self.size)

    def prefetch(self) -> None:
        """Have the pages come to device 0, in the current stream."""
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        where, size = ctypes.c_void_p(self.address), ctypes.c_size_t(self.size)
        if int((torch.version.cuda or "0").partition(".")[0]) >= 13:  # a location instead of a number, and flags
            status = self.runtime.cudaMemPrefetchAsync(where, size, _Location(1, 0), ctypes.c_uint(0), stream)
        else:
            status = self.runtime.cudaMemPrefetchAsync(where, size, ctypes.c_int(0), stream)
        if status:
            raise NotTimeable(f"the device prefetches no managed memory (CUDA error {status})")

    def __del__(self) -> None:
        if getattr(self, "address", 0):
            self.runtime.cudaFree(ctypes.c_void_p(self.address))


class _Location(ctypes.Structure):
    """`cudaMemLocation`: 1 is a device."""

    _fields_ = (("kind", ctypes.c_int), ("number", ctypes.c_int))


def _runtime() -> ctypes.CDLL:
    """Return the runtime library that torch has loaded."""
    major = (torch.version.cuda or "").partition(".")[0]
    torch.cuda.init()
    try:
        return ctypes.CDLL(f"libcudart.so.{major}")
    except OSError as error:
        raise NotTimeable(f"CUDA's runtime library cannot be called: {error}") from error


def _of_host_pages(name: str, size: int) -> Callable[[int], int]:
    """Return how a device reads memory that lies on the host, by its own clock; pages are brought back before each."""
    pages = None if name == "zero-copy" else _Pages(size, _runtime())
    if pages is None:
        pinned = torch.ones(size // 4, pin_memory=True)
        seen = torch.as_tensor(_Pinned(pinned), device="cuda:0")
    else:
        seen = torch.as_tensor(pages, device="cuda:0")

    def batch(calls: int) -> int:
        took = 0.0
        for _ in range(calls):
            torch.cuda.synchronize()
            if pages is not None:
                pages.to_host()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(SPIN_CYCLES)
            start.record()
            if name == "managed-prefetch" and pages is not None:
                pages.prefetch()
            else:
                seen.sum()
            end.record()
            torch.cuda.synchronize()
            took += float(start.elapsed_time(end))
        return max(1, round(took * 1e6))

    return batch


class _Pinned:
    """Pinned memory of the host as a device sees it, at the same address."""

    def __init__(self, held: torch.Tensor) -> None:
        self.held = held
        self.__cuda_array_interface__ = {
            "shape": tuple(held.shape), "typestr": "<f4", "data": (held.data_ptr(), False), "version": 3
        }  # fmt: skip


def _by_the_host(into: torch.Tensor, source: torch.Tensor, calls: int) -> int:
    torch.cuda.synchronize()
    began = time.perf_counter_ns()
    for _ in range(calls):
        into.copy_(source)
    for place in range(torch.cuda.device_count()):
        torch.cuda.synchronize(place)
    return time.perf_counter_ns() - began


def _on_device(ways: list[tuple[torch.Tensor, torch.Tensor]], streams: list[Any], calls: int) -> int:
    """Return the nanoseconds from the first start to the last end, while a device waits until all are queued."""
    start, ends = torch.cuda.Event(enable_timing=True), [torch.cuda.Event(enable_timing=True) for _ in streams]
    torch.cuda.synchronize()
    torch.cuda._sleep(SPIN_CYCLES)
    start.record()
    for (into, source), stream, end in zip(ways, streams, ends, strict=True):
        stream.wait_event(start)
        with torch.cuda.stream(stream):
            for _ in range(calls):
                into.copy_(source, non_blocking=True)
            end.record()
    torch.cuda.synchronize()
    took: float = max(start.elapsed_time(end) for end in ends)
    return max(1, round(took * 1e6))
