"""A scripted binding to CUPTI, in place of a device and its library, which only a GPU machine has.

It has the functions of cupti-python that xsp calls. It keeps the records of enabled kinds, and passes them at a flush
to the callback that was registered last. On request, records are of cupti-python's own classes.
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
        if records:
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
