"""Read OTLP in JSON: the lines of the Collector's file exporter, or a single document; plain or gzip.

As OTLP specifies, ids are hexadecimal digits, 64-bit integers are strings or numbers, enums are numbers or names.
Lines are read one at a time. No package beyond xsp's own dependencies is needed.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from xsp.errors import TraceError
from xsp.importers.contract import Imported, Losses, RowImporter, open_bytes, read_error
from xsp.importers.otlp import MAX_DEPTH, MAX_MESSAGE_BYTES, InvalidSpan, OtlpSpan, Reader, ScopeSpans

_OTLP_START = re.compile(rb'\s*\{[^{}\[\]]*"resource(?:Spans|Metrics|Logs)"\s*:')
_OTHER_SIGNALS = ("resourceMetrics", "resourceLogs", "resourceProfiles")
_INTEGER = re.compile(r"-?[0-9]{1,20}")
_STATUS = {"STATUS_CODE_UNSET": 0, "STATUS_CODE_OK": 1, "STATUS_CODE_ERROR": 2}
_BOM = b"\xef\xbb\xbf"
_GROUPS = {"scopeSpans": "scope", "instrumentationLibrarySpans": "instrumentationLibrary"}
"""Field of a resource with groups of spans → field of a group with its scope; OTLP renamed both in 2022."""


class OtlpJson(RowImporter):
    """Importer of OTLP JSON files."""

    name = "otlp-json"

    def recognises(self, head: bytes, source: str) -> bool:
        """Return whether the first object of the file is an OTLP object."""
        return _OTLP_START.match(head.removeprefix(_BOM)) is not None

    def read(self, source: str) -> Imported:
        """Start to read a file; see `RowImporter.read`."""
        losses = Losses(self.name)
        reader = Reader(losses)

        def parts() -> Iterator[ScopeSpans]:
            with open_bytes(Path(source)) as file:
                for place, document in documents(file, source):
                    if any(name in document for name in _OTHER_SIGNALS):
                        losses.changed["messages of metrics, logs or profiles, which hold no spans"] += 1
                    yield from parts_of(document, place)
            reader.close()

        return Imported(reader.rows(parts()), losses, reader.runs)


def documents(file: IO[bytes], source: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the JSON objects of a file with their positions: one per line, or a single object over all lines.

    Raises:
        TraceError: the file contains something else; the message names the line.
    """
    number, is_first = 0, True
    while line := _line(file, source, number + 1):
        number += 1
        text = line.removeprefix(_BOM) if number == 1 else line
        if not text.strip():
            continue
        was_first, is_first = is_first, False
        if was_first and not _may_be_complete(text):
            text += read_rest(file, source, MAX_MESSAGE_BYTES - len(text))
            yield source, parse_object(text, source)
            return
        place = f"{source}, line {number}"
        yield place, parse_object(text, place)


def _may_be_complete(line: bytes) -> bool:
    """Return whether a first line can be a whole object; if not, the object continues on the next lines."""
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return line.rstrip().endswith(b"}") and len(line.strip()) > 1
    return True


def _line(file: IO[bytes], source: str, number: int) -> bytes:
    try:
        line = file.readline(MAX_MESSAGE_BYTES + 1)
    except (EOFError, OSError, zlib.error) as error:
        raise read_error(source, error, f"line {number}") from error
    if len(line) > MAX_MESSAGE_BYTES:
        raise TraceError(
            f"{source}, line {number}: longer than {MAX_MESSAGE_BYTES >> 20} MiB; write more and shorter lines"
        )
    return line


def read_rest(file: IO[bytes], source: str, max_bytes: int = MAX_MESSAGE_BYTES) -> bytes:
    """Return the rest of a file, if it is not too large to be decoded in memory.

    Raises:
        TraceError: the rest is too large, or cannot be read.
    """
    try:
        rest = file.read(max_bytes + 1)
    except (EOFError, OSError, zlib.error) as error:
        raise read_error(source, error) from error
    if len(rest) > max_bytes:
        raise TraceError(f"{source}: one document of more than {MAX_MESSAGE_BYTES >> 20} MiB; write it as JSON lines")
    return rest


def parse_object(text: bytes, place: str) -> dict[str, Any]:
    """Parse a JSON object.

    Raises:
        TraceError: the text is something else, or truncated; the message names the position.
    """
    try:
        document = json.loads(text)
    except json.JSONDecodeError as error:
        raise TraceError(f"{place}: not JSON, or cut off ({error})") from error
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{place}: JSON that cannot be read ({error})") from error
    return _object(document, place, "the document")


def parts_of(document: Mapping[str, Any], place: str) -> Iterator[ScopeSpans]:
    """Yield the parts of an OTLP document.

    Args:
        document: object with `resourceSpans`.
        place: position of the document, for error messages.

    Raises:
        TraceError: the structure is not OTLP's.
    """
    for resource in _list(document, "resourceSpans", place):
        resource = _object(resource, place, "an item of resourceSpans")
        description = _object(resource.get("resource") or {}, place, "resource")
        try:
            attributes = attributes_of(description.get("attributes"))
        except InvalidSpan as error:
            raise TraceError(f"{place}: attributes of a resource: {error}") from None
        for name, scope_key in _GROUPS.items():
            for group in _list(resource, name, place):
                group = _object(group, place, f"an item of {name}")
                scope = _object(group.get(scope_key) or {}, place, scope_key).get("name", "")
                spans = _list(group, "spans", place)
                yield ScopeSpans(attributes, scope if isinstance(scope, str) else "", map(decode_span, spans))


def decode_span(span: Any) -> OtlpSpan | InvalidSpan:
    """Return a decoded span, or the reason why it cannot be decoded."""
    if not isinstance(span, dict):
        return InvalidSpan("it is not a JSON object")
    status = span.get("status")
    code = status.get("code", 0) if isinstance(status, dict) else 0
    try:
        return OtlpSpan(
            trace_id=span.get("traceId"),
            span_id=span.get("spanId"),
            parent_id=span.get("parentSpanId"),
            name=span.get("name", ""),
            start_ns=integer(span.get("startTimeUnixNano")),
            end_ns=integer(span.get("endTimeUnixNano")),
            attributes=attributes_of(span.get("attributes")),
            status=_STATUS.get(code, 0) if isinstance(code, str) else code,
            links=tuple(str(link.get("traceId")) for link in span.get("links") or () if isinstance(link, dict)),
            events=item_count(span.get("events")),
        )
    except InvalidSpan as error:
        return error
    except TypeError:
        return InvalidSpan("its fields do not have the types of OTLP")


def attributes_of(pairs: Any, depth: int = 0) -> dict[str, Any]:
    """Return a list of OTLP key-value pairs as a dictionary.

    Raises:
        InvalidSpan: the value is not such a list.
    """
    if pairs is None:
        return {}
    if not isinstance(pairs, list):
        raise InvalidSpan("its attributes are not a list")
    attributes = {}
    for pair in pairs:
        if not isinstance(pair, dict) or not isinstance(pair.get("key"), str):
            raise InvalidSpan("one of its attributes has no key")
        attributes[pair["key"]] = value_of(pair.get("value"), depth)
    return attributes


def value_of(value: Any, depth: int = 0) -> Any:
    """Return the value of an OTLP `AnyValue`; None if it is empty.

    Raises:
        InvalidSpan: it is not an `AnyValue`.
    """
    if not value:
        return None
    if depth > MAX_DEPTH:
        raise InvalidSpan("one of its attributes is nested too deeply")
    if isinstance(value, dict) and len(value) == 1:
        ((kind, content),) = value.items()
        if kind in ("stringValue", "bytesValue") and isinstance(content, str):
            return content
        if kind == "boolValue" and isinstance(content, bool):
            return content
        if kind == "intValue" and (number := integer(content)) is not None:
            return number
        if kind == "doubleValue":
            try:
                return float(content)
            except (TypeError, ValueError, OverflowError):
                raise InvalidSpan("one of its attributes has a value whose type is not in OTLP") from None
        if kind in ("arrayValue", "kvlistValue") and isinstance(content, dict):
            elements = content.get("values") or []
            if kind == "kvlistValue":
                return attributes_of(elements, depth + 1)
            if isinstance(elements, list):
                return [value_of(element, depth + 1) for element in elements]
    raise InvalidSpan("one of its attributes has a value whose type is not in OTLP")


def item_count(value: Any) -> int:
    """Return the number of items of a list; 0 for other values."""
    return len(value) if isinstance(value, list) else 0


def integer(value: Any) -> int | None:
    """Return a 64-bit integer that is written as a number or as a string; None for other values."""
    if isinstance(value, str) and _INTEGER.fullmatch(value):
        value = int(value)
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    return value if is_integer and -(1 << 63) <= value < 1 << 63 else None


def _object(value: Any, place: str, label: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TraceError(f"{place}: {label} is not a JSON object; this is not OTLP")
    return value


def _list(parent: Mapping[str, Any], name: str, place: str) -> list[Any]:
    value = parent.get(name)
    if value is None:
        return []
    if not isinstance(value, list):
        raise TraceError(f"{place}: {name} is not a list; this is not OTLP")
    return value
