"""Read Perfetto's traces (`.pftrace`, `.perfetto-trace`): the slices and counters of its track events.

Packets are decoded one after the other into a table of trace events, whose begins and ends are paired by track. What
they mean then follows from the same rules as for Chrome's JSON: traces of PyTorch's profiler and of XLA's that were
converted keep their categories and arguments. Other packets (scheduling, samples of the CPU) are counted.
"""

from __future__ import annotations

import itertools
import json
import math
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import duckdb

from xsp import table
from xsp.errors import TraceError
from xsp.importers import chrome, kineto
from xsp.importers.contract import MAX_TIME_NS, SAMPLES, Losses, SourceInfo, TableImporter, check_values, read_file
from xsp.importers.protobuf import (
    MAX_BYTES,
    NUMBER,
    WireError,
    double,
    fields,
    message,
    numbers,
    signed,
    text,
)
from xsp.schema import SAMPLE_COLUMNS, Column

SUFFIXES = (".pftrace", ".perfetto-trace", ".pftrace.gz", ".perfetto-trace.gz")

_FIRST_TAGS = (
    b"\x18",
    b"\x32",
    b"\x40",
    b"\x50",
    b"\x5a",
    b"\x62",
    b"\x68",
    b"\x8a",
    b"\xe2\x03",
    b"\xda\x03",
    b"\xd0\x03",
)
"""First bytes of packets; no message of OTLP and no plane of an XSpace begins with one of them."""

_REMEDY = "copy it again, or convert it: traceconv json"
_OTHERS = {
    1: "events of the kernel (ftrace)", 9: "statistics of processes", 52: "counters of the GPU (gpu_counter_event)",
    53: "GPU render stages", 66: "samples of the CPU", 37: "heap profiles", 54: "samples of the CPU",
    133: "packets compressed with zstd",
}  # fmt: skip
"""Kinds of packets that are not read and are counted."""

_BOOTTIME, _REALTIME, _FIRST_OWN_CLOCK = 6, 1, 64
_BEGIN, _END, _INSTANT, _COUNTER = 1, 2, 3, 4
_MAX_DEPTH = 20
_MAX_ARGUMENTS = 64
_BATCH = 1 << 15

_COLUMNS = tuple(
    Column(name, kind, "")
    for name, kind in {
        "number": "BIGINT", "ph": "VARCHAR", "cat": "VARCHAR", "name": "VARCHAR", "track": "VARCHAR",
        "ts_ns": "BIGINT", "dur_ns": "BIGINT", "args": "VARCHAR", "value": "DOUBLE",
    }.items()
)  # fmt: skip
_TRACK_COLUMNS = tuple(
    Column(name, "VARCHAR", "") for name in ("track", "pid", "tid", "name", "process_name", "thread_name", "unit")
)


class Perfetto(TableImporter):
    """Perfetto's binary traces: slices, counters and their arguments."""

    name = "perfetto"

    def recognises(self, head: bytes, source: str) -> bool:
        """Return whether the file begins with a packet, or is named like a trace of Perfetto."""
        if head[:1] != b"\x0a":
            return False
        length = next((index for index in range(1, 6) if head[index : index + 1] < b"\x80"), 5)
        return source.lower().endswith(SUFFIXES) or head[length + 1 :].startswith(_FIRST_TAGS)

    def fill(self, con: duckdb.DuckDBPyConnection, source: str) -> SourceInfo:
        """Make the table `raw_spans`, see `TableImporter.fill`.

        Raises:
            TraceError: the file is damaged, or holds no slice and no counter.
        """
        data = read_file(source, MAX_BYTES, "record for a shorter time, or convert a part of it: traceconv json")
        losses = Losses(self.name)
        reader = _Reader(data)
        table.create(con, "perfetto_events", _COLUMNS)
        try:
            rows = reader.rows()
            while batch := list(itertools.islice(rows, _BATCH)):
                table.insert(con, "perfetto_events", batch, _COLUMNS)
        except (WireError, zlib.error) as error:
            raise TraceError(f"{source}, {error}: a trace of Perfetto that is damaged or cut off; {_REMEDY}") from error
        losses.skipped.update(reader.skipped)
        if not reader.has_realtime:
            losses.note("times count from the start of the machine: the file does not say what time it was")
        table.create(con, "perfetto_tracks", _TRACK_COLUMNS)
        table.insert(con, "perfetto_tracks", reader.track_rows(), _TRACK_COLUMNS)
        with check_values(source):
            # make the table of samples of the counters, if there are any
            if con.execute("SELECT 1 FROM perfetto_events WHERE ph = 'C' LIMIT 1").fetchall():
                table.create(con, SAMPLES, SAMPLE_COLUMNS)
                con.execute(f"INSERT INTO {SAMPLES} BY NAME {_MAKE_SAMPLES}")
                con.execute("DELETE FROM perfetto_events WHERE ph = 'C'")
            return _interpret(con, source, losses)


# --- packets ----------------------------------------------------------------------------------------------------


@dataclass
class _Track:
    name: str = ""
    parent: int | None = None
    pid: int | None = None
    tid: int | None = None
    process_name: str = ""
    thread_name: str = ""
    unit: str | None = None
    """Unit of a counter; None for a track of slices."""

    is_incremental: bool = False
    multiplier: int = 1
    total: int = 0
    """Sum of the values of an incremental counter so far."""


@dataclass
class _Sequence:
    """What later packets of a writer refer to."""

    names: dict[int, str] = field(default_factory=dict)
    categories: dict[int, str] = field(default_factory=dict)
    argument_names: dict[int, str] = field(default_factory=dict)
    values: dict[int, str] = field(default_factory=dict)
    track: int | None = None
    extra_tracks: list[int] = field(default_factory=list)
    clock: int | None = None
    clocks: dict[int, list[int]] = field(default_factory=dict)
    """Of a clock of the writer: its time, the time of the trace's clock then, the unit, whether times are deltas."""


class _Reader:
    """Decodes the packets of a file."""

    def __init__(self, data: bytes) -> None:
        self.skipped: Counter[str] = Counter()
        self.has_realtime = False
        self._data = data
        self._tracks: dict[int, _Track] = {}
        self._sequences: dict[int, _Sequence] = {}
        self._offsets: dict[int, int] = {}
        """By built-in clock: nanoseconds to add for the time since the epoch."""

        self._number = 0
        self._unpacked = 0

    def rows(self) -> Iterator[tuple[Any, ...]]:
        """Yield the rows of `_COLUMNS`."""
        yield from self._trace(self._data, 0)

    def track_rows(self) -> list[tuple[Any, ...]]:
        """Return the rows of `_TRACK_COLUMNS`, each with the process and the thread that it inherits."""
        rows = []
        for uuid, track in self._tracks.items():
            chain, at = [track], track
            while at.parent in self._tracks and len(chain) < _MAX_DEPTH:
                at = self._tracks[at.parent]
                chain.append(at)
            pid = next((each.pid for each in chain if each.pid is not None), None)
            process_name = next((each.process_name for each in chain if each.process_name), "")
            tid = None if track.tid is None else str(track.tid)
            rows.append((str(uuid), None if pid is None else str(pid), tid, track.name or track.thread_name,
                         process_name or (chain[-1].name if len(chain) > 1 else ""), track.thread_name,
                         track.unit))  # fmt: skip
        return rows

    def _trace(self, data: bytes, depth: int) -> Iterator[tuple[Any, ...]]:
        for number, low, high in fields(data, 0, len(data)):
            if number == 1:
                yield from self._packet(data, low, high, depth)

    def _packet(self, data: bytes, low: int, high: int, depth: int) -> Iterator[tuple[Any, ...]]:
        parts = list(message(data, low, high))
        values = {number: start for number, start, end in parts if end == NUMBER}
        sequence = self._sequences.setdefault(values.get(10, 0), _Sequence())
        if values.get(13, 0) & 1 or values.get(41):
            sequence.names, sequence.categories, sequence.argument_names, sequence.values = {}, {}, {}, {}
            sequence.track, sequence.extra_tracks, sequence.clock = None, [], None
        nested = {number: (start, end) for number, start, end in parts if end != NUMBER}
        if 12 in nested:
            self._intern(data, sequence, *nested[12])
        if 59 in nested:
            self._defaults(data, sequence, *nested[59])
        if 6 in nested:
            self._clocks(data, sequence, *nested[6])
        for number in (60, 43, 44):
            if number in nested:
                self._describe(data, number, values.get(10, 0), sequence, *nested[number])
        if 11 in nested:
            time = self._time(sequence, values.get(8, 0), values.get(58))
            yield from self._event(data, sequence, time, *nested[11])
        if 50 in nested and depth == 0:
            yield from self._trace(self._unpack(data, *nested[50]), depth + 1)
        for number, reason in _OTHERS.items():
            if number in nested:
                self.skipped[reason] += 1

    def _unpack(self, data: bytes, low: int, high: int) -> bytes:
        unpacked = zlib.decompressobj().decompress(data[low:high], MAX_BYTES - self._unpacked + 1)
        self._unpacked += len(unpacked)
        if self._unpacked > MAX_BYTES:
            raise WireError(f"byte {low}: its compressed packets have more than {MAX_BYTES >> 30} GiB")
        return unpacked

    def _intern(self, data: bytes, sequence: _Sequence, low: int, high: int) -> None:
        targets = {1: sequence.categories, 2: sequence.names, 3: sequence.argument_names, 29: sequence.values}
        for number, start, end in message(data, low, high):
            if number in targets:
                iid, name = 0, ""
                for part, first, last in message(data, start, end):
                    if part == 1:
                        iid = first
                    elif part == 2:
                        name = text(data, first, last)
                targets[number][iid] = name

    def _defaults(self, data: bytes, sequence: _Sequence, low: int, high: int) -> None:
        for number, start, end in message(data, low, high):
            if number == 58:
                sequence.clock = start
            elif number == 11:
                extra: list[int] = []
                for part, first, last in message(data, start, end):
                    if part == 11:
                        sequence.track = first
                    elif part == 31:
                        extra += numbers(data, first, last)
                sequence.extra_tracks = extra

    def _clocks(self, data: bytes, sequence: _Sequence, low: int, high: int) -> None:
        found: dict[int, tuple[int, int, int]] = {}
        for number, start, end in message(data, low, high):
            if number == 1:
                values = {part: first for part, first, last in message(data, start, end) if last == NUMBER}
                found[values.get(1, 0)] = (values.get(2, 0), values.get(4, 0) or 1, values.get(3, 0))
        if _REALTIME in found:
            for clock, (time, unit, _) in found.items():
                if clock < _FIRST_OWN_CLOCK:
                    self._offsets.setdefault(clock, found[_REALTIME][0] - time * unit)
        base = found.get(_BOOTTIME) or next((found[clock] for clock in found if clock < _FIRST_OWN_CLOCK), None)
        for clock, (time, unit, is_incremental) in found.items():
            if clock >= _FIRST_OWN_CLOCK:
                sequence.clocks[clock] = [time, base[0] * base[1] if base else time * unit, unit, is_incremental]

    def _time(self, sequence: _Sequence, timestamp: int, clock: int | None) -> int:
        """Return the time of a packet in nanoseconds, since the epoch if the file relates its clock to it."""
        clock = clock or sequence.clock or _BOOTTIME
        if clock in sequence.clocks:
            state = sequence.clocks[clock]
            if state[3]:
                state[0], state[1] = state[0] + timestamp, state[1] + timestamp * state[2]
                time = state[1]
            else:
                time = state[1] + (timestamp - state[0]) * state[2]
            clock = _BOOTTIME
        else:
            time = timestamp
        self.has_realtime |= clock in self._offsets or clock == _REALTIME
        return time + self._offsets.get(clock, 0)

    def _describe(self, data: bytes, kind: int, writer: int, sequence: _Sequence, low: int, high: int) -> None:
        """Keep the description of a track, in its present form or as one of a process or a thread."""
        track, uuid = _Track(), 0
        if kind in (43, 44):
            self._owner(data, track, 4 if kind == 44 else 3, low, high)
            if kind == 43:
                return
            uuid = sequence.track = -1 - writer
        else:
            for number, start, end in message(data, low, high):
                if number == 1:
                    uuid = start
                elif number == 5:
                    track.parent = start
                elif number in (2, 10, 13):
                    track.name = text(data, start, end)
                elif number in (3, 4):
                    self._owner(data, track, number, start, end)
                elif number == 8:
                    self._counter(data, track, start, end)
        known = self._tracks.get(uuid)
        if known is None or track != _Track():  # a description is written again without what is known already
            track.total = known.total if known is not None else 0
            self._tracks[uuid] = track

    @staticmethod
    def _owner(data: bytes, track: _Track, kind: int, low: int, high: int) -> None:
        for number, start, end in message(data, low, high):
            if number == 1:
                track.pid = signed(start)
            elif kind == 4 and number == 2:
                track.tid = signed(start)
            elif kind == 4 and number == 5:
                track.thread_name = text(data, start, end)
            elif kind == 3 and number == 6:
                track.process_name = text(data, start, end)

    @staticmethod
    def _counter(data: bytes, track: _Track, low: int, high: int) -> None:
        track.unit = ""
        for number, start, end in message(data, low, high):
            if number == 3:
                track.unit = {2: "", 3: "bytes", 1: "ns"}.get(start, "")
            elif number == 4:
                track.multiplier = signed(start) or 1
            elif number == 5:
                track.is_incremental = bool(start)
            elif number == 6:
                track.unit = text(data, start, end)

    def _event(self, data: bytes, sequence: _Sequence, time: int, low: int, high: int) -> Iterator[tuple[Any, ...]]:
        kind = track = value = name = None
        categories: list[str] = []
        arguments: dict[str, Any] = {}
        extra_tracks, extra_values = [], []
        legacy: dict[int, int] = {}
        for number, start, end in message(data, low, high):
            if number == 9:
                kind = start
            elif number == 11:
                track = start
            elif number == 10:
                name = sequence.names.get(start)
            elif number == 23:
                name = text(data, start, end)
            elif number == 3:
                categories += [sequence.categories.get(iid, "") for iid in numbers(data, start, end)]
            elif number == 22:
                categories.append(text(data, start, end))
            elif number == 4 and len(arguments) < _MAX_ARGUMENTS:
                key, argument = self._argument(data, sequence, start, end, 0)
                arguments[key] = argument
            elif number == 30:
                value = float(signed(start))
            elif number == 44:
                value = double(start)
            elif number == 31:
                extra_tracks += numbers(data, start, end)
            elif number == 12:
                extra_values += [float(signed(each)) for each in numbers(data, start, end)]
            elif number == 6:
                legacy = {part: first for part, first, last in message(data, start, end) if last == NUMBER}
        track = track if track is not None else sequence.track or 0
        self._tracks.setdefault(track, _Track())
        if not 0 <= time < MAX_TIME_NS:
            self.skipped["without a time, or with one that is out of range"] += 1
            return
        for uuid, each in zip(extra_tracks or sequence.extra_tracks, extra_values, strict=False):
            yield self._sample(uuid, time, each)
        phase, dur = {_BEGIN: "B", _END: "E", _INSTANT: "i"}.get(kind or 0), None
        if kind == _COUNTER:
            if value is not None:
                yield self._sample(track, time, value)
            return
        if kind is None and legacy.get(2) == ord("X"):
            phase, dur = "X", signed(legacy.get(3, 0)) * 1000
            name = name or sequence.names.get(legacy.get(1, 0))
        if phase is None or (dur is not None and not 0 <= dur < MAX_TIME_NS):
            self.skipped["track events of other types"] += 1
            return
        encoded = json.dumps(arguments) if arguments else None
        self._number += 1
        yield self._number, phase, ",".join(filter(None, categories)), name, str(track), time, dur, encoded, None

    def _sample(self, track: int, time: int, value: float) -> tuple[Any, ...]:
        """Return the row of a value of a counter."""
        described = self._tracks.setdefault(track, _Track(unit=""))
        if described.is_incremental:
            described.total += int(value) if math.isfinite(value) else 0
            value = float(described.total)
        self._number += 1
        return self._number, "C", None, None, str(track), time, None, None, value * described.multiplier

    def _argument(self, data: bytes, sequence: _Sequence, low: int, high: int, depth: int) -> tuple[str, Any]:
        name = ""
        value: Any = None
        entries: dict[str, Any] = {}
        elements: list[Any] = []
        for number, start, end in message(data, low, high):
            if number == 1:
                name = sequence.argument_names.get(start, "")
            elif number == 10:
                name = text(data, start, end)
            elif number == 2:
                value = bool(start)
            elif number in (3, 7):
                value = start
            elif number == 4:
                value = signed(start)
            elif number == 5:
                number_value = double(start)
                value = number_value if math.isfinite(number_value) else None
            elif number == 6:
                value = text(data, start, end)
            elif number == 9:
                value = _json_of(text(data, start, end))
            elif number == 17:
                value = sequence.values.get(start)
            elif number in (11, 12) and depth < _MAX_DEPTH and len(entries) + len(elements) < _MAX_ARGUMENTS:
                key, inner = self._argument(data, sequence, start, end, depth + 1)
                if number == 11:
                    entries[key] = inner
                else:
                    elements.append(inner)
        return name, entries or elements or value


def _json_of(content: str) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        return content


# --- meaning ----------------------------------------------------------------------------------------------------

_PID, _TID = "coalesce(t.pid, '0')", "coalesce(t.tid, 'track ' || e.track)"

_MAKE_SAMPLES = """
    SELECT e.ts_ns AS time_ns, coalesce(nullif(t.name, ''), 'unnamed counter') AS name, coalesce(t.unit, '') AS unit,
           e.value, TRY_CAST(nullif(regexp_extract(coalesce(t.process_name, ''), '(?i)gpu ?:?#?(\\d{1,4})$', 1), '')
                             AS INTEGER) AS device
    FROM perfetto_events e LEFT JOIN perfetto_tracks t ON t.track = e.track
    WHERE e.ph = 'C' AND isfinite(e.value)
"""


def _interpret(con: duckdb.DuckDBPyConnection, source: str, losses: Losses) -> SourceInfo:
    """Read the events as those of PyTorch's profiler if they have its categories, else as trace events of others."""
    con.execute(f"CREATE TABLE events AS {_TRACE_EVENTS}")
    con.execute(f"CREATE TEMP TABLE perfetto_pairs AS {chrome.PAIRS}")
    con.execute(f"CREATE TEMP TABLE perfetto_trace AS {_WHOLE}")
    con.execute(f"INSERT INTO perfetto_trace BY NAME {_METADATA}")
    for name in ("events", "perfetto_pairs", "perfetto_events", "perfetto_tracks"):
        con.execute(f"DROP TABLE {name}")
    if not con.execute("SELECT 1 FROM perfetto_trace WHERE ph IN ('B', 'X') LIMIT 1").fetchall():
        raise TraceError(
            "; ".join(
                [f"{source}: a trace of Perfetto without slices of track events; record the data source track_event",
                 *losses.sentences()]
            )
        )  # fmt: skip
    with_json = "(SELECT * REPLACE (args::JSON AS args) FROM perfetto_trace)"
    con.execute(f"CREATE TABLE events AS SELECT * REPLACE ({chrome.ARGS} AS args) FROM {with_json}")
    if not con.execute(chrome.FROM_TORCH).fetchall():
        con.execute("DROP TABLE perfetto_trace")
        return chrome.interpret(con, source, losses)
    con.execute("DROP TABLE events")
    try:
        return kineto.fill_from(con, source, with_json, losses)
    finally:
        con.execute("DROP TABLE perfetto_trace")


_WHOLE = """
    SELECT e.* REPLACE (CASE WHEN e.ph = 'B' AND NOT p.no_end THEN 'X' ELSE e.ph END AS ph,
                        CASE WHEN e.ph = 'B' AND NOT p.no_end THEN p.end_ns - e.ts_ns ELSE e.dur_ns END AS dur_ns)
    FROM events e LEFT JOIN perfetto_pairs p ON p.number = e.number WHERE e.ph <> 'E' OR p.no_begin
"""
"""The events with begins and ends that belong together as one."""

_TRACE_EVENTS = f"""
    SELECT e.number, e.ph, nullif(e.cat, '') AS cat, coalesce(e.name, 'unnamed') AS name, {_PID} AS pid, {_TID} AS tid,
           NULL::VARCHAR AS id, NULL::VARCHAR AS bp, e.ts_ns, e.dur_ns, e.args
    FROM perfetto_events e LEFT JOIN perfetto_tracks t ON t.track = e.track
"""

_METADATA = f"""
    SELECT -1 - row_number() OVER () AS number, 'M' AS ph, key AS name, pid, tid, 0 AS ts_ns,
           json_object('name', owner)::VARCHAR AS args
    FROM (
        SELECT DISTINCT 'process_name' AS key, {_PID} AS pid, NULL AS tid, process_name AS owner
        FROM perfetto_tracks t JOIN (SELECT DISTINCT track FROM perfetto_events) e USING (track)
        WHERE process_name <> ''
        UNION ALL SELECT DISTINCT 'thread_name', {_PID}, {_TID}, t.name
        FROM perfetto_tracks t JOIN (SELECT DISTINCT track FROM perfetto_events) e USING (track) WHERE t.name <> ''
    )
"""
