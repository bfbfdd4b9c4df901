"""Latencies of models from a CSV file of any origin.

The first line names the columns: `model` with names that `xsp graph` takes, one of `latency_ns`, `latency_us`,
`latency_ms` and `latency_s`, and, if they vary, `device`, `batch` and `threads`. Other columns are ignored.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from xsp.errors import UsageError

UNITS: Mapping[str, float] = {"latency_ns": 1.0, "latency_us": 1e3, "latency_ms": 1e6, "latency_s": 1e9}
MODEL = ("model", "spec")
FORMAT = "columns are model, latency_ms (or _ns, _us, _s), and device, batch, threads where they vary"


@dataclass(frozen=True)
class Latency:
    """The time of a step of a model."""

    model: str
    ns: float
    device: str = ""
    batch: int | None = None
    threads: int | None = None


def read(path: Path) -> tuple[list[Latency], list[str]]:
    """Return the latencies of a file, and a line with the reason for each row without a valid latency.

    Raises:
        UsageError: the file cannot be read, is not a table of latencies, or no row has a valid latency.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: cannot be read as text ({getattr(error, 'strerror', None) or error})") from error
    head = text.split("\n", 1)[0]
    rows = csv.DictReader(io.StringIO(text, newline=""), delimiter=max(",;\t", key=head.count))
    latencies: list[Latency] = []
    holes: list[str] = []
    try:
        columns = [name.strip() for name in rows.fieldnames or ()]
        rows.fieldnames = columns
        model = next((name for name in MODEL if name in columns), None)
        unit = [name for name in UNITS if name in columns]
        if model is None or len(unit) != 1:
            names = ", ".join(columns)[:100] or "none"
            raise UsageError(f"{path}: not a table of latencies: {FORMAT}; there are {names}")
        for row in rows:
            latency = _latency(row, model, unit[0])
            if isinstance(latency, Latency):
                latencies.append(latency)
            else:
                holes.append(f"line {rows.line_num}: {latency}")
    except csv.Error as error:
        raise UsageError(f"{path}: line {rows.line_num}: not CSV ({error})") from error
    if not latencies:
        raise UsageError(f"{path}: no row has a latency{f' ({holes[0]})' if holes else ''}")
    return latencies, holes


def _latency(row: Mapping[str, str | None], model: str, unit: str) -> Latency | str:
    """Return the latency of a row, or the reason why the row is invalid."""
    name = (row[model] or "").strip()
    if not name:
        return "no model"
    try:
        value = float(row[unit] or "")
    except ValueError:
        return f"{name}: {unit} is {row[unit]!r}"
    if not (math.isfinite(value) and value > 0):
        return f"{name}: {unit} is {row[unit]!r}"
    numbers: dict[str, int | None] = {}
    for column in ("batch", "threads"):
        text = (row.get(column) or "").strip()
        try:
            numbers[column] = int(float(text)) if text else None
        except (ValueError, OverflowError):
            return f"{name}: {column} is {text!r}"
        if numbers[column] is not None and (numbers[column] or 0) < 1:
            return f"{name}: {column} is {text!r}"
    return Latency(name, value * UNITS[unit], (row.get("device") or "").strip(), numbers["batch"], numbers["threads"])
