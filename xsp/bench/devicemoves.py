"""Transfers to, from and within a device, for the runtime `transfers`.

Imports torch: import it where it is needed. Transfers are timed by the device's clock, from the first start to the last
end. Transfers of pageable memory, which keep the host busy, and transfers between two devices use the host's clock.
"""

from __future__ import annotations

import ctypes
import functools
import time
from collections.abc import Callable
from typing import Any

import torch

from xsp.bench.inputs import NotTimeable
from xsp.bench.torchcalls import Prepared, self_timed
from xsp.bench.transfers import FAMILIES, ROW

SPIN_CYCLES = 2_000_000
"""Cycles for which a device spins while transfers are queued."""


def prepare(name: str, size: int) -> Prepared:
    """Return a transfer that involves a device, ready to be timed."""
    if not torch.cuda.is_available():
        raise NotTimeable("there is no device here")
    if name == "peer-copy" and torch.cuda.device_count() < 2:
        raise NotTimeable("there is only one device here, and a peer copy needs two")
    if not FAMILIES[name].most:
        return self_timed(_launch_timer(name), most_calls=500)
    if name == "zero-copy" or name.startswith("managed-"):
        return self_timed(_host_page_timer(name, size), most_calls=100)
    host = [torch.ones(size, dtype=torch.uint8, pin_memory="pinned" in name) for _ in range(2)]
    device = [torch.ones(size, dtype=torch.uint8, device="cuda:0") for _ in range(2)]
    if name == "peer-copy":
        device[1] = device[1].to("cuda:1")
    pairs: dict[str, tuple[Any, Any]] = {
        "host-to-device": (device[0], host[0]), "device-to-host": (host[0], device[0]),
        "device-copy": (device[0], device[1]), "peer-copy": (device[1], device[0]),
    }  # fmt: skip
    if name == "both-ways-pinned":
        directions = [(device[0], host[0]), (host[1], device[1])]
        streams = [torch.cuda.Stream(), torch.cuda.Stream()]
        return self_timed(lambda calls: _time_on_device(directions, streams, calls), most_calls=100)
    if name in ("device-read", "device-write", "device-strided"):
        return self_timed(_within_device(name, size), most_calls=100)
    target, source = pairs[name.removesuffix("-pageable").removesuffix("-pinned")]
    if name.endswith("pageable") or name == "peer-copy":
        return self_timed(lambda calls: _time_by_host(target, source, calls))
    return self_timed(lambda calls: _time_on_device([(target, source)], [torch.cuda.Stream()], calls), most_calls=100)


def _within_device(name: str, size: int) -> Callable[[int], int]:
    """Return a function that times calls within a device by the device's clock."""
    if name == "device-strided":
        rows = [torch.ones(2 * size // ROW, ROW // 4, device="cuda:0")[::2] for _ in range(2)]
        return lambda calls: _time_on_device([(rows[0], rows[1])], [torch.cuda.Stream()], calls)
    tensor = torch.ones(size // 4, device="cuda:0")

    def batch(calls: int) -> int:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        torch.cuda._sleep(SPIN_CYCLES)
        start.record()
        for _ in range(calls):
            if name == "device-read":
                tensor.sum()
            else:
                tensor.fill_(2.0)
        end.record()
        torch.cuda.synchronize()
        return max(1, round(float(start.elapsed_time(end)) * 1e6))

    return batch


def _launch_timer(name: str) -> Callable[[int], int]:
    """Return a function that times launches or waits by the host's clock; callers limit calls to the launch queue."""
    call: Callable[[], Any] = (
        torch.cuda.synchronize if name == "synchronize" else functools.partial(torch.cuda._sleep, 1)
    )
    if name == "graph-launch":
        tensor, graph = torch.zeros(1, device="cuda:0"), torch.cuda.CUDAGraph()
        tensor.add_(1)  # load the kernel, which is not allowed during a capture
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            tensor.add_(1)
        call = graph.replay

    def batch(calls: int) -> int:
        call()
        torch.cuda.synchronize()
        start = time.perf_counter_ns()
        for _ in range(calls):
            call()
        elapsed_ns = time.perf_counter_ns() - start
        torch.cuda.synchronize()
        return max(1, elapsed_ns)

    return batch


class _Pages:
    """Managed memory, passed to torch by its address (`__cuda_array_interface__`) and freed with this object."""

    def __init__(self, size: int, runtime: ctypes.CDLL) -> None:
        self.size, self.runtime, address = size, runtime, ctypes.c_void_p()
        status = runtime.cudaMallocManaged(ctypes.byref(address), ctypes.c_size_t(size), ctypes.c_uint(1))
        if status or not address.value:
            raise NotTimeable(f"managed memory cannot be allocated (CUDA error {status})")
        self.address: int = address.value
        self.__cuda_array_interface__ = {
            "shape": (size // 4,), "typestr": "<f4", "data": (self.address, False), "version": 3
        }  # fmt: skip

    def to_host(self) -> None:
        """Write all pages from the host, so that they reside there."""
        ctypes.memset(self.address, 0, self.size)

    def prefetch(self) -> None:
        """Prefetch the pages to device 0, in the current stream."""
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        address, size = ctypes.c_void_p(self.address), ctypes.c_size_t(self.size)
        if int((torch.version.cuda or "0").partition(".")[0]) >= 13:  # takes a location, not a number, and flags
            status = self.runtime.cudaMemPrefetchAsync(address, size, _Location(1, 0), ctypes.c_uint(0), stream)
        else:
            status = self.runtime.cudaMemPrefetchAsync(address, size, ctypes.c_int(0), stream)
        if status:
            raise NotTimeable(f"managed memory cannot be prefetched (CUDA error {status})")

    def __del__(self) -> None:
        if getattr(self, "address", 0):
            self.runtime.cudaFree(ctypes.c_void_p(self.address))


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
        raise NotTimeable(f"CUDA's runtime library cannot be called: {error}") from error


def _host_page_timer(name: str, size: int) -> Callable[[int], int]:
    """Return a function that times a device's access to host memory, by its clock; pages return to the host before."""
    pages = None if name == "zero-copy" else _Pages(size, _runtime())
    if pages is None:
        pinned = torch.ones(size // 4, pin_memory=True)
        tensor = torch.as_tensor(_Pinned(pinned), device="cuda:0")
    else:
        tensor = torch.as_tensor(pages, device="cuda:0")

    def batch(calls: int) -> int:
        elapsed_ms = 0.0
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
                tensor.sum()
            end.record()
            torch.cuda.synchronize()
            elapsed_ms += float(start.elapsed_time(end))
        return max(1, round(elapsed_ms * 1e6))

    return batch


class _Pinned:
    """Pinned host memory as a device sees it, at the same address."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.__cuda_array_interface__ = {
            "shape": tuple(tensor.shape), "typestr": "<f4", "data": (tensor.data_ptr(), False), "version": 3
        }  # fmt: skip


def _time_by_host(target: torch.Tensor, source: torch.Tensor, calls: int) -> int:
    torch.cuda.synchronize()
    start = time.perf_counter_ns()
    for _ in range(calls):
        target.copy_(source)
    for device in range(torch.cuda.device_count()):
        torch.cuda.synchronize(device)
    return time.perf_counter_ns() - start


def _time_on_device(directions: list[tuple[torch.Tensor, torch.Tensor]], streams: list[Any], calls: int) -> int:
    """Return the nanoseconds from the first start to the last end; the device spins until all transfers are queued."""
    start, ends = torch.cuda.Event(enable_timing=True), [torch.cuda.Event(enable_timing=True) for _ in streams]
    torch.cuda.synchronize()
    torch.cuda._sleep(SPIN_CYCLES)
    start.record()
    for (target, source), stream, end in zip(directions, streams, ends, strict=True):
        stream.wait_event(start)
        with torch.cuda.stream(stream):
            for _ in range(calls):
                target.copy_(source, non_blocking=True)
            end.record()
    torch.cuda.synchronize()
    elapsed_ms: float = max(start.elapsed_time(end) for end in ends)
    return max(1, round(elapsed_ms * 1e6))
