"""Read `.xplane.pb`, the XSpace that the profiler of XLA writes for JAX, TensorFlow and PyTorch/XLA.

An XSpace has planes (the host, each device), a plane has lines (threads, streams), a line has events. Names of events
and of their statistics are stored once in each plane, and events refer to them by number. What the events mean is in
`xsp.importers.xla`, because the trace events that are exported beside the file mean the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import duckdb

from xsp.errors import TraceError
from xsp.importers import contract, hlo, xla
from xsp.importers.contract import MAX_TIME_NS, Losses, SourceInfo, TableImporter, read_file
from xsp.importers.protobuf import MAX_BYTES, NUMBER, WireError, double, fields, message, signed, text

_NAMES = (b"/host:", b"/device:", b"/task:", b"Task Environment", b"#Chip")
"""Beginnings of names of planes."""

_RECORD = "record fewer steps between jax.profiler.start_trace and stop_trace"
_SUFFIX = ".xplane.pb"
_MAX_STATS = 100
"""Maximum number of statistics of an event that are read."""

HOST_PROCESS = 701
"""Number of the process of the first plane of a host, as the trace events beside the file have it."""


class XPlane(TableImporter):
    """The XSpace that the profiler of JAX, TensorFlow and PyTorch/XLA writes (`.xplane.pb`)."""

    name = "xplane"

    def recognises(self, head: bytes, source: str) -> bool:
        """Return whether the file begins with a plane, or is named like an XSpace."""
        return is_xspace(head) or (
            source.lower().endswith(_SUFFIX) and head[:1] in (b"\x0a", b"\x12", b"\x1a", b"\x22")
        )

    def fill(self, con: duckdb.DuckDBPyConnection, source: str) -> SourceInfo:
        """Make the table `raw_spans`, see `TableImporter.fill`.

        Raises:
            TraceError: the file is damaged, or holds no event.
        """
        data = read_file(source, MAX_BYTES, _RECORD)
        losses = Losses(self.name)
        try:
            planes = [_Plane(data, low, high) for number, low, high in fields(data, 0, len(data)) if number == 1]
            base_ns = _start_ns(planes)
            xla.create(con)
            xla.insert_programs(con, [row for plane in planes for row in plane.programs()])
            for number, plane in enumerate(planes):
                xla.insert(con, _events(plane, number, base_ns, losses))
        except WireError as error:
            raise TraceError(
                f"{source}, {error}: an XSpace of JAX or TensorFlow that is damaged or cut off; copy it again, or give "
                "the .trace.json.gz that lies beside it"
            ) from error
        if base_ns == 0:
            losses.note("the file does not say when the recording began: times count from its start")
        run = xla.fill(con, source, losses, self.name)
        devices = {plane.device: plane for plane in planes if plane.device is not None}
        run["machine"] = _machine([devices.get(number) for number in range(max(devices, default=-1) + 1)])
        return SourceInfo(run, losses)


def is_xspace(head: bytes) -> bool:
    """Return whether a file with these first bytes is an XSpace: its first field is a plane, which begins with a name.

    OTLP and Perfetto's packets begin with the same tag, but what follows in them is no printable text.
    """
    if head[:1] != b"\x0a":
        return False
    at = next((index for index in range(1, 11) if head[index : index + 1] < b"\x80"), 10) + 1
    if head[at : at + 1] == b"\x08":  # the number of the plane
        at = next((index for index in range(at + 1, at + 11) if head[index : index + 1] < b"\x80"), at + 10) + 1
    return head[at : at + 1] == b"\x12" and head[at + 2 : at + 34].startswith(_NAMES)


class _Metadata(NamedTuple):
    """The name of the events that refer to it, and the statistics that they share."""

    name: str
    display_name: str
    stats: dict[str, Any]


class _Plane:
    """A plane, with its names, its statistics and the ranges of its lines."""

    def __init__(self, data: bytes, low: int, high: int) -> None:
        self.data = data
        self.name = ""
        self.lines: list[tuple[int, int]] = []
        self.stat_names: dict[int, str] = {}
        stats: list[tuple[int, int]] = []
        metadata: list[tuple[int, int]] = []
        for number, start, end in message(data, low, high):
            if number == 2:
                self.name = text(data, start, end)
            elif number == 3:
                self.lines.append((start, end))
            elif number == 4:
                metadata.append((start, end))
            elif number == 5:
                key, value = _entry(data, start, end)
                name = next((text(data, *each) for field, *each in message(data, *value) if field == 2), "")
                self.stat_names[key] = name
            elif number == 6:
                stats.append((start, end))
        self.stats = dict(self.stat(start, end) for start, end in stats[:_MAX_STATS])
        self.is_metadata = self.name == "/host:metadata"
        self._entries = metadata if self.is_metadata else []
        self.metadata = {} if self.is_metadata else dict(self._metadata(*_entry(data, *each)) for each in metadata)

    @property
    def device(self) -> int | None:
        """The number of the device; None for other planes."""
        return xla.device_of(self.name)

    def programs(self) -> Iterator[tuple[str, str, int]]:
        """Yield name of the module, name of the operator and FLOPs, for the programs whose HLO the plane has."""
        for low, high in self._entries:
            _, value = _entry(self.data, low, high)
            module, protos = "", []
            for number, start, end in message(self.data, *value):
                if number == 2:
                    module = re.sub(r"\(\d+\)$", "", text(self.data, start, end))
                elif number == 5:
                    protos += [(a, b) for part, a, b in message(self.data, start, end) if part == 6 and b != NUMBER]
            for place in protos:
                yield from ((module, op, flops) for op, flops in hlo.flops_of(self.data, *place))

    def _metadata(self, key: int, value: tuple[int, int]) -> tuple[int, _Metadata]:
        name = display_name = ""
        stats: dict[str, Any] = {}
        for number, low, high in message(self.data, *value):
            if number == 2:
                name = text(self.data, low, high)
            elif number == 4:
                display_name = text(self.data, low, high)
            elif number == 5 and len(stats) < _MAX_STATS:
                stat, content = self.stat(low, high)
                stats[stat] = content
        return key, _Metadata(name, display_name, stats)

    def stat(self, low: int, high: int) -> tuple[str, Any]:
        """Return the name and the value of a statistic; bytes have no value."""
        name = ""
        value: Any = None
        for number, start, end in message(self.data, low, high):
            if number == 1:
                name = self.stat_names.get(start, "")
            elif number == 2:
                value = double(start) if end == NUMBER else None
            elif number == 3:
                value = start
            elif number == 4:
                value = signed(start)
            elif number == 5:
                value = text(self.data, start, end)
            elif number == 7:
                value = self.stat_names.get(start)
        return name, value


def _entry(data: bytes, low: int, high: int) -> tuple[int, tuple[int, int]]:
    """Return the key of an entry of a map, and the range of its value."""
    key, value = 0, (low, low)
    for number, start, end in message(data, low, high):
        if number == 1:
            key = start
        elif number == 2:
            value = (start, end)
    return key, value


def _start_ns(planes: list[_Plane]) -> int:
    """Return the start of the recording in nanoseconds since the epoch; 0 if the file does not state it."""
    starts = (plane.stats.get("profile_start_time") for plane in planes)
    return next((start for start in starts if isinstance(start, int) and 0 < start < MAX_TIME_NS), 0)


def _events(plane: _Plane, number: int, base_ns: int, losses: Losses) -> Iterator[tuple[Any, ...]]:
    """Yield the rows of `xla.COLUMNS` of a plane."""
    for low, high in plane.lines:
        data, line, name, display_name, line_ns = plane.data, 0, "", "", 0
        events = []
        for field, start, end in message(data, low, high):
            if field == 1:
                line = signed(start)
            elif field == 2:
                name = text(data, start, end)
            elif field == 11:
                display_name = text(data, start, end)
            elif field == 3:
                line_ns = signed(start)
            elif field == 4:
                events.append((start, end))
        # lines count from the start of the recording, or, before they are put in order, from 1970
        line_ns += base_ns if line_ns < base_ns else 0
        for start, end in events:
            row = _event(plane, start, end, line_ns)
            if row is None:
                losses.skipped["without a time, or with one that is out of range"] += 1
            else:
                yield HOST_PROCESS + number, plane.name, line, display_name or name, *row


def _event(plane: _Plane, low: int, high: int, line_ns: int) -> tuple[Any, ...] | None:
    metadata = _Metadata("", "", {})
    offset_ps = duration_ps = 0
    stats: dict[str, Any] = {}
    for number, start, end in message(plane.data, low, high):
        if number == 4:
            if len(stats) < _MAX_STATS:
                name, value = plane.stat(start, end)
                stats[name] = value
        elif number == 1:
            metadata = plane.metadata.get(start, metadata)
        elif number == 2:
            offset_ps = signed(start)
        elif number == 3:
            duration_ps = signed(start)
        elif number == 5:  # an event that only counts has no time
            return None
    start_ns = line_ns + offset_ps // 1000
    if not (0 <= start_ns < MAX_TIME_NS and 0 <= duration_ps // 1000 < MAX_TIME_NS):
        return None
    return metadata.display_name or metadata.name, start_ns, duration_ps // 1000, *xla.values(metadata.stats | stats)


def _machine(planes: list[_Plane | None]) -> dict[str, Any]:
    properties = []
    for plane in planes:
        stats = plane.stats if plane is not None else {}
        vendor = stats.get("device_vendor")
        name = stats.get("device_type_string") or (f"{vendor} GPU" if vendor else "unknown")
        cores, memory, major, minor = (
            value if isinstance(value, int) and 0 <= value < MAX_TIME_NS else None
            for value in map(stats.get, ("core_count", "memory_size", "compute_cap_major", "compute_cap_minor"))
        )
        properties.append(contract.device(str(name)[:256], cores, memory, major, minor, None))
    return {"devices": [device["name"] for device in properties], "device_properties": properties}
