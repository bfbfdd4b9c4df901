"""Small files of other programs, made by hand in their formats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import sqlitefiles

SESSION_NS = 1_790_000_000_000_000_000
STRINGS = {
    1: "cudaLaunchKernel_v7000",
    2: "void gemm<float>(float*)",
    3: "gemm",
    4: "cudaStreamSynchronize_v3020",
    5: "cudaGraphLaunch_v10000",
    6: "Buffer flush",
    7: "cudnnConvolutionForward",
}


def packed(pid: int, tid: int = 0) -> int:
    """Return a process and a thread as nsys packs them."""
    return (1 << 48) | (pid << 24) | tid


def kernel(start: int, end: int, correlation: int, pid: int = 100, device: int = 0, **columns: Any) -> dict[str, Any]:
    """Return a row of a kernel."""
    return {
        "start": start, "end": end, "deviceId": device, "contextId": 1, "streamId": 7, "correlationId": correlation,
        "globalPid": packed(pid), "demangledName": 2, "shortName": 3, "gridX": 4, "gridY": 1, "gridZ": 1, "blockX": 64,
        "blockY": 1, "blockZ": 1, "registersPerThread": 32, "staticSharedMemory": 128, "dynamicSharedMemory": 0,
        "graphNodeId": None, **columns,
    }  # fmt: skip


def call(start: int, end: int, correlation: int, name: int = 1, pid: int = 100, tid: int = 1) -> dict[str, Any]:
    """Return a row of a runtime call."""
    return {"start": start, "end": end, "globalTid": packed(pid, tid), "correlationId": correlation, "nameId": name}


def nvtx(start: int, end: int | None, text: str | None, tid: int = 1, pid: int = 100, **columns: Any) -> dict[str, Any]:
    """Return a row of a range."""
    return {"start": start, "end": end, "eventType": 59, "text": text, "textId": None,
            "globalTid": packed(pid, tid), "endGlobalTid": None, "domainId": 0, **columns}  # fmt: skip


def nsys(path: Path, tables: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Write an export of nsys with some tables, each of rows with the same columns; return its path."""
    content = {name: (list(rows[0]), [[row[column] for column in rows[0]] for row in rows])
               for name, rows in tables.items()}  # fmt: skip
    strings = ["id INTEGER PRIMARY KEY", "value TEXT"], list(STRINGS.items())
    return str(sqlitefiles.written(path, {"StringIds": strings, **content}))


START = {"TARGET_INFO_SESSION_START_TIME": [{"utcEpochNs": SESSION_NS}]}
GPUS = {
    "TARGET_INFO_GPU": [
        {"id": 0, "name": "NVIDIA A100", "smCount": 108, "totalMemory": 40 << 30, "computeMajor": 8, "computeMinor": 0},
        {"id": 1, "name": "NVIDIA A100", "smCount": 108, "totalMemory": 40 << 30, "computeMajor": 8, "computeMinor": 0},
    ]
}
RUNTIME, KERNELS, NVTX = "CUPTI_ACTIVITY_KIND_RUNTIME", "CUPTI_ACTIVITY_KIND_KERNEL", "NVTX_EVENTS"

STEP = {
    **START,
    **GPUS,
    RUNTIME: [call(110, 115, 1), call(130, 180, 2, name=4), call(210, 215, 3), call(300, 305, 4, tid=2)],
    KERNELS: [kernel(120, 170, 1), kernel(220, 260, 3), kernel(310, 350, 4)],
    "CUPTI_ACTIVITY_KIND_MEMCPY": [
        {"start": 180, "end": 190, "deviceId": 0, "contextId": 1, "streamId": 7, "correlationId": 9, "bytes": 64,
         "globalPid": packed(100), "copyKind": 1, "srcKind": 0, "dstKind": 2}
    ],
    "CUPTI_ACTIVITY_KIND_OVERHEAD": [
        {"start": 111, "end": 112, "globalTid": packed(100, 1), "correlationId": 1, "nameId": 6, "overheadType": 3}
    ],
    NVTX: [
        nvtx(100, 380, "step 0"), nvtx(101, 190, "conv1"), nvtx(200, 270, "fc"),
        nvtx(105, 185, "aten::mm, seq = 5, op_id = 1, sizes = [[2, 3], [3, 4]]"),
        nvtx(205, 265, "aten::add, seq = 6, op_id = 2"),
        nvtx(295, 360, "MmBackward0, seq = 5, op_id = 3", tid=2),
    ],
}  # fmt: skip
"""A step with two layers, a backward operator, a copy, a flush."""


def _event(name: str, at: float, dur: float, category: str, tid: int | str = 1, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": tid, "ts": at, "dur": dur, "args": args}


KINETO: dict[str, Any] = {
    "schemaVersion": 1,
    "deviceProperties": [{"id": 0, "name": "NVIDIA A100", "numSms": 108, "computeMajor": 8, "computeMinor": 0}],
    "distributedInfo": {"backend": "nccl", "rank": 1, "world_size": 2},
    "baseTimeNanoseconds": SESSION_NS,
    "traceEvents": [
        {"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "args": {"name": "python"}},
        _event("ProfilerStep#1", 100, 400, "user_annotation", **{"External id": 1}),
        _event("nn.Module: Linear_0", 110, 200, "python_function", **{"Python id": 1}),
        _event("aten::mm", 120, 100, "cpu_op", **{"External id": 2, "Record function id": 5, "Sequence number": 3,
               "Fwd thread id": 0, "Input Dims": [[2, 3], [3, 4]], "Input type": ["float", "float"]}),
        _event("cudaLaunchKernel", 130, 10, "cuda_runtime", correlation=7, **{"External id": 2}),
        _event("ampere_sgemm_64x64", 150, 90, "kernel", 7, device=0, stream=7, correlation=7, context=1,
               grid=[4, 1, 1], block=[64, 1, 1], **{"registers per thread": 32, "est. achieved occupancy %": 40}),
        _event("Memcpy HtoD", 250, 5, "gpu_memcpy", 7, device=0, stream=7, correlation=8, bytes=64),
        _event("cudaStreamSynchronize", 260, 30, "cuda_runtime", correlation=9),
        _event("MmBackward0", 330, 60, "cpu_op", 2, **{"External id": 3, "Sequence number": 3, "Fwd thread id": 1}),
        _event("ncclDevKernel_AllReduce_Sum_f32", 340, 40, "kernel", 20, device=0, stream=20, correlation=11,
               **{"Collective name": "allreduce", "In msg nelems": 4, "Group size": 2, "dtype": "Float"}),
        _event("Buffer Flush", 410, 5, "overhead", 0),
        {"ph": "i", "cat": "cpu_instant_event", "name": "[memory]", "s": "t", "pid": 1, "tid": 1, "ts": 125,
         "args": {"Bytes": 64, "Device Type": 1, "Device Id": 0, "Total Allocated": 64, "Addr": 1}},
        {"ph": "s", "id": 7, "pid": 1, "tid": 1, "ts": 130, "cat": "ac2g", "name": "ac2g"},
        {"ph": "f", "id": 7, "pid": 0, "tid": 7, "ts": 150, "cat": "ac2g", "name": "ac2g", "bp": "e"},
    ],
}  # fmt: skip
"""A step of a module with its backward, a kernel, a copy, a collective, an allocation."""

EXECUTION: dict[str, Any] = {
    "schema": "1.0.1",
    "pid": 1,
    "nodes": [
        {"name": "aten::mm", "id": 4, "rf_id": 5, "parent": 3, "fw_parent": 0, "seq_id": 3, "tid": 1, "fw_tid": 0,
         "inputs": [[6, 7, 0, 6, 4, "cuda:0"], 2], "input_shapes": [[2, 3], []],
         "input_types": ["Tensor(float)", "Int"],
         "outputs": [[8]], "output_shapes": [[2, 4]], "output_types": ["Tensor(float)"]},
        {"name": "MmBackward0", "id": 9, "parent": 3, "attrs": [{"name": "rf_id", "type": "uint64", "value": 3},
         {"name": "fw_parent", "type": "uint64", "value": 4}], "inputs": {"values": [], "shapes": [], "types": []}},
    ],
}  # fmt: skip
"""The execution trace beside `KINETO`."""

CHROME: dict[str, Any] = {
    "displayTimeUnit": "ns",
    "traceEvents": [
        {"ph": "M", "pid": 5, "name": "process_name", "args": {"name": "/device:GPU:0"}},
        {"ph": "M", "pid": 5, "tid": 1, "name": "thread_name", "args": {"name": "Stream #14(Compute)"}},
        {"ph": "X", "pid": 5, "tid": 1, "ts": 12.5, "dur": 3, "name": "fusion", "args": {"correlation_id": "12",
         "kernel_details": "regs:32 static_shared:0 dynamic_shared:16 grid:4,1,1 block:256,1,1 occ_pct:50"}},
        {"ph": "X", "pid": 1, "tid": 2, "ts": 1, "dur": 50, "name": "train", "args": {"step_num": "3"}},
        {"ph": "X", "pid": 1, "tid": 2, "ts": 5, "dur": 1, "name": "cuLaunchKernel", "args": {"correlation_id": "12"}},
        {"ph": "B", "pid": 1, "tid": 2, "ts": 20, "name": "a"},
        {"ph": "B", "pid": 1, "tid": 2, "ts": 21, "name": "b"},
        {"ph": "E", "pid": 1, "tid": 2, "ts": 25},
        {"ph": "E", "pid": 1, "tid": 2, "ts": 30},
        {"ph": "b", "pid": 1, "tid": 2, "ts": 7, "id": "0x1", "cat": "c", "name": "later"},
        {"ph": "e", "pid": 1, "tid": 3, "ts": 9, "id": "0x1", "cat": "c", "name": "later"},
        {"ph": "C", "pid": 1, "ts": 9, "name": "memory", "args": {"bytes": 3}},
    ],
}  # fmt: skip
"""What JAX writes, begins with their ends, an asynchronous span."""
