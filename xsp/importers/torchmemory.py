"""Read memory records of PyTorch: snapshots of the caching allocator, and memory timelines of its profiler.

A snapshot (`torch.cuda.memory._dump_snapshot`) is a pickle, and a pickle can run code. Its reader knows only
dictionaries, lists, tuples, strings and numbers, see `plainpickle`; no code of the file ever runs. Timelines
(`prof.export_memory_timeline`) are JSON.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePath
from typing import Any

import duckdb

from xsp import table
from xsp.errors import TraceError
from xsp.importers.contract import (
    MAX_TIME_NS,
    RAW_COLUMNS,
    Losses,
    SourceInfo,
    TableImporter,
    check_values,
    open_bytes,
    read_error,
)
from xsp.importers.plainpickle import PickleError, Plain
from xsp.schema import Column, Kind, Level

MAX_FILE_BYTES = 1 << 30
"""Maximum bytes of a file, which is read at once; PyTorch holds a snapshot in memory too."""

MAX_RATIO, FREE_BYTES = 100, 4 << 20
"""Maximum ratio of the content to its gzip, and the bytes up to which any ratio is accepted."""

CATEGORIES = (
    "parameter",
    "optimizer state",
    "input",
    "temporary",
    "activation",
    "gradient",
    "autograd detail",
    "unknown",
)
"""Categories of memory in a timeline, in its order (torch/profiler/_memory_profiler.py, `_CATEGORY_TO_INDEX`)."""

MAX_START_NS = MAX_TIME_NS - 1000
"""Maximum time in nanoseconds; the span around all changes ends a microsecond after the last one, and must fit too."""

_ROWS = [Column(name, kind, "") for name, kind in
         {"number": "BIGINT", "start_ns": "BIGINT", "type": "VARCHAR", "alloc_bytes": "BIGINT",
          "attributes": "VARCHAR"}.items()]  # fmt: skip

Rows = Iterator[tuple[int, str | None, int, dict[str, Any]]]
"""Nanoseconds, category of the memory, change in bytes, and attributes."""


class TorchMemory(TableImporter):
    """PyTorch's snapshots of memory, and its memory timelines."""

    name = "torch-memory"

    def recognises(self, head: bytes, source: str) -> bool:
        """Return whether the file is a pickle, or an array of arrays of numbers."""
        start = bytes(head[:64]).translate(None, b" \t\r\n")
        return _is_pickle(head) or (start[:2] == b"[[" and start[2:3] in b"-0123456789" and len(start) > 2)

    def fill(self, con: duckdb.DuckDBPyConnection, source: str) -> SourceInfo:
        """Make the table `raw_spans`, see `TableImporter.fill`.

        Raises:
            TraceError: the file is damaged, too large, would run code, or has other content.
        """
        losses = Losses(self.name)
        with open_bytes(Path(source)) as file:
            compressed_bytes = Path(source).stat().st_size
            most = min(MAX_FILE_BYTES, max(FREE_BYTES, MAX_RATIO * compressed_bytes))
            try:
                content = file.read(most + 1)
            except (EOFError, OSError, zlib.error) as error:
                raise read_error(source, error) from error
        if len(content) > most and most < MAX_FILE_BYTES:
            raise TraceError(f"{source}: its gzip becomes more than {MAX_RATIO} times as large, which no snapshot does")
        if len(content) > most:
            raise TraceError(f"{source}: is larger than 1 GiB; record fewer allocations (max_entries)")
        try:
            rows = _snapshot(source, content, losses) if _is_pickle(content) else _timeline(source, content, losses)
            records = [
                (index, start_ns, kind, size, json.dumps(attributes))
                for index, (start_ns, kind, size, attributes) in enumerate(rows)
            ]
        except (AttributeError, IndexError, KeyError, TypeError, ValueError, OverflowError, RecursionError, MemoryError,
                SystemError) as error:  # fmt: skip
            raise TraceError(f"{source}: is not in PyTorch's form ({type(error).__name__}: {error})") from error
        with check_values(source):
            table.create(con, "raw_spans", RAW_COLUMNS)
            table.create(con, "memory_rows", _ROWS)
            table.insert(con, "memory_rows", records, _ROWS)
            ((inserted,),) = con.execute(
                f"INSERT INTO raw_spans BY NAME SELECT number, start_ns, 0 AS dur_ns, 'memory' AS name, type, "
                f"{int(Level.OP)} AS level, '{Kind.ALLOC}' AS kind, alloc_bytes, attributes, 'ok' AS status, "
                f"false AS replayed, 'torch-memory' AS collector FROM memory_rows "
                f"WHERE start_ns BETWEEN 0 AND {MAX_START_NS}"
            ).fetchall()
            if inserted < len(records):
                losses.skipped["a time before the epoch or in the far future"] += len(records) - inserted
            con.execute(
                f"INSERT INTO raw_spans BY NAME SELECT max(number) + 1 AS number, min(start_ns) AS start_ns, "
                f"max(start_ns) + 1000 - min(start_ns) AS dur_ns, 'recorded memory' AS name, 'ok' AS status, "
                f"{int(Level.APPLICATION)} AS level, '{Kind.USER}' AS kind, false AS replayed, "
                "'torch-memory' AS collector FROM raw_spans HAVING count(*) > 0"
            )
            con.execute("DROP TABLE memory_rows")
        ((losses.spans,),) = con.execute("SELECT count(*) FROM raw_spans").fetchall()
        if not losses.spans:
            raise TraceError(f"{source}: holds no allocations; call torch.cuda.memory._record_memory_history() first")
        return SourceInfo({"profiler": {"name": "PyTorch's memory"}}, losses)


# --- snapshots ----------------------------------------------------------------------------------------------


def _is_pickle(head: bytes) -> bool:
    """Return whether bytes are a pickle of protocol 2 or later, as PyTorch writes it."""
    return head[:1] == b"\x80" and head[1:2] in b"\x02\x03\x04\x05" and len(head) > 2


def _snapshot(source: str, content: bytes, losses: Losses) -> Rows:
    try:
        plain = Plain(content)
    except (PickleError, MemoryError, OverflowError) as error:
        raise TraceError(f"{source}: not read, and nothing in it was run: {error or type(error).__name__}") from error
    snapshot = plain.value
    if not isinstance(snapshot, dict) or not isinstance(snapshot.get("device_traces"), list):
        raise TraceError(f"{source}: is a pickle, but not a memory snapshot (torch.cuda.memory._dump_snapshot)")
    return _Changes(source, snapshot, plain.instructions, losses).rows()


class _Changes:
    """The changes of memory in a snapshot.

    A pickle of kilobytes can refer to the same lists again and again, so that a walk through it does not end. Each
    segment, block and event of a snapshot is an object of its own, so there are at most as many as instructions.
    """

    def __init__(self, source: str, snapshot: dict[str, Any], most_visits: int, losses: Losses) -> None:
        self._source, self._snapshot, self._losses = source, snapshot, losses
        self._visits_left = most_visits
        self._frames: dict[int, str | None] = {}
        """The origins of allocations, by id of their list of frames, which many share."""

    def _visit(self, values: Any) -> list[Any]:
        """Return the values of a list, and count them.

        Raises:
            TraceError: with those before, these are more than the file states.
        """
        if len(values) > self._visits_left:
            raise TraceError(f"{self._source}: refers to the same events again and again, which no snapshot does")
        self._visits_left -= len(values)
        return list(values)

    def rows(self) -> Rows:
        """Yield the changes of each device; totals are computed backwards from the final state, as segments give it."""
        final: dict[int, tuple[int, int]] = {}
        for segment in self._visit(self._snapshot.get("segments", [])):
            device = segment.get("device", 0)
            if not isinstance(device, int):
                raise TypeError("a device is no number")
            allocated, reserved = final.get(device, (0, 0))
            blocks = self._visit(segment["blocks"])
            allocated += sum(block["size"] for block in blocks if block["state"] in _IN_USE)
            final[device] = allocated, reserved + segment["total_size"]
        for device, trace in enumerate(self._visit(self._snapshot["device_traces"])):
            yield from self._of_device(device, self._visit(trace), *final.get(device, (0, 0)))

    def _of_device(self, device: int, trace: list[Any], allocated: int, reserved: int) -> Rows:
        losses = self._losses
        signs = [
            (event, _ALLOCATED_SIGNS.get(_text(event["action"]), 0), _RESERVED_SIGNS.get(_text(event["action"]), 0))
            for event in trace
        ]
        allocated -= sum(sign * event["size"] for event, sign, _ in signs)
        reserved -= sum(sign * event["size"] for event, _, sign in signs)
        if trace and "time_us" not in trace[0]:
            losses.note("the snapshot has no times: its events are placed in order, a microsecond apart")
        for index, (event, allocation_sign, reserve_sign) in enumerate(signs):
            allocated, reserved = allocated + allocation_sign * event["size"], reserved + reserve_sign * event["size"]
            if event["action"] == "oom":
                losses.note(f"device {device} ran out of memory: {event['size']} bytes were asked for")
            if not allocation_sign:
                if not reserve_sign:
                    losses.skipped[f"events {_text(event['action'])}"] += 1
                continue
            attributes = {"device_type": "1", "device": str(device), "address": _number(event["addr"]),
                          "total_allocated_bytes": allocated, "total_reserved_bytes": reserved,
                          "frame": self._frame(event.get("frames"))}  # fmt: skip
            start_ns = int(event.get("time_us", index)) * 1000
            yield (
                start_ns,
                None,
                allocation_sign * event["size"],
                {key: value for key, value in attributes.items() if value is not None},
            )

    def _frame(self, frames: Any) -> str | None:
        """Return where an event comes from; the same lists of frames occur many times."""
        if not frames:
            return None
        if id(frames) not in self._frames:  # the snapshot keeps them alive, so an id is that of one list
            self._frames[id(frames)] = _origin(frames)
        return self._frames[id(frames)]


_IN_USE = ("active_allocated", "active_pending_free")
"""States of blocks that are allocated."""

_ALLOCATED_SIGNS = {"alloc": 1, "free_completed": -1}
_RESERVED_SIGNS = {"segment_alloc": 1, "segment_free": -1, "segment_map": 1, "segment_unmap": -1}
"""Events that change the allocated bytes, and the bytes that the allocator reserves; with their signs."""


def _origin(all_frames: list[dict[str, Any]]) -> str | None:
    """Return the origin of an allocation: the innermost Python frame outside torch, without directories."""
    frames = [frame for frame in all_frames if _text(frame.get("filename")).endswith(".py")]
    user_frames = (frame for frame in frames if "torch" not in PurePath(frame["filename"]).parts)
    innermost = next(user_frames, next(iter(frames), None))
    if innermost is None:
        return None
    return f"{_text(innermost.get('name'))} ({PurePath(innermost['filename']).name}:{_number(innermost.get('line'))})"


def _text(value: Any) -> str:
    """Return a text of the file; a value of another type is not converted, as its text could exceed the memory."""
    return value[:1024] if isinstance(value, str) else "without a name"


def _number(value: Any) -> str:
    return str(value) if isinstance(value, int) else "?"


# --- timelines ----------------------------------------------------------------------------------------------


def _timeline(source: str, content: bytes, losses: Losses) -> Rows:
    try:
        timeline = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise read_error(source, error) from error
    losses.note("a memory timeline does not name its device; it is taken as that of device 0")
    if len(timeline) == 2 and isinstance(timeline[1], list) and timeline[1] and isinstance(timeline[1][0], list):
        return _by_category(*timeline)
    return _raw(timeline)


def _by_category(times: Sequence[int], sizes: Sequence[Sequence[int]]) -> Rows:
    """Yield the changes of each category; the rows of `sizes` begin with a column of zeros."""
    last_sizes = [0] * (len(CATEGORIES) + 1)
    for time, row in zip(times, sizes, strict=True):
        for index, category in enumerate(CATEGORIES, 1):
            if index < len(row) and row[index] != last_sizes[index]:
                last_total = sum(last_sizes)
                change, last_sizes[index] = row[index] - last_sizes[index], row[index]
                yield time * 1000, category, change, _of_device(last_total + change)


def _raw(rows: Sequence[Sequence[int]]) -> Rows:
    """Yield the changes of a raw timeline, whose rows are nanoseconds, action, change in bytes, category.

    Memory from before the recording has the time -1. Memory that changes its category is freed and allocated again.
    """
    allocated, first_time = 0, min((row[0] for row in rows if row[0] >= 0), default=0)
    for time, _, change, category in rows:
        allocated += change
        kind = CATEGORIES[category] if 0 <= category < len(CATEGORIES) else CATEGORIES[-1]
        yield max(time, first_time), kind, change, _of_device(allocated)


def _of_device(total: int) -> dict[str, Any]:
    return {"device_type": "1", "device": "0", "total_allocated_bytes": total}
