"""CUPTI's activity records: the kinds that are requested, their fields, and tables of delivered records.

They are delivered as raw buffers (`recordbuffers`) or as objects of cupti-python (`recordobjects`); both make the same
tables. A table is arrays, because a step of ten thousands of kernels takes seconds if each record is an object.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

COLLECTOR = "cupti"
"""Name of the collector in the spans."""

BUFFER_BYTES = 8 << 20


class Activity(enum.IntEnum):
    """The requested kinds of records, with CUPTI's numbers."""

    MEMCPY = 1
    MEMSET = 2
    DRIVER = 4
    RUNTIME = 5
    CONCURRENT_KERNEL = 10
    MARKER = 12
    OVERHEAD = 17
    MEMCPY2 = 22
    SYNCHRONIZATION = 38


class Kernel(NamedTuple):
    """A kernel; times of CUPTI's clock in nanoseconds, 0 if it had not begun or ended at the flush."""

    start: int
    end: int
    device_id: int
    stream_id: int
    context_id: int
    correlation_id: int
    name: str | None
    grid_x: int
    grid_y: int
    grid_z: int
    block_x: int
    block_y: int
    block_z: int
    registers_per_thread: int | None
    static_shared_memory: int | None
    dynamic_shared_memory: int | None
    graph_node_id: int | None


class Copy(NamedTuple):
    """A copy on a device, or between two."""

    start: int
    end: int
    device_id: int
    stream_id: int
    context_id: int
    correlation_id: int
    bytes: int
    copy_kind: int
    graph_node_id: int | None


class Memset(NamedTuple):
    """A memset on a device."""

    start: int
    end: int
    device_id: int
    stream_id: int
    context_id: int
    correlation_id: int
    bytes: int
    graph_node_id: int | None


class ApiCall(NamedTuple):
    """A call of CUDA's runtime or driver."""

    start: int
    end: int
    cbid: int
    process_id: int
    thread_id: int
    correlation_id: int
    return_value: int


class Wait(NamedTuple):
    """A wait of a call, and its subject."""

    start: int
    end: int
    correlation_id: int
    type: int
    context_id: int
    stream_id: int


class Overhead(NamedTuple):
    """CUPTI's or the driver's own work."""

    start: int
    end: int
    overhead_kind: int
    object_kind: int | None
    object_id_pt_thread_id: int | None


class Marker(NamedTuple):
    """The beginning or the end of an NVTX range."""

    timestamp: int
    flags_: int
    id: int
    name: str | None
    domain: str | None
    object_kind: int | None
    object_id_pt_thread_id: int | None


_THREAD_OBJECT = 2
"""CUPTI's number for a thread in the fields that give the kind of an object."""


def thread_of(row: Overhead | Marker) -> int | None:
    """Return the number of a record's thread; None if the record belongs to another kind of object."""
    return row.object_id_pt_thread_id if row.object_kind == _THREAD_OBJECT else None


Row = Kernel | Copy | Memset | ApiCall | Wait | Overhead | Marker

ROW_TYPES: dict[int, Any] = {
    Activity.CONCURRENT_KERNEL: Kernel,
    Activity.MEMCPY: Copy,
    Activity.MEMCPY2: Copy,
    Activity.MEMSET: Memset,
    Activity.RUNTIME: ApiCall,
    Activity.DRIVER: ApiCall,
    Activity.SYNCHRONIZATION: Wait,
    Activity.OVERHEAD: Overhead,
    Activity.MARKER: Marker,
}

TEXT_FIELDS = ("name", "domain")

UNKNOWN = -1
"""In a table, the value of a field that this version of CUPTI does not have; it is None in a row."""

Integers = npt.NDArray[np.int64]


class Table:
    """Records of one type, a column for each field, in the order of their delivery.

    A text is a number in the list of texts of the batch; number 0 is no text.
    """

    def __init__(self, row_type: Any, kind: Integers, number: Integers, columns: dict[str, Integers]) -> None:
        """Make a table of columns of one length.

        Args:
            row_type: the records' type of row.
            kind: the kind of each record, a number of `Activity`.
            number: the place of each record in its batch.
            columns: the columns by the fields of the row type.
        """
        self.row_type = row_type
        self.kind = kind
        self.number = number
        self._columns = columns

    @classmethod
    def of_rows(
        cls,
        row_type: Any,
        kinds: Sequence[int],
        rows: Sequence[Sequence[Any]],
        texts: list[str | None],
        numbers: Sequence[int] | None = None,
    ) -> Table:
        """Return the table of rows; their texts are appended to `texts`, which begins with None."""
        text_numbers: dict[str | None, int] = {None: 0}
        columns: dict[str, Integers] = {}
        for field, values in zip(row_type._fields, zip(*rows, strict=True), strict=True):
            if field in TEXT_FIELDS:
                for text in dict.fromkeys(values):
                    if text is not None:
                        text_numbers[text] = len(texts)
                        texts.append(text)
                columns[field] = np.array([text_numbers[text] for text in values], np.int64)
            else:
                columns[field] = _integers(values)
        number = np.arange(len(rows)) if numbers is None else np.array(numbers, np.int64)
        return cls(row_type, np.array(kinds, np.int64), number, columns)

    def __len__(self) -> int:
        return len(self.number)

    def __getitem__(self, field: str) -> Integers:
        return self._columns[field]

    def where(self, mask: npt.NDArray[np.bool_]) -> Table:
        """Return the records for which the mask is true."""
        columns = {field: values[mask] for field, values in self._columns.items()}
        return Table(self.row_type, self.kind[mask], self.number[mask], columns)

    def without_calls(self, correlation_ids: Integers) -> Table:
        """Return the records that are not of these calls."""
        if not len(correlation_ids) or not len(self):
            return self
        return self.where(~np.isin(self["correlation_id"], correlation_ids))

    def rows(self, texts: Sequence[str | None]) -> list[Any]:
        """Return the records as rows of their type."""
        columns: list[list[Any]] = []
        for field in self.row_type._fields:
            values = self[field].tolist()
            if field in TEXT_FIELDS:
                values = [texts[number] for number in values]
            elif UNKNOWN in values:
                values = [None if value == UNKNOWN else value for value in values]
            columns.append(values)
        return list(map(self.row_type._make, zip(*columns, strict=True)))

    @classmethod
    def joined(cls, tables: Sequence[Table]) -> Table:
        """Return the records of one or several tables of one type, in the order of their delivery."""
        if len(tables) == 1:
            return tables[0]
        number = np.concatenate([table.number for table in tables])
        order = np.argsort(number, kind="stable")
        columns = {
            field: np.concatenate([table[field] for table in tables])[order] for field in tables[0].row_type._fields
        }
        kind = np.concatenate([table.kind for table in tables])
        return cls(tables[0].row_type, kind[order], number[order], columns)


class Batch:
    """The records that were delivered for a step, as a table for each type of row."""

    def __init__(self) -> None:
        self.texts: list[str | None] = [None]
        """The texts of the records; fields have their numbers in this list."""

        self._tables: dict[Any, list[Table]] = {}

    def add(self, table: Table) -> None:
        """Add records; their texts are in `texts` already."""
        self._tables.setdefault(table.row_type, []).append(table)

    def __len__(self) -> int:
        return sum(len(table) for tables in self._tables.values() for table in tables)

    def __getitem__(self, row_type: Any) -> Table:
        """Return the records of a type, which may be none."""
        tables = self._tables.get(row_type)
        if tables is None:
            none = np.empty(0, np.int64)
            return Table(row_type, none, none, dict.fromkeys(row_type._fields, none))
        self._tables[row_type] = [joined := Table.joined(tables)]
        return joined

    def rows(self) -> list[tuple[Activity, Row]]:
        """Return all records as rows, with their kinds, in the order of their delivery."""
        numbered = [
            (number, Activity(kind), row)
            for table in map(self.__getitem__, list(self._tables))
            for number, kind, row in zip(
                table.number.tolist(), table.kind.tolist(), table.rows(self.texts), strict=True
            )
        ]
        return [(kind, row) for _, kind, row in sorted(numbered, key=lambda each: each[0])]


class Records(Protocol):
    """The destination of CUPTI's records."""

    form: str
    """What CUPTI delivers, for a person."""

    unreadable: int
    """Number of records, or of buffers from the first such record on, that could not be read."""

    unrequested: int
    """Number of records of kinds that were not requested here, but by another client."""

    def register(self, cupti: Any) -> None:
        """Make CUPTI deliver its records here; `cupti` is the binding, whose errors are raised."""

    def take(self) -> Batch:
        """Return and forget the records that were delivered since the last call."""


def distinct(columns: Iterable[Integers]) -> tuple[list[bytes], dict[bytes, int]]:
    """Find equal rows of columns, of which there is at least one.

    Returns:
        A key for each row, which equal rows share; and for each key the position of a row.
    """
    values = np.stack(tuple(columns), axis=1)
    keys: list[bytes] = np.ascontiguousarray(values).view(f"V{values.itemsize * values.shape[1]}").ravel().tolist()
    return keys, dict(zip(keys, range(len(keys)), strict=True))


def _integers(values: Sequence[Any]) -> Integers:
    """Return values of 64 bits as signed ones; None is UNKNOWN."""
    try:
        return np.array(values, np.int64)
    except (TypeError, OverflowError):
        signed = [UNKNOWN if value is None else (value + (1 << 63)) % (1 << 64) - (1 << 63) for value in values]
        return np.array(signed, np.int64)
