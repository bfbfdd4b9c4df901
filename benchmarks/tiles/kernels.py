"""The algorithms of `reference` on a device, in Triton: `tl.dot` of 16×16 tiles, segments of any lengths.

One program processes sixteen segments (`16n`) or one segment (`256n`); long segments are reduced and scanned in parts
(`grid`). If TRITON_INTERPRET=1 is set before this module is imported, Triton runs the kernels on a CPU without a
driver: slowly, and with sums of half-precision accumulators rounded in another order.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

PART = 4096
"""Number of elements of a segment that one program processes at the level of the grid."""


@triton.jit
def _reduce_16n(values, starts, lengths, sums, segments, longest, HALF: tl.constexpr):  # type: ignore[no-untyped-def]
    kind = tl.float16 if HALF else tl.float32
    row, column = tl.arange(0, 16)[:, None], tl.arange(0, 16)[None, :]
    segment = tl.program_id(0) * 16 + tl.arange(0, 16)
    start = tl.load(starts + segment, mask=segment < segments, other=0)[None, :]
    length = tl.load(lengths + segment, mask=segment < segments, other=0)[None, :]
    ones_row = tl.where(row + 0 * column == 0, 1.0, 0.0).to(tl.float16)
    accumulator = tl.zeros((16, 16), kind)
    for offset in range(0, longest, 16):
        tile = tl.load(values + start + offset + row, mask=offset + row < length, other=0.0)
        accumulator = tl.dot(ones_row, tile, accumulator, out_dtype=kind)
    sums_row = tl.sum(tl.where(row == 0, accumulator, 0.0).to(tl.float32), axis=0)
    tl.store(sums + segment, sums_row, mask=segment < segments)


@triton.jit
def _reduce_256n(values, starts, lengths, sums, HALF: tl.constexpr):  # type: ignore[no-untyped-def]
    kind = tl.float16 if HALF else tl.float32
    row, column = tl.arange(0, 16)[:, None], tl.arange(0, 16)[None, :]
    start, length = tl.load(starts + tl.program_id(0)), tl.load(lengths + tl.program_id(0))
    ones_row = tl.where(row + 0 * column == 0, 1.0, 0.0).to(tl.float16)
    accumulator = tl.zeros((16, 16), kind)
    for offset in range(0, length, 256):
        position = offset + row * 16 + column
        tile = tl.load(values + start + position, mask=position < length, other=0.0)
        accumulator = tl.dot(ones_row, tile, accumulator, out_dtype=kind)
    accumulator = tl.dot(accumulator.to(tl.float16), tl.trans(ones_row), out_dtype=kind)
    corner = tl.where((row == 0) & (column == 0), accumulator, 0.0).to(tl.float32)
    tl.store(sums + tl.program_id(0), tl.sum(tl.sum(corner, axis=1), axis=0))


@triton.jit
def _scan_16n(values, starts, lengths, sums, segments, longest, HALF: tl.constexpr):  # type: ignore[no-untyped-def]
    kind = tl.float16 if HALF else tl.float32
    row, column = tl.arange(0, 16)[:, None], tl.arange(0, 16)[None, :]
    segment = tl.program_id(0) * 16 + tl.arange(0, 16)
    start = tl.load(starts + segment, mask=segment < segments, other=0)[:, None]
    length = tl.load(lengths + segment, mask=segment < segments, other=0)[:, None]
    upper = tl.where(row <= column, 1.0, 0.0).to(tl.float16)
    accumulator = tl.zeros((16, 16), kind)
    for offset in range(0, longest, 16):
        tile = tl.load(values + start + offset + column, mask=offset + column < length, other=0.0)
        carried = tl.sum(tl.where(column == 15, accumulator, 0.0).to(tl.float32), axis=1)[:, None]
        accumulator = tl.dot(tile, upper, tl.broadcast_to(carried, (16, 16)).to(kind), out_dtype=kind)
        tl.store(sums + start + offset + column, accumulator, mask=offset + column < length)


@triton.jit
def _scan_256n(values, starts, lengths, sums, HALF: tl.constexpr):  # type: ignore[no-untyped-def]
    kind = tl.float16 if HALF else tl.float32
    row, column = tl.arange(0, 16)[:, None], tl.arange(0, 16)[None, :]
    start, length = tl.load(starts + tl.program_id(0)), tl.load(lengths + tl.program_id(0))
    upper = tl.where(row <= column, 1.0, 0.0).to(tl.float16)
    lower = tl.where(row > column, 1.0, 0.0).to(tl.float16)
    ones = tl.full((16, 16), 1.0, tl.float16)
    accumulator = tl.zeros((16, 16), kind)
    for offset in range(0, length, 256):
        position = offset + row * 16 + column
        tile = tl.load(values + start + position, mask=position < length, other=0.0)
        corner = tl.where((row == 15) & (column == 15), accumulator, 0.0).to(tl.float32)
        carried = tl.sum(tl.sum(corner, axis=1), axis=0)
        accumulator = tl.dot(tile, upper, tl.full((16, 16), 0.0, kind) + carried.to(kind), out_dtype=kind)
        earlier = tl.dot(lower, tile, out_dtype=kind)
        accumulator = tl.dot(earlier.to(tl.float16), ones, accumulator, out_dtype=kind)
        tl.store(sums + start + position, accumulator, mask=position < length)


class Segments:
    """Segments of values, and all that the kernels need of their lengths.

    Reading a length makes the host wait for the device, so whoever computes several times with the same lengths makes
    this once.
    """

    def __init__(self, lengths: torch.Tensor) -> None:
        """Compute starts and the longest segment.

        Args:
            lengths: number of elements of each segment, 64-bit integers on the device of the values.
        """
        self.lengths = lengths
        self.starts = lengths.cumsum(0) - lengths
        self.count = len(lengths)
        self.longest = int(lengths.max()) if self.count else 0

    @functools.cached_property
    def parts(self) -> Parts:
        """The segments in parts of at most `PART` elements."""
        lengths = self.lengths
        per = (lengths + PART - 1) // PART
        parts = torch.full((int(per.sum()),), PART, dtype=lengths.dtype, device=lengths.device)
        ends, is_filled = per.cumsum(0), per > 0
        parts[(ends - 1)[is_filled]] = (lengths - (per - 1) * PART)[is_filled]
        return Parts(Segments(parts), Segments(per), parts.cumsum(0) - 1, (ends - per)[is_filled])


class Parts(NamedTuple):
    """Parts of segments, for the level of the grid."""

    parts: Segments
    per_segment: Segments
    """As many elements as a segment has parts."""

    last_elements: torch.Tensor
    """Position of the last element of each part."""

    first_parts: torch.Tensor
    """Number of the first part of each segment that is not empty."""


def reduce(name: str, values: torch.Tensor, lengths: torch.Tensor | Segments, half: bool = False) -> torch.Tensor:
    """Return the sum of each segment in single precision.

    Args:
        name: `reduction_16n`, `reduction_256n` or `reduction_grid`.
        values: values of all segments in half precision, one segment after the other.
        lengths: number of elements of each segment, 64-bit integers on the same device; or what is known of them.
        half: whether accumulators have half precision.
    """
    segments = lengths if isinstance(lengths, Segments) else Segments(lengths)
    if name == "reduction_grid":
        sums = reduce("reduction_256n", values, segments.parts.parts, half)
        return reduce("reduction_256n", sums.half(), segments.parts.per_segment, half)
    starts, count, longest = segments.starts, segments.count, segments.longest
    sums = torch.zeros(count, dtype=torch.float32, device=values.device)
    if not count:
        return sums
    sizes = segments.lengths
    if name == "reduction_16n":
        _reduce_16n[(triton.cdiv(count, 16),)](values, starts, sizes, sums, count, longest, HALF=half, num_warps=1)
    else:
        _reduce_256n[(count,)](values, starts, sizes, sums, HALF=half, num_warps=1)
    return sums


def scan(name: str, values: torch.Tensor, lengths: torch.Tensor | Segments, half: bool = False) -> torch.Tensor:
    """Return the inclusive prefix sums of the segments by `scan_16n`, `scan_256n` or `scan_grid`; see `reduce`."""
    segments = lengths if isinstance(lengths, Segments) else Segments(lengths)
    if name == "scan_grid":
        parts = segments.parts
        sums = scan("scan_256n", values, parts.parts, half)
        if not parts.parts.count:
            return sums
        totals = scan("scan_256n", sums[parts.last_elements].half(), parts.per_segment, half)
        earlier = torch.cat([totals.new_zeros(1), totals[:-1]])
        earlier[parts.first_parts] = 0
        return sums + earlier.repeat_interleave(parts.parts.lengths, output_size=len(values))
    starts, count, longest = segments.starts, segments.count, segments.longest
    sums = torch.zeros(len(values), dtype=torch.float16 if half else torch.float32, device=values.device)
    if not count:
        return sums
    sizes = segments.lengths
    if name == "scan_16n":
        _scan_16n[(triton.cdiv(count, 16),)](values, starts, sizes, sums, count, longest, HALF=half, num_warps=1)
    else:
        _scan_256n[(count,)](values, starts, sizes, sums, HALF=half, num_warps=1)
    return sums


FUNCTIONS: dict[str, Any] = {
    "reduction_16n": reduce, "reduction_256n": reduce, "reduction_grid": reduce,
    "scan_16n": scan, "scan_256n": scan, "scan_grid": scan,
}  # fmt: skip
