"""Numbers with units in the cells of a table: `12.3 ms`, `64 samples`, `16GiB`."""

from __future__ import annotations

import math
import re
from typing import Any, NamedTuple

TIME_UNITS = {
    "s": 1.0, "sec": 1.0, "secs": 1.0, "second": 1.0, "seconds": 1.0, "ms": 1e-3, "msec": 1e-3, "us": 1e-6,
    "usec": 1e-6, "\u00b5s": 1e-6, "\u03bcs": 1e-6, "ns": 1e-9, "nsec": 1e-9, "min": 60.0, "mins": 60.0, "minute": 60.0,
    "minutes": 60.0, "h": 3600.0, "hour": 3600.0, "hours": 3600.0,
}  # fmt: skip
"""Seconds of a unit of time."""

UNITS_OF_TIME = "ns, us, ms, s, min or h"
UNITS_OF_MEMORY = "B, kB, MB, GB, TB, KiB, MiB, GiB or TiB"
"""Units, as an error lists them."""

BYTE_UNITS = {
    "b": 1.0, "byte": 1.0, "bytes": 1.0,
    **{f"{prefix}b": 1000.0**power for power, prefix in enumerate("kmgt", 1)},
    **{f"{prefix}ib": 1024.0**power for power, prefix in enumerate("kmgt", 1)},
}  # fmt: skip
"""Bytes of a unit of memory."""

_QUANTITY = re.compile(r"\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*([^\W\d_][^\W\d_/]*(?:/[^\W\d_]+)?|%)?\s*")
_MISSING = {"", "nan", "null", "none", "na", "n/a", "-"}


class Quantity(NamedTuple):
    """A number with its unit, as written; the unit is empty if there is none."""

    number: float
    unit: str


def is_missing(value: Any) -> bool:
    """Return whether a cell has no value."""
    return (
        value is None
        or (isinstance(value, float) and not math.isfinite(value))
        or (isinstance(value, str) and value.strip().lower() in _MISSING)
    )


def number(value: Any) -> float | None:
    """Return a finite number, which may be a text; None for `inf`, booleans, numbers with units and other values."""
    if isinstance(value, bool) or is_missing(value) or not isinstance(value, (int, float, str)):
        return None
    try:
        result = float(value)
    except (ValueError, OverflowError):
        return None
    return result if math.isfinite(result) and abs(result) < 1e100 else None


def quantity(value: Any) -> Quantity | None:
    """Return a number with or without a unit; None for any other value."""
    plain_number = number(value)
    if plain_number is not None:
        return Quantity(plain_number, "")
    match = _QUANTITY.fullmatch(value) if isinstance(value, str) else None
    if match is None or (result := number(match[1])) is None:
        return None
    return Quantity(result, match[2] or "")


def scales(units: set[str]) -> dict[str, float] | None:
    """Return factors that convert numbers of all units to one; None if the units cannot be converted.

    Units of time become seconds, units of memory bytes. Singular and plural of one word are equal, in any case.

    Args:
        units: units as written.
    """
    if len(units) < 2:
        return dict.fromkeys(units, 1.0)
    lower = {unit: unit.lower() for unit in units}
    for table in (TIME_UNITS, BYTE_UNITS):
        if all(word in table for word in lower.values()):
            return {unit: table[word] for unit, word in lower.items()}
    return dict.fromkeys(units, 1.0) if len({word.rstrip("s") for word in lower.values()}) == 1 else None


def seconds(value: Any, default_scale: float | None) -> float | None:
    """Return the seconds of a cell: a number with a unit of time, or a number in the unit of the column.

    Args:
        value: the cell.
        default_scale: seconds of the column's unit; None if it has none.
    """
    found = quantity(value)
    if found is None:
        return None
    scale = TIME_UNITS.get(found.unit.lower()) if found.unit else default_scale
    return None if scale is None else found.number * scale
