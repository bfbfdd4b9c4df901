"""Convert decoded OTLP spans to rows: spans of xsp get their original columns back, other spans are imported unchanged.

A span is xsp's own if it carries `xsp.kind`; its attributes become columns according to `xsp.semconv`. A span of kind
`run` does not become a row, but describes the run. A trace that was delivered in parts (see `xsp.otlp.zoom`) is
reassembled: folded spans represent others and are left out, and spans of a detail trace name their original trace.

A span of another program becomes a row of level APPLICATION and kind user, with its scope as its collector.

Spans that cannot become rows (no ids, no times, wrong types) are left out and counted by reason.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from xsp import semconv
from xsp.fields import is_count
from xsp.importers import contract
from xsp.importers.contract import MAX_TIME_NS, Losses, Row
from xsp.run import Run
from xsp.schema import COLUMNS, Kind, Level, Span

MAX_MESSAGE_BYTES = 256 << 20
"""Maximum bytes of a line, document or message, because it is decoded in memory."""

MAX_DEPTH = 32
"""Maximum nesting depth of lists and objects in an attribute; a span with a deeper one is left out."""

FOLD = "xsp.fold."
"""Prefix of the attributes of a folded span, which represents several; `count` is their number."""

TRACE_ID = "xsp.trace_id"
PARENT_ID = "xsp.parent_id"
"""Attributes with the original trace and parent of a span that was delivered in another trace."""

_KIND, _LEVEL = "xsp.kind", "xsp.level"
_RUN_SPAN = Kind.RUN.value
_JAEGER_PREFIXES = ("@jaeger@", "jaeger.adjuster")
"""Prefixes of attributes that Jaeger adds when a trace is requested."""

_TRACE = re.compile(r"(?!0{32})[0-9a-f]{32}")
_SPAN = re.compile(r"(?!0{16})[0-9a-f]{16}")
_NO_SPAN = "0" * 16
"""The parent that some exporters give a root."""

_ERROR = 2
"""OTLP's status code for an error."""

_RANGE = {"SMALLINT": 1 << 15, "INTEGER": 1 << 31, "BIGINT": 1 << 63}
_COLUMN = {column.attribute: column for column in COLUMNS if column.attribute is not None}
_CORE_ATTRIBUTES = frozenset({_KIND, _LEVEL, "xsp.duration_ns", "xsp.attributes", TRACE_ID, PARENT_ID, semconv.RUN})


class InvalidSpan(ValueError):
    """A span that cannot become a row; the message is the reason."""


class OtlpSpan(NamedTuple):
    """A span with the fields of OTLP: ids in hexadecimal digits, unconverted values."""

    trace_id: Any
    span_id: Any
    parent_id: Any
    name: Any
    start_ns: Any
    end_ns: Any
    attributes: Mapping[str, Any]
    status: int = 0
    links: tuple[str, ...] = ()
    """Trace ids of the spans that it links to."""

    events: int = 0
    """Number of its events, for which the table has no place."""


class ScopeSpans(NamedTuple):
    """Spans of one resource and one scope."""

    resource: Mapping[str, Any]
    scope: str
    spans: Iterable[OtlpSpan | InvalidSpan]


class Reader:
    """Converts parts into rows, and collects the runs."""

    def __init__(self, losses: Losses, unit_ns: int = 1) -> None:
        """Start without runs.

        Args:
            losses: counts what is left out.
            unit_ns: resolution of the times in the source, in nanoseconds.
        """
        self.losses = losses
        self.runs: list[Run] = []
        self.links: set[str] = set()
        """Ids of the traces that spans of xsp link to."""

        self.folded = 0
        """Number of spans in detail traces, according to the folded spans."""

        self.restored = 0
        """Number of spans that were read from detail traces."""

        self._run_indices: dict[str, int] = {}
        self._unit_ns = unit_ns

    def rows(self, parts: Iterable[ScopeSpans]) -> Iterator[Row]:
        """Yield the rows of all parts, and count spans that cannot become rows."""
        for part in parts:
            run = self._run_of(part.resource)
            for decoded in part.spans:
                try:
                    span = self._span(part, decoded)
                except InvalidSpan as error:
                    self.losses.skipped[str(error)] += 1
                    continue
                if span is not None:
                    self.losses.spans += 1
                    yield Row(span, run)

    def close(self) -> None:
        """Add the notes that depend on the whole source."""
        if self.folded > self.restored:
            self.losses.note(
                f"{self.folded - self.restored} spans are in detail traces that were not given; "
                "the overview alone does not hold them"
            )

    def _span(self, part: ScopeSpans, decoded: OtlpSpan | InvalidSpan) -> Span | None:
        if isinstance(decoded, InvalidSpan):
            raise decoded
        trace_id, span_id = _id(_TRACE, decoded.trace_id, "trace"), _id(_SPAN, decoded.span_id, "span")
        is_root = not decoded.parent_id or decoded.parent_id == _NO_SPAN
        parent_id = None if is_root else _id(_SPAN, decoded.parent_id, "parent")
        span = Span(trace_id, span_id, parent_id, name=_text(decoded.name), start_ns=_time(decoded.start_ns))
        span = span._replace(dur_ns=_time(decoded.end_ns) - span.start_ns)
        if span.dur_ns < 0:
            raise InvalidSpan("it ends before it starts")
        if _KIND not in decoded.attributes:
            return self._foreign(part, decoded, span)
        self.links.update(link for link in decoded.links if _TRACE.fullmatch(link))
        if decoded.attributes[_KIND] == _RUN_SPAN:
            self._add_description(decoded.attributes.get(semconv.RUN))
            return None
        return self._xsp_span(part, decoded, span)

    def _xsp_span(self, part: ScopeSpans, decoded: OtlpSpan, span: Span) -> Span | None:
        """Return a span of xsp with its original columns; None if it only represents others."""
        attributes = decoded.attributes
        count = attributes.get(f"{FOLD}count")
        if count is not None:
            self.folded += count if is_count(count) else 0
            return None
        columns = {
            **self._origin(attributes),
            "kind": _text(attributes[_KIND]),
            "level": _level(attributes.get(_LEVEL)),
            "dur_ns": self._duration(attributes.get("xsp.duration_ns"), span.dur_ns),
        }
        extra: dict[str, Any] = {}
        from_resource = {name: part.resource[name] for name in semconv.RESOURCE_COLUMNS & part.resource.keys()}
        for name, value in {**from_resource, **attributes}.items():
            if name in _COLUMN and name not in _CORE_ATTRIBUTES:
                columns[_COLUMN[name].name] = _value(name, value)
            elif name not in _CORE_ATTRIBUTES and not name.startswith(_JAEGER_PREFIXES):
                extra[name] = value
        if (columns.get("step") or 0) < 0:
            raise InvalidSpan("xsp.step is below 0")
        return span._replace(**columns, attributes=_nested(extra))

    def _origin(self, attributes: Mapping[str, Any]) -> dict[str, Any]:
        """Return the original trace and parent of a span that was delivered in another trace."""
        origin: dict[str, Any] = {}
        if TRACE_ID in attributes:
            self.restored += 1
            origin["trace_id"] = _id(_TRACE, attributes[TRACE_ID], "original trace")
        if PARENT_ID in attributes:
            original = attributes[PARENT_ID]
            origin["parent_id"] = _id(_SPAN, original, "original parent") if original else None
        return origin

    def _foreign(self, part: ScopeSpans, decoded: OtlpSpan, span: Span) -> Span:
        """Return a span of another program."""
        attributes = {
            name: value for name, value in decoded.attributes.items() if not name.startswith(_JAEGER_PREFIXES)
        }
        service = part.resource.get("service.name")
        if service is not None:
            attributes.setdefault("service.name", service)
        if decoded.events:
            self.losses.changed["events of spans left out"] += decoded.events
        process, thread = part.resource.get(semconv.PROCESS), attributes.get("thread.id")
        error = attributes.get("error.type")
        error_status = f"error:{_text(str(error)) if isinstance(error, (str, int)) else 'unknown'}"
        return span._replace(
            level=int(Level.APPLICATION),
            kind=Kind.USER.value,
            status=error_status if decoded.status == _ERROR else "ok",
            collector=_text(part.scope) or None,
            process=process if is_count(process) else None,
            thread=thread if is_count(thread) else None,
            attributes=_nested(attributes),
        )

    def _duration(self, stated: Any, measured_ns: int) -> int:
        """Return the stated duration if the times agree with it, else the difference of the times."""
        slack = 0 if self._unit_ns == 1 else 2 * self._unit_ns
        if is_count(stated) and abs(stated - measured_ns) <= slack:
            return int(stated)
        if stated is not None:
            self.losses.changed["duration taken from start and end, which xsp.duration_ns contradicts"] += 1
        return measured_ns

    # --- runs -----------------------------------------------------------------------------------------

    def _run_of(self, resource: Mapping[str, Any]) -> str:
        """Return the id of a resource's run, and keep the resource's description of it."""
        run_id = resource.get(semconv.RUN_ID)
        if not isinstance(run_id, str) or not run_id:
            return ""
        description = {
            "id": run_id,
            "name": resource.get(semconv.RUN_NAME),
            "xsp": resource.get("telemetry.sdk.version"),
            "host": resource.get("host.id"),
            "process": resource.get(semconv.PROCESS),
            "rank": resource.get(semconv.RANK),
            "local_rank": resource.get(semconv.LOCAL_RANK),
            "world_size": resource.get(semconv.WORLD_SIZE),
        }
        if run_id not in self._run_indices:
            text = json.dumps({name: value for name, value in description.items() if value is not None}, default=str)
            self._add_run(contract.run_of(text, self.losses))
        return run_id if run_id in self._run_indices else ""

    def _add_description(self, text: Any) -> None:
        """Keep the description in a run's own span."""
        if not isinstance(text, str):
            self.losses.changed["span of a run without a description"] += 1
            return
        self._add_run(contract.run_of(text, self.losses))

    def _add_run(self, run: Run | None) -> None:
        """Keep the latest description of each run."""
        if run is None or run.id is None:
            return
        index = self._run_indices.setdefault(run.id, len(self.runs))
        if index == len(self.runs):
            self.runs.append(run)
        elif (run.end_ns or 0) >= (self.runs[index].end_ns or 0):
            self.runs[index] = run


def _id(pattern: re.Pattern[str], value: Any, label: str) -> str:
    text = value.lower() if isinstance(value, str) else ""
    if not pattern.fullmatch(text):
        raise InvalidSpan(f"its {label} id is not valid")
    return text


def _time(value: Any) -> int:
    if not is_count(value) or not 0 < value < MAX_TIME_NS:
        raise InvalidSpan("its times are missing or not valid")
    return int(value)


def _level(value: Any) -> int:
    try:
        level = semconv.level_of(value) if isinstance(value, str) else value
        if is_count(level) and level < _RANGE["SMALLINT"]:
            return int(level)
    except ValueError:
        pass
    raise InvalidSpan("its level is not a level of xsp")


def _value(name: str, value: Any) -> Any:
    """Return an attribute as the value of its column."""
    kind = _COLUMN[name].type
    if kind == "VARCHAR":
        if isinstance(value, str):
            return _text(value)
    elif kind == "BOOLEAN":
        if isinstance(value, bool):
            return value
    elif kind == "DOUBLE":
        if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
            return float(value)
    elif isinstance(value, int) and not isinstance(value, bool) and -_RANGE[kind] <= value < _RANGE[kind]:
        return value
    raise InvalidSpan(f"{name} is not of the type {kind}")


def _text(value: Any) -> str:
    """Return text that can be encoded as UTF-8."""
    if not isinstance(value, str):
        raise InvalidSpan("its name or one of its texts is not text")
    return value if value.isascii() else value.encode("utf-8", "replace").decode()


def _nested(attributes: Mapping[str, Any]) -> str | None:
    try:
        return semconv.nested({_text(name): _plain(value) for name, value in attributes.items()})
    except RecursionError:
        raise InvalidSpan("its attributes are nested too deeply") from None


def _plain(value: Any) -> Any:
    """Return an equivalent value that JSON can represent."""
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, (bytes, bytearray)):
        return value.hex()
    if isinstance(value, (list, tuple)):
        return [_plain(element) for element in value]
    if isinstance(value, Mapping):
        return {_text(str(name)): _plain(element) for name, element in value.items()}
    return value
