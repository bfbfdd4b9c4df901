"""Small files of other programs, made by hand in their formats."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

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


def kernel(start: int, end: int, correlation: int, pid: int = 100, device: int = 0, **more: Any) -> dict[str, Any]:
    """Return a row of a kernel."""
    return {
        "start": start, "end": end, "deviceId": device, "contextId": 1, "streamId": 7, "correlationId": correlation,
        "globalPid": packed(pid), "demangledName": 2, "shortName": 3, "gridX": 4, "gridY": 1, "gridZ": 1, "blockX": 64,
        "blockY": 1, "blockZ": 1, "registersPerThread": 32, "staticSharedMemory": 128, "dynamicSharedMemory": 0,
        "graphNodeId": None, **more,
    }  # fmt: skip


def call(start: int, end: int, correlation: int, name: int = 1, pid: int = 100, tid: int = 1) -> dict[str, Any]:
    """Return a row of a runtime call."""
    return {"start": start, "end": end, "globalTid": packed(pid, tid), "correlationId": correlation, "nameId": name}


def nvtx(start: int, end: int | None, text: str | None, tid: int = 1, pid: int = 100, **more: Any) -> dict[str, Any]:
    """Return a row of a range."""
    return {"start": start, "end": end, "eventType": 59, "text": text, "textId": None,
            "globalTid": packed(pid, tid), "endGlobalTid": None, "domainId": 0, **more}  # fmt: skip


def nsys(path: Path, tables: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Write an export of nsys with some tables, each of rows with the same columns; return its path."""
    with closing(sqlite3.connect(path)) as db:
        db.execute("CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT)")
        db.executemany("INSERT INTO StringIds VALUES (?, ?)", STRINGS.items())
        for name, rows in tables.items():
            columns = list(rows[0])
            db.execute(f"CREATE TABLE {name} ({', '.join(f'[{column}]' for column in columns)})")
            marks = ", ".join("?" * len(columns))
            db.executemany(f"INSERT INTO {name} VALUES ({marks})", [[row[c] for c in columns] for row in rows])
        db.commit()
    return str(path)


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
        nvtx(100, 280, "step 0"), nvtx(290, 380, "step 1"), nvtx(101, 190, "conv1"), nvtx(200, 270, "fc"),
        nvtx(105, 185, "aten::mm, seq = 5, op_id = 1, sizes = [[2, 3], [3, 4]]"),
        nvtx(205, 265, "aten::add, seq = 6, op_id = 2"),
        nvtx(295, 360, "MmBackward0, seq = 5, op_id = 3", tid=2),
    ],
}  # fmt: skip
"""Two steps with two layers, a backward operator, a copy, a flush."""
