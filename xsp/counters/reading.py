"""Parser of Nsight Compute's CSV, with one row for each replayed kernel.

Two forms are supported, both as written by versions 2020.1 to 2025.3:

- `ncu --csv --page raw`: a column for each metric, a second line with their units, then a line for each kernel;
- `ncu --csv` (page `details`): a line for each metric, with its name, unit and value.

Output of the program and of ncu before, between and after the tables is skipped. Numbers depend on the locale:
`1,234.5`, `1.234,5`, `1 234,5`; the format is determined once for the whole file. `n/a` is a metric that the device
does not have. NVTX ranges look like `7  "<default domain>:name:none:…"  "<default domain>:…"`, outermost first.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from xsp.device import metrics
from xsp.errors import TraceError

Size = tuple[int, int, int]

_NAME = "Kernel Name"
_LONG_COLUMNS = ("Metric Name", "Metric Unit", "Metric Value")
_RANGES = "Push/Pop_Range"
"""Part of the name of the column with the NVTX ranges of the launching thread."""

_RANGE = re.compile(r'"[^":]*:((?:[^"])*)"')
_RANGE_SUFFIX = re.compile(r"(:none)+$")
_NUMBER = re.compile(r"\d[\d.,'\s\u00a0\u202f]*(?:[eE][-+]?\d+)?", re.ASCII)
_MAX_VALUE = 2**62
"""Upper bound of a counter, far above that of any kernel; larger numbers are ignored."""

_PREFIXES = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_UNIT = re.compile(r"([KMGT]?)(byte|inst|op)s?")
_HOWTO = "make it with: ncu --import REPORT --csv --page raw --print-units base > report.csv"


class ReplayedKernel(NamedTuple):
    """One replayed kernel."""

    name: str
    grid: Size | None
    block: Size | None
    capability: tuple[int, int] | None
    ranges: tuple[str, ...]
    """NVTX ranges around its launch, outermost first, of the default domain and of others."""

    values: Mapping[str, float]
    """Values by the metric's name, in bytes, instructions, operations, percent."""


def read(path: Path) -> list[ReplayedKernel]:
    """Return the kernels of a report, in the order in which they were launched.

    Raises:
        TraceError: the file cannot be read, or holds no kernel.
    """
    records = list(_records(_text(path), path))
    rows = list(_long_rows(records, path) if records and _LONG_COLUMNS[0] in records[0] else _wide_rows(records, path))
    if not rows:
        raise TraceError(f"{path}: holds no kernel of Nsight Compute; {_HOWTO}")
    return rows


def _text(path: Path) -> str:
    """Return the text of a file in one of the encodings that shells use for redirected output."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise TraceError(f"{path}: cannot be read ({error.strerror})") from error
    encoding = "utf-16" if content[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"
    try:
        return content.decode(encoding)
    except UnicodeDecodeError as error:
        raise TraceError(f"{path}: is not text ({error.reason}); a binary report is not read: {_HOWTO}") from error


def _records(text: str, path: Path) -> Iterator[dict[str, str]]:
    """Yield the lines of the table by column, without other output around it; each process has a header."""
    header: list[str] = []
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            fields = next(csv.reader([line]), [])  # line by line: other output may contain an unbalanced quote
        except csv.Error as error:
            raise TraceError(f"{path}: line {number} is not CSV ({error}); {_HOWTO}") from error
        if _NAME in fields:
            header = [field.strip() for field in fields]
        elif header and len(fields) == len(header):
            yield {name: field.strip() for name, field in zip(header, fields, strict=True)}


def _wide_rows(records: Sequence[Mapping[str, str]], path: Path) -> Iterator[ReplayedKernel]:
    """Yield the rows of the page `raw`; the line with the units has no kernel name."""
    units: Mapping[str, str] = {}
    numbers = _Numbers((record[name] for record in records if record[_NAME] for name in _metric_columns(record)), path)
    for record in records:
        if record[_NAME]:
            values = {name: numbers.value(record[name], units.get(name, "")) for name in _metric_columns(record)}
            yield _row(record, values)
        else:
            units = record


def _metric_columns(record: Mapping[str, str]) -> list[str]:
    """Return the columns of known metrics; others may have any content."""
    return [name for name in record if name in metrics.NAMES]


def _long_rows(records: Sequence[Mapping[str, str]], path: Path) -> Iterator[ReplayedKernel]:
    """Yield the rows of the page `details`, where successive lines with the same ID belong to one kernel."""
    name, unit, value = _LONG_COLUMNS
    numbers = _Numbers((record.get(value, "") for record in records if record.get(name) in metrics.NAMES), path)
    kernels: dict[tuple[str, str], tuple[Mapping[str, str], dict[str, float | None]]] = {}
    for record in records:
        number = (record.get("Process ID", ""), record.get("ID", ""))
        _, values = kernels.setdefault(number, (record, {}))
        if record.get(name) in metrics.NAMES:
            values[record[name]] = numbers.value(record.get(value, ""), record.get(unit, ""))
    yield from (_row(record, values) for record, values in kernels.values())


def _row(record: Mapping[str, str], values: Mapping[str, float | None]) -> ReplayedKernel:
    capability = re.fullmatch(r"(\d+)\.(\d+)", record.get("CC", ""))
    return ReplayedKernel(
        name=record[_NAME],
        grid=_size(record.get("Grid Size", "")),
        block=_size(record.get("Block Size", "")),
        capability=(int(capability[1]), int(capability[2])) if capability else None,
        ranges=tuple(_ranges(record)),
        values={name: value for name, value in values.items() if value is not None},
    )


def _size(text: str) -> Size | None:
    """Parse a size such as `(128, 1, 1)`."""
    numbers = re.findall(r"\d+", text)
    return (int(numbers[0]), int(numbers[1]), int(numbers[2])) if len(numbers) == 3 else None


def _ranges(record: Mapping[str, str]) -> Iterator[str]:
    for column, text in record.items():
        if _RANGES in column:
            yield from (_RANGE_SUFFIX.sub("", message) for message in _RANGE.findall(text))


class _Numbers:
    """The number format of one file."""

    def __init__(self, texts: Iterable[str], path: Path) -> None:
        """Determine the decimal separator: a dot, unless the numbers show that it is a comma.

        A mark that occurs several times in a number, or first of two different ones, separates thousands; a mark that
        occurs once, and not before exactly three digits, is the decimal separator.

        Raises:
            TraceError: the numbers contradict each other.
        """
        evidence: dict[str, str] = {}
        for text in texts:
            mark = _fraction_mark(text)
            if mark is not None:
                evidence.setdefault(mark, text)
        if len(evidence) > 1:
            examples = " and ".join(repr(text) for text in evidence.values())
            raise TraceError(f"{path}: numbers are written in two formats, {examples}; {_HOWTO}")
        self._fraction = next(iter(evidence), ".")

    def value(self, text: str, unit: str) -> float | None:
        """Return a number in units without a prefix; None for `n/a`, empty text and other text."""
        if not _NUMBER.fullmatch(text):
            return None
        digits = "".join(letter for letter in text if letter.isalnum() or letter in f"-+{self._fraction}")
        scale = _UNIT.fullmatch(unit)
        try:
            number = float(digits.replace(self._fraction, ".")) * (_PREFIXES[scale[1]] if scale else 1)
        except ValueError:  # two decimal separators
            return None
        return number if number < _MAX_VALUE else None


def _fraction_mark(text: str) -> str | None:
    """Return the decimal separator if this number alone shows it, else None."""
    if not _NUMBER.fullmatch(text):
        return None
    marks = [letter for letter in text if letter in ".,"]
    if not marks:
        return None
    last_mark = marks[-1]
    opposite = "," if last_mark == "." else "."
    if opposite in marks:
        return last_mark
    if len(marks) > 1:
        return opposite
    digits = re.split(r"[eE]", text)[0].partition(last_mark)[2]
    return last_mark if len(digits) != 3 or text.startswith("0" + last_mark) else None
