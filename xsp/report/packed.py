"""Columns of a hundred thousand values in little text: different values once, numbers as differences.

A page cannot read Parquet, and JSON spends a dozen characters on a time. Neighbouring spans begin soon after each
other and have neighbouring parents, so differences are small: they are written as zigzag variable-length integers
(seven bits a byte, the lowest first; 0, -1, 1, -2 … as 0, 1, 2, 3 …) in base64. `timeline.js` reads them.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Iterable, Sequence
from typing import Any

EXACT = 2**51
"""Integers from here on are written as text: the differences of larger ones are more than a page counts exactly."""


def pack(values: Iterable[Any]) -> dict[str, Any]:
    """Return a column as JSON of one of three forms.

    Returns:
        `all`: the one value that all have; `values` and `at`: the different values, and which of them each one is;
        `numbers` and `holes`: integers, a missing one standing as the one before, and the lengths of the stretches
        that are there and missing, in turn.
    """
    column = [_plain(value) for value in values]
    different = list(dict.fromkeys(column))
    if len(different) <= 1:
        return {"all": different[0] if different else None}
    if 16 * len(different) > len(column) and _are_integers(different):
        return {"numbers": differences(_filled(column)), "holes": stretches(column)}
    number = {value: place for place, value in enumerate(different)}
    return {"values": different, "at": differences([number[value] for value in column])}


def differences(numbers: Sequence[int]) -> str:
    """Return integers below `EXACT` as text, each as its difference from the one before."""
    written = bytearray()
    before = 0
    for number in numbers:
        step = number - before
        before = number
        rest = step << 1 if step >= 0 else (-step << 1) - 1
        while rest > 127:
            written.append(rest & 127 | 128)
            rest >>= 7
        written.append(rest)
    return base64.b64encode(written).decode()


def stretches(column: Sequence[Any]) -> list[int]:
    """Return how many values are there, how many then are missing, how many are there again, and so on."""
    lengths, missing = [0], False
    for value in column:
        if (value is None) is not missing:
            lengths.append(0)
            missing = not missing
        lengths[-1] += 1
    return lengths


def _are_integers(values: Sequence[Any]) -> bool:
    return all(value is None or (type(value) is int and abs(value) < EXACT) for value in values)


def _filled(column: Sequence[int | None]) -> list[int]:
    """Replace what is missing by the value before, whose difference is none."""
    filled, last = [], 0
    for value in column:
        last = last if value is None else value
        filled.append(last)
    return filled


def _plain(value: Any) -> Any:
    """Return a value that JSON can say."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, int) and not isinstance(value, bool):
        return value if abs(value) < EXACT else str(value)
    return value if value is None or isinstance(value, (str, bool)) else str(value)
