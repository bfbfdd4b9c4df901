"""NUMA nodes of this machine, and copies from one of them to another.

Pages are bound to a node by the system call `mbind`, because libnuma may be missing. Neither torch nor the table engine
is needed here.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path

NODES = Path("/sys/devices/system/node")

_MBIND = {"x86_64": 237, "aarch64": 235, "riscv64": 235, "ppc64le": 259, "s390x": 268}
"""Machine → number of the system call."""

_BIND = 2
"""`MPOL_BIND`: pages come only from the given nodes."""


def nodes() -> list[int]:
    """Return the numbers of the nodes that have memory, in order; empty if the system does not report them."""
    return _numbers("has_memory")


def cores_of(node: int) -> set[int]:
    """Return the cores of a node that this process may use."""
    return set(_numbers(f"node{node}/cpulist")) & os.sched_getaffinity(0)


def _numbers(name: str) -> list[int]:
    """Return the numbers in a list file of the system, such as `0-3,8`."""
    try:
        text = (NODES / name).read_text(encoding="ascii").strip()
        ranges = [[int(number) for number in part.split("-")] for part in text.split(",") if part]
    except (OSError, ValueError):
        return []
    return [number for bounds in ranges for number in range(bounds[0], bounds[-1] + 1)]


def pair() -> tuple[int, int] | None:
    """Return a node on which this process may run and the node furthest from it; None if there is no such pair."""
    available = nodes()
    local = next((node for node in available if cores_of(node)), None)
    if local is None or len(available) < 2:
        return None
    try:
        texts = (NODES / f"node{local}" / "distance").read_text(encoding="ascii").split()
        distances = dict(zip(_numbers("online"), map(int, texts), strict=True))
    except (OSError, ValueError):
        distances = {}
    return local, max((node for node in available if node != local), key=lambda node: distances.get(node, 0))


def memory(size: int, node: int) -> ctypes.Array[ctypes.c_char]:
    """Return `size` bytes of memory on a node, written once.

    Raises:
        OSError: the memory cannot be bound; `strerror` is the reason in words.
    """
    number = _MBIND.get(platform.machine())
    if number is None:
        raise OSError(errno.ENOSYS, f"binding memory to a NUMA node is not supported on {platform.machine()}")
    mapping = mmap.mmap(-1, size)
    buffer = (ctypes.c_char * size).from_buffer(mapping)
    bits = 8 * ctypes.sizeof(ctypes.c_ulong)
    mask = (ctypes.c_ulong * (node // bits + 1))()
    mask[node // bits] = 1 << node % bits
    library = ctypes.CDLL(None, use_errno=True)
    begin = ctypes.c_ulong(ctypes.addressof(buffer))
    max_node = ctypes.c_ulong(bits * len(mask) + 1)
    if library.syscall(number, begin, ctypes.c_ulong(size), _BIND, mask, max_node, ctypes.c_uint(0)):
        code = ctypes.get_errno()
        raise OSError(code, f"memory cannot be bound to NUMA node {node} ({os.strerror(code)})")
    mapping[:] = bytes(size)
    return buffer


def copy_timer(size: int, is_far: bool) -> Callable[[int], int]:
    """Return a function that times copies by one thread into its node's memory, from that node or the furthest one.

    Raises:
        OSError: there is only one node, or memory cannot be bound; `strerror` is the reason in words.
    """
    node_pair = pair()
    if node_pair is None:
        raise OSError(errno.ENODEV, "there is only one NUMA node here, and two are needed")
    local, remote = node_pair
    target, source = memory(size, local), memory(size, remote if is_far else local)

    def batch(calls: int) -> int:
        affinity = os.sched_getaffinity(0)
        os.sched_setaffinity(0, cores_of(local) & affinity)
        try:
            start = time.perf_counter_ns()
            for _ in range(calls):
                ctypes.memmove(target, source, size)
            return time.perf_counter_ns() - start
        finally:
            os.sched_setaffinity(0, affinity)

    return batch
