"""Grouping of gradients for communication: PyTorch's buckets, and merged gradients.

`of_ddp` is the plan of DistributedDataParallel from its second step on, when it has rebuilt its buckets in the order in
which gradients arrive. `merged` solves the problem of Shi, Chu and Li (MG-WFBP, arXiv 1811.11141) exactly.
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


def of_ddp(sizes: Sequence[int], bucket: int | None = None) -> Buckets:
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
    current: list[int] = []
    filled = 0
    for place, size in enumerate(sizes):
        current.append(place)
        filled += size
        if filled >= limit:
            buckets.append(tuple(current))
            current, filled = [], 0
            limit = BUCKET_BYTES if bucket is None else bucket
    return (*buckets, *([tuple(current)] if current else ()))


def exposed(ready: Sequence[float], sizes: Sequence[float], plan: Buckets, takes: Callable[[float], float]) -> float:
    """Return the time at which the last bucket has been communicated, over one channel in the order of the buckets.

    Args:
        ready: arrival time of each gradient in seconds, never decreasing.
        sizes: bytes of each gradient.
        plan: the buckets.
        takes: function from the bytes of a bucket to the seconds of its collective.
    """
    end = 0.0
    for bucket in plan:
        end = max(end, ready[bucket[-1]]) + takes(sum(sizes[index] for index in bucket))
    return end


def merged(ready: Sequence[float], sizes: Sequence[float], start: float, per_byte: float) -> Buckets:
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
    total = [0.0]
    for size in sizes:
        total.append(total[-1] + size)
    best: list[tuple[float, int, int]] = [(0.0, 0, 0)]  # by gradients: end, number of buckets, start of the last one
    for until in range(1, len(ready) + 1):
        best.append(
            min(
                (max(best[since][0], ready[until - 1]) + start + per_byte * (total[until] - total[since]),
                 best[since][1] + 1, since)
                for since in range(until)
            )
        )  # fmt: skip
    buckets: list[tuple[int, ...]] = []
    until = len(ready)
    while until:
        since = best[until][2]
        buckets.append(tuple(range(since, until)))
        until = since
    return tuple(reversed(buckets))
