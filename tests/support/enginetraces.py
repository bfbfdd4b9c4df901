"""Small traces of PyTorch's profiler of engines that serve language models, with their annotations."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def box(category: str, name: str, start: float, duration: float, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": 1, "ts": start, "dur": duration, "args": args}


def served(path: Path, steps: Sequence[tuple[str, float, float, float]], *more: dict[str, Any], rank: int = 0) -> Path:
    """Write the trace of an engine: each step with its annotation, time on the host until the next one begins, delay of
    its kernel behind the launch, and time of the kernel; microseconds."""
    events, now = [*more], 0.0
    for number, (name, host, delay, device) in enumerate(steps, 1):
        link = {"correlation": number}
        events += [
            box("user_annotation", name, now, host - 10),
            box("cuda_runtime", "cudaGraphLaunch", now + 20, 10, **link),
            box("kernel", "gemm", now + 20 + delay, device, device=0, stream=7, **link) | {"pid": 0, "tid": 7},
        ]
        now += host
    device = {"id": 0, "name": "NVIDIA H100 80GB HBM3", "numSms": 132}
    job = {"distributedInfo": {"rank": rank, "world_size": 2}}
    path.write_text(json.dumps({"schemaVersion": 1, **job, "deviceProperties": [device], "traceEvents": events}))
    return path
