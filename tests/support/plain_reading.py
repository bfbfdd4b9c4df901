"""The content of a trace file, read without xsp: `json` or `sqlite3`, and loops.

It is slow and simple on purpose. Tests compare it with xsp's results for the same file.
"""

from __future__ import annotations

import functools
import gzip
import itertools
import json
import sqlite3
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

KERNEL = {"kernel"}
COPY = {"gpu_memcpy", "gpu_memset", "memcpy", "memset"}
OPERATOR = {"cpu_op", "operator", "user_annotation"}
CALL = ("runtime", "driver")
"""Endings of the categories of runtime calls."""

COMMUNICATION = ("nccl", "rccl", "nvshmem", "allreduce", "all_reduce", "allgather", "all_gather", "reducescatter",
                 "reduce_scatter", "alltoall", "all_to_all", "cross_device_reduce")  # fmt: skip
"""Words in the names of communication kernels."""

MILLISECOND = 1_000_000
NVTX_PUSHED, NVTX_STARTED = 59, 60
"""Types of ranges in nsys's table of NVTX."""


class UnreadableError(Exception):
    """The file is not a timeline of a supported kind."""


class Work(NamedTuple):
    """What a device did in one interval of nanoseconds."""

    name: str
    is_copy: bool
    device: int
    stream: int
    start: int
    end: int
    launch: tuple[int, int | None]
    """Its process, if the source has it, and the number that it shares with its launch."""


@dataclass
class Reading:
    """The content of a file."""

    work: list[Work] = field(default_factory=list)
    calls: set[tuple[int, int | None]] = field(default_factory=set)
    """Process and number of each runtime call."""

    operators: Counter[str] = field(default_factory=Counter)
    """Calls of operators and annotations by name."""

    operators_ns: Counter[str] = field(default_factory=Counter)
    nested: dict[Any, list[tuple[int, int, str]]] = field(default_factory=dict)
    """Begin, end and name of each operator, without annotations, by thread; for Kineto only."""

    places: dict[int | None, tuple[Any, int]] = field(default_factory=dict)
    """Thread and begin of each runtime call by its number; for Kineto only."""

    modules: int = 0
    steps: int = 0
    rank: int | None = None
    malformed: Counter[str] = field(default_factory=Counter)
    """Malformed intervals, by category."""

    def kernels(self, device: int | None = None) -> list[Work]:
        return [work for work in self.on_device(device) if not work.is_copy]

    def copies(self, device: int | None = None) -> list[Work]:
        return [work for work in self.on_device(device) if work.is_copy]

    def on_device(self, device: int | None) -> list[Work]:
        return [work for work in self.work if device is None or work.device == device]

    def devices(self) -> list[int]:
        return sorted({work.device for work in self.work})

    def enclosing_operator(self, work: Work) -> str | None:
        """Return the innermost operator that was open on its thread when the work was launched."""
        thread, launch_ns = self.places.get(work.launch[1], (None, 0)) if work.launch[1] else (None, 0)
        candidates = self._operators_by_ms.get((thread, launch_ns // MILLISECOND), ())
        open_operators = [(end - start, name) for start, end, name in candidates if start <= launch_ns < end]
        return min(open_operators)[1] if open_operators else None

    @functools.cached_property
    def _operators_by_ms(self) -> dict[Any, list[Any]]:
        """The operators that are open in each millisecond of a thread."""
        operators: dict[Any, list[Any]] = {}
        for thread, ranges in self.nested.items():
            for start, end, name in ranges:
                for millisecond in range(start // MILLISECOND, end // MILLISECOND + 1):
                    operators.setdefault((thread, millisecond), []).append((start, end, name))
        return operators

    def gaps(self, device: int) -> list[tuple[int, int | None]]:
        """Return the length of each gap of a device, and the part of it before the launch of the work that ended it.

        The part is None if the file has no such launch, or if the launch begins after the work.
        """
        gaps, busy_until = [], None
        for work in sorted(self.on_device(device), key=lambda work: work.start):
            if busy_until is not None and work.start > busy_until:
                _, launch_ns = self.places.get(work.launch[1], (None, None)) if work.launch[1] else (None, None)
                has_launch = launch_ns is not None and launch_ns <= work.start
                gaps.append((work.start - busy_until, max(0, launch_ns - busy_until) if has_launch else None))
            busy_until = work.end if busy_until is None else max(busy_until, work.end)
        return gaps

    def mean_queue(self, device: int, stream: int) -> float:
        """Return the mean number of activities of a stream that were launched and had not begun."""
        changes = []
        for work in self.work:
            _, launch_ns = self.places.get(work.launch[1], (None, None)) if work.launch[1] else (None, None)
            if (work.device, work.stream) == (device, stream) and launch_ns is not None and launch_ns <= work.start:
                changes += [(launch_ns, 1), (work.start, -1)]
        changes.sort()
        waiting = area = 0
        for (time, change), (until, _) in itertools.pairwise(changes):
            waiting += change
            area += waiting * (until - time)
        return area / (changes[-1][0] - changes[0][0])

    def launched_count(self) -> int:
        """Return the number of device activities whose launch is in the file."""
        return sum(work.launch in self.calls for work in self.work if work.launch[1])


# --- figures ----------------------------------------------------------------------------------------------


def total_ns(work: Iterable[Work]) -> int:
    return sum(interval.end - interval.start for interval in work)


def busy_ns(work: Iterable[Work]) -> int:
    """Return the time in which at least one was active."""
    busy, busy_until = 0, None
    for interval in sorted(work, key=lambda interval: interval.start):
        if busy_until is None or interval.start > busy_until:
            busy += interval.end - interval.start
            busy_until = interval.end
        elif interval.end > busy_until:
            busy += interval.end - busy_until
            busy_until = interval.end
    return busy


def window_ns(work: list[Work]) -> int:
    """Return the time from the first start to the last end."""
    return max(interval.end for interval in work) - min(interval.start for interval in work) if work else 0


def communicates(work: Work) -> bool:
    return not work.is_copy and any(word in work.name.lower() for word in COMMUNICATION)


def exposed_ns(work: list[Work]) -> int:
    """Return the time in which communication kernels were active and no other kernel of that device was."""
    kernels = [kernel for kernel in work if not kernel.is_copy]
    return busy_ns(kernels) - busy_ns([kernel for kernel in kernels if not communicates(kernel)])


# --- files ------------------------------------------------------------------------------------------------


def read_trace(path: Path) -> Reading:
    """Read a file.

    Raises:
        UnreadableError: it is of another kind.
    """
    return nsys(path) if path.suffix == ".sqlite" else kineto(path)


def content(path: Path) -> Any:
    """Return the JSON of a file, with exact decimal numbers."""
    raw = path.read_bytes()
    try:
        return json.loads(gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw, parse_float=Decimal, strict=False)
    except ValueError as error:
        raise UnreadableError(str(error)) from error


def kineto(path: Path) -> Reading:
    """Read what PyTorch's profiler wrote."""
    document = content(path)
    rows = document.get("traceEvents") if isinstance(document, dict) else document
    if not isinstance(rows, list):
        raise UnreadableError("there are no traceEvents")
    reading = Reading()
    if isinstance(document, dict):
        reading.rank = (document.get("distributedInfo") or {}).get("rank")
    for row in rows:
        if isinstance(row, dict) and row.get("ph") == "X":
            _interval(reading, row)
    reading.work = list(dict.fromkeys(reading.work))  # work that two profilers recorded is in the file twice
    return reading


def _interval(reading: Reading, row: dict[str, Any]) -> None:
    kind, name, args = str(row.get("cat")).lower(), str(row.get("name")), row.get("args") or {}
    if "ts" not in row or "dur" not in row or row["dur"] < 0 or row["ts"] < 0:
        reading.malformed[kind] += 1
        return
    start, duration = round(Decimal(row["ts"]) * 1000), round(Decimal(row["dur"]) * 1000)
    number = args.get("correlation")
    if kind in KERNEL or kind in COPY:
        place = int(args.get("device", row["pid"])), int(args.get("stream", row["tid"]))
        reading.work.append(Work(name, kind in COPY, *place, start, start + duration, (0, number)))
    elif kind.endswith(CALL):
        reading.calls.add((0, number))
        reading.places[number] = ((row["pid"], row["tid"]), start)
    elif kind in OPERATOR:
        if kind != "user_annotation":
            reading.nested.setdefault((row["pid"], row["tid"]), []).append((start, start + duration, name))
        reading.operators[name] += 1
        reading.operators_ns[name] += duration
        reading.steps += name.startswith("ProfilerStep#")
    elif kind == "python_function":
        reading.modules += name.startswith("nn.Module: ")


def nsys(path: Path) -> Reading:
    """Read an export of Nsight Systems."""
    con = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
    con.row_factory = sqlite3.Row
    texts = {row["id"]: row["value"] for row in rows(con, "StringIds")}
    reading = Reading()
    for table in ("KERNEL", "MEMCPY", "MEMSET"):
        for row in rows(con, f"CUPTI_ACTIVITY_KIND_{table}"):
            name = texts[row["demangledName"]] if table == "KERNEL" else table
            launch = (row["globalPid"] >> 24, row["correlationId"])
            place = (row["deviceId"], row["streamId"], row["start"], row["end"])
            reading.work.append(Work(name, table != "KERNEL", *place, launch))
    for row in rows(con, "CUPTI_ACTIVITY_KIND_RUNTIME"):
        reading.calls.add((row["globalTid"] >> 24, row["correlationId"]))
    for row in rows(con, "NVTX_EVENTS"):
        if row["eventType"] in (NVTX_PUSHED, NVTX_STARTED) and row["end"] is not None:
            name, _, notes = (row["text"] or texts.get(row["textId"], "")).partition(", ")
            if "op_id = " in notes:  # written by PyTorch for each operator
                reading.operators[name] += 1
                reading.operators_ns[name] += row["end"] - row["start"]
    con.close()
    return reading


def rows(con: sqlite3.Connection, table: str) -> Iterator[sqlite3.Row]:
    """Yield the rows of a table; none if there is no such table."""
    if con.execute("SELECT 1 FROM sqlite_master WHERE name = ?", [table]).fetchall():
        yield from con.execute(f'SELECT * FROM "{table}"')
