"""The worker process, which times specs: it reads them as lines of JSON and writes timings in the same form. It loads
neither xsp's table engine nor any state of the parent."""

from __future__ import annotations

import dataclasses
import json
import mmap
import os
import struct
import sys
import time
import warnings
from pathlib import Path
from typing import Any

from xsp import processes
from xsp.bench.spec import Spec, Timing

CELL = struct.Struct("qq")
"""Place of the running spec, and the start of its run in nanoseconds of the monotonic clock."""

EXTRA_BYTES = 1 << 30
"""Bytes that libraries may take in addition to the tensors of a block: pools, kernel caches, work space."""


def work(parent: int, threads: int, cell: int, limit_bytes: int, answers: int) -> None:
    """Report that the process is ready, then time the sittings that arrive on stdin, one per line.

    Args:
        parent: process ID of the parent; this process ends with it.
        threads: number of torch threads.
        cell: file to map, which records the running spec: the parent reads it if this process crashes.
        limit_bytes: most bytes that tensors may take.
        answers: descriptor to which answers are written.
    """
    processes.end_with_parent(parent)
    import torch

    from xsp.bench import rounds  # noqa: F401  slow to import, so done before the process reports that it is ready

    warnings.simplefilter("ignore")
    torch.set_num_threads(threads)
    _limit(limit_bytes)
    with os.fdopen(answers, "wb", buffering=0) as stream, mmap.mmap(cell, CELL.size) as running:

        def mark(place: int) -> None:
            running[:] = CELL.pack(place, time.monotonic_ns())

        def send(answer: dict[str, Any]) -> None:
            stream.write(json.dumps(answer).encode() + b"\n")

        send({"ready": True})
        for line in sys.stdin:
            request = json.loads(line)
            mark(-1)
            _sit(request, mark, send, limit_bytes)


def _sit(request: dict[str, Any], mark: Any, send: Any, limit_bytes: int) -> None:
    from xsp.bench import rounds

    specs = [Spec.from_plain(spec) for spec in request["specs"]]
    ratio = rounds.sit(
        specs,
        lambda place, timing: send({"place": place, "timing": to_plain(timing)}),
        mark,
        seconds=request["seconds"],
        rotated_bytes=request["rotated_bytes"],
        limit_bytes=limit_bytes,
        seed=request["seed"],
    )
    send({"canary_ratio": ratio})


def _limit(limit_bytes: int) -> None:
    """Make allocations fail beyond the limit of this process, before the system kills it or another process."""
    try:
        import resource

        status = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
        current = int(next(line.split()[1] for line in status if line.startswith("VmData"))) * 1024
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        resource.setrlimit(resource.RLIMIT_DATA, (current + limit_bytes + EXTRA_BYTES, hard))
    except (ImportError, OSError, ValueError, StopIteration):  # not on Linux: only the footprint is checked
        return


def to_plain(timing: Timing) -> dict[str, Any]:
    """Return a timing as plain values for JSON, without the fields that its spec determines."""
    left_out = {"calls", "key", "work_key", "op", "variant", "state", "threads", "runtime", "environment"}
    values = dataclasses.asdict(timing)
    return {name: value for name, value in values.items() if name not in left_out}
