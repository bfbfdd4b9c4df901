"""Figures with units as text for people, text of options as figures, and long names cut.

Times, bytes and shares are written with three digits and the unit that fits, everywhere in the same way. JSON has plain
numbers, with the unit in the key.
"""

from __future__ import annotations

import math
import re

MISSING = "–"
"""What is written for a value that was not measured."""

_TIME_UNITS = ((1e9, "s"), (1e6, "ms"), (1e3, "µs"), (1.0, "ns"))
_BINARY_UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))
_PREFIXES = ("", "K", "M", "G", "T", "P", "E")


def ns_text(ns: float | None) -> str:
    """Return nanoseconds with three digits and the unit that fits: `1.23 ms`, `12.3 µs`, `123 ns`."""
    if ns is None:
        return MISSING
    size = abs(ns)
    factor, unit = next((entry for entry in _TIME_UNITS if size >= 0.9995 * entry[0]), _TIME_UNITS[-1])
    value = ns / factor
    is_whole = abs(value) >= 99.95 or (unit == "ns" and (size >= 0.995 or not size))
    return f"{value:.{0 if is_whole else 1 if abs(value) >= 9.995 else 2}f} {unit}"


def ms_text(ms: float | None) -> str:
    """Return milliseconds with three digits and the unit that fits, see `ns_text`."""
    return ns_text(None if ms is None else 1e6 * ms)


def seconds_text(seconds: float | None) -> str:
    """Return seconds with three digits and the unit that fits, see `ns_text`."""
    return ns_text(None if seconds is None else 1e9 * seconds)


def milliseconds(ns: float | None) -> float | None:
    """Return nanoseconds in milliseconds; None stays."""
    return None if ns is None else ns / 1e6


def size_text(nbytes: float) -> str:
    """Return bytes with three digits and a binary unit: `64 KiB`, `97.8 MiB`."""
    factor, unit = next((entry for entry in _BINARY_UNITS if nbytes >= entry[0]), (1, "B"))
    value = nbytes / factor
    return f"{value:.0f} {unit}" if value >= 999.5 else f"{value:.3g} {unit}"


def amount(value: float | None, unit: str = "") -> str:
    """Return a figure with three digits and a decimal prefix, `4.09 GB`; a dash for None."""
    if value is None:
        return MISSING
    size, place = float(value), 0
    while abs(size) >= 999.5 and place < len(_PREFIXES) - 1:
        size, place = size / 1000, place + 1
    digits = f"{size:.0f}" if place == 0 or size >= 99.95 else f"{size:.1f}" if size >= 9.995 else f"{size:.2f}"
    return f"{digits} {_PREFIXES[place]}{unit}".rstrip()


def at_least(text: str, is_partial: bool) -> str:
    """Return the text of a sum, with `≥` before it if some of its parts are unknown; a dash stays one."""
    return f"≥ {text}" if is_partial and text != MISSING else text


def share_text(share: float, digits: int = 0) -> str:
    """Return a share in percent; one of a thousand percent or more without decimals."""
    return f"{100 * share:,.{digits if share < 10 else 0}f} %"


def percent_of(part: float | None, total: float | None) -> float | None:
    """Return a part in percent of the total; None without one of them, or if the total is 0."""
    return None if part is None or not total else 100 * part / total


def number(value: float) -> str:
    """Return a number with three or four significant digits; only very large or small ones have an exponent."""
    if 0.001 <= abs(value) < 0.1:
        return f"{value:.{2 - math.floor(math.log10(abs(value)))}f}"
    if value == 0 or 0.1 <= abs(value) < 100_000:
        digits = max(0, 3 - len(str(int(abs(value))))) + (1 if abs(value) < 1000 else 0)
        return f"{value:.{digits}f}"
    return f"{value:,.0f}" if 100_000 <= abs(value) < 10_000_000 else f"{value:.3g}"


def short_number(value: float) -> str:
    """Return a number with three significant digits, or all digits before the point: `0.0123`, `12.3`, `12,345`."""
    return f"{value:,.0f}" if 100 <= abs(value) < 1e10 else f"{value:.3g}"


def counted(count: int, noun: str) -> str:
    """Return a number with its noun, in the plural if it is not 1: `1 step`, `1,200 steps`."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


def cut(text: str, width: int) -> str:
    """Return a text in at most `width` characters; the last one is `…` if the text is longer."""
    return text if len(text) <= width else f"{text[: max(1, width - 1)]}…"


# --- text as figures --------------------------------------------------------------------------------------------------

_SECONDS = {
    "": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0,
    "ms": 1e-3, "us": 1e-6, "\u00b5s": 1e-6, "\u03bcs": 1e-6, "ns": 1e-9,
}  # fmt: skip
"""Seconds by unit; microseconds with the micro sign and with the Greek letter, which look the same."""

_BYTES = {
    "": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40,
}  # fmt: skip

MAX_BYTES = 1 << 62

_FIGURE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([a-z\u00b5\u03bc]*)")


def parse_seconds(text: str) -> float | None:
    """Return the seconds in `60s`, `2m`, `5ms` or `90`; None if the text is not a finite duration, 0 or more."""
    match = _FIGURE.fullmatch(text.strip())
    if match is None or match[2] not in _SECONDS:
        return None
    seconds = float(match[1]) * _SECONDS[match[2]]
    return seconds if math.isfinite(seconds) else None


def parse_bytes(text: str) -> int | None:
    """Return the bytes in `64MiB`, `25 MB` or `4096`; None if the text is not a size above 0 and below 2⁶²."""
    match = _FIGURE.fullmatch(text.strip().lower())
    size = float(match[1]) * _BYTES.get(match[2], 0) if match is not None else 0.0
    return max(1, round(size)) if 0 < size < MAX_BYTES else None


def shortened(text: str, width: int) -> str:
    """Return a text in at most `width` columns of a terminal, without its middle if necessary."""
    from rich.cells import cell_len, set_cell_size

    if cell_len(text) <= width:
        return text
    before = (width - 1) // 2
    after = width - 1 - before
    return set_cell_size(text, before) + "…" + set_cell_size(text[::-1], after)[::-1]
