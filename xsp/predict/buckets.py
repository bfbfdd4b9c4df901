"""Which gradients travel together: PyTorch's buckets, and the rule of merged gradients.

`of_ddp` is the plan of DistributedDataParallel from its second step on, when it has rebuilt its buckets in the order in
which gradients arrive. `merged` is the rule of Shi, Chu and Li (MG-WFBP, arXiv 1811.11141), made safe.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from xsp.errors import UsageError

MIB = 1 << 20
FIRST_BYTES = 1 * MIB
"""Limit of the first bucket, where the size of the others is PyTorch's own."""

BUCKET_BYTES = 25 * MIB

Buckets = tuple[tuple[int, ...], ...]
"""Places of gradients in the order of their arrival; each bucket is full when its last one arrives."""


def of_ddp(sizes: Sequence[int], bucket: int | None = None) -> Buckets:
    """Return the buckets of gradients in the order of their arrival.

    A bucket is full as soon as it has reached its limit, so it may be larger than that. The first one's limit is 1 MiB
    if the size of the others is the usual one; whoever states a size gets it for all.

    Args:
        sizes: bytes of each gradient, of one element type.
        bucket: limit in bytes; PyTorch's own (25 MiB) unless told otherwise.

    Raises:
        UsageError: a size is negative, or the limit is not above 0.
    """
    if bucket is not None and bucket <= 0:
        raise UsageError(f"a bucket of {bucket} bytes holds nothing; give a size above 0, such as 25MiB")
    if any(size < 0 for size in sizes):
        raise UsageError("a gradient has no negative size")
    limit = FIRST_BYTES if bucket is None else bucket
    found: list[tuple[int, ...]] = []
    held: list[int] = []
    filled = 0
    for place, size in enumerate(sizes):
        held.append(place)
        filled += size
        if filled >= limit:
            found.append(tuple(held))
            held, filled = [], 0
            limit = BUCKET_BYTES if bucket is None else bucket
    return (*found, *([tuple(held)] if held else ()))


def exposed(ready: Sequence[float], sizes: Sequence[float], plan: Buckets, takes: Callable[[float], float]) -> float:
    """Return when the last bucket has been communicated, over one channel in the order of the buckets.

    Args:
        ready: when each gradient arrives, in seconds, never decreasing.
        sizes: bytes of each.
        plan: which travel together.
        takes: seconds for so many bytes.
    """
    end = 0.0
    for bucket in plan:
        end = max(end, ready[bucket[-1]]) + takes(sum(sizes[each] for each in bucket))
    return end


def merged(ready: Sequence[float], sizes: Sequence[float], start: float, per_byte: float) -> Buckets:
    """Return the buckets with which communication ends first, if a collective of M bytes takes start + per_byte · M.

    The published rule merges a gradient with the one before it where waiting for it costs less than another start-up,
    and decides by the neighbour alone. This is the exact answer of that problem, by dynamic programming over where the
    last bucket begins: the end of the buckets before it is never better if it is later. So it is never slower than
    without merging. Of plans that are equally fast it has the fewest buckets.

    Args:
        ready: when each gradient arrives, in seconds, never decreasing.
        sizes: bytes of each.
        start: start-up of a collective in seconds.
        per_byte: seconds a byte.

    Raises:
        UsageError: gradients do not arrive in their order, or there are not as many sizes.
    """
    if len(ready) != len(sizes) or any(after < before for before, after in itertools.pairwise(ready)):
        raise UsageError("gradients must arrive in their order, each with its size")
    total = [0.0]
    for size in sizes:
        total.append(total[-1] + size)
    best: list[tuple[float, int, int]] = [(0.0, 0, 0)]  # until here: the end, buckets, where the last one begins
    for until in range(1, len(ready) + 1):
        best.append(
            min(
                (max(best[since][0], ready[until - 1]) + start + per_byte * (total[until] - total[since]),
                 best[since][1] + 1, since)
                for since in range(until)
            )
        )  # fmt: skip
    found: list[tuple[int, ...]] = []
    until = len(ready)
    while until:
        since = best[until][2]
        found.append(tuple(range(since, until)))
        until = since
    return tuple(reversed(found))
