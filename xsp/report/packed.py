"""Columns of a hundred thousand values in little text: only changes, each value once, numbers as differences.

A page cannot read Parquet, and JSON spends a dozen characters on a time. Neighbouring spans begin soon after each
other and have neighbouring parents, so differences are small: they are written as zigzag variable-length integers
(seven bits per byte, the lowest first; 0, -1, 1, -2 … as 0, 1, 2, 3 …) in base64. `spans.js` reads them.
"""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

EXACT_LIMIT = 2**51
"""Integers from here on are written as text, because JavaScript does not represent their differences exactly."""


_ID = re.compile(r"[0-9a-f]{16}")


def pack(positions: Array, values: Array) -> dict[str, Any]:
    """Return a column as JSON.

    Args:
        positions: the positions at which the value differs from the one before, including the first position.
        values: the value from each position on; missing values are masked, or None.

    Returns:
        `all`, if there is only one value. Else `from`, the positions of the changes, and their values in one of three
        forms. `values` and `at`: the different values, and the index of the value at each change. `numbers` and
        `holes`: integers, with the preceding one for a missing one, and the lengths of present and missing stretches
        in turn. `hex`: the bytes of ids.
    """
    if values.dtype.kind == "i":
        missing = np.ma.getmaskarray(values)
        numbers = np.where(missing, 0, np.ma.getdata(values)).astype(np.int64)
        if not len(numbers) or -EXACT_LIMIT < numbers.min() <= numbers.max() < EXACT_LIMIT:
            distinct_count = len(np.unique(numbers[~missing])) + int(missing.any())
            if distinct_count > 1 and 16 * distinct_count > len(numbers):
                # a missing value becomes the value before, so that their difference is 0
                last_present = np.maximum.accumulate(np.where(missing, -1, np.arange(len(numbers))))
                packed = {
                    "numbers": differences(np.where(last_present >= 0, numbers[last_present], 0)),
                    "holes": stretches(missing),
                }
                return {"from": differences(positions), **packed}
    column = values.tolist()
    json_values = {value: _plain(value) for value in dict.fromkeys(column)}
    column = [json_values[value] for value in column]
    distinct = list(dict.fromkeys(json_values.values()))
    if len(distinct) <= 1:
        return {"all": distinct[0] if distinct else None}
    return {"from": differences(positions), **_values(column, distinct)}


def changes(values: Array) -> Array:
    """Return the positions at which a column's value differs from the one before, including the first position.

    Args:
        values: the column; missing values are masked.
    """
    raw, missing = np.ma.getdata(values), np.ma.getmaskarray(values)
    is_change = np.ones(len(raw), bool)
    is_change[1:] = np.where(missing[1:] | missing[:-1], missing[1:] != missing[:-1], raw[1:] != raw[:-1])
    positions: Array = np.flatnonzero(is_change)
    return positions


def _values(column: Sequence[Any], distinct: Sequence[Any]) -> dict[str, Any]:
    is_varied = 16 * len(distinct) > len(column)
    if is_varied and all(isinstance(value, str) and _ID.fullmatch(value) for value in distinct):
        return {"hex": base64.b64encode(bytes.fromhex("".join(column))).decode()}
    index_by_value = {value: index for index, value in enumerate(distinct)}
    return {"values": distinct, "at": differences([index_by_value[value] for value in column])}


def differences(numbers: Sequence[int] | Array) -> str:
    """Return integers below `EXACT_LIMIT` as text, each as its difference from the one before."""
    steps: Array = np.diff(np.asarray(numbers, dtype=np.int64), prepend=0)
    zigzag: Array = np.where(steps >= 0, steps << 1, (-steps << 1) - 1)
    lengths = np.ones(len(zigzag), np.int64)
    for bits in range(7, 63, 7):
        lengths += zigzag >> bits > 0
    end_positions = np.cumsum(lengths)
    encoded = np.empty(int(end_positions[-1]) if len(end_positions) else 0, np.uint8)
    position, active = end_positions - lengths, np.arange(len(zigzag))
    while len(active):
        continues = zigzag[active] > 127
        encoded[position[active]] = zigzag[active] & 127 | continues << 7
        active = active[continues]
        zigzag[active] >>= 7
        position[active] += 1
    return base64.b64encode(encoded.tobytes()).decode()


def stretches(missing: Array) -> list[int]:
    """Return the lengths of the stretches of present and missing values in turn, beginning with present ones."""
    edges = np.flatnonzero(np.diff(missing.astype(np.int8), prepend=0))
    lengths: list[int] = np.diff(edges, prepend=0, append=len(missing)).tolist()
    return lengths


def _plain(value: Any) -> Any:
    """Return a value that JSON can represent."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, int) and not isinstance(value, bool):
        return value if abs(value) < EXACT_LIMIT else str(value)
    return value if value is None or isinstance(value, (str, bool)) else str(value)
