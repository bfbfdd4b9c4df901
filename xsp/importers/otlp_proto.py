"""Read OTLP in protobuf: a single message (`TracesData`, an export request), or messages of the Collector's file
exporter, each after its length in four bytes, most significant first; plain or gzip.

Messages are read one at a time, with the official classes of `opentelemetry-proto` (extra `otel`).
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from xsp.errors import PluginError, TraceError
from xsp.importers.contract import Imported, Losses, RowImporter, open_bytes, read_error
from xsp.importers.otlp import MAX_DEPTH, MAX_MESSAGE_BYTES, InvalidSpan, OtlpSpan, Reader, ScopeSpans
from xsp.importers.xplane import is_xspace
from xsp.plugins import importing

_LENGTH = struct.Struct(">I")
_RESOURCE_SPANS = 0x0A
"""First byte of an OTLP message of spans: the tag of field 1 with a length."""

_ZSTD = b"\x28\xb5\x2f\xfd"


class OtlpProto(RowImporter):
    """Importer of OTLP protobuf files."""

    name = "otlp-proto"

    def recognises(self, head: bytes, source: str) -> bool:
        """Return whether the file begins with an OTLP message, or with the length of one."""
        if is_xspace(head):
            return False
        return head[4:8] == _ZSTD or _is_message(head) or _is_message(head[4:], _length(head))

    def read(self, source: str) -> Imported:
        """Start to read a file; see `RowImporter.read`."""
        _message_class()
        losses = Losses(self.name)
        reader = Reader(losses)

        def parts() -> Iterator[ScopeSpans]:
            for place, body in _messages(source):
                yield from parts_of(decode(body, place), place)
            reader.close()

        return Imported(reader.rows(parts()), losses, reader.runs)


def _length(head: bytes) -> int | None:
    return _LENGTH.unpack_from(head)[0] if len(head) >= _LENGTH.size else None


def _is_message(content: bytes, length: int | None = None) -> bool:
    """Return whether the content is the start of a message: the first field fits, and begins like resource spans."""
    if not content or content[0] != _RESOURCE_SPANS:
        return False
    size, offset = 0, 1
    for shift in range(0, 35, 7):
        if offset >= len(content):
            return False
        size |= (content[offset] & 0x7F) << shift
        offset += 1
        if not content[offset - 1] & 0x80:
            break
    if length is not None and offset + size > length:
        return False
    return size == 0 or offset >= len(content) or content[offset] in (0x0A, 0x12, 0x1A)


def _messages(source: str) -> Iterator[tuple[str, bytes]]:
    """Yield the messages of a file with their positions."""
    with open_bytes(Path(source)) as file:
        head = _read(file, 8, source, 0)
        if _ZSTD in (head[:4], head[4:8]):
            raise TraceError(f"{source}: compressed with zstd, which is not read; decompress it, or export it as gzip")
        if _is_message(head):
            yield source, head + _read(file, MAX_MESSAGE_BYTES, source, len(head))
            if _read(file, 1, source, MAX_MESSAGE_BYTES):
                raise TraceError(
                    f"{source}: one message of more than {MAX_MESSAGE_BYTES >> 20} MiB; export smaller ones"
                )
            return
        yield from _prefixed(file, source, head)


def _prefixed(file: IO[bytes], source: str, head: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield the messages of a file in which each follows its length, with their positions in words."""
    offset, number = 0, 0
    while head:
        number += 1
        position = f"message {number} at byte {offset}"
        head += _read(file, _LENGTH.size - len(head), source, offset)
        length = _length(head)
        if length is None:
            raise TraceError(f"{source}, {position}: the file is truncated; copy it again")
        if length > MAX_MESSAGE_BYTES:
            raise TraceError(f"{source}, {position}: a length of {length} bytes; this is not OTLP, or it is damaged")
        body = head[_LENGTH.size : _LENGTH.size + length]
        rest = head[_LENGTH.size + length :]
        body += _read(file, length - len(body), source, offset)
        if len(body) < length:
            raise TraceError(f"{source}, {position}: only {len(body)} of {length} bytes are there; copy the file again")
        yield f"{source}, {position}", body
        offset += _LENGTH.size + length
        head = rest + _read(file, _LENGTH.size - len(rest), source, offset)


def _read(file: IO[bytes], size: int, source: str, offset: int) -> bytes:
    try:
        return file.read(max(size, 0))
    except (EOFError, OSError, zlib.error) as error:
        raise read_error(source, error, f"after byte {offset}") from error


def _message_class() -> Any:
    with importing(PluginError, "reading OTLP protobuf needs opentelemetry-proto: pip install 'xsp[otel]' ({error})"):
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
    return ExportTraceServiceRequest


def decode(body: bytes, place: str) -> Any:
    """Decode a message of spans.

    Raises:
        TraceError: it is truncated or not OTLP.
        PluginError: the package that decodes it is missing.
    """
    message = _message_class()()
    try:
        message.ParseFromString(body)
    except Exception as error:  # implementations of protobuf raise different errors
        raise TraceError(
            f"{place}: begins as OTLP's protobuf does, but is damaged or cut off ({error}); copy it again, or export "
            "it again as JSON (a Collector's `file` exporter without `format: proto`)"
        ) from error
    return message


def parts_of(message: Any, place: str) -> Iterator[ScopeSpans]:
    """Yield the parts of a message.

    Raises:
        TraceError: attributes of a resource are nested too deeply.
    """
    for resource in message.resource_spans:
        try:
            attributes = {pair.key: value_of(pair.value) for pair in resource.resource.attributes}
        except InvalidSpan as error:
            raise TraceError(f"{place}: attributes of a resource: {error}") from None
        for group in resource.scope_spans:
            yield ScopeSpans(attributes, group.scope.name, map(decode_span, group.spans))


def decode_span(span: Any) -> OtlpSpan | InvalidSpan:
    """Return a decoded span, or the reason why it cannot be decoded."""
    try:
        return OtlpSpan(
            trace_id=span.trace_id.hex(),
            span_id=span.span_id.hex(),
            parent_id=span.parent_span_id.hex(),
            name=span.name,
            start_ns=span.start_time_unix_nano,
            end_ns=span.end_time_unix_nano,
            attributes={pair.key: value_of(pair.value) for pair in span.attributes},
            status=span.status.code,
            links=tuple(link.trace_id.hex() for link in span.links),
            events=len(span.events),
        )
    except InvalidSpan as error:
        return error


def value_of(value: Any, depth: int = 0) -> Any:
    """Return the value of an OTLP `AnyValue`; None if it is empty.

    Raises:
        InvalidSpan: it is nested too deeply.
    """
    if depth > MAX_DEPTH:
        raise InvalidSpan("one of its attributes is nested too deeply")
    kind = value.WhichOneof("value")
    if kind is None:
        return None
    content = getattr(value, kind)
    if kind == "array_value":
        return [value_of(element, depth + 1) for element in content.values]
    if kind == "kvlist_value":
        return {pair.key: value_of(pair.value, depth + 1) for pair in content.values}
    return content
