"""CUPTI's records as the raw buffers that it fills, read as arrays.

cupti-python creates an object for each record before the record can be read, which takes longer than all that xsp makes
of it. So buffers are registered with libcupti itself, and records of one kind are read together, at the offsets of
their structure in NVIDIA's header.

The structures grow with CUPTI's versions. Two conditions protect against reading one that is not known: CUPTI's version
is one whose header was compared, and libcupti itself (`cuptiActivityGetNextRecord`) steps over records of each kind by
the size of a known structure. Otherwise records are objects of cupti-python (`recordobjects`). No device has run this
yet, and a mistake would end the program that is measured, so it is used only where `CHOICE` asks for it.
"""

from __future__ import annotations

import ctypes
import functools
import os
import struct
import sys
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from xsp_collectors.cuda.activities import (
    BUFFER_BYTES,
    TEXT_FIELDS,
    Activity,
    ApiCall,
    Batch,
    Copy,
    Integers,
    Kernel,
    Marker,
    Memset,
    Overhead,
    Table,
    Wait,
)

CHOICE = "XSP_CUPTI_BUFFERS"
"""Environment variable that asks for the buffers, by `1`."""

VERSIONS = range(13_00_00, 13_03_00)
"""The values of `cuptiGetVersion` whose structures are known: CUDA 13.0 to 13.2."""

EXTERNAL_CORRELATION = 39
"""The kind of record that is not requested here, but that Kineto requests."""

_KINDS = (*map(int, Activity), EXTERNAL_CORRELATION)

_KEPT_BUFFERS = 2
"""Number of buffers that are kept for the next request."""


class Structure(NamedTuple):
    """The structure of records in memory: the offsets of fields, equal in all versions of CUPTI 13, and the sizes."""

    kinds: tuple[Activity, ...]
    row_type: Any
    fields: Mapping[str, tuple[int, str]]
    """Offset and NumPy type by the field of the row type."""

    sizes: tuple[int, ...]
    """The sizes of the versions of the structure, in bytes; later versions only append fields."""

    def dtype(self, size: int) -> np.dtype[Any]:
        """Return the NumPy type of these records, with the kind, which is the first field of all records."""
        fields = {"kind": (0, "<i4"), **self.fields}
        offsets, formats = zip(*fields.values(), strict=True)
        return np.dtype({"names": list(fields), "formats": formats, "offsets": offsets, "itemsize": size})


_DEVICE_WORK = {"start": (16, "<u8"), "end": (24, "<u8")}
_COPY = {
    **_DEVICE_WORK,
    "bytes": (8, "<u8"),
    "device_id": (32, "<u4"),
    "context_id": (36, "<u4"),
    "stream_id": (40, "<u4"),
}

STRUCTURES = (
    Structure(
        (Activity.CONCURRENT_KERNEL,),
        Kernel,
        {
            **_DEVICE_WORK,
            "registers_per_thread": (6, "<u2"),
            "device_id": (40, "<u4"),
            "context_id": (44, "<u4"),
            "stream_id": (48, "<u4"),
            "grid_x": (52, "<i4"),
            "grid_y": (56, "<i4"),
            "grid_z": (60, "<i4"),
            "block_x": (64, "<i4"),
            "block_y": (68, "<i4"),
            "block_z": (72, "<i4"),
            "static_shared_memory": (76, "<i4"),
            "dynamic_shared_memory": (80, "<i4"),
            "correlation_id": (92, "<u4"),
            "name": (104, "<u8"),
            "graph_node_id": (144, "<u8"),
        },
        (208, 216, 224),  # CUpti_ActivityKernel9, 10 and 11
    ),
    Structure(
        (Activity.MEMCPY,),
        Copy,
        {**_COPY, "copy_kind": (4, "u1"), "correlation_id": (44, "<u4"), "graph_node_id": (64, "<u8")},
        (88, 96),  # CUpti_ActivityMemcpy5 and 6
    ),
    Structure(
        (Activity.MEMCPY2,),
        Copy,
        {**_COPY, "copy_kind": (4, "u1"), "correlation_id": (60, "<u4"), "graph_node_id": (72, "<u8")},
        (96,),  # CUpti_ActivityMemcpyPtoP4
    ),
    Structure(
        (Activity.MEMSET,),
        Memset,
        {**_COPY, "correlation_id": (44, "<u4"), "graph_node_id": (64, "<u8")},
        (88,),  # CUpti_ActivityMemset4
    ),
    Structure(
        (Activity.RUNTIME, Activity.DRIVER),
        ApiCall,
        {
            "cbid": (4, "<u4"),
            "start": (8, "<u8"),
            "end": (16, "<u8"),
            "process_id": (24, "<u4"),
            "thread_id": (28, "<u4"),
            "correlation_id": (32, "<u4"),
            "return_value": (36, "<u4"),
        },
        (40,),  # CUpti_ActivityAPI
    ),
    Structure(
        (Activity.SYNCHRONIZATION,),
        Wait,
        {
            "type": (4, "<i4"),
            "start": (8, "<u8"),
            "end": (16, "<u8"),
            "correlation_id": (24, "<u4"),
            "context_id": (28, "<u4"),
            "stream_id": (32, "<u4"),
        },
        (40, 56),  # CUpti_ActivitySynchronization and 2
    ),
    Structure(
        (Activity.OVERHEAD,),
        Overhead,
        {
            "overhead_kind": (4, "<i4"),
            "object_kind": (8, "<i4"),
            "object_id_pt_thread_id": (16, "<u4"),
            "start": (24, "<u8"),
            "end": (32, "<u8"),
        },
        (48, 56),  # CUpti_ActivityOverhead2 and 3
    ),
    Structure(
        (Activity.MARKER,),
        Marker,
        {
            "flags_": (4, "<i4"),
            "timestamp": (8, "<u8"),
            "id": (16, "<u4"),
            "object_kind": (20, "<i4"),
            "object_id_pt_thread_id": (28, "<u4"),
            "name": (40, "<u8"),
            "domain": (48, "<u8"),
        },
        (56,),  # CUpti_ActivityMarker2
    ),
)


class _Part(NamedTuple):
    """The records of one structure in a buffer; texts are numbers already."""

    structure: Structure
    number: Integers
    records: npt.NDArray[Any]


class _Content(NamedTuple):
    """What was in a buffer: the number of records, their texts (the first is None), and the records."""

    size: int
    texts: list[str | None]
    parts: list[_Part]


class RecordBuffers:
    """The records in the buffers that CUPTI delivered and that were not taken yet.

    CUPTI keeps the functions that were registered until others are, so there is one object for a process.
    """

    form = "CUPTI's buffers"

    def __init__(self, library: Any, strides: Mapping[int, int] | None = None) -> None:
        """Prepare.

        Args:
            library: libcupti, as `ctypes` loads it.
            strides: the bytes from a record to the next, by its kind; default: libcupti is asked when it is in use.
        """
        self.unreadable = 0
        self.unrequested = 0
        self._library = library
        self._words: list[int | None] = []
        self._types: list[np.dtype[Any]] = []
        if strides is not None:
            self._set_strides(strides)
        self._contents: deque[_Content] = deque()
        self._free: list[int] = []
        self._lent: set[int] = set()
        self._c = _c_library()
        self.on_request, self.on_complete = _Request(self._request), _Complete(self._complete)
        for function in (self.on_request, self.on_complete):  # CUPTI may call them until the process has ended
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(function))

    def register(self, cupti: Any) -> None:
        """Make CUPTI fill buffers of this object.

        Args:
            cupti: the binding, which is not needed.

        Raises:
            OSError: CUPTI refuses, or its records are of structures that are not known.
        """
        if not self._types:
            self._set_strides({kind: stride for kind in _KINDS if (stride := _stride(self._library, kind)) is not None})
        status = self._library.cuptiActivityRegisterCallbacks(self.on_request, self.on_complete)
        if status != 0:
            raise OSError(f"cuptiActivityRegisterCallbacks returned {status}")

    def _set_strides(self, strides: Mapping[int, int]) -> None:
        if not all(strides.get(kind) in structure.sizes for structure in STRUCTURES for kind in structure.kinds):
            raise OSError("the structures of CUPTI's records are not known")
        self._words = [strides[kind] // 4 if kind in strides else None for kind in range(max(_KINDS) + 1)]
        self._types = [structure.dtype(strides[structure.kinds[0]]) for structure in STRUCTURES]

    def take(self) -> Batch:
        """Return and forget the records that were delivered since the last call."""
        batch = Batch()
        count = 0
        while self._contents:
            content = self._contents.popleft()
            first_text = len(batch.texts) - 1
            batch.texts += content.texts[1:]
            for structure, number, records in content.parts:
                columns = {field: records[field].astype(np.int64) for field in structure.row_type._fields}
                for field in TEXT_FIELDS:
                    if field in columns:
                        columns[field] += np.where(columns[field] > 0, first_text, 0)
                batch.add(Table(structure.row_type, records["kind"].astype(np.int64), number + count, columns))
            count += content.size
        return batch

    def _request(self, buffer: Any, size: Any, most_records: Any) -> None:
        """Hand over an empty buffer. Called by CUPTI, also within the program's launches."""
        try:
            address = self._free.pop()
        except IndexError:
            address = self._c.malloc(BUFFER_BYTES)
        if address is not None:  # otherwise there is no memory: CUPTI drops records, and counts them
            self._lent.add(address)
        buffer[0], size[0], most_records[0] = address, BUFFER_BYTES, 0

    def _complete(self, context: Any, stream: int, address: int, size: int, valid_bytes: int) -> None:
        """Copy the records of a buffer. Called by CUPTI, on a thread of its own."""
        if address not in self._lent:  # a buffer of another client, which was recording before
            self.unrequested += 1
            return
        self._lent.remove(address)
        try:
            if valid_bytes:
                self._contents.append(self._read(address, valid_bytes))
        except Exception:  # it must not propagate into CUPTI
            self.unreadable += 1
        if len(self._free) < _KEPT_BUFFERS:
            self._free.append(address)
        else:
            self._c.free(address)

    def _read(self, address: int, valid_bytes: int) -> _Content:
        content: Any = (ctypes.c_char * (valid_bytes // 8 * 8)).from_address(address)
        buffer = np.frombuffer(content, np.uint64)
        kinds = buffer.view(np.uint32)
        position = np.array(self._walk(kinds), np.int64)
        kinds, position = kinds[position], position // 2
        texts = _Texts()
        parts: list[_Part] = []
        count = 0
        for structure, record_type in zip(STRUCTURES, self._types, strict=True):
            number = np.flatnonzero(np.isin(kinds, structure.kinds))
            if len(number):
                words = np.arange(record_type.itemsize // 8)
                records = buffer[position[number][:, None] + words].view(record_type)[:, 0]
                for field in TEXT_FIELDS:
                    if field in structure.fields:
                        records[field] = texts.numbers(records[field])
                parts.append(_Part(structure, number, records))
                count += len(number)
        self.unrequested += len(position) - count
        return _Content(len(position), texts.texts, parts)

    def _walk(self, buffer: Any) -> list[int]:
        """Return the positions of the records in a buffer of words of four bytes."""
        kinds, words = memoryview(buffer), self._words
        positions: list[int] = []
        append = positions.append
        position, end = 0, len(buffer)
        try:
            while position < end:
                append(position)
                position += words[kinds[position]]  # type: ignore[operator]
        except (IndexError, TypeError):  # a kind that CUPTI itself does not step over
            position = end + 1
        if position > end:  # the last record is none, or is not complete
            positions.pop()
            self.unreadable += 1
        return positions


class _Texts:
    """The texts of a buffer. They are read while CUPTI hands over the buffer, because later they may be gone."""

    def __init__(self) -> None:
        self.texts: list[str | None] = [None]
        self._numbers: dict[str | None, int] = {None: 0}

    def numbers(self, addresses: npt.NDArray[np.uint64]) -> Integers:
        """Return the numbers of the texts at addresses; a null pointer is number 0."""
        different, inverse = np.unique(addresses, return_inverse=True)
        return np.array([self._number(address) for address in different.tolist()], np.int64)[inverse]

    def _number(self, address: int) -> int:
        text = ctypes.string_at(address).decode("utf-8", "replace") if address else None
        if text not in self._numbers:
            self._numbers[text] = len(self.texts)
            self.texts.append(text)
        return self._numbers[text]


_Request = ctypes.CFUNCTYPE(
    None, ctypes.POINTER(ctypes.c_void_p), ctypes.POINTER(ctypes.c_size_t), ctypes.POINTER(ctypes.c_size_t)
)
_Complete = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_uint32, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t)


def of_library(path: Path | None) -> RecordBuffers | None:
    """Return the buffers for the libcupti of this process; None if nobody asked for them, or its version is not known.

    Args:
        path: libcupti, which ends the process if there is no driver; None if it was not found.
    """
    if os.environ.get(CHOICE) != "1" or path is None or sys.byteorder != "little" or struct.calcsize("P") != 8:
        return None
    return _of_file(path)


@functools.cache
def _of_file(path: Path) -> RecordBuffers | None:
    try:
        return of_loaded(ctypes.CDLL(str(path)))
    except (OSError, AttributeError):  # it cannot be loaded, or lacks a function
        return None


def of_loaded(library: Any) -> RecordBuffers | None:
    """Return the buffers for a libcupti; None if its version is not known.

    Args:
        library: libcupti, as `ctypes` loads it.

    Raises:
        AttributeError: it lacks a function.
    """
    version = ctypes.c_uint32()
    is_known = library.cuptiGetVersion(ctypes.byref(version)) == 0 and version.value in VERSIONS
    return RecordBuffers(library) if is_known else None


def _stride(library: Any, kind: int) -> int | None:
    """Return how many bytes libcupti advances from a record of a kind to the next; None if it does not."""
    buffer = (ctypes.c_uint32 * 512)(*[kind] * 512)  # wherever the next record begins, it is of this kind
    record = ctypes.c_void_p()
    for _ in range(2):
        size = ctypes.c_size_t(ctypes.sizeof(buffer))
        if library.cuptiActivityGetNextRecord(buffer, size, ctypes.byref(record)) != 0:
            return None
    stride = (record.value or 0) - ctypes.addressof(buffer)
    return stride if stride > 0 and stride % 8 == 0 else None


def _c_library() -> Any:
    """Return the C library: its memory, unlike that of an array, is not freed when Python ends before CUPTI."""
    library = ctypes.CDLL(None)
    library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    library.free.restype, library.free.argtypes = None, [ctypes.c_void_p]
    return library
