"""Grouping of gradients for communication: PyTorch's buckets, and merged gradients.

`ddp_buckets` is the plan of DistributedDataParallel from its second step on, when it has rebuilt its buckets in the
order in which gradients arrive. `merge_gradients` solves the problem of Shi, Chu and Li (MG-WFBP, arXiv 1811.11141)
exactly.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from xsp.errors import UsageError

MIB = 1 << 20
FIRST_BYTES = 1 * MIB
"""Size limit of the first bucket if the others have PyTorch's default size."""

BUCKET_BYTES = 25 * MIB

Buckets = tuple[tuple[int, ...], ...]
"""Indices of gradients in the order of arrival, by bucket; a bucket is full when its last gradient arrives."""


def ddp_buckets(sizes: Sequence[int], bucket: int | None = None) -> Buckets:
    """Return the buckets of gradients in the order of their arrival.

    A bucket is full as soon as it reaches its limit, so it may be larger than the limit. With the default size the
    limit of the first bucket is 1 MiB; a given size applies to all buckets.

    Args:
        sizes: bytes of each gradient, all of one element type.
        bucket: limit in bytes; default: PyTorch's 25 MiB.

    Raises:
        UsageError: a size is negative, or the limit is not above 0.
    """
    if bucket is not None and bucket <= 0:
        raise UsageError(f"a bucket of {bucket} bytes holds nothing; give a size above 0, such as 25MiB")
    if any(size < 0 for size in sizes):
        raise UsageError("the size of a gradient must not be negative")
    limit = FIRST_BYTES if bucket is None else bucket
    buckets: list[tuple[int, ...]] = []
    members: list[int] = []
    filled_bytes = 0
    for index, size in enumerate(sizes):
        members.append(index)
        filled_bytes += size
        if filled_bytes >= limit:
            buckets.append(tuple(members))
            members, filled_bytes = [], 0
            limit = BUCKET_BYTES if bucket is None else bucket
    return (*buckets, *([tuple(members)] if members else ()))


def communication_end(
    ready: Sequence[float], sizes: Sequence[float], plan: Buckets, collective_seconds: Callable[[float], float]
) -> float:
    """Return the time at which the last bucket has been communicated, over one channel in the order of the buckets.

    Args:
        ready: arrival time of each gradient in seconds, never decreasing.
        sizes: bytes of each gradient.
        plan: the buckets.
        collective_seconds: seconds of a collective, as a function of the bytes of a bucket.
    """
    end = 0.0
    for bucket in plan:
        end = max(end, ready[bucket[-1]]) + collective_seconds(sum(sizes[index] for index in bucket))
    return end


def merge_gradients(ready: Sequence[float], sizes: Sequence[float], start: float, per_byte: float) -> Buckets:
    """Return the buckets with which communication ends first, if a collective of M bytes takes start + per_byte · M.

    The published rule merges a gradient with the previous one if waiting for it costs less than another start-up, and
    looks only at that neighbour. This function solves the same problem exactly, by dynamic programming over the start
    of the last bucket: a later end of the buckets before it is never better. The result is never slower than without
    merging. Among equally fast plans it has the fewest buckets.

    Args:
        ready: arrival time of each gradient in seconds, never decreasing.
        sizes: bytes of each gradient.
        start: start-up of a collective in seconds.
        per_byte: seconds per byte.

    Raises:
        UsageError: arrival times decrease, or the number of sizes differs.
    """
    if len(ready) != len(sizes) or any(after < before for before, after in itertools.pairwise(ready)):
        raise UsageError("gradients must arrive in order, each with its size")
    offsets = [0.0]
    for size in sizes:
        offsets.append(offsets[-1] + size)
    best: list[tuple[float, int, int]] = [(0.0, 0, 0)]  # by gradients: end, number of buckets, start of the last one
    for stop in range(1, len(ready) + 1):
        best.append(
            min(
                (max(best[begin][0], ready[stop - 1]) + start + per_byte * (offsets[stop] - offsets[begin]),
                 best[begin][1] + 1, begin)
                for begin in range(stop)
            )
        )  # fmt: skip
    buckets: list[tuple[int, ...]] = []
    stop = len(ready)
    while stop:
        begin = best[stop][2]
        buckets.append(tuple(range(begin, stop)))
        stop = begin
    return tuple(reversed(buckets))
