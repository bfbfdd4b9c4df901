"""CUPTI's records as the objects of cupti-python, copied in its callback; where raw buffers cannot be read.

A record lives only as long as its buffer, and its class differs by version of cupti-python. So the callback copies
values by the names of the fields, which are the same in all versions, and keeps no record.

cupti-python 13.0 reads each field through a record array of NumPy, in 4 µs, or 70 µs for a kernel; and it ends the
process if a name is a null pointer. So its records are unpacked from their bytes, at the offsets of their NumPy type.
"""

from __future__ import annotations

import ctypes
import operator
import struct
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from xsp_collectors.cuda.activities import BUFFER_BYTES, ROW_TYPES, TEXT_FIELDS, Batch, Row, Table

Reader = Callable[[Any], tuple[Any, ...]]
"""Copies the values of a record."""

Texts = dict[int, "str | None"]
"""Texts by their addresses, which stay valid while CUPTI hands over a buffer."""


class RecordObjects:
    """The records that cupti-python delivered and that were not taken yet."""

    form = "objects of cupti-python"

    def __init__(self) -> None:
        self._batches: deque[list[tuple[int, tuple[Any, ...]]]] = deque()
        self._readers: dict[tuple[type, int], Reader | None] = {}
        self._texts: Texts = {}
        self.unreadable = 0
        """Number of records that could not be copied; an exception must not propagate into CUPTI."""

        self.unrequested = 0
        """Number of records of kinds that were not requested here, but by another client."""

    def register(self, cupti: Any) -> None:
        """Make CUPTI deliver its records here.

        Args:
            cupti: the binding.

        Raises:
            Exception: an error of the binding.
        """
        cupti.activity_register_callbacks(self.request, self.complete)

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

    def take(self) -> Batch:
        """Return and forget the records that were delivered since the last call."""
        rows_by_type: dict[type[Row], list[tuple[int, int, tuple[Any, ...]]]] = {}
        number = 0
        while self._batches:
            for kind, values in self._batches.popleft():
                rows_by_type.setdefault(ROW_TYPES[kind], []).append((kind, number, values))
                number += 1
        batch = Batch()
        for row_type, rows in rows_by_type.items():
            kinds, numbers, values = zip(*rows, strict=True)
            batch.add(Table.of_rows(row_type, kinds, values, batch.texts, numbers))
        return batch

    def _add_reader(self, record: Any, kind: int) -> Reader | None:
        """Determine and remember how records of this class are read."""
        read_fields = self._readers[type(record), kind] = _reader(record, kind, self._texts)
        return read_fields


def _reader(record: Any, kind: int, texts: Texts) -> Reader | None:
    """Return a function that copies the fields of such records; None for a kind that was not requested."""
    row_type: Any = ROW_TYPES.get(kind)
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


def _unpacking_reader(dtype: Any, field_paths: Sequence[str], texts: Texts) -> Reader:
    """Return a function that unpacks fields from the bytes of records of a NumPy type."""
    fields = {path: field for path in field_paths if (field := _field_offset(dtype, path)) is not None}
    layout, end = "<", 0
    for offset, code in sorted(fields.values()):
        layout, end = f"{layout}{offset - end}x{code}", offset + struct.calcsize(code)
    positions = {field: number for number, field in enumerate(sorted(fields.values()))}
    selection = [(positions[fields[path]] if path in fields else None, path in TEXT_FIELDS) for path in field_paths]
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
