"""What a trace file holds, counted by reading it plainly: `json` or `sqlite3`, loops, and nothing of xsp.

It is slow and obvious on purpose. Tests compare it with what xsp says of the same file.
"""

from __future__ import annotations

import functools
import gzip
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
"""How the categories end that hold runtime calls."""

COMMUNICATION = ("nccl", "rccl", "nvshmem", "allreduce", "all_reduce", "allgather", "all_gather", "reducescatter",
                 "reduce_scatter", "alltoall", "all_to_all", "cross_device_reduce")  # fmt: skip
"""Words in the names of kernels that talk to other devices."""

MILLISECOND = 1_000_000
NVTX_PUSHED, NVTX_STARTED = 59, 60
"""Types of ranges in nsys's table of NVTX."""


class NotPlain(Exception):
    """The file is no timeline of a kind that is read here."""


class Work(NamedTuple):
    """What a device did in one interval of nanoseconds."""

    name: str
    copies: bool
    device: int
    stream: int
    start: int
    end: int
    launch: tuple[int, int | None]
    """Its process, where the source tells one, and the number that its launch has as well."""


@dataclass
class Reading:
    """A file, read."""

    work: list[Work] = field(default_factory=list)
    calls: set[tuple[int, int | None]] = field(default_factory=set)
    """Process and number of each runtime call."""

    operators: Counter[str] = field(default_factory=Counter)
    """Calls of operators and annotations by name."""

    operators_ns: Counter[str] = field(default_factory=Counter)
    nested: dict[Any, list[tuple[int, int, str]]] = field(default_factory=dict)
    """Begin, end and name of each operator, annotations apart, by thread; of Kineto alone."""

    places: dict[int | None, tuple[Any, int]] = field(default_factory=dict)
    """Thread and begin of each runtime call by its number; of Kineto alone."""

    modules: int = 0
    steps: int = 0
    rank: int | None = None
    strange: Counter[str] = field(default_factory=Counter)
    """Intervals that make no sense."""

    def kernels(self, device: int | None = None) -> list[Work]:
        return [each for each in self.on(device) if not each.copies]

    def copies(self, device: int | None = None) -> list[Work]:
        return [each for each in self.on(device) if each.copies]

    def on(self, device: int | None) -> list[Work]:
        return [each for each in self.work if device is None or each.device == device]

    def devices(self) -> list[int]:
        return sorted({each.device for each in self.work})

    def around(self, work: Work) -> str | None:
        """Return the innermost operator that was open on its thread when the work was launched."""
        thread, at = self.places.get(work.launch[1], (None, 0)) if work.launch[1] else (None, 0)
        near = self._near.get((thread, at // MILLISECOND), ())
        holding = [(end - start, name) for start, end, name in near if start <= at < end]
        return min(holding)[1] if holding else None

    @functools.cached_property
    def _near(self) -> dict[Any, list[Any]]:
        """The operators that are open in each millisecond of a thread."""
        found: dict[Any, list[Any]] = {}
        for thread, ranges in self.nested.items():
            for start, end, name in ranges:
                for place in range(start // MILLISECOND, end // MILLISECOND + 1):
                    found.setdefault((thread, place), []).append((start, end, name))
        return found

    def gaps(self, device: int) -> list[tuple[int, int | None]]:
        """Return how long each gap of a device is, and how much of it lies before the launch of what ended it.

        The second is None where the file holds no launch of it, or one that begins after it.
        """
        found, until = [], None
        for each in sorted(self.on(device), key=lambda each: each.start):
            if until is not None and each.start > until:
                _, at = self.places.get(each.launch[1], (None, None)) if each.launch[1] else (None, None)
                known = at is not None and at <= each.start
                found.append((each.start - until, max(0, at - until) if known else None))
            until = each.end if until is None else max(until, each.end)
        return found

    def launched(self) -> int:
        """Count the device work whose launch stands in the file."""
        return sum(each.launch in self.calls for each in self.work if each.launch[1])


# --- figures ----------------------------------------------------------------------------------------------


def total_ns(work: Iterable[Work]) -> int:
    return sum(each.end - each.start for each in work)


def busy_ns(work: Iterable[Work]) -> int:
    """Return the time in which at least one was under way."""
    busy, until = 0, None
    for each in sorted(work, key=lambda each: each.start):
        if until is None or each.start > until:
            busy += each.end - each.start
            until = each.end
        elif each.end > until:
            busy += each.end - until
            until = each.end
    return busy


def window_ns(work: list[Work]) -> int:
    """Return the time from the first start to the last end."""
    return max(each.end for each in work) - min(each.start for each in work) if work else 0


def communicates(work: Work) -> bool:
    return not work.copies and any(word in work.name.lower() for word in COMMUNICATION)


def exposed_ns(work: list[Work]) -> int:
    """Return the time in which communication kernels were under way and no other kernel of that device was."""
    kernels = [each for each in work if not each.copies]
    return busy_ns(kernels) - busy_ns([each for each in kernels if not communicates(each)])


# --- files ------------------------------------------------------------------------------------------------


def read(path: Path) -> Reading:
    """Read a file.

    Raises:
        NotPlain: it is of another kind.
    """
    return nsys(path) if path.suffix == ".sqlite" else kineto(path)


def content(path: Path) -> Any:
    """Return the JSON of a file, with numbers as exact as they stand there."""
    raw = path.read_bytes()
    try:
        return json.loads(gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw, parse_float=Decimal, strict=False)
    except ValueError as error:
        raise NotPlain(str(error)) from error


def kineto(path: Path) -> Reading:
    """Read what PyTorch's profiler wrote."""
    written = content(path)
    rows = written.get("traceEvents") if isinstance(written, dict) else written
    if not isinstance(rows, list):
        raise NotPlain("there are no traceEvents")
    found = Reading()
    if isinstance(written, dict):
        found.rank = (written.get("distributedInfo") or {}).get("rank")
    for row in rows:
        if isinstance(row, dict) and row.get("ph") == "X":
            _interval(found, row)
    found.work = list(dict.fromkeys(found.work))  # what two profilers saw stands there twice
    return found


def _interval(found: Reading, row: dict[str, Any]) -> None:
    kind, name, args = str(row.get("cat")).lower(), str(row.get("name")), row.get("args") or {}
    if "ts" not in row or "dur" not in row or row["dur"] < 0 or row["ts"] < 0:
        found.strange[kind] += 1
        return
    start, lasted = round(Decimal(row["ts"]) * 1000), round(Decimal(row["dur"]) * 1000)
    number = args.get("correlation")
    if kind in KERNEL or kind in COPY:
        place = int(args.get("device", row["pid"])), int(args.get("stream", row["tid"]))
        found.work.append(Work(name, kind in COPY, *place, start, start + lasted, (0, number)))
    elif kind.endswith(CALL):
        found.calls.add((0, number))
        found.places[number] = ((row["pid"], row["tid"]), start)
    elif kind in OPERATOR:
        if kind != "user_annotation":
            found.nested.setdefault((row["pid"], row["tid"]), []).append((start, start + lasted, name))
        found.operators[name] += 1
        found.operators_ns[name] += lasted
        found.steps += name.startswith("ProfilerStep#")
    elif kind == "python_function":
        found.modules += name.startswith("nn.Module: ")


def nsys(path: Path) -> Reading:
    """Read an export of Nsight Systems."""
    con = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
    con.row_factory = sqlite3.Row
    texts = {row["id"]: row["value"] for row in rows(con, "StringIds")}
    found = Reading()
    for table in ("KERNEL", "MEMCPY", "MEMSET"):
        for row in rows(con, f"CUPTI_ACTIVITY_KIND_{table}"):
            name = texts[row["demangledName"]] if table == "KERNEL" else table
            launch = (row["globalPid"] >> 24, row["correlationId"])
            place = (row["deviceId"], row["streamId"], row["start"], row["end"])
            found.work.append(Work(name, table != "KERNEL", *place, launch))
    for row in rows(con, "CUPTI_ACTIVITY_KIND_RUNTIME"):
        found.calls.add((row["globalTid"] >> 24, row["correlationId"]))
    for row in rows(con, "NVTX_EVENTS"):
        if row["eventType"] in (NVTX_PUSHED, NVTX_STARTED) and row["end"] is not None:
            name, _, notes = (row["text"] or texts.get(row["textId"], "")).partition(", ")
            if "op_id = " in notes:  # written by PyTorch for each operator
                found.operators[name] += 1
                found.operators_ns[name] += row["end"] - row["start"]
    con.close()
    return found


def rows(con: sqlite3.Connection, table: str) -> Iterator[sqlite3.Row]:
    """Yield the rows of a table, none where there is no such table."""
    if con.execute("SELECT 1 FROM sqlite_master WHERE name = ?", [table]).fetchall():
        yield from con.execute(f'SELECT * FROM "{table}"')
