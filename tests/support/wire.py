"""Messages of Protocol Buffers, written field by field: an encoder that shares no code with the readers."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from typing import Any

Value = int | float | str | bytes


def varint(value: int) -> bytes:
    """Return a number in the wire format."""
    value &= (1 << 64) - 1
    encoded = b""
    while value > 127:
        encoded += bytes([value & 127 | 128])
        value >>= 7
    return encoded + bytes([value])


def message(*parts: tuple[int, Value | Iterable[Any]]) -> bytes:
    """Return a message of fields: number and value. Integers become varints, floats doubles; a list repeats a field."""
    encoded = b""
    for number, value in parts:
        if isinstance(value, (list, tuple)):
            encoded += message(*((number, each) for each in value))
        elif isinstance(value, float):
            encoded += varint(number << 3 | 1) + struct.pack("<d", value)
        elif isinstance(value, int):
            encoded += varint(number << 3) + varint(value)
        else:
            content = value.encode() if isinstance(value, str) else bytes(value)  # type: ignore[arg-type]
            encoded += varint(number << 3 | 2) + varint(len(content)) + content
    return encoded


class Plane:
    """A plane of an XSpace, whose names are numbered as they come."""

    def __init__(self, name: str, **stats: Value) -> None:
        self._name = name
        self._stats = dict(stats)
        self._events: dict[str, tuple[int, Mapping[str, Value]]] = {}
        self._names: dict[str, int] = {}
        self._lines: list[bytes] = []

    def line(self, number: int, name: str, events: Iterable[Mapping[str, Any]], start_ns: int = 0) -> Plane:
        """Add a line of events: `name`, `at` and `dur` in nanoseconds, `stats` of the event, `shared` of its name."""
        encoded = [
            message(
                (1, self._metadata(event["name"], event.get("shared", {}))),
                (2, int(event["at"] * 1000)),
                (3, int(event["dur"] * 1000)),
                (4, [self._stat(*stat) for stat in event.get("stats", {}).items()]),
            )
            for event in events
        ]
        self._lines.append(message((1, number), (2, name), (3, start_ns), (4, encoded)))
        return self

    def encoded(self) -> bytes:
        """Return the plane as a message."""
        plane_stats = [self._stat(*stat) for stat in self._stats.items()]
        metadata = [
            message((1, number), (2, message((1, number), (2, name), (5, [self._stat(*s) for s in shared.items()]))))
            for name, (number, shared) in self._events.items()
        ]
        names = [message((1, n), (2, message((1, n), (2, name)))) for name, n in self._names.items()]
        return message((2, self._name), (3, self._lines), (4, metadata), (5, names), (6, plane_stats))

    def _metadata(self, name: str, shared: Mapping[str, Value]) -> int:
        return self._events.setdefault(name, (len(self._events) + 1, shared))[0]

    def _stat(self, name: str, value: Value) -> bytes:
        number = self._names.setdefault(name, len(self._names) + 1)
        if isinstance(value, float):
            return message((1, number), (2, value))
        if isinstance(value, int):
            return message((1, number), (4 if value < 0 else 3, value))
        if isinstance(value, bytes):
            return message((1, number), (6, value))
        if value.startswith("→"):  # a text that is stored as the name of a statistic
            return message((1, number), (7, self._names.setdefault(value[1:], len(self._names) + 1)))
        return message((1, number), (5, value))


def xspace(*planes: Plane) -> bytes:
    """Return an XSpace."""
    return message((1, [plane.encoded() for plane in planes]), (4, "a-host"))
