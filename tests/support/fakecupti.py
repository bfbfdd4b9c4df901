"""A scripted binding to CUPTI, in place of a device and its library, which only a GPU machine has.

It has the functions of cupti-python that xsp calls. It keeps the records of enabled kinds, and passes them at a flush
to the callback that was registered last. On request, records are of cupti-python's own classes, or bytes in buffers.
"""

from __future__ import annotations

import ctypes
import enum
import re
import struct
import threading
import time
from types import SimpleNamespace
from typing import Any

KERNEL, RUNTIME, DRIVER, MEMCPY, MEMSET, MARKER, OVERHEAD, SYNCHRONIZATION = 10, 5, 4, 1, 2, 12, 17, 38
START, END = 2, 4
MULTIPLE_SUBSCRIBERS = 39

CLASSES = {
    KERNEL: r"ActivityKernel\d+", RUNTIME: "ActivityAPI", DRIVER: "ActivityAPI", MEMCPY: r"ActivityMemcpy\d+",
    MEMSET: r"ActivityMemset\d+", MARKER: r"ActivityMarker\d+", OVERHEAD: r"ActivityOverhead\d+",
    SYNCHRONIZATION: r"ActivitySynchronization\d+",
}  # fmt: skip

FIELDS: dict[int, dict[str, Any]] = {
    KERNEL: {"device_id": 0, "stream_id": 7, "context_id": 1, "grid_x": 4, "grid_y": 1, "grid_z": 1, "block_x": 128,
             "block_y": 1, "block_z": 1, "registers_per_thread": 32, "static_shared_memory": 0,
             "dynamic_shared_memory": 1024, "graph_node_id": 0},
    RUNTIME: {"process_id": 1, "thread_id": 1, "return_value": 0},
    DRIVER: {"process_id": 1, "thread_id": 1, "return_value": 0},
    MEMCPY: {"device_id": 0, "stream_id": 7, "context_id": 1, "copy_kind": 1, "bytes": 4096, "graph_node_id": 0},
    MEMSET: {"device_id": 0, "stream_id": 7, "context_id": 1, "bytes": 4096, "graph_node_id": 0},
    MARKER: {"object_kind": 2, "name": None, "domain": "cuBLAS"},
    OVERHEAD: {"object_kind": 2},
    SYNCHRONIZATION: {"context_id": 1, "stream_id": 7},
}  # fmt: skip


def record(kind: int, thread: int = 1, binding: Any = None, **fields: Any) -> Any:
    """Return a record: of the binding's newest class for its kind, or a plain object with the same fields."""
    values = {"kind": kind, **FIELDS[kind], **fields}
    if kind in (RUNTIME, DRIVER):
        values["thread_id"] = thread
    if binding is None:
        result = SimpleNamespace(**values)
        if kind in (MARKER, OVERHEAD):
            result.object_id = SimpleNamespace(pt=SimpleNamespace(process_id=1, thread_id=thread))
        return result
    names = [name for name in dir(binding) if re.fullmatch(CLASSES[kind], name)]
    newest = getattr(binding, max(names, key=lambda name: (len(name), name)))
    if kind in (MARKER, OVERHEAD):
        return newest.from_ptr(_in_memory(kind, thread, values))
    result = newest()
    for name, value in values.items():
        setattr(result, name, value)
    return result


def _in_memory(kind: int, thread: int, values: dict[str, Any]) -> int:
    """Lay a record out as CUPTI does, because its union of threads and streams cannot be set otherwise."""
    if kind == MARKER:
        texts = [_address(values[name]) for name in ("name", "domain")]
        numbers = (values["flags_"], values["timestamp"], values["id"], values["object_kind"], 1, thread, 0, 0)
        content = struct.pack("<IIQIIIIIIQQ", kind, *numbers, *texts)
    else:
        numbers = (values["overhead_kind"], values["object_kind"], 1, thread, 0, values["start"], values["end"])
        content = struct.pack("<IIIIIIQQIIQ", kind, *numbers, 0, 0, 0)
    _BUFFERS.append(ctypes.create_string_buffer(content))
    return ctypes.addressof(_BUFFERS[-1])


def _address(text: str | None) -> int:
    if text is None:
        return 0
    _BUFFERS.append(ctypes.create_string_buffer(text.encode()))
    return ctypes.addressof(_BUFFERS[-1])


_BUFFERS: list[Any] = []

_COPY = "kind:I copy_kind:B 3x bytes:Q start:Q end:Q device_id:I context_id:I stream_id:I"
C_STRUCTURES = {
    KERNEL: "kind:I 2x registers_per_thread:H 8x start:Q end:Q 8x device_id:I context_id:I stream_id:I "
    "grid_x:i grid_y:i grid_z:i block_x:i block_y:i block_z:i static_shared_memory:i dynamic_shared_memory:i "
    "8x correlation_id:I 8x name:Q 8x 8x 8x 4x 4x graph_node_id:Q 4x 4x 8x 4x 4x 16x 8x 4x 4x 8x 4x 4x",
    MEMCPY: f"{_COPY} correlation_id:I 4x 4x 8x graph_node_id:Q 4x 4x 4x 4x 8x",
    22: f"{_COPY} 16x correlation_id:I 8x graph_node_id:Q 4x 4x 4x 4x",
    MEMSET: "kind:I 4x bytes:Q start:Q end:Q device_id:I context_id:I stream_id:I correlation_id:I 4x 4x 8x "
    "graph_node_id:Q 4x 4x 4x 4x",
    RUNTIME: "kind:I cbid:I start:Q end:Q process_id:I thread_id:I correlation_id:I return_value:I",
    DRIVER: "kind:I cbid:I start:Q end:Q process_id:I thread_id:I correlation_id:I return_value:I",
    SYNCHRONIZATION: "kind:I type:I start:Q end:Q correlation_id:I context_id:I stream_id:I 4x 8x 4x 4x",
    OVERHEAD: "kind:I overhead_kind:I object_kind:I 4x object:I 4x start:Q end:Q 4x 4x 8x",
    MARKER: "kind:I flags_:I timestamp:Q id:I object_kind:I 4x object:I 4x 4x name:Q domain:Q",
    39: "kind:I 12x",
}
"""The structures of CUDA 13.2 by kind, field after field, and one of a kind that is not requested."""


def packed(record: Any) -> bytes:
    """Return a plain record as CUPTI lays it out."""
    content = b""
    for part in C_STRUCTURES[record.kind].split():
        name, _, code = part.rpartition(":")
        value = getattr(record, name, 0) if name != "object" else record.object_id.pt.thread_id or 0
        value = _address(value) if isinstance(value, str) else value or 0
        content += struct.pack(f"<{code}", *((value,) if name else ()))
    return content


class FakeLibcupti:
    """The functions of libcupti that deliver buffers."""

    def __init__(self, version: int = 130200, sizes: dict[int, int] | None = None) -> None:
        """Make a library of a version; `sizes` are those of records that differ from 13.2."""
        self.version = version
        self.sizes = {kind: len(packed(_blank(kind))) for kind in C_STRUCTURES} | (sizes or {})
        self.status = 0
        self._callbacks: tuple[Any, Any] | None = None

    def cuptiGetVersion(self, version: Any) -> int:
        version._obj.value = self.version
        return 0

    def cuptiActivityGetNextRecord(self, buffer: Any, size: Any, record: Any) -> int:
        first, found = ctypes.addressof(buffer), record._obj
        if found.value is None:
            found.value = first
            return 0
        step = self.sizes.get(ctypes.c_uint32.from_address(found.value).value)
        if step is None:
            return 21  # CUPTI_ERROR_INVALID_KIND
        found.value += step
        return 0 if found.value < first + size.value else 12  # CUPTI_ERROR_MAX_LIMIT_REACHED

    def cuptiActivityRegisterCallbacks(self, request: Any, complete: Any) -> int:
        self._callbacks = request, complete
        return self.status

    def deliver(self, content: bytes) -> None:
        """Fill a buffer and hand it over."""
        assert self._callbacks is not None
        request, complete = self._callbacks
        buffer, size, most = ctypes.c_void_p(), ctypes.c_size_t(), ctypes.c_size_t(7)
        request(ctypes.byref(buffer), ctypes.byref(size), ctypes.byref(most))
        assert most.value == 0
        assert len(content) <= size.value
        ctypes.memmove(buffer.value or 0, content, len(content))
        complete(None, 0, buffer, size, len(content))


def _blank(kind: int) -> Any:
    return SimpleNamespace(kind=kind, object_id=SimpleNamespace(pt=SimpleNamespace(thread_id=0)))


class CuptiError(Exception):
    """The exception of cupti-python for an error of CUPTI."""

    def __init__(self, status: int) -> None:
        super().__init__(f"ERROR ({status})")
        self.status = status


class FakeCupti:
    """The binding; `holder` is the name of another subscriber."""

    Result = SimpleNamespace(ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED=MULTIPLE_SUBSCRIBERS)
    ActivityThreadIdType = SimpleNamespace(DEFAULT=0, SYSTEM=1)
    SUBSCRIBER_PARAMS_SIZE = 40
    runtime_api_trace_cbid = enum.IntEnum(
        "runtime_api_trace_cbid",
        {"cudaLaunchKernel_v7000": 211, "cudaGetDevice_v3020": 17, "cudaDeviceSynchronize_v3020": 165},
    )
    driver_api_trace_cbid = enum.IntEnum("driver_api_trace_cbid", {"cuLaunchKernel": 307})

    def __init__(self, holder: str | None = None, binding: Any = None) -> None:
        self.holder, self.binding = holder, binding
        self.library: FakeLibcupti | None = None
        self.subscribed = False
        self.enabled: set[int] = set()
        self.silenced: set[int] = set()
        self.unsupported: set[int] = set()
        self.dropped = 0
        self.clock_off_ns = 0
        self.threads = 0
        self._complete: Any = lambda records: None
        self._records: list[Any] = []
        self._correlation = 0

    def SubscriberParams(self) -> Any:
        return SimpleNamespace(ptr=0, old_subscriber_name=self.holder)

    def subscribe_v2(self, callback: Any, userdata: Any, params: int) -> int:
        if self.holder is not None or self.subscribed:
            raise CuptiError(MULTIPLE_SUBSCRIBERS)
        self.subscribed = True
        return 1

    def unsubscribe(self, subscriber: int) -> None:
        self.subscribed = False

    def activity_register_callbacks(self, request: Any, complete: Any) -> None:
        assert request()[0] > 0
        self._complete = complete

    def activity_enable(self, kind: int) -> None:
        if kind in self.unsupported:
            raise CuptiError(1)
        self.enabled.add(kind)

    def activity_disable(self, kind: int) -> None:
        self.enabled.discard(kind)

    def activity_flush_all(self, flag: int) -> None:
        records, self._records = self._records, []
        if records and self.library is not None:
            self.library.deliver(b"".join(map(packed, records)))
        elif records:
            self._complete(records)

    def activity_get_num_dropped_records(self, context: int, stream: int, dropped: int) -> None:
        ctypes.c_size_t.from_address(dropped).value, self.dropped = self.dropped, 0

    def activity_enable_runtime_api(self, number: int, on: int) -> None:
        self.silenced.add(number)

    def set_thread_id_type(self, kind: int) -> None:
        self.threads = kind

    def get_timestamp(self) -> int:
        return time.time_ns() + self.clock_off_ns

    # --- the device ----------------------------------------------------------------------------------

    def emit(self, kind: int, thread: int = 1, **fields: Any) -> None:
        """Keep a record if its kind is enabled."""
        if kind in self.enabled:
            self._records.append(record(kind, thread, self.binding, **fields))

    def gemm(self, call: str = "cublasGemmEx(m=64, n=32)", end: bool = True) -> None:
        """Emit the records of a call of cuBLAS on this thread: a range, a launch in it, and a kernel after it."""
        thread_id, now = threading.get_native_id(), time.time_ns()
        self._correlation += 1
        number = self._correlation
        self.emit(MARKER, thread_id, timestamp=now, flags_=START, id=number, name=call)
        self.emit(RUNTIME, thread_id, start=now + 200, end=now + 900, cbid=211, correlation_id=number)
        self.emit(MARKER, thread_id, timestamp=now + 1000, flags_=END, id=number)
        self.emit(
            KERNEL, start=now + 2000, end=now + 5000 if end else 0, correlation_id=number, name="_Z4gemmPfS_i"
        )  # fmt: skip
        time.sleep(20e-6)
