"""Segmented reduction and scan as products of 16×16 tiles, in NumPy, with the rounding of a matrix unit.

The algorithms are from Dakkak et al., "Accelerating Reduction and Scan Using Tensor Core Units" (ICS 2019). A
product takes two tiles in half precision and adds to a tile of accumulators, in single or half precision:

* Products of two half-precision numbers are exact in single precision; in half precision they are rounded.
* The sixteen terms of an element are added to the accumulator in the order of k, each sum rounded to the accumulator's
  type. A device may add them in another order or round less often: where sums are exact, the results are the same.
* A result that is a factor of the next product is rounded to half precision, also if accumulators have single
  precision: a sum of 65,520 or more becomes infinite there.
* Accumulators start from +0, and segments are padded to whole tiles with +0.

Special values follow from that, since a product with a 0 of a constant tile counts as well (0·∞ and 0·NaN are NaN):

* A reduction of ±∞ or NaN gives the result of a loop of additions: the row of P that counts has no zeros.
* `scan_16`, `scan_16n`: the elements before an infinity in its row of 16 become NaN, and later elements are right. A
  NaN makes its whole row NaN, and with `16n` all later elements.
* `scan_256`, `scan_256n`: all elements before an infinity in its tile and all elements of its row become NaN, later
  rows are right; if the infinity is in the last row, the carried element and all later elements are NaN. A NaN makes
  its whole tile and all later elements NaN.
* `scan_block`, `scan_grid`: the same inside a part. The sums of parts are scanned as a tile, too: with up to sixteen
  parts, an infinity or a NaN in any of them makes all parts but the first one NaN.
* Sums of −0 are +0, as the accumulator starts from +0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

SIDE = 16
TILE = SIDE * SIDE
WARPS = 4
"""Warps of a block: each processes a part of the segment, and the partial results are combined as one more tile."""

BLOCK = 4096
"""Number of elements of a segment that one block processes at the level of the grid."""

Halves = npt.NDArray[np.float16]
Sums = npt.NDArray[Any]


@dataclass(frozen=True)
class Constants:
    """The tiles that do not depend on the data.

    Attributes:
        P: ones in the first row: P·A has the sums of the columns of A in its first row.
        ones: ones everywhere.
        U: upper triangular with the diagonal: A·U are the inclusive scans of the rows of A.
        L: strictly lower triangular: L·A are the exclusive scans of the columns of A.
    """

    P: Halves
    ones: Halves
    U: Halves
    L: Halves


def constants(as_printed: bool = False) -> Constants:
    """Return the constant tiles.

    Args:
        as_printed: U and L as printed in the closing definition of the paper, where the two conditions on the indices
            are exchanged: ones of U where row ≥ column, ones of L where row < column. They contradict the formulas
            of the paper, and scans with them are wrong.
    """
    row, column = np.indices((SIDE, SIDE))
    upper, lower = (row >= column, row < column) if as_printed else (row <= column, row > column)
    tiles = (row == 0, row >= 0, upper, lower)
    return Constants(*(tile.astype(np.float16) for tile in tiles))


class Unit:
    """A matrix unit, which multiplies tiles and counts its products.

    Args:
        accumulate: the type of the accumulators, `"single"` or `"half"`.
        tiles: the constant tiles that the algorithms use.
    """

    def __init__(self, accumulate: str = "single", tiles: Constants | None = None) -> None:
        if accumulate not in ("single", "half"):
            raise ValueError(f"accumulators are single or half, not {accumulate!r}")
        self.kind: Any = np.float32 if accumulate == "single" else np.float16
        self.tiles = tiles or constants()
        self.products = 0

    def multiply(self, left: Sums, right: Sums, into: Sums | None = None) -> Sums:
        """Return `into + left·right` for tiles with any number of leading dimensions, in the accumulators' type.

        Factors are rounded to half precision; `into` is +0 by default.
        """
        with np.errstate(over="ignore", invalid="ignore"):
            a, b = (np.asarray(factor).astype(np.float16).astype(self.kind) for factor in (left, right))
            shape = np.broadcast_shapes(a.shape, b.shape)
            accumulator = (
                np.zeros(shape, self.kind) if into is None else np.array(np.broadcast_to(into, shape), self.kind)
            )
            for k in range(SIDE):
                accumulator += a[..., :, k, None] * b[..., None, k, :]
        self.products += int(np.prod(shape[:-2]))
        return accumulator


# --- reductions of segments that are padded to whole tiles: (segments, elements) → (segments,) ------------------


def reduction_16(unit: Unit, padded: Sums) -> Sums:
    """P·A, for segments of 16: sixteen segments are the columns of a tile."""
    return reduction_16n(unit, _exactly(padded, SIDE))


def reduction_16n(unit: Unit, padded: Sums) -> Sums:
    """P·A, accumulated down sixteen segments that are the columns of tiles: one product for each 256 elements."""
    columns = _side_by_side(padded).swapaxes(-1, -2)  # group, tile, element, segment
    accumulator = None
    for number in range(columns.shape[1]):
        accumulator = unit.multiply(unit.tiles.P, columns[:, number], accumulator)
    assert accumulator is not None
    return accumulator[:, 0, :].reshape(-1)[: len(padded)]


def reduction_256(unit: Unit, padded: Sums) -> Sums:
    """(P·A)·Pᵀ, for segments of 256: two products."""
    return reduction_256n(unit, _exactly(padded, TILE))


def reduction_256n(unit: Unit, padded: Sums) -> Sums:
    """P·A accumulated over the tiles of a segment, then ·Pᵀ: one product per tile and a final one (work-efficient)."""
    accumulator = None
    tiles = _tiles(padded)
    for number in range(tiles.shape[1]):
        accumulator = unit.multiply(unit.tiles.P, tiles[:, number], accumulator)
    return unit.multiply(accumulator, unit.tiles.P.T)[:, 0, 0]


def reduction_256n_two(unit: Unit, padded: Sums) -> Sums:
    """(P·A)·Pᵀ for each tile, the second product accumulated: two products per tile (the work-inefficient form)."""
    accumulator = None
    tiles = _tiles(padded)
    for number in range(tiles.shape[1]):
        accumulator = unit.multiply(unit.multiply(unit.tiles.P, tiles[:, number]), unit.tiles.P.T, accumulator)
    assert accumulator is not None
    return accumulator[:, 0, 0]


def reduction_block(unit: Unit, padded: Sums) -> Sums:
    """`reduction_256n` of a segment's parts, one for each warp, and then `reduction_256` of their results."""
    parts = _padded(padded, WARPS * TILE)
    sums = reduction_256n(unit, parts.reshape(-1, parts.shape[1] // WARPS)).reshape(len(padded), WARPS)
    return reduction_256(unit, _padded(sums, TILE))


def reduction_grid(unit: Unit, padded: Sums) -> Sums:
    """Two kernels: blocks reduce their parts of a segment, and then one block per segment reduces their results."""
    parts = _padded(padded, BLOCK)
    blocks = parts.shape[1] // BLOCK
    sums = reduction_block(unit, parts.reshape(-1, BLOCK)).reshape(len(padded), blocks)
    return reduction_block(unit, _padded(sums, WARPS * TILE))


# --- inclusive scans: (segments, elements) → (segments, elements) -----------------------------------------------


def scan_16(unit: Unit, padded: Sums) -> Sums:
    """A·U, for segments of 16: sixteen segments are the rows of a tile."""
    return scan_16n(unit, _exactly(padded, SIDE))


def scan_16n(unit: Unit, padded: Sums) -> Sums:
    """A·U along sixteen segments that are rows; the last column is carried to the accumulators of the next tile."""
    rows = _side_by_side(padded)  # group, tile, segment, element
    scanned, carried = np.empty(rows.shape, unit.kind), None
    for number in range(rows.shape[1]):
        scanned[:, number] = unit.multiply(rows[:, number], unit.tiles.U, carried)
        carried = scanned[:, number, :, -1:]
    return scanned.swapaxes(1, 2).reshape(-1, padded.shape[1])[: len(padded)]


def scan_256(unit: Unit, padded: Sums) -> Sums:
    """A·U + (L·A)·1, for segments of 256: three products, two of which share their accumulators."""
    return scan_256n(unit, _exactly(padded, TILE))


def scan_256n(unit: Unit, padded: Sums) -> Sums:
    """A·U + (L·A)·1 tile by tile; the last element is carried to the accumulators of the next tile."""
    tiles = _tiles(padded)
    scanned, carried = np.empty(tiles.shape, unit.kind), None
    for number in range(tiles.shape[1]):
        rows = unit.multiply(tiles[:, number], unit.tiles.U, carried)
        earlier = unit.multiply(unit.tiles.L, tiles[:, number])
        scanned[:, number] = unit.multiply(earlier, unit.tiles.ones, rows)
        carried = scanned[:, number, -1:, -1:]
    return scanned.reshape(padded.shape)


def scan_block(unit: Unit, padded: Sums) -> Sums:
    """`scan_256n` of a segment's parts, one for each warp; each part then adds the sum of the parts before it."""
    parts = _padded(padded, WARPS * TILE)
    scanned = scan_256n(unit, parts.reshape(-1, parts.shape[1] // WARPS)).reshape(len(padded), WARPS, -1)
    return _with_earlier(unit, scanned, scan_256).reshape(parts.shape)[:, : padded.shape[1]]


def scan_grid(unit: Unit, padded: Sums) -> Sums:
    """Three kernels: blocks scan their parts of a segment, the parts' sums are scanned, and added to later parts."""
    parts = _padded(padded, BLOCK)
    scanned = scan_block(unit, parts.reshape(-1, BLOCK)).reshape(len(padded), -1, BLOCK)
    return _with_earlier(unit, scanned, scan_block).reshape(parts.shape)[:, : padded.shape[1]]


def _with_earlier(unit: Unit, scanned: Sums, scan: Callable[[Unit, Sums], Sums]) -> Sums:
    """Return scanned parts (segments, parts, elements), with the sum of the earlier parts added to each."""
    count = scanned.shape[1]
    totals = scan(unit, _padded(scanned[:, :, -1], TILE))[:, :count]
    with np.errstate(over="ignore", invalid="ignore"):
        scanned[:, 1:] += totals[:, :-1, None]
    return scanned


# --- shapes -----------------------------------------------------------------------------------------------------


def _padded(values: Sums, multiple: int) -> Sums:
    """Return rows (rows, elements), padded with +0 to a multiple of elements."""
    return np.pad(values, ((0, 0), (0, -values.shape[1] % multiple)))


def _exactly(padded: Sums, length: int) -> Sums:
    if padded.shape[1] not in (0, length):
        raise ValueError(f"segments can have at most {length} elements: one has more")
    return padded


def _tiles(padded: Sums) -> Sums:
    """Return segments as tiles (segments, tiles, 16, 16), filled row by row."""
    filled = _padded(padded, TILE)
    return filled.reshape(len(filled), -1, SIDE, SIDE)


def _side_by_side(padded: Sums) -> Sums:
    """Return (groups, tiles, segments, elements): sixteen segments per group, sixteen of their elements per tile."""
    segments, length = padded.shape
    filled = np.pad(padded, ((0, -segments % SIDE), (0, 0)))
    return filled.reshape(-1, SIDE, length // SIDE, SIDE).swapaxes(1, 2)


# --- flat values with lengths of segments -----------------------------------------------------------------------

REDUCTIONS: Mapping[str, tuple[Callable[[Unit, Sums], Sums], int]] = {
    "reduction_16": (reduction_16, SIDE),
    "reduction_256": (reduction_256, TILE),
    "reduction_16n": (reduction_16n, SIDE),
    "reduction_256n": (reduction_256n, TILE),
    "reduction_256n_two": (reduction_256n_two, TILE),
    "reduction_block": (reduction_block, TILE),
    "reduction_grid": (reduction_grid, TILE),
}
"""Name → the function, and the number of elements to a multiple of which segments are padded."""

SCANS: Mapping[str, tuple[Callable[[Unit, Sums], Sums], int]] = {
    "scan_16": (scan_16, SIDE),
    "scan_256": (scan_256, TILE),
    "scan_16n": (scan_16n, SIDE),
    "scan_256n": (scan_256n, TILE),
    "scan_block": (scan_block, TILE),
    "scan_grid": (scan_grid, TILE),
}

LONGEST = {"reduction_16": SIDE, "reduction_256": TILE, "scan_16": SIDE, "scan_256": TILE}
"""Maximum number of elements of a segment, for the algorithms on one tile."""


def reduce(name: str, values: npt.ArrayLike, lengths: Sequence[int], unit: Unit | None = None) -> Sums:
    """Return the sum of each segment, in the accumulators' type.

    Args:
        name: one of `REDUCTIONS`.
        values: values of all segments, one segment after the other; they are rounded to half precision.
        lengths: number of elements of each segment; an empty segment has the sum +0.
        unit: the matrix unit (default: a new one with single-precision accumulators).

    Raises:
        ValueError: lengths do not add up to the number of values, or a segment is too long for the algorithm.
    """
    algorithm, multiple = REDUCTIONS[name]
    unit, padded = unit or Unit(), _segments(values, lengths, multiple)[0]
    return algorithm(unit, padded) if padded.size else np.zeros(len(padded), unit.kind)


def scan(name: str, values: npt.ArrayLike, lengths: Sequence[int], unit: Unit | None = None) -> Sums:
    """Return the inclusive prefix sums of each segment, one segment after the other; see `reduce`."""
    algorithm, multiple = SCANS[name]
    padded, is_value = _segments(values, lengths, multiple)
    unit = unit or Unit()
    return algorithm(unit, padded)[is_value] if padded.size else np.zeros(0, unit.kind)


def _segments(values: npt.ArrayLike, lengths: Sequence[int], multiple: int) -> tuple[Sums, npt.NDArray[np.bool_]]:
    """Return segments as rows padded with +0, and a mask of the elements that are values."""
    with np.errstate(over="ignore"):
        flat = np.asarray(values).astype(np.float16)
    sizes = np.asarray(lengths, np.int64)
    if flat.ndim != 1 or (sizes < 0).any() or sizes.sum() != len(flat):
        raise ValueError(f"lengths of segments add up to {sizes.sum()}, but there are {flat.size} values")
    longest = int(sizes.max(initial=0))
    is_value = np.arange(-(-longest // multiple) * multiple) < sizes[:, None]
    padded = np.zeros(is_value.shape, np.float16)
    padded[is_value] = flat
    return padded, is_value
