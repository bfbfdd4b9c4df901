"""CUPTI's activity records as plain tuples, copied in the callback.

A record lives only as long as its buffer, and its class differs by version of cupti-python. So the callback copies
values by the names of the fields, which are the same in all versions, and keeps no record. A field that a version does
not have is None.

cupti-python 13.0 reads each field through a record array of NumPy, in 4 µs, or 70 µs for a kernel; and it ends the
process if a name is a null pointer. So its records are unpacked from their bytes, at the offsets of their NumPy type.
"""

from __future__ import annotations

import ctypes
import enum
import operator
import struct
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

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

_ROW_TYPES: dict[int, Any] = {
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

_KINDS: dict[int, tuple[Activity, Any]] = {int(kind): (kind, _ROW_TYPES[kind]) for kind in Activity}

Reader = Callable[[Any], tuple[Any, ...]]
"""Copies the values of a record."""

Texts = dict[int, "str | None"]
"""Texts by their addresses, which stay valid while CUPTI hands over a buffer."""


class Records:
    """The records that CUPTI delivered and that were not taken yet."""

    def __init__(self) -> None:
        self._batches: deque[list[tuple[int, tuple[Any, ...]]]] = deque()
        self._readers: dict[tuple[type, int], Reader | None] = {}
        self._texts: Texts = {}
        self.unreadable = 0
        """Number of records that could not be copied; an exception must not propagate into CUPTI."""

        self.unrequested = 0
        """Number of records of kinds that were not requested here, but by another client."""

    def request(self) -> tuple[int, int]:
        """Return the bytes of a new buffer, and 0 for an unlimited number of records. Called by CUPTI."""
        return BUFFER_BYTES, 0

    def complete(self, records: Sequence[Any]) -> None:
        """Copy the records of a buffer. Called by CUPTI, on a thread of its own."""
        batch: list[tuple[int, tuple[Any, ...]]] = []
        readers, append = self._readers, batch.append
        self._texts.clear()
        has_arrays = bool(records) and hasattr(records[0], "_data")  # a binding has one form for all records
        for record in records:
            try:
                kind = _KIND.unpack_from(record._data)[0] if has_arrays else int(record.kind)
                key = type(record), kind
                read_fields = readers[key] if key in readers else self._add_reader(record, kind)
                if read_fields is not None:
                    append((kind, read_fields(record)))
                else:
                    self.unrequested += 1
            except Exception:
                self.unreadable += 1
        self._batches.append(batch)

    def take(self) -> list[tuple[Activity, Row]]:
        """Return and forget the records that were delivered since the last call."""
        rows: list[tuple[Activity, Row]] = []
        new = tuple.__new__  # in half the time of `_make`
        while self._batches:
            for kind, values in self._batches.popleft():
                activity, row_type = _KINDS[kind]
                rows.append((activity, new(row_type, values)))
        return rows

    def _add_reader(self, record: Any, kind: int) -> Reader | None:
        """Determine and remember how records of this class are read."""
        read_fields = self._readers[type(record), kind] = _reader(record, kind, self._texts)
        return read_fields


def _reader(record: Any, kind: int, texts: Texts) -> Reader | None:
    """Return a function that copies the fields of such records; None for a kind that was not requested."""
    row_type = _ROW_TYPES.get(kind)
    if row_type is None:
        return None
    field_paths = [name.replace("object_id_pt_", "object_id.pt.") for name in row_type._fields]
    if hasattr(record, "_data"):
        return _unpacking_reader(record._data.dtype, field_paths, texts)
    if all(_has_field(record, path) for path in field_paths):
        return operator.attrgetter(*field_paths)
    readers = [operator.attrgetter(path) if _has_field(record, path) else _missing_field for path in field_paths]
    return lambda record: tuple(read_fields(record) for read_fields in readers)


_KIND = struct.Struct("<i")
"""The first field of all records."""

_CODES = {"i1": "b", "u1": "B", "i2": "h", "u2": "H", "i4": "i", "u4": "I", "i8": "q", "u8": "Q"}
_TEXT_FIELDS = ("name", "domain")


def _unpacking_reader(dtype: Any, field_paths: Sequence[str], texts: Texts) -> Reader:
    """Return a function that unpacks fields from the bytes of records of a NumPy type."""
    fields = {path: field for path in field_paths if (field := _field_offset(dtype, path)) is not None}
    layout, end = "<", 0
    for offset, code in sorted(fields.values()):
        layout, end = f"{layout}{offset - end}x{code}", offset + struct.calcsize(code)
    positions = {field: number for number, field in enumerate(sorted(fields.values()))}
    selection = [(positions[fields[path]] if path in fields else None, path in _TEXT_FIELDS) for path in field_paths]
    unpack = struct.Struct(layout).unpack_from
    if all(number is not None and not is_text for number, is_text in selection):
        select = operator.itemgetter(*(number for number, _ in selection if number is not None))
        return lambda record: select(unpack(record._data))

    def read_fields(record: Any) -> tuple[Any, ...]:
        values = unpack(record._data)
        return tuple(
            None if number is None else _text(values[number], texts) if is_text else values[number]
            for number, is_text in selection
        )

    return read_fields


def _field_offset(dtype: Any, path: str) -> tuple[int, str] | None:
    """Return the offset of a field, which may be nested, and its code for `struct`; None if there is none."""
    offset = 0
    for name in path.split("."):
        if name not in (dtype.names or ()):
            return None
        dtype, inner_offset = dtype.fields[name][:2]
        offset += inner_offset
    return offset, _CODES[dtype.str[1:]]


def _text(address: int, texts: Texts) -> str | None:
    """Return the text at an address; None for a null pointer."""
    if address not in texts:
        texts[address] = ctypes.string_at(address).decode("utf-8", "replace") if address else None
    return texts[address]


def _has_field(record: Any, path: str) -> bool:
    try:
        operator.attrgetter(path)(record)
    except AttributeError:
        return False
    return True


def _missing_field(record: Any) -> None:
    """Return None, the value of a field that this version does not have."""
