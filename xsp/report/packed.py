"""Columns of a hundred thousand values in little text: what changes, different values once, numbers as differences.

A page cannot read Parquet, and JSON spends a dozen characters on a time. Neighbouring spans begin soon after each
other and have neighbouring parents, so differences are small: they are written as zigzag variable-length integers
(seven bits a byte, the lowest first; 0, -1, 1, -2 … as 0, 1, 2, 3 …) in base64. `spans.js` reads them.
"""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Sequence
from typing import Any

EXACT = 2**51
"""Integers from here on are written as text: the differences of larger ones are more than a page counts exactly."""


_ID = re.compile(r"[0-9a-f]{16}")


def pack(changes: Sequence[tuple[int, Any]]) -> dict[str, Any]:
    """Return a column as JSON.

    Args:
        changes: the places at which its value is another than at the place before, the first one included, with the
            value from there on.

    Returns:
        `all`, where all have one value. Else `from`, the places of the changes, and their values in one of three
        forms. `values` and `at`: the different values, and which of them each one is. `numbers` and `holes`: integers,
        a missing one standing as the one before, and the lengths of the stretches that are there and missing, in turn.
        `hex`: the bytes of ids.
    """
    column = [_plain(value) for _, value in changes]
    different = list(dict.fromkeys(column))
    if len(different) <= 1:
        return {"all": different[0] if different else None}
    return {"from": differences([place for place, _ in changes]), **_values(column, different)}


def _values(column: Sequence[Any], different: Sequence[Any]) -> dict[str, Any]:
    several = 16 * len(different) > len(column)
    if several and _are_integers(different):
        return {"numbers": differences(_filled(column)), "holes": stretches(column)}
    if several and all(isinstance(value, str) and _ID.fullmatch(value) for value in different):
        return {"hex": base64.b64encode(bytes.fromhex("".join(column))).decode()}
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
