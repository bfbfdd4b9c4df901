"""Grouping of gradients for communication: PyTorch's buckets.

They are those of DistributedDataParallel from its second step on, when it has rebuilt them in the order in which
gradients arrive.
"""

from __future__ import annotations

from collections.abc import Sequence

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
